"""``Retention`` keeps prefixes in the pool for requests that ask for it, and lets others go.

To keep is to touch: every ``TOUCH_EVERY_S`` seconds the records of a kept prefix count as used, so the pool evicts
others first. A hit starts the prefix's time again. All kept prefixes of a pool fit a share of its memory: an equal part
for each tenant that announces anything, at most this share of its quota, and of that for each engine that keeps
something. A prefix without room is not kept, so that no caller displaces what another one keeps.

To be done is to expire: the records' time to live gets short (``Store.expire_many``), and any later use renews it. So a
prefix that others share stays. No caller is known by name, so the longest wish for a record lasts: what is kept is not
let go, and a shorter wish takes nothing from a longer one.

Threads: the engine's scheduler thread makes the calls, which return at once. The first hint starts a thread that asks
the store.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm.logger import init_logger

from kvpool import metrics
from kvpool.discovery.quota import read_standings
from kvpool.errors import KVPoolError, NoThread, StoreUnavailable
from kvpool.key.key import Namespace, keeper_key, keepers_prefix, namespace_prefix
from kvpool.metrics import Counters
from kvpool.store import LookupGroup, Store
from kvpool.store.clients.lookup_keys import LookupKeys
from kvpool.threads import TurnThread, start_thread

logger = init_logger("vllm.kvpool")

TOUCH_EVERY_S = 30.0
KEEPER_LEASE_S = 4 * TOUCH_EVERY_S  # of the document that counts this engine among those that keep
CALL_S = 10.0  # for each batch
EXPIRE_KEYS = 4096  # per batch
MAX_WAITING = 1024  # hints; the oldest is dropped


class Prefix(NamedTuple):
    """A request's records in the pool. ``hashes``: the engine's own, of the first group's records."""

    namespace: Namespace
    groups: Sequence[LookupGroup]
    hashes: Sequence[bytes]
    nbytes: int


class _Kept(NamedTuple):
    namespace: Namespace
    groups: Sequence[LookupGroup]
    nbytes: int
    keep_s: float
    ends_s: float


