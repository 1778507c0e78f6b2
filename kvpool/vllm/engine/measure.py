"""``WeightsMeasure``: what a rank's model holds in memory, known by samples of all of it.

Of each tensor 64 pieces of 64 bytes, evenly spread, or all of a small one; with its name, type and shape. 70 B
parameters on 16 ranks are some 1,100 tensors, and 4 MiB a rank. An update of one element in a million is found with a
probability of 0.88; one of a few rows of a large table may not be, as in files (decision 4).

Threads: the worker's model thread only.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from kvpool.transfer.device import Event, device_of

PIECES, PIECE_NBYTES = 64, 64
WHOLE_NBYTES = 64 << 20  # of an adapter, of which all is read
TAKEN_AT_ONCE, LOOKED_AT = 64, 8  # tensors
MAX_UNSURE = 65_536  # keys

Tensors = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class _Tensor(NamedTuple):
    """Told from others of its name by type, shape and ``order``: ``_order``, of what is sampled."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {[*self.shape]} {[*self.order]}"


class _Copied(NamedTuple):
    """Samples on their way to the host. ``ends``: they end a rotation, in which all were these."""

    tensors: Sequence[_Tensor]
    sizes: Sequence[int]
    packed: torch.Tensor
    event: Event
    ends: bool


class WeightsMeasure:
    """``tensors``: of the model as it is now, each by a name of its own; called anew for each measure and rotation.

    Errors of all methods: what ``tensors`` raises.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._known: dict[_Tensor, bytes] = {}  # the samples of the last measure
        self._rest: Iterator[tuple[str, torch.Tensor]] | None = None  # of this rotation
        self._seen: set[_Tensor] = set()  # in this rotation
        self._copied: _Copied | None = None
        self.other = ""  # a tensor that differs, by the last look

    def take(self) -> str:
        """Measure all: 32 hex digits, equal where all names, types, shapes and samples are. Waits for the device."""
        self._rest = self._copied = None
        self._known = {}
        rest = iter(self._tensors())
        while part := list(itertools.islice(rest, TAKEN_AT_ONCE)):
            tensors, sizes, packed = _sampled(part)
            self._known |= zip(tensors, _cut(packed.cpu(), sizes), strict=True)
        known = sorted((str(tensor), samples) for tensor, samples in self._known.items())
        digest = hashlib.sha256(json.dumps([name for name, _ in known]).encode())
        for _, samples in known:
            digest.update(samples)
        return digest.hexdigest()[:32]

    def has_nan(self) -> bool:
        """Whether a sample of the last measure is no number, as after a training that diverged."""
        by_dtype: dict[torch.dtype, list[bytes]] = {}
        for tensor, samples in self._known.items():
            if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
                by_dtype.setdefault(tensor.dtype, []).append(samples)
        return any(
            bool(torch.frombuffer(bytearray(b"".join(samples)), dtype=dtype).isnan().any())
            for dtype, samples in by_dtype.items()
        )

    def look(self) -> bool | None:
        """Compare the next part with the last measure. True: a rotation through all ended, and all was the same; False:
        something differs; None: nothing is known yet. Waits for nothing: what one look copies, the next one compares.
        """
        if self._copied is not None:
            return self._compared(self._copied)
        if self._rest is None:
            self._rest, self._seen = iter(self._tensors()), set()
        part = list(itertools.islice(self._rest, LOOKED_AT))
        ends = len(part) < LOOKED_AT
        if ends:
            self._rest = None
        if not part:
            return self._is_whole()
        tensors, sizes, packed = _sampled(part)
        self._seen.update(tensors)
        device = device_of(packed.device)
        target = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=device.pinned)
        target.copy_(packed, non_blocking=device.pinned)
        self._copied = _Copied(tensors, sizes, target, device.mark(), ends)
        return self._compared(self._copied)

    def _compared(self, copied: _Copied) -> bool | None:
        if not copied.event.query():
            return None
        self._copied = None
        samples = _cut(copied.packed, copied.sizes)
        for tensor, one in zip(copied.tensors, samples, strict=True):
            if self._known.get(tensor) != one:
                self._rest, self.other = None, str(tensor)
                return False
        return self._is_whole() if copied.ends else None

    def _is_whole(self) -> bool:
        """Whether a rotation has met all that was measured, and nothing else."""
        self.other = next(iter(sorted(map(str, self._seen ^ self._known.keys()))), "")
        return not self.other


def digest_of_all(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """32 hex digits, of every byte up to ``WHOLE_NBYTES``, else of samples."""
    known = dict(tensors)
    if sum(one.numel() * one.element_size() for one in known.values()) > WHOLE_NBYTES:
        return WeightsMeasure(known.items).take()
    digest = hashlib.sha256()
    for name, tensor in sorted(known.items()):
        digest.update(json.dumps(str(_Tensor(name, tensor.dtype, tuple(tensor.shape)))).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _sampled(part: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[_Tensor], list[int], torch.Tensor]:
    tensors, samples = [], []
    for name, tensor in part:
        tensors.append(_Tensor(name, tensor.dtype, tuple(tensor.shape), _order(tensor)))
        samples.append(_sample(tensor.detach()))
    device = samples[0].device
    return tensors, [len(one) for one in samples], torch.cat([one.to(device) for one in samples])


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of it, on its device, which say what it holds beside its shape and order."""
    count, nbytes = tensor.numel(), tensor.element_size()
    each = max(1, PIECE_NBYTES // nbytes)
    if count <= PIECES * each:
        return tensor.contiguous().flatten().view(torch.uint8)
    step = (count - each) // (PIECES - 1)
    if _is_dense(tensor):
        pieces = tensor.as_strided((PIECES, each), (step, 1))
    else:
        first = torch.arange(PIECES, device=tensor.device)[:, None] * step
        places = first + torch.arange(each, device=tensor.device)
        pieces = tensor[torch.unravel_index(places, tensor.shape)]
    return pieces.contiguous().flatten().view(torch.uint8)


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Of its dimensions in memory, else a turned tensor would have the samples of the one that it was."""
    dimensions = [at for at, size in enumerate(tensor.shape) if size != 1]
    ordered = sorted(dimensions, key=tensor.stride, reverse=True)
    return () if ordered == dimensions else tuple(ordered)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether it fills a range of memory, in any order of its dimensions."""
    dimensions = sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    )
    filled = list(itertools.accumulate((size for _, size in dimensions), operator.mul, initial=1))
    return [stride for stride, _ in dimensions] == filled[:-1] and filled[-1] == math.prod(tensor.shape)


