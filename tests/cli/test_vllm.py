"""``kvpool vllm``: what is added to vLLM's command line, what wins, what is refused. Engines: ``tests/e2e``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvpool.cli.vllm import ENCODER, EVENTS, HASH, TRANSFER, Build, Start, command_of, is_free
from kvpool.errors import ConfigError
from tests.support.command_line import kvpool_process, refusal

GPU, CPU, BARE_CPU = Build(on_cpu=False, has_program=True), Build(True, True), Build(True, False)
POOL = {"KVPOOL_POOL": "valkey://pool:6379"}
CONNECTOR = {
    "kv_connector": "KVPoolConnector",
    "kv_connector_module_path": "kvpool.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {},
}
PUBLISHED = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://*:5657",
}


def start(*options: str, build: Build = GPU, taken: tuple[int, ...] = (), **environ: str) -> Start:
    """With a model, and by default a pool."""
    return command_of(
        ["serve", "ORG/MODEL", *options], environ or POOL, build, lambda port: port not in taken
    )


def of(started: Start, option: str) -> Any:
    """The only value of ``option``, parsed where it is an object."""
    (value,) = [
        after for word, after in zip(started.command, started.command[1:], strict=False) if word == option
    ]
    return json.loads(value) if value.startswith("{") else value


def refused(*options: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        start(*options, **environ)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_all_that_kvpool_needs_is_added() -> None:
    started = start()
    assert started.command[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", "ORG/MODEL"]
    assert started.variables == POOL
    assert of(started, TRANSFER) == CONNECTOR
    assert of(started, EVENTS) == PUBLISHED
    assert of(started, HASH) == "sha256_cbor"
    assert "--enable-prompt-tokens-details" in started.command
    assert "--kv-cache-memory-bytes" not in started.command, "a GPU's memory is its own"


def test_a_build_without_the_program_takes_the_model_as_an_option() -> None:
    assert start(build=BARE_CPU).command[1:5] == [
        "-m", "vllm.entrypoints.openai.api_server", "--model", "ORG/MODEL",
    ]  # fmt: skip
    by_option = command_of(["serve", "--model=M"], POOL, BARE_CPU, lambda port: True).command
    assert by_option[3:4] == ["--model=M"]


@pytest.mark.parametrize(
    ("options", "environ"),
    [
        (["--kv-cache-memory-bytes", "1G"], {}),
        (["--kv_cache_memory_bytes=1G"], {}),
        (["--gpu-memory-utilization", "0.3"], {}),
        ([], {"VLLM_CPU_KVCACHE_SPACE": "4"}),
    ],
)
def test_on_a_cpu_the_kv_cache_has_a_size_unless_the_user_gave_one(
    options: list[str], environ: dict[str, str]
) -> None:
    assert of(start(build=CPU), "--kv-cache-memory-bytes") == "2G"
    assert "2G" not in start(*options, build=CPU, **POOL, **environ).command


SPELLINGS = {
    "json": ["--kv-transfer-config", '{"kv_role": "kv_consumer", "kv_connector_extra_config": {"tenant": "a"}}'],
    "json behind =": ['--kv-transfer-config={"kv_role":"kv_consumer","kv_connector_extra_config":{"tenant":"a"}}'],
    "underscores": ["--kv_transfer_config", '{"kv_role": "kv_consumer", "kv_connector_extra_config": {"tenant": "a"}}'],
    "a beginning": ["--kv-transfer", '{"kv_role": "kv_consumer", "kv_connector_extra_config": {"tenant": "a"}}'],
    "dots": [
        "--kv-transfer-config.kv_role", "kv_consumer", "--kv-transfer-config.kv_connector_extra_config.tenant", "a",
    ],
    "dots behind =": [
        "--kv-transfer-config.kv_role=kv_consumer", "--kv-transfer-config.kv_connector_extra_config.tenant=a",
    ],
    "both": [
        "--kv-transfer-config.kv_role=kv_consumer", "--kv-transfer-config",
        '{"kv_role": "kv_both", "kv_connector_extra_config": {"tenant": "a"}}',
    ],
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_users_connector_settings_win_in_every_spelling(spelling: str) -> None:
    started = start(*SPELLINGS[spelling], "--max-model-len=4096")
    expected = {**CONNECTOR, "kv_role": "kv_consumer", "kv_connector_extra_config": {"tenant": "a"}}
    assert of(started, TRANSFER) == expected
    assert sum("transfer" in word for word in started.command) == 1, "the user's own words are merged away"
    assert "--max-model-len=4096" in started.command


@pytest.mark.parametrize(
    ("options", "events"),
    [
        (["--kv-events-config", '{"endpoint": "tcp://*:7000"}'],
         {"endpoint": "tcp://*:7000", "replay_endpoint": "tcp://*:7100"}),
        (["--kv-events-config.endpoint=tcp://*:7000", "--kv-events-config.replay_endpoint", "tcp://*:7001"],
         {"endpoint": "tcp://*:7000", "replay_endpoint": "tcp://*:7001"}),
        (["--kv-events-config.topic=kv"], {"topic": "kv"}),
        (['--kv-events-config={"endpoint": "ipc:///run/events"}'], {"endpoint": "ipc:///run/events"}),
    ],
)  # fmt: skip
def test_the_users_events_win(options: list[str], events: dict[str, str]) -> None:
    expected = {**PUBLISHED, **events}
    if "ipc" in expected["endpoint"]:
        del expected["replay_endpoint"]
    assert of(start(*options), EVENTS) == expected


def test_events_that_are_off_stay_off() -> None:
    assert of(start("--kv-events-config.enable_kv_cache_events=false"), EVENTS) == {
        "enable_kv_cache_events": False
    }


@pytest.mark.parametrize(
    ("options", "taken", "first", "replay"),
    [
        (["--port", "8001"], (), 5558, 5658),
        (["--port=8001"], (), 5558, 5658),
        ([], (5557,), 5558, 5658),
        ([], (5657, 5558), 5559, 5659),
        (["--port", "8100"], (), 5557, 5657),
        (["-dp", "4"], (), 5557, 5657),
        (["--data-parallel-size=4", "--port=8001"], (), 5561, 5661),
        (["-dp=4"], (5559,), 5561, 5661),
        (["--data-parallel-size", "300"], (), 5557, 5857),
        (["--port", "80"], (), 5637, 5737),
    ],
)
def test_events_take_free_ports_for_all_ranks(
    options: list[str], taken: tuple[int, ...], first: int, replay: int
) -> None:
    events = of(start(*options, taken=taken), EVENTS)
    assert (events["endpoint"], events["replay_endpoint"]) == (f"tcp://*:{first}", f"tcp://*:{replay}")


def test_without_a_free_port_it_says_so() -> None:
    said = refused_ports()
    assert said == "no ports for events are free from 5557 on; write endpoints in --kv-events-config"


def refused_ports() -> str:
    with pytest.raises(ConfigError) as caught:
        start(taken=tuple(range(5557, 5657)))
    return str(caught.value)


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not is_free(listener.getsockname()[1])
        port = listener.getsockname()[1]
    assert is_free(port)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([HASH, "sha256"], "hashes a pickle"),
        (["--prefix-caching-hash-algo=xxhash"], "write sha256_cbor, or leave it out"),
        (["--prefix_caching_hash_algo", "sha256"], "hashes a pickle"),
        (["--no-enable-prefix-caching"], "remove it"),
        (["--no_enable_prefix_caching"], "remove it"),
        (["--kv-offloading-size", "8"], "puts vLLM's own connector in kvpool's place"),
        (["--kv-transfer-config.kv_load_failure_policy=fail"], 'write "recompute"'),
        (["--kv-transfer-config", '{"kv_connector": "NixlConnector"}'], "names NixlConnector, which is not kvpool's"),
        (["--kv-transfer-config.kv_connector=MultiConnector",
          "--kv-transfer-config.kv_connector_extra_config.connectors=[1]"], "names MultiConnector"),
        (["--kv-transfer-config", "yes"], "write an object of JSON"),
        (["--kv-transfer-config", "[]"], "write an object of JSON"),
        (["--kv-transfer-config.kv_connector_extra_config=7"], "kv_connector_extra_config is an object"),
        (["--kv-transfer-config.kv_connector_extra_config.tenent=a"], 'did you mean "tenant"'),
        (["--config", "/nowhere/vllm.yaml"], "--config /nowhere/vllm.yaml: "),
        (["--ec-transfer-config", "yes"], """write an object of JSON, such as '{"ec_role": "ec_both"}'"""),
        (["--ec-transfer-config.ec_connector_extra_config=7"], "ec_connector_extra_config is an object"),
        (["--ec-transfer-config.ec_connector_extra_config.tenent=a"], 'did you mean "tenant"'),
        (["--ec-transfer-config.ec_connector_extra_config.store_decode=true"], 'unknown setting "store_decode"'),
        (["--ec-transfer-config.ec_connector_extra_config.pool=valkey://h"], "names another pool"),
        (["--ec-transfer-config.ec_role=ec_producer", "--kv-transfer-config.kv_role=kv_both"], "has no KV cache"),
        (["--ec-transfer-config", '{"ec_connector": "ECExampleConnector", "ec_role": "ec_producer"}'],
         "names ECExampleConnector, with which nothing of this engine is kvpool's"),
    ],
)  # fmt: skip
def test_what_kvpool_cannot_work_with_is_refused(options: list[str], words: str) -> None:
    assert words in refused(*options)


@pytest.mark.parametrize("arguments", [[], ["bench", "serve"], ["ORG/MODEL"]])
def test_only_a_server_is_started(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="write kvpool vllm -- serve MODEL"):
        command_of(arguments, POOL, GPU)


def test_xxhash_gets_the_one_seed_that_workers_must_share() -> None:
    started = start(HASH, "xxhash_cbor")
    assert started.variables == {**POOL, "PYTHONHASHSEED": "0"}
    assert of(started, HASH) == "xxhash_cbor"
    assert "PYTHONHASHSEED" not in start(HASH, "xxhash_cbor", **POOL, PYTHONHASHSEED="7").variables


def test_a_pool_of_the_connectors_wins_and_leaves_the_arguments() -> None:
    """Every user of a host can read a process's arguments."""
    url = "valkey://u:secret@other:1"
    started = start("--kv-transfer-config.kv_connector_extra_config.pool", url)
    assert started.variables == {"KVPOOL_POOL": url}
    assert not any("secret" in word for word in started.command)


