"""``PoolReconciler``: keeps the index's pool blocks equal to the pool.

Workers' events report puts and load misses, but not a server's evictions, deletions and losses. So:

- **Notices.** A key that a server reports as changed is looked up; its block is credited if present.
- **Rounds.** Mark and sweep over all keys, again and again. Each credited block is marked; a block that is
  found, or stored by an event meanwhile, loses its mark; the sweep removes blocks still marked.

A block is present when the keys of all its ranks are: of ranks up to the highest among its group's keys.

Once pool and events rest, the next round makes the index exact, within ``ReconcilerTotals.max_staleness_s``.
Notices are faster; rounds repair missed notices.

Threads: ``kvpool-reconciler`` owns all fields but ``_again`` and ``_closing``; others read ``_totals`` as a whole.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Generator, Iterable, Mapping
from typing import Any, NamedTuple

import msgpack

from kvpool.discovery.facts import announced_namespaces
from kvpool.errors import AnnouncementsRefused, ConfigError, KVPoolError, RepliesTooLarge
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.partition import Pool
from kvpool.key.key import KEY_PREFIX, Fact, FoundKey, namespace_prefix, rank_key, split_key, tenant_prefix
from kvpool.store.store import LOOK_KEYS, Notices, Store
from kvpool.threads import start_thread

DEFAULT_KEYS_PER_S = 20_000
MAX_KEYS_PER_S = 10_000_000
PAUSE_S = 10.0  # between two rounds
RETRY_S = 1.0  # after a failed round
WAIT_S = 0.25  # longest wait between two polls for work
CATCH_UP_S = 0.1
CLOSE_S = 5.0
MAX_ASKED = 1 << 16  # keys per request to the pool
MAX_RANKS = 1024  # and groups, of a namespace: keys above are skipped
SLICES = 32  # of the table, per step: a lookup waits for at most one slice
WITNESSES = 16  # recently present keys: all gone after a flush means that this pool was flushed

_KINDS = {"full": "full_attention", "mla": "mla_attention", "state": "mamba"}
_WINDOW = re.compile(r"(sliding_window(?:_mla)?):([0-9]{1,9})")
_NOTIFICATIONS_DOWN = "the pool does not say what it loses, so that is seen in rounds only"
_SCAN_FAILED = "the pool cannot be looked through, so what it loses in silence stays credited"

logger = logging.getLogger("kvpool.index")

Namespace = tuple[str, str]  # tenant, 32 hex digits


class ReconcilerTotals(NamedTuple):
    """Since the start; the last four are present values. Notices and rounds both add and remove blocks."""

    notices: int = 0
    missed_notices: int = 0
    added: int = 0
    removed: int = 0
    rounds: int = 0
    failed_rounds: int = 0
    notifications_down: int = 0  # 1: some server sends none
    round_s: float = 0.0  # of the last whole one
    max_staleness_s: float = 0.0  # a running round, the pause, and the next round


class PoolReconciler:
    """Keeps the pool's blocks in ``fleet`` equal to ``store``, in a thread, until it is closed.

    ``keys_per_s``: rate of its rounds. ``pause_s``: between two rounds. An unreachable pool, or refused scans
    or notifications, are logged and retried. ``close`` before the store. Errors: ``ConfigError``.
    """

    def __init__(
        self,
        fleet: Fleet,
        store: Store,
        *,
        keys_per_s: int = DEFAULT_KEYS_PER_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        if type(keys_per_s) is not int or not 1 <= keys_per_s <= MAX_KEYS_PER_S:
            raise ConfigError(
                f"keys a second are a whole number from 1 to {MAX_KEYS_PER_S}, not {keys_per_s!r:.40}"
            )
        self._fleet, self._store = fleet, store
        self._keys_per_s, self._pause_s = keys_per_s, pause_s
        self._closing = threading.Event()
        self._again = threading.Event()  # a new round is requested
        self._round: Generator[int, None, None] | None = None
        self._next_s = 0.0  # when the round goes on, or the next begins
        self._earliest_s = 0.0  # of the next round
        self._pools: list[Pool] = []  # in this turn
        self._known: set[Namespace] = set()  # of the last round
        self._ranks: dict[Namespace, dict[int, int]] = {}  # ranks per group
        self._groups: dict[Namespace, dict[int, dict[str, Any]]] = {}  # event fields per group
        self._witnesses: deque[str] = deque(maxlen=WITNESSES)
        self._said: set[str] = set()  # present troubles
        self._totals = ReconcilerTotals()
        self._thread = threading.Thread(target=self._run, name="kvpool-reconciler", daemon=True)
        start_thread(self._thread)

    def pool_lost(self, tenant: str | None = None) -> None:
        """Forget the pool's blocks of this tenant, and start a round; None: of all tenants. Any thread."""
        self._fleet.forget_pool(tenant)
        self._again.set()

    def totals(self) -> ReconcilerTotals:
        """Any thread."""
        return self._totals

    def close(self) -> None:
        """Idempotent. Blocks for at most ``CLOSE_S`` seconds."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    # ---- the thread

    def _run(self) -> None:
        notices = self._store.notices()
        try:
            while not self._closing.is_set():
                try:
                    self._pools = self._fleet.pools()
                    self._hear(notices)
                    self._look()
                except Exception:  # a fault of ours: the next round repairs it
                    logger.exception("looking at the pool failed")
                    self._end_round(RETRY_S, RETRY_S)
                    self._closing.wait(RETRY_S)
        finally:
            self._end_round(0.0)
            if notices is not None:
                notices.close()

    def _hear(self, notices: Notices | None) -> None:
        """Handle notices until the next step of the round is due."""
        wait_s = min(max(0.0, self._next_s - time.monotonic()), WAIT_S)
        if notices is None:
            self._closing.wait(wait_s)
            return
        heard = notices.take(wait_s)
        self._say(_NOTIFICATIONS_DOWN, heard.problem)
        missed = heard.missed or heard.emptied
        self._count(notices=len(heard.keys), missed_notices=int(missed))
        self._totals = self._totals._replace(notifications_down=int(bool(heard.problem)))
        if missed:
            self._again.set()
        try:
            if heard.emptied and not self._has_witness():
                self._fleet.forget_pool()
            for start in range(0, len(heard.keys), LOOK_KEYS):
                keys = heard.keys[start : start + LOOK_KEYS]
                self._settle(((rank_key(key, 0), block) for key, block in self._ours(keys)), ())
        except KVPoolError:
            self._again.set()

    def _look(self) -> None:
        """Take the next step of a round, or begin one, when due."""
        now_s = time.monotonic()
        if self._round is not None:
            due_s = self._next_s
        elif self._again.is_set() or not _names(self._pools) <= self._known:
            due_s = self._earliest_s
        else:
            due_s = self._next_s
        if now_s < due_s:
            return
        if self._round is None:
            self._again.clear()
            self._round, self._next_s = self._walk(), now_s
        try:
            looked_at = next(self._round)
        except StopIteration:
            self._end_round(self._pause_s, WAIT_S)
            self._say(_SCAN_FAILED, "")
        except KVPoolError as error:
            self._end_round(RETRY_S, RETRY_S)
            self._count(failed_rounds=1)
            self._say(_SCAN_FAILED, str(error))
        else:
            # Time spent on notices is caught up.
            self._next_s = max(self._next_s, now_s - CATCH_UP_S) + looked_at / self._keys_per_s

    def _end_round(self, pause_s: float, least_pause_s: float = 0.0) -> None:
        if self._round is not None:
            self._round.close()
            self._round = None
        self._next_s = time.monotonic() + pause_s
        self._earliest_s = time.monotonic() + least_pause_s

    def _walk(self) -> Generator[int, None, None]:
        """One round; yields the number of keys scanned in each step. Errors: ``KVPoolError``."""
        started_s = time.monotonic()
        pools = self._pools
        self._known = _names(pools)
        if pools:
            self._learn_groups()
            for pool in pools:
                yield 0
                cursor, slices = pool.table.mark(pool.holder), 1
                while cursor:
                    cursor, slices = pool.table.mark(pool.holder, cursor), slices + 1
                    if slices % SLICES == 0:
                        yield 0
            left_out = yield from self._walk_keys()
            for pool in pools:
                if pool.tenant in left_out:
                    continue
                left, slices = 1, 0
                while left:
                    removed, left = pool.table.sweep(pool.holder)
                    self._count(removed=removed)
                    slices += 1
                    if slices % SLICES == 0:
                        yield 0
        round_s = time.monotonic() - started_s
        self._count(rounds=1)
        self._totals = self._totals._replace(round_s=round_s, max_staleness_s=2 * round_s + self._pause_s)

    def _walk_keys(self) -> Generator[int, None, set[str]]:
        """Scan all keys at once; if refused, for names of many MiB, scan per tenant.

        Returns the tenants whose own names are refused: their losses are unknown. Errors: ``KVPoolError``.
        """
        left_out: dict[str, str] = {}
        tenants = sorted({tenant for tenant, _ in self._known})
        try:
            yield from self._walk_under(_common_prefix(self._known))
        except RepliesTooLarge:
            for tenant in tenants:
                known = {name for name in self._known if name[0] == tenant}
                try:
                    yield from self._walk_under(_common_prefix(known))
                except RepliesTooLarge as error:
                    left_out[tenant] = str(error)
        for tenant in tenants:
            trouble = f"{_SCAN_FAILED}: of tenant {tenant}"
            self._say(trouble, left_out.get(tenant, ""))
        return set(left_out)

    def _walk_under(self, prefix: str) -> Generator[int, None, None]:
        for keys in self._store.scan_keys(prefix):
            # Each block once, by its first rank: without that rank it is absent.
            found = [(key, block) for key, block in self._ours(keys) if block.rank == 0]
            yield max(LOOK_KEYS, len(keys)) + self._settle(found, set(keys))

    # ---- blocks

    def _ours(self, keys: Iterable[str]) -> list[tuple[str, FoundKey]]:
        """Parses keys of known namespaces, and counts the ranks of their groups."""
        known = _names(self._pools)
        ours = []
        for key in keys:
            block = split_key(key)
            namespace = _namespace(block)
            if namespace in known and max(block.group, block.rank) < MAX_RANKS:
                ranks = self._ranks.setdefault(namespace, {})
                ranks[block.group] = max(ranks.get(block.group, 1), block.rank + 1)
                ours.append((key, block))
        return ours

    def _settle(self, blocks: Iterable[tuple[str, FoundKey]], seen: Collection[str]) -> int:
        """Credit present blocks and remove absent ones; returns the number of keys requested.

        ``blocks``: with the key of the first rank. ``seen``: keys known to be present.
        """
        there: dict[str, FoundKey] = dict(blocks)
        wanted = [
            wanted
            for key, block in there.items()
            for rank in range(self._ranks[_namespace(block)][block.group])
            if (wanted := rank_key(key, rank)) not in seen
        ]
        gone: dict[str, FoundKey] = {}
        for start in range(0, len(wanted), MAX_ASKED):
            asked = wanted[start : start + MAX_ASKED]
            for key, found in zip(asked, self._store.contains_many(asked), strict=True):
                first = rank_key(key, 0)
                if not found and first in there:
                    gone[first] = there.pop(first)
        self._witnesses.extend(list(there)[-WITNESSES:])
        self._tell("BlockStored", there.values())
        self._tell("BlockRemoved", gone.values())
        return len(wanted)

    def _tell(self, event: str, blocks: Iterable[FoundKey]) -> None:
        by_group: dict[Namespace, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for block in blocks:
            by_group[_namespace(block)][block.group].append(block.hash64)
        if not by_group:
            return
        for pool in self._pools:
            groups = by_group.get((pool.tenant, pool.namespace))
            if groups is None:
                continue
            described = self._groups.get((pool.tenant, pool.namespace), {})
            events = [
                {"type": event, "block_hashes": hashes, "medium": "STORAGE", "group_idx": group}
                | described.get(group, {})
                for group, hashes in groups.items()
            ]
            packed = msgpack.packb([0.0, events, None])
            applied = pool.table.apply(pool.holder, packed, pool=pool.holder)
            self._count(added=applied.stored, removed=applied.removed)

    def _has_witness(self) -> bool:
        return bool(self._witnesses) and any(self._store.contains_many(list(self._witnesses)))

    def _learn_groups(self) -> None:
        """Read the KV-cache groups of the known namespaces from the facts in the pool."""
        self._ranks = {name: ranks for name, ranks in self._ranks.items() if name in self._known}
        self._groups = {name: groups for name, groups in self._groups.items() if name in self._known}
        for tenant in sorted({tenant for tenant, _ in self._known - self._groups.keys()}):
            trouble = f"the facts of tenant {tenant} cannot be read, so its blocks are judged without them"
            try:
                found = announced_namespaces(self._store, tenant)
            except AnnouncementsRefused as error:  # other tenants' facts still load
                self._say(trouble, str(error))
                continue
            self._say(trouble, "")
            for namespaces in found.values():
                for one in namespaces:
                    if (tenant, one.hex) in self._known:
                        self._groups[tenant, one.hex] = _groups(one.facts)

    # ---- totals and log

    def _count(self, **more: int) -> None:
        self._totals = self._totals._replace(
            **{name: getattr(self._totals, name) + count for name, count in more.items()}
        )

    def _say(self, trouble: str, reason: str) -> None:
        """Log a trouble with its reason when it begins, and once when it ends."""
        if reason and trouble not in self._said:
            self._said.add(trouble)
            logger.warning("%s: %s", trouble, reason)
        elif not reason and trouble in self._said:
            self._said.discard(trouble)
            logger.info("this is over: %s", trouble)


def _namespace(block: FoundKey) -> Namespace:
    return block[:2]


def _names(pools: Iterable[Pool]) -> set[Namespace]:
    return {(pool.tenant, pool.namespace) for pool in pools}


def _common_prefix(namespaces: Collection[Namespace]) -> str:
    tenants = {tenant for tenant, _ in namespaces}
    if len(namespaces) == 1:
        ((tenant, namespace),) = namespaces
        return namespace_prefix(tenant, namespace)
    return tenant_prefix(tenants.pop()) if len(tenants) == 1 else KEY_PREFIX


def _groups(facts: Mapping[str, Fact]) -> dict[int, dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    count = facts.get("groups")
    for group in range(min(count, MAX_RANKS) if type(count) is int else 0):
        attention = str(facts.get(f"group{group}.attention"))
        if attention.partition(":")[0] == "chunk":
            groups[group] = {"kv_cache_spec_kind": "chunked_local_attention"}
        elif attention in _KINDS:
            groups[group] = {"kv_cache_spec_kind": _KINDS[attention]}
        elif (window := _WINDOW.fullmatch(attention)) is not None:
            kind = {"kv_cache_spec_kind": window[1], "kv_cache_spec_sliding_window": int(window[2])}
            groups[group] = kind
        block_tokens = facts.get(f"group{group}.block_tokens")
        if group in groups and type(block_tokens) is int:
            groups[group]["block_size"] = block_tokens
    return groups
