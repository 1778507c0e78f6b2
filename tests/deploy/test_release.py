"""``scripts/release``: what it would do, with scripted tools; and a rehearsal with real ones, on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT

IMAGES = ("front", "index", "valkey", "worker", "worker-gpu")
DIGEST = f"sha256:{'d' * 64}"
TOOLS = ROOT / ".cache/release-tools/bin"
SCRIPTED = f"""#!/bin/sh
echo "$(basename "$0") $*" >>"$0.said"
for last; do :; done
[ "$1" != inspect ] || echo "[\\"${{last%:*}}@{DIGEST}\\"]"
"""
ENGINE = '''
"""A Docker engine that has one small image, and pushes it to wherever it is told."""
import hashlib, io, json, sys, tarfile
from urllib.request import Request, urlopen

def digest(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()

made = io.BytesIO()
with tarfile.open(fileobj=made, mode="w") as tar:
    package = b"Metadata-Version: 2.1\\nName: kvpool\\nVersion: 0.1.0\\n"
    entry = tarfile.TarInfo("opt/kvpool/lib/python3.11/site-packages/kvpool-0.1.0.dist-info/METADATA")
    entry.size = len(package)
    tar.addfile(entry, io.BytesIO(package))
layer = made.getvalue()
config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [digest(layer)]}}
config = json.dumps(config).encode()
kinds = "application/vnd.oci.image."
of = lambda kind, data: {"mediaType": kinds + kind, "digest": digest(data), "size": len(data)}
manifest = json.dumps({"schemaVersion": 2, "mediaType": kinds + "manifest.v1+json",
    "config": of("config.v1+json", config), "layers": [of("layer.v1.tar", layer)]}).encode()
image, tag = sys.argv[-1].rsplit(":", 1) if sys.argv[1] != "build" else ("", "")
if sys.argv[1] == "inspect":
    print(json.dumps([f"elsewhere/kvpool@{digest(layer)}", f"{image}@{digest(manifest)}"]))
if sys.argv[1] == "push":
    host, name = image.split("/", 1)
    for blob in (layer, config):
        place = urlopen(Request(f"http://{host}/v2/{name}/blobs/uploads/", method="POST")).headers["Location"]
        place += ("&" if "?" in place else "?") + f"digest={digest(blob)}"
        urlopen(Request(place, blob, {"Content-Type": "application/octet-stream"}, method="PUT"))
    kind = {"Content-Type": kinds + "manifest.v1+json"}
    urlopen(Request(f"http://{host}/v2/{name}/manifests/{tag}", manifest, kind, method="PUT"))
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout that is ready for its release, and tools that write down how they are called."""
    root = tmp_path / "tree"
    for name in ("scripts/release", "scripts/dist/sources.py", "kvpool/__init__.py", "deploy/helm/Chart.yaml",
                 "deploy/k8s/components/images/kustomization.yaml"):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    (root / "deploy/Dockerfile").write_text(re.sub(r"(_IMAGE=\S+)", rf"\1@{DIGEST}", dockerfile))
    (root / "CHANGELOG.md").write_text("## [0.1.0] - 2027-01-02\n")
    (root / ".gitignore").write_text("dist\n.cache\n__pycache__\n")
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"],
    ):
        subprocess.run(["git", *command], cwd=root, check=True, timeout=60)
    (root / "dist").mkdir()
    with zipfile.ZipFile(root / "dist/kvpool-0.1.0-cp312-abi3-linux_x86_64.whl", "w") as wheel:
        wheel.writestr("kvpool-0.1.0.dist-info/sboms/kvpool.cdx.json", '{"bomFormat": "CycloneDX"}')
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for tool in ("cosign", "docker", "helm", "syft"):
        (bin_ / tool).write_text(SCRIPTED)
        (bin_ / tool).chmod(0o755)
    return root


def release(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts/release"), *words, "registry.example"]
    path = f"{root.parent / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60, check=False
    )


def calls(root: Path, tool: str) -> list[str]:
    said = root.parent / "bin" / f"{tool}.said"
    return said.read_text().splitlines() if said.exists() else []


def test_a_release_says_what_it_would_do_and_does_nothing(tree: Path) -> None:
    run = release(tree)
    assert run.returncode == 0, run.stderr
    assert "not ready" not in run.stdout
    assert not any(calls(tree, tool) for tool in ("cosign", "docker", "helm", "syft"))
    wheel = next((tree / "dist").glob("*.whl"))
    assert f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}" in run.stdout
    would = [line for line in run.stdout.splitlines() if line.startswith("would run: ")]
    assert [line.split()[3] for line in would if wheel.name in line] == [
        "sign-blob",
        "attest-blob",
        "attest-blob",
    ]
    assert sum("docker build" in line for line in would) == 5
    made = json.loads((tree / ".cache/release/provenance.json").read_text())
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True, check=True)
    source, *others = made["buildDefinition"]["resolvedDependencies"]
    assert source["digest"] == {"gitCommit": head.stdout.strip()}
    assert len(others) == 2
    assert made["runDetails"]["builder"]["id"]
    sbom = (tree / f".cache/release/{wheel.name}.cdx.json").read_text()
    assert sbom == '{"bomFormat": "CycloneDX"}'