def test_without_a_pool_it_is_a_directory_of_this_host(tmp_path: Path) -> None:
    assert start(PATH="/bin").variables == {"KVPOOL_POOL": "file:///dev/shm/kvpool?capacity=10GiB"}
    file = tmp_path / "kvpool.toml"
    file.write_text('pool = "file:///pool"')
    assert start(KVPOOL_CONFIG=str(file)).variables == {}, "the file names it"


def test_the_pool_in_a_multi_connector_counts() -> None:
    inner = {"kv_connector": "KVPoolConnector", "kv_connector_extra_config": {"pool": "file:///near"}}
    given = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [inner, {"a": 1}]}}
    started = start(TRANSFER, json.dumps(given))
    whole = of(started, TRANSFER)
    assert whole["kv_load_failure_policy"] == "recompute"
    assert whole["kv_connector_extra_config"]["connectors"] == [CONNECTOR, {"a": 1}]
    assert started.variables == {"KVPOOL_POOL": "file:///near"}


def test_options_in_vllms_own_file_win_too(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "port: 8002\nkv-transfer-config:\n  kv_role: kv_producer\nkv-cache-memory-bytes: 1G\n"
        "enable-prompt-tokens-details: true\n"
    )
    started = start("--config", str(file), build=CPU)
    assert of(started, TRANSFER)["kv_role"] == "kv_producer"
    assert of(started, EVENTS)["endpoint"] == "tcp://*:5559"
    assert started.variables == {**POOL, "KVPOOL_HTTP_PORT": "8002"}, "the connector reads arguments alone"
    assert not {"2G", "--enable-prompt-tokens-details"} & set(started.command)
    file.write_text("enable-prefix-caching: false\n")
    assert "remove it" in refused("--config", str(file))


