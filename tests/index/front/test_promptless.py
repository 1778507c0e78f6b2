"""Requests that are placed without their prompt: each is counted with its reason, and none without."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvpool.index.fleet.fleet import Fleet
from kvpool.index.front import placer as placer_module
from kvpool.index.front import renderer
from kvpool.index.front.inference_request import MAX_READ_NBYTES
from kvpool.index.front.placer import Placer
from kvpool.index.front.settings import PlacingSettings
from kvpool.index.request_stats import PROMPTLESS
from tests.support.openai_worker import ScriptedWorker, scripted
from tests.support.placing import LONG, placer_of

CHAT = "/v1/chat/completions"


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode()


@dataclass
class There:
    worker: ScriptedWorker
    placer: Placer
    patch: pytest.MonkeyPatch

    def without_render(self) -> None:
        self.worker.render = None

    def with_status(self, status: int) -> None:
        self.worker.render_status = status

    def with_long_answers(self) -> None:
        self.patch.setattr(renderer, "MAX_RENDERED_NBYTES", 10)

    def without_an_end(self) -> None:
        self.worker.hold_render.clear()
        self.patch.setattr(self.placer, "_settings", PlacingSettings(timeout_s=0.2))

    def with_other_bodies(self) -> None:
        self.patch.setattr(placer_module, "MAX_UNDER_WAY", 0)

    def with_an_image_at_no_place(self) -> None:
        ranges = {"image": [{"offset": -1, "length": 1}]}
        self.worker.features = {"mm_hashes": {"image": ["h"]}, "mm_placeholders": ranges}

    def without_workers(self) -> None:
        self.patch.setattr(self.placer, "_serves", lambda: False)
        self.placer._fleet.remove("default/a")

    def with_a_fault(self) -> None:
        def fault(*_: object, **__: object) -> None:
            raise RuntimeError("on purpose")

        self.patch.setattr(self.placer._router, "rank", fault)


@pytest.mark.parametrize(
    ("reason", "path", "sent", "prepare", "outcome"),
    [
        ("no-body", "/v1/models", b"", None, "unreadable"),
        ("unreadable", CHAT, b"{", None, "unreadable"),
        ("too-large", CHAT, body(user="x" * MAX_READ_NBYTES), None, "unreadable"),
        ("unknown-model", CHAT, body(model="n"), None, "unknown-model"),
        ("no-prompt", "/v1/embeddings", body(), None, "no-tokens"),
        ("no-render", CHAT, body(), There.without_render, "no-tokens"),
        ("refused", CHAT, body(), lambda there: there.with_status(400), "no-tokens"),
        ("large-answer", CHAT, body(), There.with_long_answers, "no-tokens"),
        ("no-answer", CHAT, body(), lambda there: there.with_status(500), "no-tokens"),
        ("late", CHAT, body(), There.without_an_end, "no-tokens"),
        ("busy", CHAT, body(user=LONG), There.with_other_bodies, "no-tokens"),
        ("unmatched", CHAT, body(), There.with_an_image_at_no_place, "no-tokens"),
        ("no-worker", CHAT, body(), There.without_workers, "load"),
        ("failed", CHAT, body(), There.with_a_fault, "failed"),
        (None, CHAT, body(), None, "load"),
    ],
)
@pytest.mark.anyio
async def test_a_request_that_is_placed_without_its_prompt_is_counted_with_its_reason(
    reason: str | None, path: str, sent: bytes, prepare: Callable[[There], None] | None, outcome: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fleet = Fleet()
    with scripted("a") as (worker,):
        fleet.add(worker.worker(), "flag")
        fleet.rank("default/a", 0).heard()
        async with placer_of(fleet) as (placer, _):
            if prepare is not None:
                prepare(There(worker, placer, monkeypatch))
            placement = await placer.place(path, {}, sent, "default")
            assert placement.reason == outcome, placement.detail
            counted = placer._stats.totals().promptless
            assert {name: count for name, count in counted.items() if count} == (
                {reason: 1} if reason else {}
            )
            assert set(counted) == set(PROMPTLESS)