def test_a_release_signs_what_it_has_pushed(tree: Path) -> None:
    run = release(tree, "--publish")
    assert run.returncode == 0, run.stdout + run.stderr
    pushed = [f"registry.example/kvpool-{image}@{DIGEST}" for image in IMAGES]
    cosign = calls(tree, "cosign")
    assert [line.split()[-1] for line in cosign if line.startswith("cosign sign --yes")] == pushed
    kinds = [re.search(r"(attest\S*) --yes --type (\S+)", line) for line in cosign if " attest" in line]
    assert [found.groups() for found in kinds if found] == [
        *[("attest-blob", "slsaprovenance1"), ("attest-blob", "cyclonedx")],
        *[("attest", "slsaprovenance1"), ("attest", "cyclonedx")] * 5,
    ]
    assert [line.split()[2] for line in calls(tree, "syft")] == [f"registry:{image}" for image in pushed]
    assert not any("--build-arg" in line for line in calls(tree, "docker"))
    made = json.loads((tree / ".cache/release/index.provenance.json").read_text())["buildDefinition"]
    assert made["externalParameters"]["target"] == "index"
    assert {"uri": "python:3.11-slim-bookworm", "digest": {"sha256": "d" * 64}} in made[
        "resolvedDependencies"
    ]
    wheel = next((tree / "dist").glob("*.whl"))
    digest = {"sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}
    assert {"uri": wheel.name, "digest": digest} in made["resolvedDependencies"]
    tags = subprocess.run(["git", "tag"], cwd=tree, capture_output=True, text=True, check=True)
    assert tags.stdout.split() == ["v0.1.0"]


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("CHANGELOG.md", "## [Unreleased]\n", "no section [0.1.0]"),
        ("deploy/helm/Chart.yaml", "version: 0.2.0\nappVersion: 0.1.0\n", "Chart.yaml says 0.2.0"),
        ("deploy/Dockerfile", "ARG A_IMAGE=a/b:1.0\n", "a/b:1.0 is not pinned by digest"),
        ("dist/kvpool-0.0.9.tar.gz", "", "dist/ has not the wheels of 0.1.0 alone"),
    ],
)
def test_what_is_not_ready_is_not_published(tree: Path, file: str, text: str, why: str) -> None:
    (tree / file).write_text(text)
    run = release(tree, "--publish")
    assert run.returncode == 1
    assert why in run.stdout
    assert ("the working tree has changes" in run.stdout) == (not file.startswith("dist/"))
    assert not calls(tree, "docker")


@pytest.fixture
def real(tree: Path) -> Path:
    """The checkout, and real tools but for Docker's engine."""
    bin_ = tree.parent / "bin"
    for tool, file in {
        "cosign": TOOLS / "cosign",
        "docker-registry": TOOLS / "docker-registry",
        "syft": TOOLS / "syft",
        "helm": ROOT / ".cache/kubernetes/bin/helm",
    }.items():
        found = file if os.access(file, os.X_OK) else shutil.which(tool)
        if not found:
            pytest.skip(f"{tool} is not here: make .cache/release-tools/.stamp gets it")
        (bin_ / tool).unlink(missing_ok=True)
        (bin_ / tool).symlink_to(found)
    (bin_ / "docker").write_text(f"#!{sys.executable}{ENGINE}")
    for name in ("scripts/rehearse-release", "docs/how-to/install.md"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    shutil.copytree(ROOT / "deploy/helm", tree / "deploy/helm", dirs_exist_ok=True)
    return tree


def rehearsal(root: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(root / "scripts/rehearse-release"),
        "--images",
        "index",
        str(root / "dist"),
    ]
    environment = {**os.environ, "PATH": f"{root.parent / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_users_verify_what_a_release_signs_and_nothing_else(real: Path) -> None:
    run = rehearsal(real)
    assert run.returncode == 0, run.stdout + run.stderr
    told = re.findall(
        r"^(verified|refused for another key|refused for a change): cosign (\S+)", run.stdout, re.MULTILINE
    )
    # A wheel, the chart, an image.
    users = ["verify-blob"] * 2 + ["verify-blob-attestation"] * 2 + ["verify"] + ["verify-attestation"] * 2
    assert told == [
        (how, command)
        for how in ("verified", "refused for another key", "refused for a change")
        for command in users
    ]
    assert not list((real / "dist").glob("*.json"))
    tags = subprocess.run(["git", "tag"], cwd=real, capture_output=True, text=True, check=True)
    assert not tags.stdout


@pytest.mark.parametrize(
    ("signs", "instead"),
    [
        ('run("cosign", "attest", *how', '_tell("cosign", "attest", *how'),
        ("str(predicate), pushed)", 'str(asked.scratch / "provenance.json"), pushed)'),
    ],
)
def test_a_rehearsal_fails_where_a_release_does_not_sign(real: Path, signs: str, instead: str) -> None:
    release = real / "scripts/release"
    text = release.read_text()
    assert signs in text
    release.write_text(text.replace(signs, instead))
    run = rehearsal(real)
    assert run.returncode == 1
    assert "does not verify" in run.stderr or "says something else" in run.stderr, run.stderr