@pytest.mark.parametrize(
    "options",
    [
        ["--api-key", "k-secret", "l-secret", "--port", "8001"],
        ["--api-key=k-secret", "--hf-token=l-secret"],
        [TRANSFER, json.dumps({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [
            {"kv_connector": "KVPoolConnector"},
            {"kv_connector": "KVPoolConnector", "kv_connector_extra_config": {"pool": "valkey://u:k-secret@h"}}]}})],
        ["--kv-transfer-config.kv_connector_extra_config.pool=valkey://u:k-secret@h"],
        ["--api_key", "k-secret"], ["--api_key=k-secret"], ["--api-ke", "k-secret"], ["--hf_token=k-secret"],
        ["--hf-t", "k-secret", "l-secret"], ["--enforce-eager", "k-secret"], ["-q", "k-secret"], ["-O.x=secret"],
        ["--otlp-traces-endpoint", "https://u:k-secret@collector/v1"], ["--otlp-traces-endpoint=https://h?key=k-secret"],
        ["--hf-overrides", '{"token": "k-secret"}'], ["--hf-overrides.token", "k-secret"],
        ["--kv-events-config", '{"endpoint": "tcp://u:k-secret@h:5557", "more": {"secret": "k-secret"}}'],
        ["--kv-events-config", '{"topic": "a topic: k-secret", "hwm": ["k-secret"]}'],
        [TRANSFER, json.dumps({"kv_connector_extra_config": {"tenant": "t"}, "engine_id": "k-secret"})],
        ["--kv-transfer-config", '{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": ['
         '{"kv_connector": "KVPoolConnector"}, {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": '
         '{"lmcache.remote_url": "redis://u:k-secret@h", "token": "k-secret", "pin": 5150}}]}}'],
        [ENCODER, '{"ec_connector_extra_config": {"pool": "valkey://u:m-secret@h", "model_id": "k-secret"}}'],
        [ENCODER, '{"ec_connector": "Another", "ec_ip": "k-secret", "ec_connector_extra_config": {"key": "k-secret"}}'],
        ["--port", "8001", "k-secret=1"], ["--served-model-name", "a", "https://k-secret"],
    ],
)  # fmt: skip
def test_no_secret_is_shown(options: list[str]) -> None:
    shown = start(*options, "--max-num-batched-tokens", "64", KVPOOL_POOL="valkey://u:m-secret@h").shown()
    assert "secret" not in shown
    assert "5150" not in shown
    assert "serve ORG/MODEL" in shown
    assert "--max-num-batched-tokens 64" in shown
    assert '"kv_role": "kv_both"' in shown
    assert "***" in shown


