"""What connectors of encoders' outputs take of a scheduler's step: vLLM asks them for each request with images.

The connectors' own objects, requests that have what a connector reads, and a pool that has nothing, or never answers.
Runs in a process of its own, for it imports vLLM: ``python -m benchmarks.encoder_steps ROUNDS`` prints JSON.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

from benchmarks.contest import percentile
from demo.engine_process import child_environment
from kvpool.errors import KVPoolError
from kvpool.metrics import REQUEST_FAULTS

REQUESTS, IMAGES = 64, 4
IMAGE_TOKENS, WORDS = 256, 16
WARM_UPS = 20
TIMEOUT_S = 300.0
DECODE, ABSENT, ASKED = "in decode", "before images, absent", "before images, asked for"
OWN, PEER = "kvpool", "vLLM, folder"


@dataclass(frozen=True)
class Step:
    """Of all ``requests`` together: their questions, and the message to the workers."""

    connector: str
    requests: int
    images: int
    what: str
    p50_us: float
    p90_us: float


def measure_steps(rounds: int) -> list[Step]:
    """Takes ten seconds. Errors: ``KVPoolError``."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.encoder_steps", str(rounds)],
        env=child_environment({"VLLM_LOGGING_STREAM": "ext://sys.stderr"}),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise KVPoolError(f"the scheduler's step was not measured: {done.stderr.strip()[-1000:]}")
    return [Step(**step) for step in json.loads(done.stdout)]


def _measured(rounds: int) -> list[Step]:
    requests = _requests()
    return [
        _timed(OWN, DECODE, requests, _own(requests, _Empty(), computed=True), rounds, computed=True),
        _timed(PEER, DECODE, requests, _peer(), rounds, computed=True),
        _timed(OWN, ABSENT, requests, _own(requests, _Empty(), computed=False), rounds, computed=False),
        _timed(OWN, ASKED, requests, _own(requests, _Silent(), computed=False), rounds, computed=False),
    ]


def _requests() -> list[Any]:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return [
        SimpleNamespace(
            request_id=f"request-{number}",
            kv_transfer_params=None,
            mm_features=[
                MultiModalFeatureSpec(
                    data=None, modality="image", identifier=f"{number:032x}{image:032x}",
                    mm_position=PlaceholderRange(WORDS + image * (IMAGE_TOKENS + WORDS), IMAGE_TOKENS),
                )
                for image in range(IMAGES)
            ],
        )
        for number in range(REQUESTS)
    ]  # fmt: skip


class _Batch:
    def __init__(self, keys: Sequence[str], *, ends: bool) -> None:
        self._keys, self._ends = keys, ends

    def done(self) -> bool:
        return self._ends

    def results(self) -> Sequence[int]:
        from kvpool import _native

        return [_native.MISS] * len(self._keys)

    def cancel(self) -> None:
        pass


class _Empty:
    """A pool that has nothing, and says so at once."""

    ends = True

    def submit_touch(self, keys: Sequence[str], *, timeout_s: float) -> _Batch:
        return _Batch(keys, ends=self.ends)


class _Silent(_Empty):
    """A pool that does not answer while it is measured."""

    ends = False


def _own(requests: Sequence[Any], store: Any, *, computed: bool) -> Any:
    from kvpool.config import EncoderConfig
    from kvpool.vllm.encoder.connector import KVPoolECConnector
    from kvpool.vllm.encoder.scheduler import EncoderScheduler, Engine
    from kvpool.vllm.plan import Measured

    cached: set[str] = set()
    scheduler = EncoderScheduler(
        EncoderConfig.load({"pool": "file:///unused", "lookup_timeout_s": 60.0}, {}),
        store,
        {"engine": "bench"},
        Engine(lambda: [Measured("0" * 32)], lambda: False, lambda: cached),
        stores=True,
        needs_bytes=True,
        widths={"image": 4096},
        width=4096,
        dtype="bfloat16",
        writer=b"bench",
        alone=False,
    )
    connector: Any = object.__new__(KVPoolECConnector)
    connector._scheduler = scheduler
    for request in requests:
        scheduler.seen(request)
    if computed:  # the engine has all outputs, and goes on with tokens
        for request in requests:
            connector.ensure_cache_available(request, 0)
            for index, feature in enumerate(request.mm_features):
                connector.has_cache_item(feature.identifier)
                connector.update_state_after_alloc(request, index)
                cached.add(feature.identifier)
        connector.build_connector_meta(_step())
    return connector


def _peer() -> Any:
    from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector

    connector: Any = object.__new__(ECExampleConnector)
    connector._mm_datas_need_loads = {}
    return connector


def _step() -> Any:
    return SimpleNamespace(total_num_scheduled_tokens=REQUESTS)


def _timed(
    name: str, what: str, requests: Sequence[Any], connector: Any, rounds: int, *, computed: bool
) -> Step:
    tokens = WORDS + IMAGES * (IMAGE_TOKENS + WORDS) if computed else 0
    ask: Callable[[Any, int], bool] = connector.ensure_cache_available
    output, took_us, said = _step(), [], set()
    for _ in range(WARM_UPS + rounds):
        started = time.perf_counter_ns()
        for request in requests:
            said.add(ask(request, tokens))
        connector.build_connector_meta(output)
        took_us.append((time.perf_counter_ns() - started) / 1e3)
    assert said == {what != ASKED}, "whether requests may go on"
    if name == OWN:
        faults = [key for key in connector._scheduler.stats() if REQUEST_FAULTS.name in key]
        assert not faults, "a request without the pool costs less"
    times = sorted(took_us[WARM_UPS:])
    return Step(name, len(requests), IMAGES, what, percentile(times, 0.5), percentile(times, 0.9))


if __name__ == "__main__":
    logging.getLogger("vllm").setLevel(logging.WARNING)
    print(json.dumps([asdict(step) for step in _measured(int(sys.argv[1]))]))
