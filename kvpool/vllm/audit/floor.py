"""``Floor``: how far honest blocks are from each other, learnt of pairs of this engine's own; and the judgement by it.

An engine that computes a block again adds in another order: other chunks, another batch, other threads. What that makes
of a layer, relative to its norm, is the floor of the layer. A distance beyond twice the floor is a finding.

The first layer's keys and values depend on the tokens alone. If it differs, the record is wrong. If only later ones do,
so is something in front: the prefix, or the weights.

Threads: the caller's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvpool.discovery.audit_news import Kind
from kvpool.vllm.plan import DRAFT, AuditedPart, LayerDistance

LEAST_PAIRS = 8  # before it judges others
FACTOR = 2.0
# By element: the least floor of a layer, whatever is learnt: engines whose own pairs are equal to the bit meet others.
# And the most, in case that a pair is wrong itself.
LEAST = {"float32": 1e-4, "float16": 3e-3, "bfloat16": 2e-2, "float8_e4m3fn": 4e-2, "float8_e5m2": 8e-2}
MOST_OF_LEAST = 4.0
# All floors are so many times as wide in models with recurrent layers, where a state of one long step is another, in
# the last digits, than of many short ones; and with experts, where rounding chooses between two that are about as good.
STATES, EXPERTS = 2.0, 4.0
# Of a layer that drafts the values of a block's last token depend on the token behind the block, which no hash covers.
LEAST_OF_DRAFTS = 0.4
_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass
class Judged:
    """``verdict``: of ``metrics.AUDITS``. ``distance``: over all layers of the model; ``layers``: of each, and of those
    that draft, from the first on.

    ``far``: those beyond the floor. ``what``: what is wrong, if anything: ``record`` or ``prefix``; empty: either.
    """

    verdict: str
    distance: float = 0.0
    layers: Mapping[str, float] = field(default_factory=dict)
    far: Sequence[str] = ()
    what: Kind = ""
    writers: frozenset[bytes] = frozenset()  # of the record
    limit: float = 0.0  # of the first one that is too far


class Floor:
    """``learns_from``: this engine's name in records; None: it stores nothing, and learns of what others stored.

    ``width``: of the model (``STATES``, ``EXPERTS``).
    """

    def __init__(self, learns_from: bytes | None, *, width: float = 1.0) -> None:
        self._learns_from = learns_from
        self._width = width
        self._pairs: list[Mapping[str, float]] = []  # the first ones
        self._largest: dict[str, float] = {}  # by layer; infinite: it is as far as others' blocks would be

    @property
    def is_known(self) -> bool:
        return len(self._pairs) >= LEAST_PAIRS

    @property
    def largest(self) -> tuple[str, float]:
        """The layer that is farthest from itself in honest pairs, and how far."""
        return max(self._largest.items(), key=lambda one: one[1], default=("", 0.0))

    def forget(self) -> None:
        self._pairs.clear()
        self._largest.clear()

    def judge(self, parts: Sequence[AuditedPart]) -> Judged:
        """What an audit found, of all its ranks together. Of one of this engine's own blocks it learns."""
        parts = [part for part in parts if part.why != "no_numbers"] or parts
        if why := next((part.why for part in parts if part.why), "" if parts else "gone"):
            return Judged(why)
        sums: dict[str, tuple[float, float]] = {}
        least: dict[str, float] = {}
        for layer in (layer for part in parts for layer in part.layers):
            difference, norm = sums.get(layer.name, (0.0, 0.0))
            sums[layer.name] = difference + layer.difference, norm + layer.norm
            least[layer.name] = self._least(layer)
        layers = {name: _relative(*sums[name]) for name in sorted(sums, key=_place)}
        of_model = [one for name, one in sums.items() if not name.startswith(DRAFT)]
        whole = _relative(sum(one[0] for one in of_model), sum(one[1] for one in of_model))
        writers = frozenset(part.writer for part in parts)
        may_learn = self._learns_from is None or writers == {self._learns_from}
        if not self.is_known:
            if may_learn:
                self._learn(layers, least)
            return Judged("no_floor", whole, layers, writers=writers)
        limits = {name: FACTOR * max(least[name], self._largest.get(name, 0.0)) for name in layers}
        far = [
            name
            for name, distance in layers.items()
            if not distance <= limits[name]
            or math.isinf(distance)  # no number, also where no distance is too far
        ]
        if far:
            what = _what(next(iter(layers)), far[0])
            return Judged("differs", whole, layers, far, what, writers, limits[far[0]])
        if may_learn:
            for name, distance in layers.items():
                most = MOST_OF_LEAST * least[name]
                self._largest[name] = max(self._largest.get(name, 0.0), min(most, distance))
        return Judged("same", whole, layers, writers=writers)

    def _least(self, layer: LayerDistance) -> float:
        """The least floor of a layer, whatever is learnt."""
        return LEAST_OF_DRAFTS if layer.name.startswith(DRAFT) else self._width * LEAST[layer.element]

    def _learn(self, layers: Mapping[str, float], least: Mapping[str, float]) -> None:
        self._pairs.append(layers)
        if len(self._pairs) < LEAST_PAIRS:
            return
        for name in layers:
            pairs = sorted(pair.get(name, 0.0) for pair in self._pairs)
            most = MOST_OF_LEAST * least[name]
            self._largest[name] = min(most, pairs[-1]) if pairs[len(pairs) // 2] <= most else math.inf


def _what(first: str, far: str) -> Kind:
    """What is wrong if the first layer that is too far is ``far``."""
    if _place(first)[0] or far.startswith(DRAFT):
        return ""  # the model's first layer is none that is compared, or the model's layers are right
    return "record" if far == first else "prefix"


def _place(layer: str) -> tuple[int, str]:
    """A layer's number in the model, and its name."""
    number = _NUMBER.search(f"{layer}.")
    return int(number[1]) if number else -1, layer


def _relative(difference: float, norm: float) -> float:
    if not difference:
        return 0.0
    return math.sqrt(difference / norm) if norm and math.isfinite(difference) else math.inf
