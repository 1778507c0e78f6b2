"""The near pool of ``deploy/k8s/components/near-pool`` and ``docker-compose.near.yml``: one memory volume in all
workers of a host, with their user as its owner, before the pool that they have without it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from kvpool.store import StoreURL
from tests.deploy.manifests import ROOT, Object, build, containers, nbytes, one, overlay, pod_of

USER = 10001  # of deploy/Dockerfile
MIB = 1 << 20
SECURE = """
resources: [{k8s}/base]
components: [{k8s}/components/valkey, {k8s}/components/envoy, {k8s}/components/secure, {k8s}/components/near-pool]
"""


def room(size_nbytes: int) -> int:
    """What a pool may fill of a file system of its own."""
    return size_nbytes - min(max(size_nbytes // 20, 16 * MIB), 4096 * MIB)


def of_tmpfs(options: str) -> dict[str, str]:
    found = dict(each.partition("=")[::2] for each in options.split(","))
    assert found["huge"] == "within_size"
    assert found["uid"] == str(USER)
    assert found["mode"] == "0700", "who reads a pool can reconstruct prompts"
    return found


def near_and_far(worker: Object, far: str) -> list[StoreURL]:
    """As the kubelet writes them: a variable stands for the value of one before it."""
    names = [each["name"] for each in worker["env"]]
    assert names.index("FAR_POOL") < names.index("KVPOOL_POOL")
    (value,) = (each["value"] for each in worker["env"] if each["name"] == "KVPOOL_POOL")
    return StoreURL.parse(value.replace("$(FAR_POOL)", far)).pools()


def test_workers_of_a_node_share_the_tmpfs_that_it_has_mounted() -> None:
    objects = overlay("near")
    worker = one(objects, "Deployment", "worker")
    (container,) = containers(worker)
    url = one(overlay("envoy"), "ConfigMap", "kvpool-pool")["data"]["url"]
    assert url == one(objects, "ConfigMap", "kvpool-pool")["data"]["url"]
    near, far = near_and_far(container, url)
    assert far == StoreURL.parse(url)
    (mount,) = (each for each in container["volumeMounts"] if each["mountPath"] == near.path)
    (volume,) = (each for each in pod_of(worker)["volumes"] if each["name"] == mount["name"])
    claim = one(objects, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
    disk = one(objects, "PersistentVolume", claim["spec"]["volumeName"])
    place = {key: claim["metadata"][key] for key in ("namespace", "name")}
    assert disk["spec"]["claimRef"] == place, "no other namespace may claim it"
    for each in (claim, disk):
        assert each["spec"]["accessModes"] == ["ReadWriteMany"]
        assert each["spec"]["storageClassName"] == "", "no provisioner makes another"
    page = (ROOT / "docs/how-to/kubernetes.md").read_text()
    ((at, options),) = re.findall(r"^kvpool (\S+) tmpfs (\S+) 0 0$", page, re.MULTILINE)
    assert at == disk["spec"]["hostPath"]["path"]
    assert disk["spec"]["hostPath"]["type"] == "Directory", "a node without it is found out"
    size = int(of_tmpfs(options)["size"].removesuffix("g")) << 30
    assert size == nbytes(disk["spec"]["capacity"]["storage"])
    assert near.capacity_nbytes <= room(size)
    assert pod_of(worker)["securityContext"]["runAsUser"] == USER
    (without,) = containers(one(overlay("envoy"), "Deployment", "worker"))
    its_own = nbytes(without["resources"]["limits"]["memory"])
    memory = {kind: nbytes(container["resources"][kind]["memory"]) for kind in ("requests", "limits")}
    assert memory == {"requests": its_own + size // worker["spec"]["replicas"], "limits": its_own + size}


def test_the_index_follows_the_far_pool() -> None:
    assert one(overlay("near"), "Deployment", "index") == one(overlay("envoy"), "Deployment", "index")


def test_a_far_pool_may_be_named_by_a_secret(tmp_path: Path) -> None:
    folder = tmp_path / "overlay"
    folder.mkdir()
    k8s = Path("../" * len(folder.resolve().parts[1:])) / str(ROOT / "deploy/k8s").lstrip("/")
    (folder / "kustomization.yaml").write_text(SECURE.format(k8s=k8s))
    (container,) = containers(one(tuple(build(folder)), "Deployment", "worker"))
    (far,) = (each for each in container["env"] if each["name"] == "FAR_POOL")
    assert far["valueFrom"] == {"secretKeyRef": {"name": "kvpool-pool", "key": "url"}}
    assert near_and_far(container, "valkey://far")[1] == StoreURL.parse("valkey://far")


def defaults(text: str) -> str:
    """As Compose reads it where no variable is set. Of two within another the inner one first."""
    while (found := re.sub(r"\$\{\w+:-([^${}]*)\}", r"\1", text)) != text:
        text = found
    return found


def test_workers_of_compose_share_a_memory_volume() -> None:
    near_file, base = (
        yaml.safe_load(defaults((ROOT / name).read_text()))
        for name in ("docker-compose.near.yml", "docker-compose.yml")
    )
    workers = [name for name in base["services"] if name.startswith("worker-")]
    assert list(near_file["services"]) == workers
    (options,) = (each["driver_opts"] for each in near_file["volumes"].values())
    assert options["type"] == "tmpfs"
    size = int(of_tmpfs(options["o"])["size"].removesuffix("m")) * MIB
    (name,) = near_file["volumes"]
    for worker in workers:
        each = near_file["services"][worker]
        near, far = StoreURL.parse(each["environment"]["KVPOOL_POOL"]).pools()
        assert each["volumes"] == [f"{name}:{near.path}"]
        assert near.capacity_nbytes <= room(size)
        assert far == StoreURL.parse(base["services"][worker]["environment"]["KVPOOL_POOL"])
        limits = (int(each["mem_limit"][:-1]) << 30, int(base["services"][worker]["mem_limit"][:-1]) << 30)
        assert limits[0] >= limits[1] + size


@pytest.mark.parametrize("page", ["docs/how-to/kubernetes.md", "docs/tutorials/compose.md"])
def test_the_pages_name_it(page: str) -> None:
    assert "near pool" in (ROOT / page).read_text()
