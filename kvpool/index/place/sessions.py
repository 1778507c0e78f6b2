"""``Sessions``: where each session's last request went, for a router's costs.

A session's next prompt mostly begins with the last one. Its *home*, the rank that computed that, is credited with it
while its events may be late, and for longer where they are not to be trusted or the prompt's tokens are unknown.

Of a prompt's hashes those are kept that end at its last block and 1, 2, 4, ... blocks before it: each covers all
blocks before it. Ids are kept as digests.

A session that begins goes where the homes of others leave room (``router.py``), so each rank's tokens are summed.
One thread at a time.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvpool.index.place.load import LoadBoard, RankKey
from kvpool.index.request_stats import Placed

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_SESSIONS = 65536
ANNOUNCE_S = 30.0  # after a placement, until its blocks' events must have come
KEEP_S = 900.0  # of a home
ENDED_AT_ONCE = 8  # homes that a call drops at most, of those that are over
HASH_NBYTES = 8


class Session(NamedTuple):
    """``stays``: its requests follow each other; False: only its name is shared, as by all users of an application."""

    tenant: str
    digest: bytes
    stays: bool = True

    @classmethod
    def of(cls, tenant: str, session_id: str | None, prompt_cache_key: str | None = None) -> Session | None:
        """None: neither is named."""
        if not (name := session_id or prompt_cache_key):
            return None
        digest = hashlib.blake2b(name.encode(errors="replace"), digest_size=16).digest()
        return cls(tenant, digest, bool(session_id))

    @property
    def seed(self) -> int:
        return int.from_bytes(self.digest[:8], "little")


class Home(NamedTuple):
    """``hashes``: of ``blocks`` blocks, the last and those before it by powers of two."""

    rank: RankKey
    placed_s: float
    tokens: int
    blocks: int
    hashes: tuple[bytes, ...]

    def shared(self, hashes: memoryview) -> int:
        """Leading blocks of these that it has, at least half as close to their end as all of them."""
        for end, own in zip(_ends(self.blocks), self.hashes, strict=True):
            if hashes[(end - 1) * HASH_NBYTES : end * HASH_NBYTES] == own:
                return end
        return 0


class Sessions:
    """``loads``: told of each rank's tokens. ``tenant_share``: of the sessions. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float], loads: LoadBoard, tenant_share: float = 1.0) -> None:
        self._clock, self._loads = clock, loads
        self._most = max(1, int(MAX_SESSIONS * tenant_share))  # of a tenant
        self._homes: dict[str, OrderedDict[bytes, Home]] = {}  # by tenant and digest, the oldest first
        self._count = 0
        self._tokens: Counter[RankKey] = Counter()  # of their homes

    def __len__(self) -> int:
        return self._count

    def home(self, session: Session) -> Home | None:
        self._end(session.tenant)
        homes = self._homes.get(session.tenant)
        home = None if homes is None else homes.get(session.digest)
        return None if home is None or self._is_over(home) else home

    def kept(self, home: Home, hashes: Buffer, block_tokens: int, tokens: int) -> tuple[int, int]:
        """Tokens of a prompt that are credited to its session's home: in any case, and where events tell nothing."""
        view = memoryview(hashes).cast("B")
        is_known = view.nbytes > 0
        kept = home.shared(view) * block_tokens if is_known and home.hashes else min(tokens, home.tokens)
        is_due = is_known and self._clock() - home.placed_s > ANNOUNCE_S
        return 0 if is_due else kept, kept

    def place(self, session: Session, rank: RankKey, hashes: Buffer, tokens: int) -> Placed:
        """A request of a session goes to a rank. One of less than half its tokens (a sub-agent) changes nothing."""
        former = self.home(session)
        if former is not None and tokens < former.tokens // 2:
            return "stayed" if former.rank == rank else "aside"
        placed: Placed = "first" if former is None else "stayed" if former.rank == rank else "moved"
        view = memoryview(hashes).cast("B")
        blocks = len(view) // HASH_NBYTES
        kept = tuple(bytes(view[(end - 1) * HASH_NBYTES : end * HASH_NBYTES]) for end in _ends(blocks))
        self._set(session, Home(rank, self._clock(), tokens, blocks, kept))
        return placed

    def settle(self, session: Session, placed: RankKey, rank: RankKey) -> None:
        """A request that was ``placed`` at one rank went to another."""
        home = self.home(session)
        if home is not None and home.rank == placed:
            self._set(session, home._replace(rank=rank))

    def _set(self, session: Session, home: Home) -> None:
        homes = self._homes.setdefault(session.tenant, OrderedDict())
        former = homes.get(session.digest)
        if former is None:
            self._count += 1
        else:
            self._add(former.rank, -former.tokens)
        self._add(home.rank, home.tokens)
        homes[session.digest] = home
        homes.move_to_end(session.digest)
        while len(homes) > self._most:
            self._drop(session.tenant)
        while self._count > MAX_SESSIONS:
            self._drop(max(self._homes, key=lambda tenant: len(self._homes[tenant])))

    def _drop(self, tenant: str) -> None:
        _, home = self._homes[tenant].popitem(last=False)
        self._add(home.rank, -home.tokens)
        self._count -= 1
        if not self._homes[tenant]:
            del self._homes[tenant]

    def _add(self, rank: RankKey, tokens: int) -> None:
        self._tokens[rank] += tokens
        self._loads.house(*rank, self._tokens[rank])
        if not self._tokens[rank]:
            del self._tokens[rank]

    def _is_over(self, home: Home) -> bool:
        return self._clock() - home.placed_s > KEEP_S

    def _end(self, tenant: str) -> None:
        """Drop the tenant's oldest homes that are over: more of them a call than a call adds."""
        for _ in range(ENDED_AT_ONCE):
            homes = self._homes.get(tenant)
            if homes is None or not self._is_over(next(iter(homes.values()))):
                return
            self._drop(tenant)


def _ends(blocks: int) -> list[int]:
    """The numbers of leading blocks whose last hash is kept, the most first."""
    return [blocks, *(blocks - (1 << power) for power in range((blocks - 1).bit_length()))] if blocks else []
