"""``Sessions``: where each session's last request went, for a router's costs.

A session's next prompt mostly begins with the last one. Its *home*, the start of a rank that computed that, is credited
with it until a batch of its events comes, and for longer where they are not to be trusted or the prompt's tokens are
unknown. A rank that starts again is nobody's home.

Of a prompt's hashes those are kept that end at its last block and 1, 2, 4, ... blocks before it: each covers all
blocks before it. Ids are kept as digests.

A session that begins goes where the homes of others leave room (``router.py``), so each rank's tokens are summed. They
grow, so each counts at least as its tenant's sessions of that model do on average.
One thread at a time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvpool.index.cost.load import LoadBoard
from kvpool.index.fleet.rank import RankKey
from kvpool.index.prompt import Session
from kvpool.index.request_stats import Placed

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_SESSIONS = 65536
ANNOUNCE_S = 30.0  # after a placement, until its blocks' events must have come
KEEP_S = 900.0  # of a home
ENDED_AT_ONCE = 8  # homes that a call drops at most, of those that are over
HASH_NBYTES = 8


class Home(NamedTuple):
    """``batches``: events of the rank before the placement. ``counted``: tokens that the session counts there.
    ``hashes``: of ``blocks`` blocks, the last one's and those at distances of 1, 2, 4, ... before it; empty: its tokens
    were unknown. ``model``: the rank's.
    """

    rank: RankKey
    batches: int
    placed_s: float
    tokens: int
    counted: int
    blocks: int
    hashes: tuple[bytes, ...]
    model: str = ""

    def shared(self, hashes: memoryview) -> int:
        """Leading blocks of these that it has, at least half as close to their end as all of them."""
        for end, own in zip(_ends(self.blocks), self.hashes, strict=True):
            if hashes[(end - 1) * HASH_NBYTES : end * HASH_NBYTES] == own:
                return end
        return 0

    def goes_on(self, hashes: memoryview) -> bool:
        """Whether a prompt of these goes on with the last one: it has half of its blocks, or nobody knows them."""
        return not hashes.nbytes or 2 * self.shared(hashes) >= self.blocks


class Sessions:
    """``loads``: told of each rank's tokens. ``tenant_share``: of the sessions. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float], loads: LoadBoard, tenant_share: float = 1.0) -> None:
        self._clock, self._loads = clock, loads
        self._most = max(1, int(MAX_SESSIONS * tenant_share))  # of a tenant
        self._homes: dict[str, OrderedDict[bytes, Home]] = {}  # by tenant and digest, the oldest first
        self._count = 0
        self._tokens: Counter[RankKey] = Counter()  # that they count there
        self._said: Counter[tuple[str, str]] = Counter()  # tokens of homes, by tenant and model
        self._many: Counter[tuple[str, str]] = Counter()  # homes

    def __len__(self) -> int:
        return self._count

    def home(self, session: Session) -> Home | None:
        self._end(session.tenant)
        homes = self._homes.get(session.tenant)
        home = None if homes is None else homes.get(session.digest)
        return None if home is None or self._is_over(home) else home

    def kept(
        self, home: Home, batches: int, hashes: Buffer, block_tokens: int, tokens: int
    ) -> tuple[int, int]:
        """Tokens of a prompt that are credited to its session's home: in any case, and where events tell nothing.

        ``batches``: that the rank has told by now. Any since the placement speaks for itself: it came when the prompt
        was computed, or tells of what has taken its place.
        """
        view = memoryview(hashes).cast("B")
        is_known = view.nbytes > 0
        kept = home.shared(view) * block_tokens if is_known and home.hashes else min(tokens, home.tokens)
        is_due = is_known and (batches != home.batches or self._clock() - home.placed_s > ANNOUNCE_S)
        return 0 if is_due else kept, kept

    def place(
        self, session: Session, rank: RankKey, batches: int, hashes: Buffer, tokens: int, model: str = ""
    ) -> Placed:
        """A request of a session goes to a rank of a model, which has told so many batches.

        One of less than half its tokens (a sub-agent) changes nothing.
        """
        former, view = self.home(session), memoryview(hashes).cast("B")
        if former is not None and tokens < former.tokens // 2:
            return "stayed" if former.rank == rank else "aside"
        if former is not None and not former.goes_on(view):  # begins anew, or another one has its name
            self._loads.place(former.rank, former.tokens)  # where they stay for a while
            former = None
        placed: Placed = "first" if former is None else "stayed" if former.rank == rank else "moved"
        blocks = len(view) // HASH_NBYTES
        kept = tuple(bytes(view[(end - 1) * HASH_NBYTES : end * HASH_NBYTES]) for end in _ends(blocks))
        if not blocks and former is not None and placed == "stayed":  # what its tokens once told is as true
            blocks, kept = former.blocks, former.hashes
        counted = max(tokens, self._typical(session.tenant, model))
        self._set(session, Home(rank, batches, self._clock(), tokens, counted, blocks, kept, model))
        return placed

    def _typical(self, tenant: str, model: str) -> int:
        """What a session comes to: the tenant's of the model, with those that ended of late, have so many tokens."""
        many = self._many[tenant, model]
        return self._said[tenant, model] // many if many else 0

    def settle(self, session: Session, placed: tuple[str, int], rank: RankKey, batches: int) -> None:
        """A request that was ``placed`` at one worker's rank went to another, which has told so many batches."""
        home = self.home(session)
        if home is not None and home.rank[:2] == placed:
            self._set(session, home._replace(rank=rank, batches=batches))

    def _set(self, session: Session, home: Home) -> None:
        homes = self._homes.setdefault(session.tenant, OrderedDict())
        former = homes.get(session.digest)
        if former is None:
            self._count += 1
        else:
            self._add(session.tenant, former, -1)
        self._add(session.tenant, home, 1)
        homes[session.digest] = home
        homes.move_to_end(session.digest)
        while len(homes) > self._most:
            self._drop(session.tenant)
        while self._count > MAX_SESSIONS:
            self._drop(max(self._homes, key=lambda tenant: len(self._homes[tenant])))

    def _drop(self, tenant: str) -> None:
        _, home = self._homes[tenant].popitem(last=False)
        self._add(tenant, home, -1)
        self._count -= 1
        if not self._homes[tenant]:
            del self._homes[tenant]

    def _add(self, tenant: str, home: Home, sign: int) -> None:
        of = tenant, home.model
        self._said[of] += sign * home.tokens
        self._many[of] += sign
        if not self._many[of]:
            del self._said[of], self._many[of]
        self._tokens[home.rank] += sign * home.counted
        self._loads.house(home.rank, self._tokens[home.rank])
        if not self._tokens[home.rank]:
            del self._tokens[home.rank]

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
