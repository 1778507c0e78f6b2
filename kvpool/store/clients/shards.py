"""``Shards``: which server holds a slot, of a cluster or a sentinels' service, and which of them do not answer."""

from __future__ import annotations

import binascii
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from kvpool.store.server.topology import LAST_SLOT, Primary

Address = tuple[str, int]

_SLOTS = LAST_SLOT + 1


def slot_of(key: bytes) -> int:
    """The hash slot of a record's key, which has no brace."""
    return binascii.crc_hqx(key, 0) % _SLOTS


class Shards:
    """The map of the servers for a store's links, and a breaker a server. Any thread.

    A silent server, one that nobody can dial, or one that refuses is away: links ask it for nothing.
    ``TopologyWatch`` reads the map again while one is, and each reading calls ``probe`` with every server that is
    away (blocking; it raises where there is no answer); an answer ends it. ``_changed`` (a condition) guards all
    fields; no I/O under it.
    """

    def __init__(self, probe: Callable[[Address], None]) -> None:
        self._probe = probe
        self._changed = threading.Condition()
        self._holders: list[Address | None] = [None] * _SLOTS
        self._known: frozenset[Address] = frozenset()
        self._away: dict[Address, str] = {}
        self._times_away: Counter[Address] = Counter()
        self._counts: Counter[str] = Counter(moved=0, asked=0)
        self._is_stale = self._closed = False

    # ------------------------------------------------------------------ for TopologyWatch

    def install(self, found: Sequence[Primary]) -> None:
        holders: list[Address | None] = [None] * _SLOTS
        for host, port, slots in found:
            for first, last in slots:
                holders[first : last + 1] = [(host, port)] * (last + 1 - first)
        with self._changed:
            self._holders, self._known = holders, frozenset((one.host, one.port) for one in found)
            self._away = {server: why for server, why in self._away.items() if server in self._known}
            self._times_away = Counter({one: n for one, n in self._times_away.items() if one in self._known})
            away = list(self._away)
        for server in away:
            if self.closed():
                return
            why = ""
            try:
                self._probe(server)
            except Exception as error:  # any error of a client
                why = str(error) or type(error).__name__
            with self._changed:
                if not why:
                    self._away.pop(server, None)
                elif server in self._away:
                    self._away[server] = why

    def wait_until_stale(self, timeout_s: float) -> bool:
        """What links see after it, the reading that follows may have missed: that counts for the next one."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stale or self._away or self._closed, timeout_s)
            is_stale, self._is_stale = self._is_stale or bool(self._away), False
            return is_stale and not self._closed

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def closed(self) -> bool:
        with self._changed:
            return self._closed

    # ------------------------------------------------------------------ for links

    def servers(self) -> frozenset[Address]:
        with self._changed:
            return self._known

    def holder(self, slot: int) -> Address | None:
        with self._changed:
            return self._holders[slot]

    def why_away(self, server: Address) -> str:
        """Empty: it is not."""
        with self._changed:
            return self._away.get(server, "")

    def times_away(self, server: Address) -> int:
        """A link that sees it change checks its connection to that server."""
        with self._changed:
            return self._times_away[server]

    def fell_away(self, server: Address, why: str) -> None:
        with self._changed:
            if server in self._known and server not in self._away:
                self._away[server] = why
                self._times_away[server] += 1
        self.look_again()

    def redirected(self, *, for_good: bool) -> None:
        """A server sent a key on; ``for_good``: its map is newer than ours."""
        with self._changed:
            self._counts["moved" if for_good else "asked"] += 1
        if for_good:
            self.look_again()

    def look_again(self) -> None:
        """A server says that it is not what the map has it for."""
        with self._changed:
            self._is_stale = True
            self._changed.notify_all()

    def counted(self, counters: dict[str, int]) -> dict[str, int]:
        """``counters`` of the links with what they do not know."""
        with self._changed:
            up = 0 if len(self._away) == len(self._known) else counters["up_connections"]
            return counters | self._counts | {"up_connections": up}
