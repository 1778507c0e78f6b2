"""In which namespaces an engine's outputs of encoders are, as its announcement says it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.clock import REAL
from kvpool.config import EncoderConfig
from kvpool.discovery.worker_record import announced_workers
from kvpool.store import open_store
from tests.support.deadlines import eventually
from tests.support.memory_store import MemoryStore

pytestmark = [pytest.mark.vllm]
FACTS = {"engine": "vllm", "kind": "encoder", "weights": "w"}


def a_scheduler(store: Any, measure: Callable[[], Any], **more: Any) -> Any:
    from kvpool.vllm.encoder.scheduler import EncoderScheduler, Engine

    options: dict[str, Any] = {
        "stores": True, "needs_bytes": True, "widths": {"image": 64, "audio": 32, "video": 64},
        "width": 64, "dtype": "bfloat16", "writer": bytes(16), "clock": REAL, **more,
    }  # fmt: skip
    return EncoderScheduler(
        EncoderConfig.load({"pool": "file:///unused"}, {}),
        store,
        FACTS,
        Engine(measure, lambda: False, list),
        **options,
    )


def test_an_engine_says_the_namespaces_that_it_loads_of() -> None:
    from kvpool.key.key import Namespace
    from kvpool.vllm.plan import Measured

    weights = ["v"]
    store = MemoryStore()
    scheduler = a_scheduler(store, lambda: [Measured(weights[0])])
    forms = ("32 bfloat16", "64 bfloat16")
    expected = tuple(Namespace("default", {**FACTS, "output_row": form}) for form in forms)
    assert scheduler.spaces() == expected
    scheduler.called("reload_weights")
    assert scheduler.spaces() == (), "nobody has looked what a call made of the weights"
    weights[0] = "other"
    assert scheduler._namespaces.of(forms[0]) not in expected
    changed = scheduler.spaces()
    assert len(changed) == 2
    assert not {*changed} & {*expected}
    scheduler.switch_off("of a test")
    assert scheduler.spaces() == ()
    scheduler.close()
    store.close()


def test_a_worker_tells_what_changes() -> None:
    from kvpool.key.key import Namespace
    from kvpool.vllm.encoder.plan import EncoderMetadata
    from kvpool.vllm.encoder.worker import EncoderWorker

    told: list[tuple[str, ...]] = []
    worker = EncoderWorker(EncoderConfig.load({"pool": "file:///unused"}, {}), stores=False, tell=told.append)
    one, other = (Namespace("default", {"weights": name}) for name in "ab")
    for spaces in (None, (one,), None, (one, other)):
        worker.load(EncoderMetadata(spaces=spaces), {}, None)  # type: ignore[arg-type]
    assert told == [(one.hex,), (one.hex, other.hex)]
    worker.close()
    assert told[2:] == [()], "it loads no more"


def test_an_announcement_follows_what_is_said(engine_config: Any, tmp_path: Path) -> None:
    from types import SimpleNamespace

    from kvpool.config import PoolConfig
    from kvpool.key.key import Namespace
    from kvpool.vllm.tell import announcement
    from kvpool.vllm.tell.media import said, say

    config = engine_config()
    settings = PoolConfig.load({"pool": f"file://{tmp_path}/pool", "lease_s": 3.0}, {})
    media, other = ("ab" * 16,), ("cd" * 16, "ef" * 16)

    def describe(namespace: str) -> Any:
        cache = SimpleNamespace()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(announcement.internals, "block_sizes", lambda config, cache: (16, 16))
            return announcement.describe(config, cache, settings, namespace)

    with open_store(settings.pool) as store:
        announcer = announcement.EngineAnnouncer(settings, "m", describe)
        announcer.enter(store, Namespace(settings.tenant, {"weights": "w"}))

        def announced() -> list[tuple[str, ...]]:
            return [one.worker.media_namespaces for one in announced_workers(store, settings.tenant) if one]

        assert eventually(lambda: announced() == [()]), "there is no connector of encoders"
        say("another engine", other)
        say(config.instance_id, media)
        assert eventually(lambda: announced() == [media])
        say(config.instance_id, other)
        assert eventually(lambda: announced() == [other])
        for engine in ("another engine", config.instance_id):
            say(engine, ())
        assert eventually(lambda: announced() == [()])
        announcer.close(store)
    assert said(config.instance_id) == ()
