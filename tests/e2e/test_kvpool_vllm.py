"""Two workers that ``kvpool vllm`` starts, with nothing but a pool and a model, share a hit. The pool comes late.

And an engine that only encodes, before one that answers.
"""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from demo.engine_process import free_ports
from demo.pictures import FOR_WARMTH, PICTURE
from demo.worker_process import Answer, ask, serving
from tests.support.deadlines import eventually
from tests.support.encoder_engines import VISION, WITH_VISION
from tests.support.engine_forks import ROOT, forking_environment
from tests.support.engines import BLOCK_TOKENS, prompt
from tests.support.records import records_on
from tests.support.servers import Server, started

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PROMPT = prompt(7, 1200)
OPTIONS = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--block-size", str(BLOCK_TOKENS),
    "--kv-cache-memory-bytes", "128M",
)  # fmt: skip
# What a lookup takes on a busy machine is no fault of the test.
SETTINGS = {"KVPOOL_START_WITHOUT_POOL": "1", "KVPOOL_LOOKUP_TIMEOUT_S": "20", "KVPOOL_COST_GATE": "0"}


def asked(url: str) -> Answer:
    return ask(url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 8})


def test_two_workers_share_a_hit_in_a_pool_that_comes_after_them(llama: Path, tmp_path: Path) -> None:
    server = Server("valkey-server", tmp_path)
    first_port, second_port = free_ports(2)
    more = (OPTIONS, {**forking_environment(), **SETTINGS})
    with serving("first", tmp_path, server.url, llama, first_port, *more) as first:
        computed = asked(first)
        assert computed.cached_tokens == 0, "there is no pool yet"
        with started(server), serving("second", tmp_path, server.url, llama, second_port, *more) as second:
            # The first one holds the blocks, and stores them when it looks them up and the pool misses them.
            whole = len(PROMPT) // BLOCK_TOKENS
            assert eventually(
                lambda: asked(first).text == computed.text and records_on(server.client) >= whole
            )
            loaded = asked(second)
            assert loaded.cached_tokens == whole * BLOCK_TOKENS
            assert loaded.text == computed.text != ""
            assert eventually(lambda: len(server.client.keys("*:worker:*")) == 2), "both are announced"
    said = (tmp_path / "first.log").read_text().splitlines()[0]
    assert said.startswith(f"kvpool runs: KVPOOL_POOL={server.url} ")


@pytest.mark.rare
@WITH_VISION
def test_an_engine_that_only_encodes_stores_what_another_one_answers_with(
    llava: Path, tmp_path: Path
) -> None:
    """As ``examples/pictures.sh`` says."""
    modules = forking_environment()
    environment = {**modules, **SETTINGS, "PYTHONPATH": f"{modules['PYTHONPATH']}:{VISION}"}
    roles = dict(zip(("ec_producer", "ec_consumer"), free_ports(2), strict=True))
    with ExitStack() as engines:
        first, second = (
            engines.enter_context(
                serving(
                    role,
                    tmp_path,
                    f"file://{tmp_path}/pool",
                    llava,
                    port,
                    (*OPTIONS, f"--ec-transfer-config.ec_role={role}"),
                    environment,
                )
            )
            for role, port in roles.items()
        )

        def show(picture: Path, *urls: str) -> str:
            command = ["sh", str(ROOT / "examples/pictures.sh"), str(llava), str(picture), *urls]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            assert ran.returncode == 0, ran.stderr
            return ran.stdout

        assert show(PICTURE, first, second) == (
            f"{first}: 1 computed, 0 from the pool\n{second}: 0 computed, 1 from the pool\n"
        )
        assert show(FOR_WARMTH, second) == f"{second}: 1 computed, 1 from the pool\n", "it can encode, too"
    said = (tmp_path / "ec_producer.log").read_text().splitlines()[0]
    assert "--ec-transfer-config" in said
    assert "--kv-transfer-config" not in said
