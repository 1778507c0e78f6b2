"""The scheduler's half of the encoders' connector on a store, as vLLM's scheduler calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvpool.config import EncoderConfig
from kvpool.key.hashing import media_hash
from kvpool.key.key import Namespace, writer_name
from kvpool.metrics import Samples
from kvpool.store import Store
from kvpool.vllm.encoder.plan import EncoderMetadata
from kvpool.vllm.encoder.scheduler import EncoderScheduler, Engine
from kvpool.vllm.plan import Measured
from tests.support.clock import Clock
from tests.support.scripted_store import ScriptedStore

WIDTH, DTYPE = 4, "float32"
SIZE = "image_grid_thw"  # of an image's fields, which says how many rows its output has
FACTS = {"engine": "vllm", "kind": "encoder", "weights": "of the test"}
SPACE = Namespace("default", {**FACTS, "output_row": f"{WIDTH} {DTYPE}"})
WRITER = writer_name("this engine")


def key(identifier: str) -> str:
    return SPACE.key(media_hash(identifier), 0, 0)


def payload(identifier: str, rows: int) -> bytes:
    """What the encoder of the test makes of an item."""
    draw = np.random.default_rng(sum(identifier.encode()))
    return draw.standard_normal((rows, WIDTH)).astype(np.float32).tobytes()


@dataclass(frozen=True)
class Picture:
    """At its place in the prompt. ``adapter``: before its name, if its output depends on one.

    ``fields``: of what its caller sent.
    """

    name: str
    offset: int
    rows: int = 8
    modality: str = "image"
    adapter: str = ""
    fields: tuple[str, ...] = ()

    @property
    def identifier(self) -> str:
        return f"{self.adapter}:{self.name}" if self.adapter else self.name


def _data(picture: Picture) -> MultiModalKwargsItem | None:
    def field_of(name: str) -> MultiModalFieldElem:
        numbers = picture.rows * 1176 if name == "pixel_values" else 3
        return MultiModalFieldElem(torch.zeros(numbers), MultiModalBatchedField())

    return MultiModalKwargsItem({name: field_of(name) for name in picture.fields}) if picture.fields else None


def request(name: str, *pictures: Picture, tokens: int = 100, params: Any = None) -> Request:
    features = [
        MultiModalFeatureSpec(
            data=_data(one),
            modality=one.modality,
            identifier=one.identifier,
            mm_position=PlaceholderRange(offset=one.offset, length=one.rows),
            mm_hash=one.name,
        )
        for one in pictures
    ]
    extra = None if params is None else {"kv_transfer_params": {"kvpool": params}}
    return Request(
        name, list(range(tokens)), SamplingParams(max_tokens=8, extra_args=extra), None, mm_features=features
    )


@dataclass
class Encoders:
    """``half`` with what stands around it: the engine's own cache, its weights, and a clock that tests move."""

    store: Store
    settings: dict[str, Any] = field(default_factory=dict)
    stores: bool = True
    needs_bytes: bool = True
    alone: bool = True
    random_number: Callable[[], float] = lambda: 1.0

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.cached: set[str] = set()  # by the engine
        self.held: set[tuple[str, str]] = set()  # of these, for requests
        self.measured = [Measured("the start's")]
        self.is_asleep = False
        config = EncoderConfig.load({"pool": "file:///unused", "audit_share": 0, **self.settings}, {})
        self.half = EncoderScheduler(
            config,
            self.store,
            FACTS,
            Engine(
                lambda: self.measured,
                lambda: self.is_asleep,
                lambda: self.cached,
                self.evict,
                lambda identifier, name: identifier in self.cached and (identifier, name) in self.held,
                lambda modality: {SIZE} if modality == "image" else set(),
            ),
            stores=self.stores,
            needs_bytes=self.needs_bytes,
            alone=self.alone,
            widths={"image": WIDTH},
            width=WIDTH,
            dtype=DTYPE,
            writer=WRITER,
            clock=self.clock,
            random_number=self.random_number,
        )
        self.samples: Samples = {}

    def evict(self, identifier: str) -> bool:
        """As if no request held it."""
        self.cached.discard(identifier)
        return True

    def schedule(self, asked: Request) -> list[bool]:
        """As vLLM does with a request that is ready: asks for each item and allocates it; whether the pool had it."""
        found = []
        for index in range(len(asked.mm_features)):
            identifier = asked.mm_features[index].identifier
            self.held.add((identifier, asked.request_id))
            if identifier in self.cached:
                continue
            found.append(self.half.has(identifier))
            assert found[-1] or asked.mm_features[index].data is None, "no encoder can run for it"
            self.cached.add(identifier)
            self.half.allocated(asked, index)
        return found

    def plan(self, tokens: int = 10) -> EncoderMetadata:
        output = SchedulerOutput.make_empty()
        output.total_num_scheduled_tokens = tokens
        return self.half.plan(output)

    def count(self, name: str, label: str = "") -> float:
        """A counter so far."""
        for sample, value in self.half.stats().items():
            before = self.samples.get(sample, 0.0)
            if not isinstance(value, list) and not isinstance(before, list):
                self.samples[sample] = before + value
        found = self.samples.get(f"kvpool_encoder_{name}_total{label and '/'}{label}", 0.0)
        assert not isinstance(found, list)
        return found


def has(store: ScriptedStore, *pictures: Picture) -> None:
    for one in pictures:
        store.records[key(one.identifier)] = payload(one.identifier, one.rows)


def ready(encoders: Encoders, store: ScriptedStore, asked: Request) -> None:
    """Answer all that is asked until the request may go on."""
    for _ in range(3):
        if encoders.half.is_ready(asked, 0):
            return
        store.end_all()
    assert encoders.half.is_ready(asked, 0)