STAND_IN = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['KVPOOL_POOL'], os.getpid()]))"


@pytest.mark.parametrize("dashes", [["--"], []], ids=["dashes", "none"])
def test_the_process_becomes_vllm(tmp_path: Path, dashes: list[str]) -> None:
    for module in ("cli/main", "openai/api_server"):
        file = tmp_path / "vllm/entrypoints" / f"{module}.py"
        file.parent.mkdir(parents=True)
        file.write_text(STAND_IN)
        for folder in (tmp_path / "vllm", tmp_path / "vllm/entrypoints", file.parent):
            (folder / "__init__.py").touch()
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = kvpool_process(
        "vllm", "--pool", "valkey://u:secret@h", *dashes, "serve", "M", "--seed", "1", env=environ
    )
    assert ended.returncode == 0, ended.stderr
    arguments, pool, _ = json.loads(ended.stdout)
    assert pool == "valkey://u:secret@h"
    assert {"M", "--seed", "1", TRANSFER, EVENTS} <= set(arguments)
    unknown, line = ended.stderr.splitlines()
    assert unknown.startswith("kvpool: whether this model has an encoder is not known")
    assert line.startswith("kvpool runs: KVPOOL_POOL='valkey://u:***@h' ")
    assert "secret" not in line


def test_a_refusal_is_one_line() -> None:
    ended: subprocess.CompletedProcess[str] = kvpool_process("vllm", "--", "serve", "M", HASH, "sha256")
    assert ended.returncode == 2
    assert refusal(ended).startswith(f"kvpool: {HASH} sha256 hashes a pickle")
