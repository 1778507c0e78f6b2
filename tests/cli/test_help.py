"""What the command line says of itself: help, completion, exit codes, failures as JSON, tables of any width."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpool import open_store
from kvpool.cli import tables
from kvpool.cli.exits import EXIT_USAGE
from kvpool.cli.tables import Column, fitted, show
from kvpool.config import PoolConfig
from tests.support.command_line import kvpool, kvpool_process, refused

COMMANDS = [
    ("index",), ("router",), ("vllm",), ("doctor",), ("top",), ("lookup",), ("size",), ("purge",), ("quota",),
    ("token",), ("bench",), ("bench", "store"),
]  # fmt: skip


def wide(columns: int) -> dict[str, str]:
    return {**os.environ, "COLUMNS": str(columns)}


def panels(page: str) -> list[str]:
    return re.findall(r"^╭─ (.+?) ─+╮$", page, re.MULTILINE)


@pytest.mark.parametrize("command", [(), *COMMANDS], ids=" ".join)
def test_help_is_whole_in_80_columns(command: tuple[str, ...]) -> None:
    page = kvpool(*command, "-h", env=wide(80)).stdout
    assert max(map(len, page.splitlines())) <= 80
    assert "…" not in page, "no text is cut"
    assert "--help" in page
    types = ("<int", "<list", "<bool", " TEXT ", " INTEGER ")
    assert not any(kind in page for kind in types), "units, and no types"


@pytest.mark.parametrize("command", ["index", "router"])
def test_options_of_a_service_are_in_groups(command: str) -> None:
    assert panels(kvpool(command, "--help", env=wide(80)).stdout) == [
        "Options", "Addresses", "Pool and workers", "Memory and limits", "Placing requests", "Start and end",
        "TLS and tokens", "Logs and traces",
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["index", "router"])
@pytest.mark.parametrize("option", ["--scrape", "--place-headers", "--reuse-reports"])
def test_an_option_that_said_the_default_is_refused(command: str, option: str) -> None:
    line = refused(command, option)
    assert line == f"kvpool: {option} is no option any more: it is the default; leave it out"


@pytest.mark.parametrize(
    ("habit", "says"),
    [
        ("status", "kvpool top shows an index and its workers, kvpool doctor examines a deployment"),
        ("stats", "kvpool top shows an index and its workers, kvpool doctor examines a deployment"),
        ("ping", "kvpool doctor says whether a pool, an index or a front answers"),
        ("version", "kvpool --version prints it"),
    ],
)
def test_a_command_by_habit_is_answered_with_ours(habit: str, says: str) -> None:
    assert refused(habit) == refused(habit, "--json") == f"kvpool: {habit} is no command: {says}"
    assert kvpool(habit).returncode == EXIT_USAGE


def test_who_purges_all_is_told_everything_and_how_to_look() -> None:
    look = "--dry-run alone shows what is there"
    line = refused("purge", "--pool", "file:///nowhere", "--all")
    assert line == f"kvpool: --all is no option: write --everything; {look}, by tenant and namespace"
    assert look in refused("purge", "--pool", "file:///nowhere")


@pytest.mark.parametrize("command", [(), ("bench",)], ids=" ".join)
def test_without_a_command_there_is_help(command: tuple[str, ...]) -> None:
    ended = kvpool(*command)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == kvpool(*command, "--help").stdout


def test_the_version_by_the_script_and_by_the_package() -> None:
    said = kvpool("--version").stdout
    assert said.strip().count(".") == 2
    by_package = [sys.executable, "-m", "kvpool", "--version"]
    assert subprocess.run(by_package, capture_output=True, text=True, timeout=120).stdout == said


def test_completion_knows_commands_options_and_values() -> None:
    def completed(words: str) -> list[str]:
        last = len(words.split(" ")) - 1
        variables = {"_KVPOOL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(last)}
        return kvpool(env={**os.environ, **variables}).stdout.split()

    assert completed("kvpool do") == ["doctor"]
    assert completed("kvpool top --s") == ["--sort"]
    assert completed("kvpool top --sort d") == ["device", "disk"]
    assert completed("kvpool bench st") == ["store"]


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["top", "--onse"], 2, "UsageError"),
        (["nothing"], 2, "UsageError"),
        (["bench", "nothing"], 2, "UsageError"),
        (["lookup", "--model", "m"], 2, "ConfigError"),
        (["lookup", "--model", "m", "--token-ids", "@/nowhere/x"], 1, "ConfigError"),
        (["top", "--once", "--index", "127.0.0.1:1"], 1, "IndexUnavailable"),
        (["purge", "--pool", "file:///nowhere/x", "--everything", "--yes"], 1, "ConfigError"),
        (["purge", "--pool", "valkey://127.0.0.1:1", "--everything", "--yes"], 1, "StoreUnavailable"),
        (
            ["index", "--listen", "127.0.0.1:0", "--tls-cert", "/nowhere/x", "--tls-key", "/nowhere/x"],
            1,
            "ConfigError",
        ),
        (["index", "--listen", "nowhere.invalid:0"], 1, "ConfigError"),
        (["index", "--listen", "x"], 2, "ConfigError"),
    ],
)
def test_exit_codes_tell_the_command_line_from_the_world(arguments: list[str], code: int, kind: str) -> None:
    ended = kvpool(*arguments)
    assert (ended.returncode, ended.stdout) == (code, "")
    (line,) = ended.stderr.splitlines()
    as_json = kvpool(*arguments, "--json")
    assert as_json.stderr == ""
    if arguments[0] == "index":  # it has no --json, and says so in JSON
        assert json.loads(as_json.stdout)["error"]["message"].startswith("No such option: --json")
        return
    error = json.loads(as_json.stdout)["error"]
    assert (as_json.returncode, error["exit_code"], error["type"]) == (code, code, kind)
    assert line == f"kvpool: {error['message']}"


@pytest.mark.parametrize("arguments", [["--version"], ["index", "--help"], ["top", "--json", "--onse"]])
def test_a_full_standard_output_is_one_line(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "kvpool", *arguments]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert ended.returncode == 1
    assert ended.stderr == "kvpool: nothing can be written to standard output: No space left on device\n"


def test_a_reader_that_has_gone_is_told_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kvpool", "--version"]
    ended = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_a_name_that_the_output_has_no_bytes_for_is_escaped(tmp_path: Path) -> None:
    model = {"model_type": "llama", "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 64}
    (tmp_path / "模型").mkdir()
    (tmp_path / "模型" / "config.json").write_text(json.dumps(model))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "200"}
    ended = kvpool_process("size", "--model", f"{tmp_path}/模型", env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"{tmp_path}/\\u6a21\\u578b: K and V of 1 heads of 64")


def test_input_and_output_may_be_closed() -> None:
    for command, code, says in (
        ("--version >&-", 0, ""),
        ("lookup --model m --token-ids - <&-", 2, "holds no"),
    ):
        ended = subprocess.run(
            ["sh", "-c", f'exec "$0" -m kvpool {command}', sys.executable],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert ended.returncode == code
        assert says in ended.stderr
        assert len(ended.stderr.splitlines()) == bool(says), ended.stderr


def test_forced_colours_make_no_screen_of_a_pipe(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    open_store(f"{url}?capacity=16MiB").close()
    ended = kvpool_process("purge", "--pool", url, "--dry-run", env={**os.environ, "FORCE_COLOR": "1"})
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\x1b[" not in ended.stdout


@pytest.mark.parametrize("said", [{"FORCE_COLOR": "1"}, {"COLUMNS": "0"}, {}])
def test_a_table_on_a_pipe_has_no_limit(said: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert tables.console().width == tables.WIDE


def test_failures_say_nothing_of_grpc() -> None:
    for target, advice in (
        ("127.0.0.1:1", ": nothing listens there; start one: kvpool index --listen 127.0.0.1:1"),
        ("nowhere.invalid:5", "; check the address"),
    ):
        line = refused("top", "--once", "--index", target)
        assert f"no index answers on {target}: " in line
        assert line.endswith(advice)
        assert not any(
            word in line for word in ("ipv4", "UNKNOWN", "errors resolving", "last error", "field:")
        )
    assert line.startswith("kvpool: no index answers on nowhere.invalid:5: the name of its host ")


ADDRESS = "HOST:PORT with a port from 0 to 65535, such as 127.0.0.1:50051"


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *(("index", option) for option in ("--listen", "--metrics", "--http", "--ext-proc", "--bootstrap")),
        *(("router", option) for option in ("--listen", "--grpc", "--bootstrap")),
        *(("doctor", option) for option in ("--index", "--picker")),
        ("top", "--index"),
    ],
)
def test_an_address_that_is_none_is_told_with_its_option(command: str, option: str) -> None:
    for wrong in ("foo", "127.0.0.1:99999"):
        ended = kvpool(command, option, wrong)
        assert ended.returncode == EXIT_USAGE
        assert ended.stderr == f"kvpool: {option}: '{wrong}' is not an address: write {ADDRESS}\n"


@pytest.mark.parametrize(
    "arguments", [("index", "--max-memory"), ("router", "--max-memory"), ("bench", "store", "--batch-bytes")]
)
def test_a_size_that_is_none_is_told_with_its_option(arguments: tuple[str, ...]) -> None:
    line = refused(*arguments, "2GG")
    assert line.startswith(f'kvpool: {arguments[-1]}: "2GG" is not a size: ')


def test_a_missing_value_names_the_page_of_its_own_command() -> None:
    assert refused("doctor", "--pool").endswith("requires an argument (see kvpool doctor --help)")
    assert refused("bench", "store", "--pool").endswith("(see kvpool bench store --help)")


def test_files_of_tls_are_told_by_their_options(tmp_path: Path) -> None:
    nowhere, asks = f"{tmp_path}/tls_ca", ("top", "--once", "--index", "127.0.0.1:1")
    line = refused(*asks, "--tls-ca", nowhere)
    assert line == f"kvpool: --tls-ca {nowhere}: No such file or directory"
    as_json = json.loads(kvpool(*asks, "--tls-ca", nowhere, "--json").stdout)["error"]
    assert line == f"kvpool: {as_json['message']}"
    assert "--tls-cert and --tls-key go together" in refused(*asks, "--tls-cert", nowhere)
    assert "--tls-cert needs --tls-ca" in refused(*asks, "--tls-cert", nowhere, "--tls-key", nowhere)


def test_pool_and_index_can_stand_in_the_environment(tmp_path: Path) -> None:
    pool = {**os.environ, "KVPOOL_POOL": f"file://{tmp_path}/nowhere"}
    assert f"file://{tmp_path}/nowhere: there is no such directory" in refused(
        "purge", "--everything", "--yes", env=pool
    )
    index = {**os.environ, "KVPOOL_INDEX": "127.0.0.1:1"}
    assert "no index answers on 127.0.0.1:1" in refused("top", "--once", env=index)
    assert "no index answers on 127.0.0.1:1" in refused(
        "lookup", "--model", "m", "--hashes", "-", env=index, stdin="1"
    )
    # A worker in such an environment does not take it for a misspelled setting.
    assert PoolConfig.load({"pool": "file:///pool"}, environ={"KVPOOL_INDEX": "h:1"}).pool == "file:///pool"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pool", "file:///proc/nowhere"], "file:///proc/nowhere"),
        (["--pool", "file:///etc/passwd"], "choose a directory"),
        (["--pool", "valkeys://user:secret@127.0.0.1:1?ca=/nowhere/x.pem"], "/nowhere/x.pem"),
        (["--rounds", "0"], "--rounds"),
        (["--batch-bytes", "0"], "--batch-bytes"),
    ],
)
def test_wrong_use_is_one_clear_line(arguments: list[str], says: str) -> None:
    line = refused("bench", "store", *arguments)
    assert says in line
    assert "secret" not in line


AS_NOBODY = """
import os, sys
import zoneinfo, kvpool.cli.bench_store, kvpool.store.file  # while the interpreter's files can be read
from kvpool.cli.app import main
if os.getuid() == 0:  # no permission stops root
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
main()
"""


def test_a_folder_without_write_access_is_one_clear_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    for folder in tmp_path.parents:
        if folder.name.startswith("pytest-") and folder.stat().st_uid == os.getuid():
            folder.chmod(0o755)
    arguments = ["bench", "store", "--pool", f"file://{tmp_path}/pool"]
    ended = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode != 0
    assert "Permission denied" in ended.stderr.strip().splitlines()[-1]
    assert "write access" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_commands_start_without_pydantic() -> None:
    """Its import takes as long as the rest of a command's start."""
    code = "import sys, kvpool.cli.index, kvpool.cli.app; print('pydantic' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == "False\n"


