"""``examples/``: each is run as its first lines say, against a real index and, where it needs one, a real Valkey."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from demo.engine_process import free_ports
from kvpool import BlockHasher, IndexClient
from tests.support.deadlines import eventually
from tests.support.feeds import Misbehaving, misbehaving
from tests.support.http_client import post
from tests.support.index_process import Index
from tests.support.index_process import running as running_index
from tests.support.openai_worker import ScriptedWorker, scripted
from tests.support.recipes import started
from tests.support.servers import running
from tests.support.wire import batch, stored

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GO = ROOT / ".cache/go/root"
TOKENS = list(range(100, 180))  # five blocks, of which a worker holds three

# Go compiles gRPC the first time.
pytestmark = [pytest.mark.usefixtures("grpc_started"), pytest.mark.timeout(600)]


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=280, check=False, **options
    )  # type: ignore[call-overload,no-any-return]


def holding(publisher: Misbehaving, blocks: int) -> None:
    publisher.publish(batch(stored(BlockHasher(16).hashes(TOKENS)[:blocks])))


@contextmanager
def an_index(workers: dict[str, tuple[Misbehaving, str]], *more: str) -> Iterator[Index]:
    """One that follows workers by name: their publisher, and the address where they serve."""
    options = [
        word
        for name, (one, address) in workers.items()
        for word in (
            "--worker",
            f"{name}={one.publisher.events},replay={one.publisher.replay},model=m,block=16,address={address}",
        )
    ]
    with running_index(*options, *more) as index, IndexClient(index.target, 60) as client:
        if workers:
            assert eventually(lambda: not any(client.lookup("m", token_ids=TOKENS).stale))
        yield index


@pytest.fixture
def index() -> Iterator[Index]:
    """Of one worker that holds three blocks."""
    with misbehaving() as publisher:
        holding(publisher, 3)
        with an_index({"w-1": (publisher, "http://h:8000")}) as made:
            yield made


def test_the_python_client(index: Index, tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as server:
        url = f"valkey://127.0.0.1:{server.port}"
        ran = run(sys.executable, EXAMPLES / "python_client.py", url, index.target, "m", *TOKENS)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout == (
            "pool: 2 put, 2 found, 2 deleted\nw-1 at http://h:8000: 3 of 5 blocks in its memory, 0 in the pool\n"
        )
        assert server.client.dbsize() == 0
        ran = run(sys.executable, EXAMPLES / "python_client.py", url, "127.0.0.1:9", "m", *TOKENS)
        assert ran.returncode == 1
        assert ran.stderr.startswith("no answer: ")


@contextmanager
def router(folder: Path, target: str, fallback: ScriptedWorker) -> Iterator[str]:
    (port,) = free_ports(1)
    command = [
        sys.executable,
        str(EXAMPLES / "router.py"),
        f"127.0.0.1:{port}",
        target,
        f"http://{fallback.at}",
    ]
    with started(command, folder / f"router-{port}.log", f"http://127.0.0.1:{port}/health"):
        yield f"http://127.0.0.1:{port}"


def test_the_router_of_twenty_lines(tmp_path: Path) -> None:
    asked = {"model": "m", "prompt": TOKENS}
    with ExitStack() as parts:
        workers = parts.enter_context(scripted("a", "b"))
        publishers = [parts.enter_context(misbehaving()) for _ in workers]
        holding(publishers[1], 5)
        known = {
            worker.name: (publisher, f"http://{worker.at}")
            for worker, publisher in zip(workers, publishers, strict=True)
        }
        holding(publishers[0], 1)
        index = parts.enter_context(an_index(known))
        url = parts.enter_context(router(tmp_path, index.target, workers[0]))
        # On a busy machine an answer may come too late: then it is the fallback.
        assert eventually(lambda: post(url, asked).worker == "b"), "who holds most of it"
        assert json.loads(workers[1].bodies[-1]) == asked
        others = [
            post(url, {"model": "m", "prompt": list(range(n, n + 64))}).worker for n in range(0, 6400, 64)
        ]
        assert set(others) == {"a", "b"}, "what nobody holds is spread"
        assert index.stop()[0] == 0
        assert post(url, asked).worker == "a", "without an index: the fallback"


def test_the_router_has_twenty_lines() -> None:
    source = (EXAMPLES / "router.py").read_text()
    body = source.partition("async def completions")[2].partition("async def health")[0]
    assert len([line for line in body.splitlines()[1:] if line.strip()]) <= 20


def test_curl() -> None:
    with misbehaving() as publisher, ExitStack() as parts:
        holding(publisher, 3)
        known = {"w": (publisher, "http://127.0.0.1:1")}
        index = parts.enter_context(an_index(known, "--http", "127.0.0.1:0"))
        door = f"http://127.0.0.1:{index.http_port}"
        ran = run("sh", EXAMPLES / "curl.sh", door, "m")
        assert ran.returncode == 0, ran.stderr + ran.stdout
        first, held, placed = ran.stdout.splitlines()
        assert first == "the index serves"
        assert json.loads(held)["device_blocks"] == [3], held
        assert json.loads(held)["prompt_blocks"] == [65], "blocks of 128 tokens find whole ones, too"
        assert json.loads(placed)["rows"]["worker"] == ["w"], placed
        (worker,) = parts.enter_context(scripted("w"))
        assert run("sh", EXAMPLES / "curl.sh", door, "m", f"http://{worker.at}").returncode == 0
        assert json.loads(worker.bodies[-1])["prompt"] == TOKENS * 13
        ran = run("sh", EXAMPLES / "curl.sh", door, "another")
        assert ran.returncode != 0
        assert "error" in ran.stdout


def test_pictures(tmp_path: Path) -> None:
    """By scripted workers, which encode nothing; on engines: ``tests/e2e/test_kvpool_vllm.py``."""
    picture = tmp_path / "picture.png"
    picture.write_bytes(bytes(range(256)) * 999)
    with scripted("a", "b") as workers:
        urls = [f"http://{worker.at}" for worker in workers]
        ran = run("sh", EXAMPLES / "pictures.sh", "m", picture, *urls)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout == "".join(f"{url}: 0 computed, 0 from the pool\n" for url in urls)
        bodies = [json.loads(worker.bodies[-1]) for worker in workers]
        assert [body.pop("cache_salt") for body in bodies] == [worker.at for worker in workers]
        assert bodies[0] == bodies[1]
        shown = bodies[0]["messages"][0]["content"][0]["image_url"]["url"]
        assert base64.b64decode(shown.removeprefix("data:image/png;base64,")) == picture.read_bytes()
        workers[1].status, workers[1].reply = 400, b"it sees nothing"
        ran = run("sh", EXAMPLES / "pictures.sh", "m", picture, *urls)
        assert ran.returncode == 1
        assert "it sees nothing" in ran.stderr
    ran = run("sh", EXAMPLES / "pictures.sh", "m")
    assert ran.returncode == 2
    assert "sh pictures.sh MODEL PICTURE.png" in ran.stdout


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of the example with its generated code, and the environment to build it in. Debian's packages have no
    modules: they are found below GOPATH.
    """
    program = GO / "usr/lib/go-1.24/bin/go"
    if not program.exists():
        pytest.skip("there is no Go: make .cache/go/.stamp gets it on Debian")
    path = tmp_path_factory.mktemp("go")
    folder = path / "src/kvpool.example/lookup"
    shutil.copytree(EXAMPLES / "go", folder)
    (generate,) = re.findall(r"^//go:generate protoc (.*)$", (folder / "main.go").read_text(), re.MULTILINE)
    words = generate.replace("../../protos", str(ROOT / "protos")).split()
    plugins = [f"--plugin={each}={GO / 'usr/bin' / each}" for each in ("protoc-gen-go", "protoc-gen-go-grpc")]
    ran = run(
        sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", *plugins, *words,
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT / ".cache/proto")},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    environment = {
        **os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "GOROOT": str(program.parents[1]),
        "GOPATH": f"{path}:{GO / 'usr/share/gocode'}", "GO111MODULE": "off", "CGO_ENABLED": "0",
        "GOCACHE": str(ROOT / ".cache/go/build"), "GOTOOLCHAIN": "local",
        # Most of the time is gRPC's compilation: without optimizations, debug information and searches for garbage.
        "GOFLAGS": "'-gcflags=all=-N -l -dwarf=false'", "GOGC": "off",
        "GOLDEN": str(ROOT / "tests/golden/protocol.json"),
    }  # fmt: skip
    return folder, environment


def test_go_hashes_as_the_protocols_page_says(go: tuple[Path, dict[str, str]]) -> None:
    folder, environment = go
    ran = run("go", "test", "-count=1", ".", cwd=folder, env=environment)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert not run("gofmt", "-l", ".", cwd=EXAMPLES / "go", env=environment).stdout


def test_the_go_client(index: Index, go: tuple[Path, dict[str, str]]) -> None:
    folder, environment = go
    built = run("go", "build", "-o", "lookup", ".", cwd=folder, env=environment)
    assert built.returncode == 0, built.stderr
    ran = run(folder / "lookup", index.target, "m", 16, *TOKENS)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "w-1 at http://h:8000: 3 of 5 blocks in its memory, 0 in the pool, stale: false\n"
    ran = run(folder / "lookup", index.target, "nobody", 16, *TOKENS)
    assert ran.returncode == 1
    assert "NotFound" in ran.stderr
