"""The messages between both halves of the encoders' connector."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata

from kvpool.key.key import Namespace
from kvpool.metrics import Samples, add_samples

Payload = npt.NDArray[np.uint8]


class Shape(NamedTuple):
    """Of an output. ``dtype``: as torch calls it."""

    rows: int
    width: int
    dtype: str

    @property
    def form(self) -> str:
        """Of its rows."""
        return f"{self.width} {self.dtype}"

    @property
    def nbytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return self.rows * self.width * dtype.itemsize


class Loaded(NamedTuple):
    """An output from the pool, verified: its bytes come with the step, so that no rank lacks them."""

    payload: Payload
    shape: Shape


class Stored(NamedTuple):
    """Where an output belongs that this step computes. ``key``: empty: nowhere, for it is only compared, or looked at:
    then there is no ``record``."""

    key: str
    shape: Shape
    record: Payload | None = None  # of the pool, to be compared with it
    writer: bytes = b""  # who wrote that


class ComparedOutput(NamedTuple):
    """What an audit found: the sums of ``_native.distances``. ``why``: it says nothing."""

    identifier: str
    why: str
    writer: bytes = b""
    element: str = ""
    difference: float = 0.0
    norm: float = 0.0


@dataclass
class EncoderMetadata(ECConnectorMetadata):
    """Scheduler to workers, once a step; by identifier of an item."""

    loads: dict[str, Loaded] = field(default_factory=dict)
    stores: dict[str, Stored] = field(default_factory=dict)
    spaces: tuple[Namespace, ...] | None = None  # ``EncoderScheduler.spaces``; None: as before
    wrong: list[str] = field(default_factory=list)  # keys of records to be deleted
    writer: bytes = b""  # this engine's name in what it stores
    watch: bool = False  # the weights lie in memory, and are those of the last measure
    # They have changed, and no call has said so: what was stored since they were last seen the same is deleted.
    silent: bool = False


@dataclass
class EncoderWorkerMetadata(ECConnectorWorkerMetadata):
    """Workers to scheduler, summed over the ranks of a step."""

    forms: dict[str, tuple[int, str]] = field(
        default_factory=dict
    )  # width and type of outputs, by identifier
    compared: list[ComparedOutput] = field(default_factory=list)
    samples: Samples = field(default_factory=dict)
    broken: str = ""  # why a rank has no pool
    differs: bool = False  # the watch found other weights than those of the last measure

    def aggregate(self, other: ECConnectorWorkerMetadata) -> EncoderWorkerMetadata:
        assert isinstance(other, EncoderWorkerMetadata)
        samples = dict(self.samples)
        add_samples(samples, other.samples)
        return EncoderWorkerMetadata(
            self.forms | other.forms,
            [*self.compared, *other.compared],
            samples,
            self.broken or other.broken,
            self.differs or other.differs,
        )

    def is_empty(self) -> bool:
        return self == EncoderWorkerMetadata()
