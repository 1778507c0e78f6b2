"""What real clients see of a worker directly, and behind each front: equal but for ``EXPECTED``."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from demo.engine_process import free_ports
from demo.tiny_model import VOCABULARY
from demo.worker_process import serving
from kvpool import IndexClient
from tests.support import envoy
from tests.support.client_calls import CALLS, NAME
from tests.support.clients import Clients, seen
from tests.support.deadlines import eventually
from tests.support.engine_forks import forking_environment, write_model
from tests.support.index_process import RouterProcess, running
from tests.support.tiny_tokenizer import write_tokenizer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.allow_leaks("litellm and its clients keep threads and connections"),
    pytest.mark.filterwarnings("ignore"),  # of three packages
]

ROOT = Path(__file__).parents[2]
ROUTER, BUFFERED, STREAMED = "kvpool router", "Envoy, buffered", "Envoy, streamed"
ENVOY, ALL = (BUFFERED, STREAMED), (ROUTER, BUFFERED, STREAMED)


class Expected(NamedTuple):
    """A difference of some fronts. ``what``: matches all of a line of ``differences``. ``calls``: empty: all."""

    fronts: tuple[str, ...]
    what: str
    reason: str
    calls: tuple[str, ...] = ()


EXPECTED = (
    Expected(
        ALL, r"header x-kvpool-(worker|reason|matched-blocks|prompt-blocks): none -> .+", "says who served, and why"
    ),
    Expected(ENVOY, "header server: uvicorn -> envoy", "Envoy names itself"),
    Expected(ENVOY, r"header x-envoy-upstream-service-time: none -> \d+", "Envoy measures"),
    Expected(
        (STREAMED,),
        "header (content-length: masked -> none|transfer-encoding: none -> chunked)",
        "parts of the body go through the index, so its length is not known at its beginning",
    ),
    Expected(
        ALL, r"value: .* -> null|error: null -> \[.*|statuses: \[200\] -> \[413\]|header .*",
        "bodies are held until they are placed",
        ("chat_of_a_body_above_16_mib",),
    ),
    Expected(
        (ROUTER,), r"value: .* -> null|error: null -> \[.*|statuses: \[200\] -> \[400\]|header .*",
        "heads are bounded before their caller is known: 16 KiB a header", ("header_of_20_kb",),
    ),
    Expected(
        ALL, r"value: \[200, .*\] -> \[404, .*\]|statuses: \[200\] -> \[404\]|header .*",
        "callers could end each other's requests there", ("tokens_in_and_out_as_engines_ask",),
    ),
    Expected(
        (ROUTER,),
        r'value: \[200, ""\] -> \[200, {"status": "ok"}\]|header (content-type|server|vary|x-request-id): .*',
        "whether the router serves, not one of its workers", ("health",),
    ),
    Expected(
        (ROUTER,), r"header location: http://127\.0\.0\.1:\d+(/v1/chat/completions) -> \1",
        "a worker's address is not the caller's", ("path_with_a_slash_behind",),
    ),
    Expected(
        ENVOY, r"header location: http://127\.0\.0\.1:\d+(/v1/chat/completions) -> http://127\.0\.0\.1:\d+\1",
        "the worker reads the name that its caller asked", ("path_with_a_slash_behind",),
    ),
)  # fmt: skip


def differences(direct: dict[str, object], behind: dict[str, object]) -> list[str]:
    """A line for each."""
    found = [
        f"{part}: {json.dumps(direct.get(part))} -> {json.dumps(behind.get(part))}"
        for part in ("value", "error", "statuses")
        if direct.get(part) != behind.get(part)
    ]
    for sent, came in zip(direct["headers"], behind["headers"], strict=False):  # type: ignore[call-overload]
        found += [
            f"header {name}: {sent.get(name, 'none')} -> {came.get(name, 'none')}"
            for name in sorted({*sent, *came})
            if sent.get(name) != came.get(name)
        ]
    return found


def write_chat_model(folder: Path) -> Path:
    """A tiny model whose tokens are bytes and words, so that it can write JSON, and has a chat template."""
    model = write_model(folder / "model", kind="llama", width=256, layers=2)
    made = json.loads((write_tokenizer(folder / "tokenizer") / "tokenizer.json").read_text())
    words = made["model"]["vocab"]
    for name in ("<think>", "</think>", *(f"w{number}" for number in range(len(words) + 2, VOCABULARY))):
        words[name] = len(words)
    (model / "tokenizer.json").write_text(json.dumps(made))
    shutil.copy(folder / "tokenizer" / "tokenizer_config.json", model)
    return model


OPTIONS = (
    "--served-model-name", NAME, "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096",
    "--block-size", "128", "--kv-cache-memory-bytes", "128M", "--enable-auto-tool-choice",
    "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
    "--default-chat-template-kwargs", '{"enable_thinking": false}',
    "--enable-request-id-headers", "--enable-scale-out", "--enable-prompt-tokens-details",
    "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
)  # fmt: skip
SETTINGS = {
    "KVPOOL_ADVERTISE_HOST": "127.0.0.1", "KVPOOL_LOOKUP_TIMEOUT_S": "20", "KVPOOL_COST_GATE": "0",
    "VLLM_ENABLE_RESPONSES_API_STORE": "1", "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Clients]]:
    """Of the worker, as ``direct``, and of each front."""
    folder = tmp_path_factory.mktemp("clients")
    port, events, replay = free_ports(3)
    pool = f"file://{folder / 'pool'}"
    publisher = {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
    options = (*OPTIONS, "--kv-events-config", json.dumps({"enable_kv_cache_events": True, **publisher}))
    patience = ("--pool", pool, "--place-timeout", "60")
    with ExitStack() as parts:
        model, settings = write_chat_model(folder), {**forking_environment(), **SETTINGS}
        worker = parts.enter_context(serving("worker", folder, pool, model, port, options, settings))
        index = parts.enter_context(running("--ext-proc", "127.0.0.1:0", *patience, log=folder / "index.log"))
        router = parts.enter_context(
            running("--grpc", "127.0.0.1:0", *patience, kind=RouterProcess, log=folder / "router.log")
        )
        for target in (index.target, f"127.0.0.1:{router.port('gRPC')}"):
            known = parts.enter_context(IndexClient(target))
            assert eventually(lambda known=known: len(known.workers()) == 1)  # type: ignore[misc]
        urls = {"direct": worker, ROUTER: f"http://{router.target}"}
        picker = f"127.0.0.1:{index.port('ext_proc')}"
        for name in ENVOY:
            front = parts.enter_context(
                envoy.running(folder, [f"127.0.0.1:{port}"], [picker], duplex=name == STREAMED)
            )
            healthy = [front.healthy, "workers", "picker"]
            assert eventually(lambda f=healthy: f[0](f[1]) == f[0](f[2]) == 1)  # type: ignore[misc, operator]
            urls[name] = front.url
        made = {name: Clients(url) for name, url in urls.items()}
        for one in made.values():
            parts.callback(one.close)
        yield made


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """``litellm``, at the end of the path, which would fetch a table of prices."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / ".cache/clients")])


met: set[tuple[str, Expected]] = set()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_the_same_behind_each_front(clients: dict[str, Clients], name: str) -> None:
    direct = seen(CALLS[name], clients["direct"])
    bad = []
    for front in ALL:
        for line in differences(direct, seen(CALLS[name], clients[front])):
            good = [
                one
                for one in EXPECTED
                if front in one.fronts and name in (one.calls or (name,)) and re.fullmatch(one.what, line)
            ]
            met.update((front, one) for one in good)
            bad += [] if good else [f"{front}: {line}"]
    assert not bad, "\n".join(bad)


def test_every_difference_that_is_expected_is_met() -> None:
    if not met:
        pytest.skip("no call was made")
    assert met == {(front, one) for one in EXPECTED for front in one.fronts}
