"""The images' supply chain: pins of ``deploy/Dockerfile``, ``scripts/image-digests``, ``scripts/release``. Registry and
tools are scripted here: nothing is asked for, and nothing is signed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
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
    for name in NAMING:
        (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / NAMING[0]).write_text(f"ARG A_IMAGE={image}\n")
    (tmp_path / NAMING[1]).write_text(f"A: ${{A_IMAGE:-{image}}}, other: x{image}, more: {image}-slim")

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
    assert digests("--check").returncode == 0
    (tmp_path / NAMING[0]).write_text(f"ARG A_IMAGE={image}@sha256:{'0' * 64}\n")
    moved = digests("--check")
    assert (moved.returncode, f"its tag means {DIGEST}" in moved.stdout) == (1, True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout that is ready for its release, and tools that write down how they are called."""
    root = tmp_path / "tree"
    for name in ("scripts/release", "scripts/dist/sources.py", "kvpool/__init__.py", "deploy/helm/Chart.yaml",
                 "deploy/k8s/components/images/kustomization.yaml"):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "deploy/Dockerfile").write_text(re.sub(r"(_IMAGE=\S+)", rf"\1@{DIGEST}", DOCKERFILE))
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
    for tool in ("cosign", "docker", "helm"):
        (bin_ / tool).write_text(
            '#!/bin/sh\necho "$(basename "$0") $*" >>"$0.said"\nfor word; do [ "$last" = --metadata-file ] && '
            f'echo \'{{"containerimage.digest": "{DIGEST}"}}\' >"$word"; last=$word; done; true\n'
        )
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
    assert not any(calls(tree, tool) for tool in ("cosign", "docker", "helm"))
    wheel = next((tree / "dist").glob("*.whl"))
    assert f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}" in run.stdout
    would = [line for line in run.stdout.splitlines() if line.startswith("would run: ")]
    assert [line.split()[3] for line in would if wheel.name in line] == [
        "sign-blob",
        "attest-blob",
        "attest-blob",
    ]
    assert sum("docker buildx build" in line for line in would) == 5
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
    signed = [line.split()[-1] for line in calls(tree, "cosign") if line.startswith("cosign sign --yes")]
    assert signed == [
        f"registry.example/kvpool-{image}@{DIGEST}"
        for image in ("front", "index", "valkey", "worker", "worker-gpu")
    ]
    assert all("--sbom=true --provenance=mode=max" in line for line in calls(tree, "docker"))
    kinds = [re.findall(r"--type (\S+)", line) for line in calls(tree, "cosign") if " attest-blob " in line]
    assert kinds == [["slsaprovenance1"], ["cyclonedx"]]
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