class Retention(TurnThread):
    """``share``: of the pool's memory, for all that is kept in it; 0: nothing is. ``clock``: in seconds."""

    def __init__(
        self,
        store: Store,
        tenant: str,
        *,
        share: float,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("kvpool-retention")
        self._store, self._tenant, self._share = store, tenant, share
        self._counters, self._clock = counters, clock
        self._key = keeper_key(tenant, secrets.token_hex(8))
        self._waiting: deque[Callable[[], None]] = deque(maxlen=MAX_WAITING)
        self._ends: frozenset[bytes] = frozenset()  # the last hash of each kept prefix; replaced whole
        # The fields below: its thread only.
        self._kept: dict[bytes, _Kept] = {}  # by the prefix's last hash
        self._next_touch_s = clock() + TOUCH_EVERY_S
        self._room_nbytes = 0.0
        self._sizes: dict[str, int] = {}  # of the pool's servers, as last known
        self._is_away = False  # the pool, as logged
        self._is_blind = False  # it was logged that the pool's size is unknown

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return bool(self._ends)

    def keep(self, prefix: Prefix, keep_s: float) -> None:
        """Keep it from now on, and for ``keep_s`` seconds after each use."""
        if prefix.hashes:
            self._send(lambda: self._keep(prefix, keep_s))

    def let_go(self, prefix: Prefix) -> None:
        """Its records expire soon, but for those at its beginning that are kept."""
        if prefix.hashes:
            self._send(lambda: self._let_go(prefix))

    def used(self, hashes: Sequence[bytes]) -> None:
        """A request had these records: its use starts the time of kept prefixes again."""
        if not self._ends.isdisjoint(hashes):
            self._send(lambda: self._used(hashes))

    def _send(self, call: Callable[[], None]) -> None:
        self._waiting.append(call)
        self._woken.set()
        if self._thread.ident is None:
            with contextlib.suppress(NoThread):  # the next hint tries again
                start_thread(self._thread)

    # The thread.

    def _end(self) -> None:
        with contextlib.suppress(KVPoolError):
            self._store.withdraw(self._key)

    def _turn(self) -> float:
        self.turn()
        return 0.0 if self._waiting else max(0.0, self._next_touch_s - self._clock())

    def turn(self) -> None:
        """Take what waits, and touch what is due. Blocks for the store; its faults are logged once an outage."""
        try:
            while self._waiting and not self._closing:
                self._waiting.popleft()()
            if self._clock() >= self._next_touch_s:
                self._next_touch_s = self._clock() + TOUCH_EVERY_S
                self._touch()
            self._is_away = False
        except KVPoolError as error:
            if not self._is_away:
                logger.warning("kvpool: hints about the pool are lost: %s", error)
            self._is_away = True
        except Exception:  # never ends the thread
            logger.exception("kvpool failed while it kept prefixes")
        self._ends = frozenset(self._kept)
        self._counters.set(metrics.KEPT_NBYTES, float(self._kept_nbytes()))

    def _keep(self, prefix: Prefix, keep_s: float) -> None:
        last, ends_s = prefix.hashes[-1], self._clock() + keep_s
        begun = self._kept.keys() & set(prefix.hashes)  # it goes on from them
        if (same := self._kept.get(last)) is not None:
            keep_s, ends_s = max(keep_s, same.keep_s), max(ends_s, same.ends_s)
        replaced = [
            one for one in begun if self._kept[one].ends_s <= ends_s and self._kept[one].keep_s <= keep_s
        ]
        if not self._kept:
            self._measure_room()
        more_nbytes = prefix.nbytes - sum(self._kept[one].nbytes for one in replaced)
        if self._kept_nbytes() + more_nbytes > self._room_nbytes:
            self._used(prefix.hashes)
            self._counters.add(metrics.KEEPS_REFUSED)
            return
        for one in replaced:
            del self._kept[one]
        self._kept[last] = _Kept(prefix.namespace, prefix.groups, prefix.nbytes, keep_s, ends_s)

    def _let_go(self, prefix: Prefix) -> None:
        now_s = self._clock()
        kept = [
            one for one in self._kept.values() if one.ends_s > now_s and one.namespace == prefix.namespace
        ]
        groups = [_behind(group, [own for one in kept for own in one.groups]) for group in prefix.groups]
        names = LookupKeys(namespace_prefix(prefix.namespace.tenant, prefix.namespace.hex), groups)
        for start in range(0, len(names), EXPIRE_KEYS):
            expired = self._store.expire_many(names[start : start + EXPIRE_KEYS], timeout_s=CALL_S)
            self._counters.add(metrics.DONE_KEYS, expired)

    def _used(self, hashes: Sequence[bytes]) -> None:
        for last in self._kept.keys() & set(hashes):
            kept = self._kept[last]
            self._kept[last] = kept._replace(ends_s=self._clock() + kept.keep_s)

    def _touch(self) -> None:
        now_s = self._clock()
        self._kept = {last: kept for last, kept in self._kept.items() if kept.ends_s > now_s}
        if not self._kept:
            return
        faults: list[KVPoolError] = []
        try:
            self._measure_room()
        except KVPoolError as error:  # the room stays; a far pool that is away keeps nobody from what is near
            faults.append(error)
        nbytes = 0
        for last, kept in list(self._kept.items()):  # the oldest first
            nbytes += kept.nbytes
            if nbytes > self._room_nbytes:
                nbytes -= kept.nbytes
                del self._kept[last]
                self._counters.add(metrics.KEEPS_REFUSED)
        # Near answers for what it has, and tells far of uses more rarely: a kept prefix is touched there, too, once
        # all are touched near, so that a far pool which is away costs near nothing.
        for store in filter(None, (self._store, self._store.far)):
            faults += self._touch_in(store)
        if faults:
            raise faults[0]

    def _touch_in(self, store: Store) -> list[KVPoolError]:
        """Ask for all at once: one that a silent server keeps waiting costs the others nothing."""
        lookups = [
            store.submit_lookup(one.namespace, one.groups, timeout_s=CALL_S) for one in self._kept.values()
        ]
        faults: list[KVPoolError] = []
        for lookup in lookups:
            if self._closing:
                break
            try:
                lookup.wait()
            except StoreUnavailable as error:
                faults.append(error)
        return faults

    def _measure_room(self) -> None:
        """This engine's part of the share, of the pool or the quota.

        A pool without a limit counts as full, a list of tenants unseen as one.
        """
        self._store.announce(self._key, b"1", lease_s=KEEPER_LEASE_S)
        keepers, tenants = len(self._store.announcements(keepers_prefix(self._tenant))), 1
        with contextlib.suppress(KVPoolError):  # a user that may not read it
            tenants = max(1, len(self._store.announcing_tenants()))
        self._sizes = {
            one.server: (one.capacity_nbytes or one.used_nbytes or 0)
            if one.up
            else self._sizes.get(one.server, 0)
            for one in self._store.usage()
        }
        nbytes = sum(self._sizes.values())
        room_nbytes = nbytes / tenants
        with contextlib.suppress(KVPoolError):  # a user that may not read it
            standing = read_standings(self._store, [self._tenant])[self._tenant]
            if standing.quota_nbytes is not None:
                room_nbytes = min(room_nbytes, standing.quota_nbytes)
        self._room_nbytes = self._share * room_nbytes / max(1, keepers)
        if not nbytes and not self._is_blind:
            self._is_blind = True
            logger.warning(
                "kvpool keeps nothing for requests: no server says how much memory it has; give the pool's user "
                "the right to INFO (+info)"
            )

    def _kept_nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept.values())


def _behind(group: LookupGroup, kept: Sequence[LookupGroup]) -> LookupGroup:
    """The records of ``group`` behind those with which one of ``kept``, of the same group, begins, too."""
    shared = max((_shared(group, one) for one in kept if one.group == group.group), default=0)
    return group._replace(hashes=group.hashes[shared * group.hash_nbytes :])


def _shared(one: LookupGroup, other: LookupGroup) -> int:
    """How many records both begin with. A hash stands for all before it, too: the last equal one is searched for."""
    width, least, most = one.hash_nbytes, 0, min(one.records, other.records)
    while least < most:
        middle = (least + most) // 2
        here = slice(middle * width, (middle + 1) * width)
        least, most = (middle + 1, most) if one.hashes[here] == other.hashes[here] else (least, middle)
    return least
