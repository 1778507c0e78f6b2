"""The floors of the tree, read from its imports: they only go down, and some things stand on one alone.

Over 400 lines because all floors and walls stand together, each beside a tree that breaks it.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

# From the ground up; a module may import from its own floor and from those below. A name stands for all below it that
# has no floor of its own; "store.__init__" is the file that a package's name imports.
FLOORS = (
    {"_native", "v1"},  # built and generated
    {"clock", "errors", "files", "metrics", "text", "threads", "tracing"},
    {"key"},
    {"environment"},
    {"config"},
    {"store"},
    {"store.server"},
    {"store.clients"},
    {"store.valkey"},
    {"store.__init__"},
    {"discovery"},
    {"transfer", "index"},
    {"index.request_stats", "index.net", "index.fleet", "index.protocol", "index.tokens"},
    {"index.cost", "index.client"},
    {"index.follow"},
    {"index.serve"},
    {"index.front"},
    {"index.index", "index.__init__"},
    {"__init__"},  # the public names
    {"vllm", "sglang"},
    {"vllm.engine"},
    {"vllm.requests", "vllm.save"},
    {"vllm.audit"},
    {"vllm.load"},
    {"vllm.tell"},
    {"vllm.encoder"},
    {"vllm.scheduler", "vllm.worker", "vllm.tier"},
    {"vllm.connector"},
    {"vllm.__init__"},
    {"cli"},
    {"__main__"},
    {"demo"},  # packages beside kvpool, in no wheel
    {"benchmarks"},
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
ROOMED = {"index"}  # whose rooms and files import nothing of another one on their own floor
# Pairs that import nothing of each other, whatever their floors.
STRANGERS = (
    ("transfer", "index"),
    ("vllm", "sglang"),
    ("vllm", "index"),
    ("sglang", "index"),
    ("vllm.load", "vllm.save"),
    ("vllm.save", "vllm.tell"),
    *(
        ("index.front", f"index.fleet.{name}")
        for name in ("partition", "rank", "sequence", "table", "workers")
    ),
)

# Foreign package -> the only parts of kvpool that may import it.
ONLY_IN = {
    "torch": {"transfer", "vllm", "sglang", "benchmarks", "demo"},
    "vllm": {"vllm", "demo", "benchmarks"},
    "sglang": {"sglang"},
    "zmq": {"benchmarks"},
    "grpc": {"index", "v1", "benchmarks"},
    "google": {"index", "v1"},
    "aiohttp": {"index"},
    "opentelemetry": {"tracing"},
}
# Run as processes of their own, for what these have, most in other environments; so they may import nothing of kvpool.
APART = {
    "benchmarks.contest",
    "benchmarks.dynamo_peer",
    "benchmarks.gpu_verdict",
    "benchmarks.store_peer",
    "demo.tiny_model",
}
FORBIDDEN_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal"}
FORBIDDEN_CALLS = {"eval", "exec"}
FORBIDDEN_ATTRIBUTES = {
    ("os", "system"),
    ("os", "popen"),
    ("subprocess", "getoutput"),
    ("subprocess", "getstatusoutput"),
}
FORBIDDEN_KEYWORDS = {"shell", "allow_pickle"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
# Some to hand it on to child processes.
MAY_READ_THE_ENVIRONMENT = {"environment", "config", "cli", "demo", "benchmarks"}
MAX_LINES = 400
TOPS = ("kvpool", "demo", "benchmarks")
PARTS = ("kvpool", "benchmarks", "demo", "tests")
VAGUE_NAMES = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}


class Source(NamedTuple):
    """One file of the tree."""

    path: str  # from the root, for people
    module: str  # dotted
    is_package: bool
    tree: ast.Module

    @property
    def part(self) -> str:
        return part_of(self.module)


def part_of(module: str) -> str:
    """The name below kvpool, of the whole package or file; or that of a package beside it."""
    package, _, below = module.partition(".")
    return below.partition(".")[0] if package == "kvpool" else package


def room_of(module: str) -> str:
    """A part's name and that of the room or file in it, below kvpool."""
    return ".".join(module.removeprefix("kvpool.").split(".")[:2])