def _cut(packed: torch.Tensor, sizes: Sequence[int]) -> list[bytes]:
    whole = packed.numpy().tobytes()
    ends = list(itertools.accumulate(sizes, initial=0))
    return [whole[begin:end] for begin, end in itertools.pairwise(ends)]


class UnsureKeys:
    """Keys of what was stored since all weights were last seen the same: in this rotation, or the one before.

    A tensor may have changed at once after it was looked at. Of more than ``MAX_UNSURE`` keys the newest are kept.
    """

    def __init__(self) -> None:
        self._rotations: tuple[list[str], list[str]] = ([], [])
        self._condemned: list[str] = []

    @property
    def condemned(self) -> bool:
        return bool(self._condemned)

    def stored(self, keys: Iterable[str]) -> None:
        now = self._rotations[1]
        now += keys
        del now[: max(0, len(now) - MAX_UNSURE)]

    def rotate(self) -> None:
        """All was the same."""
        self._rotations = (self._rotations[1], [])

    def clear(self) -> None:
        """The weights are measured anew."""
        self._rotations = ([], [])

    def condemn(self) -> None:
        """The weights have changed: all of these go."""
        self._condemned += self._rotations[0] + self._rotations[1]
        self.clear()

    def take(self) -> list[str]:
        """The condemned ones, and they are so no longer."""
        taken, self._condemned = self._condemned, []
        return taken