# ---- tables


def columns() -> list[Column]:
    return [
        Column("worker", left=True, cells=["a-worker", "another-worker"]), Column("blocks", cells=["12345678", "0"]),
        Column("least", drop=2, cells=["1234567890", "0"]), Column("less", drop=1, cells=["1234567890", "0"]),
        Column("problem", wraps=True, cells=["", "it does not answer, and nobody knows why it does not answer"]),
    ]  # fmt: skip


def printed(width: int) -> str:
    out = Console(file=io.StringIO(), width=width, color_system=None)
    show(out, *fitted(columns(), out.width))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


FORGED = "m\x1b]0;owned\x07\x9b2J\x7f\u202e"  # a title, a clear screen, and text that runs backwards


def test_words_of_others_command_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = tables.console()
    monkeypatch.setattr(out, "file", io.StringIO())
    show(out, *fitted([Column(FORGED, cells=[FORGED])], 120), FORGED, Table(FORGED), Text(FORGED))
    said = out.file.getvalue()
    assert said.count("owned") == 5
    said += refused("lookup", "--index", FORGED, "--model", "m", "--tokens", "1")
    assert not [char for char in said if char not in "\n\t" and not (char.isprintable() or char == "\ufffd")]


@pytest.mark.parametrize(
    ("width", "missing"),
    [(tables.WIDE, ""), (120, ""), (70, "least"), (60, "less, least"), (30, "less, least")],
)
def test_a_narrow_table_leaves_columns_out_and_cuts_nothing(width: int, missing: str) -> None:
    shown = printed(width)
    words = " ".join(shown.split())
    assert "…" not in shown
    assert all(one in words for one in ("another-wo", "12345678", "problem"))
    assert ("1234567890" in shown) is (missing != "less, least")
    if missing:
        assert set(missing.split(", ")) == set(
            words.partition("no room for ")[2].partition(";")[0].split(", ")
        )
    if width >= 60:
        assert max(map(len, shown.splitlines())) <= width
    if width == tables.WIDE:
        assert "it does not answer, and nobody knows why it does not answer" in shown


def test_a_table_of_plain_columns_is_printed_whole() -> None:
    out = Console(file=io.StringIO(), width=20, color_system=None)
    table = Table()
    for name in ("first", "second"):
        table.add_column(name, no_wrap=True)
    table.add_row("0123456789" * 2, "abcdefghij" * 2)
    show(out, table)
    assert isinstance(out.file, io.StringIO)
    assert "abcdefghij" * 2 in out.file.getvalue()
