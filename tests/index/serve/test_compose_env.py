"""What ``scripts/compose-env`` makes, with a real Envoy and an index that asks for TLS and tokens."""

from __future__ import annotations

import json
import re
import ssl
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import kvpool
from kvpool.errors import IndexUnavailable
from kvpool.index.cost.router import Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.net.tls import ServerTls
from kvpool.index.serve.auth import TokenAuth
from tests.support import envoy
from tests.support.deadlines import eventually
from tests.support.fleets import serving
from tests.support.openai_worker import scripted

pytestmark = pytest.mark.usefixtures("grpc_started")

SCRIPT = envoy.ROOT / "scripts" / "compose-env"


def make(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True, timeout=120, check=False
    )


def look_at_health(target: str, folder: Path) -> str:
    """As the cluster's indexes are looked at, with files of ``folder``."""
    text = (envoy.ROOT / "docker-compose.secure.yml").read_text()
    (code,) = re.findall(r">-\n((?: +(?:import|sys)[^\n]*\n)+)", text)
    return " ".join(code.split()).replace("127.0.0.1:50051", target).replace("/run/secrets", str(folder))


def test_only_one_user_reads_what_is_made_and_nothing_secret_is_printed(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    run = make(folder)
    assert run.returncode == 0, run.stderr
    files = list(folder.iterdir())
    assert len(files) == 14
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) in (0o700, 0o711)
    secret = re.findall(r"[A-Za-z0-9_-]{40,}", "".join(file.read_text() for file in files))
    assert len(secret) > 5
    assert not any(one in run.stdout + run.stderr for one in secret)
    before = {file.name: file.read_bytes() for file in files}
    again = make(folder)
    assert again.returncode == 1
    assert "is there already" in again.stderr
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["made"]


def test_no_container_has_what_is_the_operators_alone(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    assert make(folder).returncode == 0
    text = (envoy.ROOT / "docker-compose.secure.yml").read_text()
    settings = "".join((folder / name).read_text() for name in ("env", "envoy.yaml", "tokens.toml"))
    for name in ("admin.token", "ca.key"):
        assert name not in text
        assert (folder / name).read_text() not in settings
    assert {*re.findall(r"KVPOOL_SECRETS:\?\}/([\w.]+)", text)} <= {file.name for file in folder.iterdir()}
    tokens = TokenAuth(str(folder / "tokens.toml"))
    rights = tokens.authenticate(f"Bearer {(folder / 'ready.token').read_text().strip()}")
    assert (rights.rights, rights.tenants) == ({"read"}, {"default"})


def test_the_front_speaks_tls_and_shows_the_index_a_token(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    assert make(folder).returncode == 0
    text = (folder / "envoy.yaml").read_text().replace("/run/secrets", str(folder))
    ca = str(folder / "ca.pem")
    tls = ServerTls(str(folder / "index.pem"), str(folder / "index.key"), "")
    fleet = Fleet()
    with (
        scripted("a") as workers,
        serving(
            fleet,
            place={"timeout_s": 60},
            router=Router(fleet),
            tls=tls,
            auth=TokenAuth(str(folder / "tokens.toml")),
        ) as index,
    ):
        fleet.add(workers[0].worker(), "flag")
        fleet.rank("default/a", 0).heard()
        admin = (folder / "admin.token").read_text().strip()
        with kvpool.IndexClient(index.target, timeout_s=60, tls_ca=ca, token=admin) as client:
            assert [one.worker.name for one in client.workers()] == ["a"]
        looks = subprocess.run(
            [sys.executable, "-c", look_at_health(index.target, folder)], check=False, timeout=60
        )
        assert looks.returncode == 0
        with (
            kvpool.IndexClient(index.target, timeout_s=60, tls_ca=ca) as client,
            pytest.raises(IndexUnavailable),
        ):
            client.workers()

        def reason(configuration: str) -> str | None:
            with envoy.running(tmp_path, [workers[0].at], [index.ext_proc], text=configuration) as front:
                assert eventually(lambda: front.healthy("workers") == 1 and front.healthy("picker") == 1)
                with pytest.raises((urllib.error.HTTPError, OSError)):
                    urllib.request.urlopen(f"{front.url}/v1/models", timeout=60)
                request = urllib.request.Request(
                    front.url.replace("http:", "https:") + "/v1/completions",
                    json.dumps({"model": "m", "prompt": "x"}).encode(),
                    {"content-type": "application/json"},
                )
                context = ssl.create_default_context(cafile=ca)
                with urllib.request.urlopen(request, timeout=60, context=context) as reply:
                    shown: str | None = reply.headers["x-kvpool-reason"]
                return shown

        assert reason(text) == "load"
        assert reason(re.sub(r"Bearer [^\"]+", "Bearer wrong", text)) is None, "served, and not placed"
