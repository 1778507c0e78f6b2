"""What places turns in ``python -m benchmarks placing``: kvpool's own ``Router``, and the rivals. Simulated time.

A rival knows what a front of its kind knows: which of its requests are answered, and by whom. kvpool knows workers'
events and gauges, too.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from benchmarks.agents_engine import Engine
from benchmarks.agents_index import RealIndex
from benchmarks.agents_traffic import Turn

LIVE_S = 900.0  # after its last turn a session counts as live, as long as a home of kvpool's lasts
BOUND = 1.25  # of the mean of requests at a worker, as Envoy's and KubeAI's hashes with a bound have it


class Policy(Protocol):
    def place(self, turn: Turn, engines: Mapping[str, Engine]) -> str:
        """The name of a worker, one of ``engines``."""

    def ended(self, turn: Turn, worker: str) -> None:
        """A placed turn was answered, or its worker died."""


class Kvpool:
    """``by_session`` False: blocks and load alone."""

    def __init__(self, index: RealIndex, *, by_session: bool) -> None:
        self._index, self._by_session = index, by_session
        self._reservations: dict[tuple[int, int], str] = {}

    def place(self, turn: Turn, engines: Mapping[str, Engine]) -> str:
        name, reservation = self._index.place(
            turn, engines.values(), by_blocks=True, by_session=self._by_session
        )
        self._reservations[turn.session, turn.number] = reservation
        return name

    def ended(self, turn: Turn, worker: str) -> None:
        self._index.release(self._reservations.pop((turn.session, turn.number)))


class _Front:
    """``busy``: requests under way, by worker."""

    def __init__(self) -> None:
        self.busy: Counter[str] = Counter()

    def place(self, turn: Turn, engines: Mapping[str, Engine]) -> str:
        name = self.choose(turn, sorted(engines))
        self.busy[name] += 1
        return name

    def ended(self, turn: Turn, worker: str) -> None:
        self.busy[worker] -= 1

    def choose(self, turn: Turn, names: Sequence[str]) -> str:
        raise NotImplementedError


class Hashed(_Front):
    """The session's worker by a hash of both."""

    def choose(self, turn: Turn, names: Sequence[str]) -> str:
        return _by_hash(turn, names)[0]


class Bounded(_Front):
    """The same, but the next one where a worker has more than ``BOUND`` times the mean of requests."""

    def choose(self, turn: Turn, names: Sequence[str]) -> str:
        most = math.ceil(BOUND * (self.busy.total() + 1) / len(names))
        return next(name for name in _by_hash(turn, names) if self.busy[name] < most)


class LeastLoad(_Front):
    """The worker with the fewest requests, of equals the one that had none for longest."""

    def __init__(self) -> None:
        super().__init__()
        self._picked: dict[str, int] = {}

    def choose(self, turn: Turn, names: Sequence[str]) -> str:
        name = min(names, key=lambda one: (self.busy[one], self._picked.get(one, -1)))
        self._picked[name] = len(self._picked) + max(self._picked.values(), default=0)
        return name


class Fewest(_Front):
    """A session begins where the fewest live ones are, and stays while that worker does."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._homes: dict[int, tuple[str, float]] = {}  # by session: a worker, and when it was asked

    def choose(self, turn: Turn, names: Sequence[str]) -> str:
        home = self._homes.get(turn.session)
        name = home[0] if home and home[0] in names else self._fewest(names)
        self._homes[turn.session] = name, self._clock()
        return name

    def _fewest(self, names: Collection[str]) -> str:
        since_s = self._clock() - LIVE_S
        live = Counter(name for name, at_s in self._homes.values() if at_s >= since_s)
        return min(names, key=lambda name: (live[name], self.busy[name], name))


def _by_hash(turn: Turn, names: Sequence[str]) -> list[str]:
    def weight(name: str) -> bytes:
        return hashlib.blake2b(f"{turn.session} {name}".encode(), digest_size=8).digest()

    return sorted(names, key=weight)
