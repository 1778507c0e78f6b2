"""Leased documents on Redis or Valkey servers: one key each with a time to live, found through an index.

For an announcement ``kvpool:t:x`` of tenant ``t``::

    kvpool:t:x:announced   string   the document, with its lease as time to live
    kvpool:t::announced    zset     the tenant's announcements, by the end of their lease (server's time, ms)
    kvpool:::announced     zset     the tenants with an index, by the end of its time to live (ms)

In a cluster the last word of each is ``{announced}``: in the same slot a document and its index change together.
The server never walks its keys, and one access rule for ``kvpool:t:*`` covers a tenant. Users without the right
to the list of tenants are missing from it; requests that name their tenant find their documents. Keys of another
form share an index. A renewal costs two commands in one round trip, however many announcements exist.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence

import redis

from kvpool.errors import AnnouncementsRefused, StoreUnavailable
from kvpool.key.key import KEY_PREFIX, parse_tenant, tenant_of
from kvpool.store.server.connection import MAX_REPLIES_NBYTES, KeptServer, deadline, max_replies
from kvpool.store.store import MAX_ANNOUNCEMENTS, MAX_DOCUMENT_NBYTES, MAX_LEASE_S, SCAN_KEYS

WRITE_S = 4.0  # a writing call, including its connect
READ_S = 10.0  # a call that reads or removes
READ_SHARE = 0.8  # for the reads; the rest is for a PING, which tells whether the server itself is slow
MAX_TENANTS = 4096
READ_AT_ONCE = 32  # documents per request: 2 MiB of replies at most
INDEX_LEASE_MS = int(MAX_LEASE_S * 1e3)  # longer than any announcement
LIST_LEASE_MS = 86_400_000  # of a tenant in the list
REGISTER_S = 60.0  # renewal of both: an index that starts finds a tenant whose entry was evicted
CLOCK_S = 10.0  # reuse of the measured clock offset

logger = logging.getLogger("kvpool")

SLOT = 1209  # of every key that ends in {announced}


class ServerDocuments:
    """The leased documents of a pool. Any thread may call any method.

    ``server``: the node that holds them, in a cluster the node of ``SLOT``. ``name``: of the store.

    Blocks for at most ``WRITE_S`` or ``READ_S`` per call. Errors: ``StoreUnavailable``.
    """

    def __init__(self, server: KeptServer, name: str, *, in_cluster: bool = False) -> None:
        self._server, self._name, self._in_cluster = server, name, in_cluster
        self._word = "{announced}" if in_cluster else "announced"
        self._list = f"kvpool:::{self._word}"  # of the tenants
        # Replaced whole, so any thread may.
        self._clock = (0, 0.0)  # ms by which the server's clock is ahead of our monotonic clock; valid until
        self._registered: dict[str, float] = {}  # tenant -> when it was listed
        self._warned_unlisted = False

    def put(self, key: str, document: bytes, lease_s: float) -> None:
        lease_ms = max(1, int(lease_s * 1e3))
        tenant = tenant_of(key)
        index = self._index(tenant)
        with self._server.asked("cannot keep an announcement", WRITE_S) as server:
            # A transaction, so that document and index entry come and go together.
            with server.pipeline(transaction=True) as together:
                together.set(f"{key}:{self._word}", document, px=lease_ms)
                together.zadd(index, {key: self._now_ms(server) + lease_ms})
                _, is_new = together.execute()
            if is_new:
                self._keep_bounded(server, index, key)
            if is_new or time.monotonic() >= self._registered.get(tenant, 0.0) + REGISTER_S:
                self._register(server, tenant, index)

    def remove(self, key: str) -> bool:
        with self._server.asked("cannot withdraw an announcement", WRITE_S) as server:
            documents, entries = self._remove(server, key)
        return bool(documents and entries)

    def of(self, keys: Sequence[str]) -> dict[str, bytes]:
        with self._server.asked("cannot read announcements", READ_S) as server:
            return self._read(server, keys)

    def all(self, prefix: str, suffix: str = "") -> dict[str, bytes]:
        """As ``Documents.all``; expired entries leave the index.

        Errors: ``AnnouncementsRefused`` also for a tenant with too large or too slow replies.
        """
        with deadline(READ_S):
            try:
                return self._all(prefix, suffix)
            except StoreUnavailable as error:
                slow = isinstance(error.__cause__, TimeoutError | redis.exceptions.TimeoutError)
                if slow and tenant_of(prefix) and self._server.answers():
                    raise AnnouncementsRefused(f"{error}, while the server answers others") from error
                raise

    def _all(self, prefix: str, suffix: str) -> dict[str, bytes]:
        documents: dict[str, bytes] = {}
        with self._server.asked("cannot read announcements", READ_S * READ_SHARE) as server:
            for tenant in self._tenants(server, prefix):
                index = self._index(tenant)
                with max_replies(MAX_REPLIES_NBYTES):
                    # Atomic against the present lease: a just renewed entry stays.
                    server.zremrangebyscore(index, "-inf", self._now_ms(server))
                    names = self._names(server, index, prefix)
                    documents |= self._read(server, [name for name in names if name.endswith(suffix)])
        return dict(sorted(documents.items()))

    def tenants(self) -> list[str]:
        with self._server.asked("cannot list the tenants", READ_S) as server:
            listed = self._tenants(server, "")
        return sorted(tenant for tenant in listed if parse_tenant(f"kvpool:{tenant}:") == tenant)

    def remove_all(self, prefix: str) -> int:
        """As ``Documents.remove_all``; without a tenant in ``prefix`` it walks the server's keys."""
        removed = 0
        with self._server.asked("cannot take announcements back", READ_S) as server:
            tenants = set(self._tenants(server, prefix))
            if not tenant_of(prefix):
                tenants |= self._unlisted(server)
            for tenant in sorted(tenants):
                index = self._index(tenant)
                keys = self._names(server, index, prefix)
                for start in range(0, len(keys), READ_AT_ONCE):
                    part = keys[start : start + READ_AT_ONCE]
                    with server.pipeline(transaction=True) as together:
                        together.unlink(*(f"{key}:{self._word}" for key in part))
                        together.zrem(index, *part)
                        removed += together.execute()[0]
                self._unregister(server, tenant, index)
        return removed

    def _tenants(self, server: redis.Redis, prefix: str) -> list[str]:
        """The tenant of ``prefix``, none for a prefix of another form, or all listed."""
        if tenant_of(prefix) or prefix[: len(KEY_PREFIX)] != KEY_PREFIX[: len(prefix)]:
            return [tenant_of(prefix)]
        server.zremrangebyscore(self._list, "-inf", self._now_ms(server))
        return [_text(member) for member in server.zrange(self._list, 0, MAX_TENANTS - 1)]

    def _names(self, server: redis.Redis, index: str, prefix: str) -> list[str]:
        """The announcements in a tenant's index.

        In a cluster names with a brace are skipped: their slot differs, and would fail the whole request.
        """
        found = [_text(member) for member in server.zrange(index, 0, MAX_ANNOUNCEMENTS - 1)]
        return [key for key in found if key.startswith(prefix) and not (self._in_cluster and "{" in key)]

    def _read(self, server: redis.Redis, keys: Sequence[str]) -> dict[str, bytes]:
        documents: dict[str, bytes] = {}
        for start in range(0, len(keys), READ_AT_ONCE):
            part = keys[start : start + READ_AT_ONCE]
            values = server.mget([f"{key}:{self._word}" for key in part])
            for key, value in zip(part, values, strict=True):
                if isinstance(value, bytes) and len(value) <= MAX_DOCUMENT_NBYTES:
                    documents[key] = value
        return documents

    def _keep_bounded(self, server: redis.Redis, index: str, key: str) -> None:
        """Undo an announcement beyond the limit. Errors: ``StoreUnavailable``, then."""
        if server.zcard(index) <= MAX_ANNOUNCEMENTS:
            return
        server.zremrangebyscore(index, "-inf", self._now_ms(server))
        if server.zcard(index) <= MAX_ANNOUNCEMENTS:
            return
        self._remove(server, key)
        raise StoreUnavailable(f"{self._name}: {MAX_ANNOUNCEMENTS} announcements are kept already")

    def _remove(self, server: redis.Redis, key: str) -> list[int]:
        """Number of removed documents, and of index entries."""
        with server.pipeline(transaction=True) as together:
            together.unlink(f"{key}:{self._word}")
            together.zrem(self._index(tenant_of(key)), key)
            return together.execute()

    def _register(self, server: redis.Redis, tenant: str, index: str) -> None:
        server.pexpire(index, INDEX_LEASE_MS)
        try:
            server.zadd(self._list, {tenant: self._now_ms(server) + LIST_LEASE_MS})
            server.zremrangebyrank(self._list, 0, -MAX_TENANTS - 1)
            server.pexpire(self._list, LIST_LEASE_MS)
        except redis.exceptions.NoPermissionError:
            if not self._warned_unlisted:
                self._warned_unlisted = True
                logger.warning(
                    "kvpool: %s: this user may not list its tenant (%s): an index finds the workers of tenant %s when "
                    "it is started with --tenant %s",
                    self._name, self._list, tenant, tenant,
                )  # fmt: skip
        self._registered[tenant] = time.monotonic()

    def _now_ms(self, server: redis.Redis) -> int:
        """The server's clock, because hosts' clocks need not agree."""
        ahead_ms, until_s = self._clock
        now_s = time.monotonic()
        if now_s >= until_s:
            seconds, microseconds = server.time()
            now_s = time.monotonic()
            ahead_ms = int(seconds) * 1000 + int(microseconds) // 1000 - int(now_s * 1000)
            self._clock = ahead_ms, now_s + CLOCK_S
        return ahead_ms + int(now_s * 1000)

    def _unregister(self, server: redis.Redis, tenant: str, index: str) -> None:
        """Unlist a tenant without announcements, unless a concurrent call announces one."""
        with (
            contextlib.suppress(redis.exceptions.NoPermissionError, redis.exceptions.WatchError),
            server.pipeline(transaction=True) as together,
        ):
            together.watch(index)  # type: ignore[no-untyped-call]
            if together.zcard(index) == 0:
                together.multi()
                together.zrem(self._list, tenant)
                together.execute()

    def _index(self, tenant: str) -> str:
        # An empty tenant's index must not be the list of tenants.
        return f"kvpool:{tenant}::{self._word}" if tenant else f"kvpool::untenanted:{self._word}"

    def _unlisted(self, server: redis.Redis) -> set[str]:
        """All tenants with an index, listed or not."""
        found = server.scan_iter(match=self._index("*"), count=SCAN_KEYS)
        return {tenant_of(_text(name)) for name in found if name != self._list.encode()}


def _text(member: object) -> str:
    return member.decode("ascii", "replace") if isinstance(member, bytes) else str(member)