def sources(root: Path) -> list[Source]:
    found = []
    for path in sorted(path for top in TOPS for path in (root / top).rglob("*.py")):
        relative = path.relative_to(root)
        parts = list(relative.with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found.append(Source(str(relative), module, is_package, ast.parse(path.read_text(), str(relative))))
    return found


def imports(source: Source, modules: set[str]) -> Iterator[tuple[int, str]]:
    """(line, module) of every import anywhere in the file: in functions and under TYPE_CHECKING, too."""

    def resolve(base: str, name: str) -> str:
        return f"{base}.{name}" if f"{base}.{name}" in modules else base

    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = source.module.split(".")
                above = here[: len(here) - node.level + source.is_package]
                base = ".".join([*above, base] if base else above)
            yield from ((node.lineno, resolve(base, alias.name)) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = (
                node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            )
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def floor_of(module: str, is_package: bool) -> int | None:
    """The floor of a module of kvpool, by the longest name that has one; None: it stands on none."""
    below = module.removeprefix("kvpool").removeprefix(".")
    if is_package and (own := f"{below}.__init__".removeprefix(".")) in FLOOR_OF:
        return FLOOR_OF[own]
    while below and below not in FLOOR_OF:
        below = below.rpartition(".")[0]
    return FLOOR_OF.get(below)


def is_below(module: str, name: str) -> bool:
    """Whether a module is, or is inside of, what has this name below kvpool."""
    return f"{module}.".startswith(f"kvpool.{name}.")


def import_faults(source: Source, modules: set[str], packages: set[str]) -> Iterator[str]:
    part = source.part
    own = floor_of(source.module, source.is_package)
    for line, module in imports(source, modules):
        where = f"{source.path}:{line}"
        package = module.partition(".")[0]
        if package in FORBIDDEN_MODULES:
            yield f"{where}: {package} must not be imported anywhere"
        if source.module in APART:
            if package == "kvpool":
                yield f"{where}: {source.module} is run where there is no kvpool"
            continue
        if package in ONLY_IN and part not in ONLY_IN[package]:
            yield f"{where}: {package} may only be imported in {sorted(ONLY_IN[package])}"
        if package not in TOPS:
            continue
        floor = floor_of(module, module in packages)
        if floor is None:
            yield f"{where}: {module} stands on no floor"
        elif own is not None:
            if floor > own:
                yield f"{where}: {source.module} imports {module}, which is above it"
            rooms = {room_of(module), room_of(source.module)}
            if floor == own and part == part_of(module) and part in ROOMED and len(rooms) > 1:
                yield f"{where}: {source.module} imports {module}, which is beside it"
            for one, other in (*STRANGERS, *((two, one) for one, two in STRANGERS)):
                if is_below(source.module, one) and is_below(module, other):
                    yield f"{where}: {one} must not see {other}"


def use_faults(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        where = f"{source.path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                yield f"{where}: {node.func.id} must not be called"
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in FORBIDDEN_KEYWORDS and not off:
                    yield f"{where}: {keyword.arg} must not be set"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in FORBIDDEN_ATTRIBUTES:
                yield f"{where}: {node.value.id}.{node.attr} must not be used"
            if (
                node.value.id == "os"
                and node.attr in ENVIRONMENT
                and source.part not in MAY_READ_THE_ENVIRONMENT
            ):
                yield f"{where}: only environment.py and config.py read the environment"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
            if names & ENVIRONMENT and source.part not in MAY_READ_THE_ENVIRONMENT:
                yield f"{where}: only environment.py and config.py read the environment"


def cycles(found: list[Source], modules: set[str]) -> Iterator[str]:
    """Files that import each other in a circle, whether they do so at once or later."""
    edges = {
        source.module: {module for _, module in imports(source, modules) if module in modules}
        - {source.module}
        for source in found
        if source.module != "kvpool"
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> Iterator[str]:
        if module in trail:
            yield "a circle of imports: " + " -> ".join([*trail[trail.index(module) :], module])
        elif module not in done:
            for target in sorted(edges.get(module, ())):
                yield from visit(target, (*trail, module))
            done.add(module)

    for module in sorted(edges):
        yield from visit(module, ())


def stands(root: Path, name: str) -> bool:
    path = root / "kvpool" / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file() or name in ("_native", "v1", *TOPS)


def faults(root: Path) -> list[str]:
    found = sources(root)
    modules = {source.module for source in found} | {"kvpool._native"}
    packages = {source.module for source in found if source.is_package}
    texts = [
        f"{source.path}: {source.part} stands on no floor"
        for source in found
        if floor_of(source.module, source.is_package) is None
    ]
    texts += [
        f"{source.path}: say what it holds" for source in found if Path(source.path).name in VAGUE_NAMES
    ]
    for source in found:
        texts += import_faults(source, modules, packages)
        texts += use_faults(source)
    return [*texts, *cycles(found, modules)]


def test_the_tree_stands() -> None:
    assert len(sources(ROOT)) > 15
    assert faults(ROOT) == []
    assert [name for name in FLOOR_OF if not stands(ROOT, name)] == [], "floors of what is no more"


def test_a_long_file_says_why_it_is_one() -> None:
    files = [
        path for kind in ("py", "cpp", "h") for part in PARTS for path in (ROOT / part).rglob(f"*.{kind}")
    ]
    lines = {path: path.read_text().splitlines() for path in files if "_pb2" not in path.name}
    assert len(lines) > 300
    long = [path for path, text in lines.items() if len(text) > MAX_LINES]
    assert long, "the limit is looked at"
    reason = f"over {MAX_LINES} lines because"
    silent = [str(path) for path in long if reason not in " ".join(lines[path][:14]).lower()]
    assert silent == [], f'split it along its nouns, or write into its first lines: "{reason} ..."'


def shared_faults(root: Path) -> list[str]:
    """Tests and benchmarks share what lies in ``tests/support`` and in kits beside them, never a test or a conftest."""
    files = [path for part in ("tests", "benchmarks") for path in (root / part).rglob("*.py")]
    modules = {".".join(path.relative_to(root).with_suffix("").parts) for path in files}
    found = []
    for path in files:
        relative = path.relative_to(root)
        source = Source(
            str(relative), ".".join(relative.with_suffix("").parts), False, ast.parse(path.read_text())
        )
        for line, module in imports(source, modules):
            package, _, below = module.partition(".")
            if package == "tests" and any(one.startswith(("test_", "conftest")) for one in below.split(".")):
                found.append(f"{source.path}:{line} imports {module}: what tests share lies in tests/support")
            above = module in modules and package == "tests" and not module.startswith("tests.support.")
            if above and source.module.startswith("tests.support."):
                found.append(f"{source.path}:{line} imports {module}, which is above it")
    return sorted(found)


def test_no_test_imports_another() -> None:
    assert shared_faults(ROOT) == []


def test_what_make_test_does_not_look_at_is_run_by_another_target() -> None:
    """``ELSEWHERE`` in the Makefile: each of these has a mark by which its target picks its tests."""
    for mark in ("compose", "dist", "e2e", "pages", "sglang"):
        files = sorted((ROOT / "tests" / mark).glob("test_*.py"))
        assert files
        told = re.compile(rf"^pytestmark = .*?mark\.({mark}|soak)\b", re.DOTALL | re.MULTILINE)
        assert [path.name for path in files if not told.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("tests/a/test_b.py", "from tests.a.test_c import d", "imports tests.a.test_c: what tests share"),
        (
            "tests/a/test_b.py",
            "def f():\n    from tests.a import test_c",
            "imports tests.a.test_c: what tests share",
        ),
        ("tests/a/conftest.py", "from tests.conftest import f", "imports tests.conftest: what tests share"),
        ("benchmarks/b.py", "from tests.a.test_c import d", "imports tests.a.test_c: what tests share"),
        ("tests/support/b.py", "from tests.a import kit", "imports tests.a.kit, which is above it"),
    ],
)
def test_an_import_of_a_test_is_found(tmp_path: Path, name: str, text: str, fault: str) -> None:
    good = {
        "tests/a/kit.py": "",
        "tests/a/test_c.py": "from tests.a.kit import x\nfrom tests.support.s import y",
    }
    for path, content in {**good, name: text}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    (found,) = shared_faults(tmp_path)
    assert fault in found


GOOD = {
    "__init__.py": "from kvpool.errors import E",
    "errors.py": "class E(Exception): ...",
    "config.py": "import os\nfrom kvpool.errors import E\nos.environ",
    "key/key.py": "from kvpool import errors, _native",
    "store/__init__.py": "from kvpool.store import file",
    "store/file.py": "from ..key.key import x",
    "transfer/mover.py": "import torch\nfrom kvpool.store.file import y",
    "vllm/__init__.py": "import vllm.v1\nfrom kvpool import E\nimport kvpool.transfer.mover",
    "cli/__init__.py": "import os, subprocess\nsubprocess.run(['x'], env=os.environ, shell=False)",
}


def plant(root: Path, changes: dict[str, str]) -> Path:
    for name, text in {**GOOD, **changes}.items():
        path = root / "kvpool" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


def test_a_good_tree_has_no_faults(tmp_path: Path) -> None:
    assert faults(plant(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("key/key.py", "from kvpool.store import file", "imports kvpool.store.file, which is above it"),
        ("key/key.py", "def f():\n    import kvpool.vllm", "kvpool.key.key imports kvpool.vllm, which is above it"),
        ("key/key.py", "if TYPE_CHECKING:\n    from ..transfer.mover import x", "which is above it"),
        ("key/key.py", "from kvpool import E", "kvpool.key.key imports kvpool, which is above it"),
        ("key/key.py", "import importlib\nimportlib.import_module('kvpool.cli')", "which is above it"),
        ("store/file.py", "from ..transfer import engine", "which is above it"),
        ("vllm/load/offers.py", "from kvpool.vllm.tell.metrics import x", "which is above it"),
        ("vllm/save/stores.py", "from kvpool.vllm.load.lookups import x", "vllm.save must not see vllm.load"),
        ("vllm/load/offers.py", "from kvpool.vllm.save.stores import x", "vllm.load must not see vllm.save"),
        ("index/fleet/table.py", "from kvpool.transfer.mover import x", "index must not see transfer"),
        ("transfer/mover.py", "from kvpool.index import x", "transfer must not see index"),
        ("index/cost/load.py", "from kvpool.index.client import x", "kvpool.index.client, which is beside it"),
        ("index/limits.py", "from kvpool.index.fleet import snapshot", "kvpool.index.fleet, which is above it"),
        (
            "index/front/placer.py",
            "from kvpool.index.fleet.table import x",
            "index.front must not see index.fleet.table",
        ),
        ("store/file.py", "import torch", "torch may only be imported in"),
        ("store/file.py", "def f():\n    from torch import nn", "torch may only be imported in"),
        ("transfer/mover.py", "import vllm", "vllm may only be imported in ['benchmarks', 'demo', 'vllm']"),
        ("transfer/mover.py", "import grpc.aio", "grpc may only be imported in"),
        ("vllm/x.py", "import zmq", "zmq may only be imported in ['benchmarks']"),
        ("store/file.py", "from google.protobuf import message", "google may only be imported in"),
        ("v1/x_pb2.py", "from kvpool.errors import E", "kvpool.v1.x_pb2 imports kvpool.errors, which is above"),
        ("key/key.py", "import pickle", "pickle must not be imported"),
        ("cli/x.py", "from pickle import loads", "pickle must not be imported"),
        ("key/key.py", "eval('1')", "eval must not be called"),
        ("../demo/tiny_model.py", "from kvpool import errors", "is run where there is no kvpool"),
        ("cli/x.py", "import demo.workspace", "kvpool.cli.x imports demo.workspace, which is above it"),
        ("cli/x.py", "from benchmarks import store", "kvpool.cli.x imports benchmarks, which is above it"),
        ("../benchmarks/store_peer.py", "from kvpool import errors", "is run where there is no kvpool"),
        ("cli/x.py", "import torch", "torch may only be imported in"),
        ("cli/x.py", "exec('1')", "exec must not be called"),
        ("cli/x.py", "import subprocess\nsubprocess.run('x', shell=True)", "shell must not be set"),
        ("cli/x.py", "import os\nos.system('x')", "os.system must not be used"),
        ("key/key.py", "import os\nos.environ['X']", "only environment.py and config.py read the environment"),
        ("vllm/x.py", "import os\nos.getenv('X')", "only environment.py and config.py read the environment"),
        ("key/key.py", "from os import environ", "only environment.py and config.py read the environment"),
        ("store/utils.py", "", "say what it holds"),
        ("odds.py", "", "odds stands on no floor"),
        ("key/key.py", "import kvpool.odds", "kvpool.odds stands on no floor"),
        ("errors.py", "from kvpool import config", "kvpool.config -> kvpool.errors -> kvpool.config"),
    ],
)  # fmt: skip
def test_a_fault_is_found(tmp_path: Path, name: str, text: str, fault: str) -> None:
    found = faults(plant(tmp_path, {name: text}))
    assert any(fault in one for one in found), found
