"""``ClusterLink``: a link to each server of a cluster, or to the primary that sentinels name, for one thread.

Each key's commands go to the server that holds its slot, one server after the other, and follow MOVED and ASK.
What befalls a server befalls its keys alone, a refused user too: they get an ``Unanswered``, the others their
replies. Where a connection ended, another server may be by now: the map is read again. Only a
connection that ends in an exchange about one key is told as such, because the key's size may be why. A server
has half of the time that is left, so that behind a silent one there is time for the rest.

Clients' own cluster clients are not used: docs/decisions/0019-redis-py-and-glide-share-one-class.md.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvpool.store.clients.link import (
    PATIENCE_S,
    Command,
    ErrorReply,
    Link,
    LinkEnded,
    LinkFault,
    LinkRefused,
    LinkSilent,
    Unanswered,
    probe_s,
)
from kvpool.store.clients.redis import RedisLink
from kvpool.store.clients.shards import Address, Shards, slot_of
from kvpool.store.server.replies import first_word
from kvpool.store.server.topology import Primaries, address_of
from kvpool.store.url import StoreURL
from kvpool.text import is_ip_address

MAX_HOPS = 5
MAX_STRANGERS = 16  # linked servers that only redirects named
_PORT = re.compile("[0-9]{1,5}")
_OF_CHANGE = ("CLUSTERDOWN", "MASTERDOWN", "READONLY")  # first words of errors by which the map is old


class _Item(NamedTuple):
    """Commands about one key: ``start`` to ``end`` of an exchange. ``asking``: ASKING goes before them."""

    start: int
    end: int
    asking: bool = False


class ClusterLink:
    """See ``Link``. ``link_to`` makes an undialled link to one server."""

    def __init__(self, shards: Shards, link_to: Callable[[Address], Link]) -> None:
        self._shards, self._link_to = shards, link_to
        self._links: dict[Address, Link] = {}
        self._servers = shards.servers()  # of the map that the links were last compared with
        self._times_away: dict[Address, int] = {}  # of linked servers, when their links last worked

    def dial(self, timeout_s: float) -> None:
        """Errors: ``LinkFault`` where no server can be dialled; ``LinkRefused``, if one of them refuses."""
        end_s = time.monotonic() + timeout_s
        faults: list[LinkFault] = []
        servers = sorted(self._follow_map())
        for server in servers:
            try:
                self._check_not_away(server)
                self._dialled(server, _share_s(end_s))
            except LinkFault as error:
                faults.append(error)
        if len(faults) == len(servers):
            refused = [one for one in faults if isinstance(one, LinkRefused)]
            raise (refused or faults or [LinkFault("no server of the pool is known")])[0]

    def is_stale(self) -> bool:
        return False  # each is checked before it is used

    def exchange(self, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        end_s = time.monotonic() + timeout_s
        self._follow_map()
        replies: list[Any] = [None] * len(commands)
        waiting: dict[Address | None, list[_Item]] = {}
        for item, key in _items(commands):
            waiting.setdefault(self._shards.holder(slot_of(key)), []).append(item)
        is_of_one = sum(map(len, waiting.values())) == 1
        for hop in range(MAX_HOPS + 1):
            redirected: dict[Address | None, list[_Item]] = {}
            for server, items in waiting.items():
                answers = self._ask(server, commands, items, end_s, is_of_one)
                for item, answered in zip(items, answers, strict=True):
                    replies[item.start : item.end] = answered
                    target = self._target(answered, server) if server and hop < MAX_HOPS else None
                    if target is not None:
                        redirected.setdefault(target[0], []).append(item._replace(asking=target[1]))
            if not redirected:
                break
            waiting = redirected
        return replies

    def drop(self) -> None:
        for server in tuple(self._links):
            self._drop(server)

    close = drop

    def _ask(
        self,
        server: Address | None,
        commands: Sequence[Command],
        items: Sequence[_Item],
        end_s: float,
        is_of_one: bool,
    ) -> list[list[Any]]:
        """The replies to each item. Errors: ``LinkEnded``, if the exchange ``is_of_one`` key."""
        sent: list[Command] = []
        for item in items:
            sent += [(b"ASKING",)] if item.asking else []
            sent += commands[item.start : item.end]
        try:
            replies = self._exchanged(server, sent, end_s)
        except LinkFault as error:
            if is_of_one and isinstance(error, LinkEnded):
                raise
            name = f"{server[0]}:{server[1]}: " if server else ""
            why = Unanswered(f"{name}{error}")
            return [[why] * (item.end - item.start) for item in items]
        if any(isinstance(reply, ErrorReply) and first_word(reply) in _OF_CHANGE for reply in replies):
            self._shards.look_again()
        answers, place = [], 0
        for item in items:
            place += item.asking
            answers.append(replies[place : place + item.end - item.start])
            place += item.end - item.start
        return answers

    def _exchanged(self, server: Address | None, sent: Sequence[Command], end_s: float) -> list[Any]:
        """Errors: ``LinkFault``, with the link dropped."""
        if server is None:
            self._shards.look_again()
            raise LinkFault("no node of the cluster serves its slot")
        self._check_not_away(server)
        link = self._dialled(server, _share_s(end_s))
        try:
            with _as_faults():
                replies = link.exchange(sent, _share_s(end_s))
            if len(replies) != len(sent):
                raise LinkFault("it sent too few replies or too many")
        except LinkFault as error:
            self._drop(server)
            if isinstance(error, LinkSilent):
                self._shards.fell_away(server, str(error))
            else:
                self._shards.look_again()
            raise
        return replies

    def _follow_map(self) -> frozenset[Address]:
        """The servers of the present map; links that an older one had, or a redirect named, end with it."""
        servers = self._shards.servers()
        if servers is not self._servers:
            self._servers = servers
            for server in [one for one in self._links if one not in servers]:
                self._drop(server)
        return servers

    def _check_not_away(self, server: Address) -> None:
        if why := self._shards.why_away(server):
            raise LinkFault(why)

    def _dialled(self, server: Address, timeout_s: float) -> Link:
        link, times_away = self._links.get(server), self._shards.times_away(server)
        if link is not None and not link.is_stale():
            if self._times_away[server] == times_away:
                return link
        elif link is not None:
            self._shards.look_again()
            link.drop()
        if link is None:
            self._make_room(server)
            link = self._links[server] = self._link_to(server)
        try:
            with _as_faults():
                link.dial(timeout_s)
        except LinkFault as error:
            self._drop(server)
            self._shards.fell_away(server, str(error))
            raise
        self._times_away[server] = times_away
        return link

    def _make_room(self, server: Address) -> None:
        """Drop links to servers that the map does not have, if there are too many. Errors: ``LinkFault``."""
        known = self._shards.servers()
        strangers = [one for one in self._links if one not in known]
        if server not in known and len(strangers) >= MAX_STRANGERS:
            for one in strangers:
                self._drop(one)

    def _drop(self, server: Address) -> None:
        link = self._links.pop(server, None)
        self._times_away.pop(server, None)
        if link is not None:
            link.close()

    def _target(self, replies: Sequence[Any], server: Address) -> tuple[Address, bool] | None:
        """Where the replies to an item send it, and whether by ASK; None: they do not, or to nowhere."""
        sent_on = [
            reply
            for reply in replies
            if isinstance(reply, ErrorReply)
            and not isinstance(reply, Unanswered)
            and first_word(reply) in ("MOVED", "ASK")
        ]
        if not sent_on:
            return None
        reply = next((one for one in sent_on if first_word(one) == "MOVED"), sent_on[0])
        asking = first_word(reply) == "ASK"
        self._shards.redirected(for_good=not asking)
        host, _, port = reply.split(" ")[-1].rpartition(":") if reply.count(" ") >= 2 else ("", "", "")
        target = address_of(host or server[0], int(port)) if _PORT.fullmatch(port) else None
        if target is None or not (target in self._shards.servers() or is_ip_address(target[0])):
            return None
        return target, asking


def cluster_of(
    url: StoreURL, primaries: Primaries, link_to: Callable[[StoreURL], Link]
) -> tuple[Shards, list[ClusterLink]]:
    """The map, still empty, and a link for each of the store's threads."""

    def probe(server: Address) -> None:
        asking = RedisLink(primaries.at(*server))
        asking.dial(probe_s(url))
        asking.close()

    shards = Shards(probe)
    return shards, [ClusterLink(shards, lambda at: link_to(primaries.at(*at))) for _ in range(url.threads)]


@contextmanager
def _as_faults() -> Iterator[None]:
    """Any error of a client is a ``LinkFault``."""
    try:
        yield
    except LinkFault:
        raise
    except Exception as error:
        raise LinkFault(f"{type(error).__name__}: {error}") from error


def _items(commands: Sequence[Command]) -> Iterator[tuple[_Item, bytes]]:
    """Each key's commands, and the key: one, or those from MULTI to EXEC."""
    start = 0
    while start < len(commands):
        end = start + 1
        if commands[start][0] == b"MULTI":
            while commands[end - 1][0] != b"EXEC":
                end += 1
        yield _Item(start, end), bytes(commands[min(start + 1, end - 1)][1])
        start = end


def _share_s(end_s: float) -> float:
    """Time for one server. Errors: ``LinkFault`` where there is none left."""
    left_s = end_s - time.monotonic()
    if left_s <= -PATIENCE_S:
        raise LinkFault("no time left for it behind silent servers")
    return max(left_s / 2, PATIENCE_S)
