"""What a live Redis or Valkey server's own settings mean for a pool, and what to change.

Read with INFO and CONFIG GET; managed servers forbid the second one, and then INFO has to do. The reasons are
measured ones: see docs/stores.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvpool.cli.finding import Finding, note, ok, problem
from kvpool.stores.server_announcements import connect
from kvpool.stores.url import StoreURL

if TYPE_CHECKING:
    import redis

TIMEOUT_S = 2.0
ABOUT = "server"
SETTINGS = (
    "client-output-buffer-limit",
    "maxmemory-clients",
    "notify-keyspace-events",
    "appendonly",
    "save",
    "lazyfree-lazy-eviction",
)
_EVICTING = "allkeys-lru"


def server_findings(url: StoreURL) -> list[Finding]:
    """Look at the server of ``url``. Blocking, for a few requests of 2 seconds each at most. Never raises."""
    import redis

    try:
        with connect(url, timeout_s=TIMEOUT_S) as server:
            return list(_findings(server))
    except redis.RedisError as error:
        return [
            note(
                ABOUT, f"its settings cannot be read: {error}", "allow INFO to this user, or ask its operator"
            )
        ]


def _findings(server: redis.Redis) -> Iterator[Finding]:
    info = _info(server)
    if info is None:
        yield note(
            ABOUT, "INFO is not allowed to this user, so nothing is known of its memory", "allow +info"
        )
        return
    yield ok(ABOUT, _name(info))
    if info.get("role") == "slave":
        yield problem(ABOUT, "it is a replica, which takes no writes", "name its primary in the pool's URL")
    if info.get("cluster_enabled") == 1:
        yield problem(
            ABOUT,
            "it is a node of a cluster: keys of other nodes cannot be reached",
            "use a server of its own",
        )
    settings = _settings(server)
    yield from _memory(info, settings)
    if settings is None:
        yield note(
            ABOUT,
            "CONFIG is not allowed, as on managed servers: limits for slow clients, notices and persistence "
            "cannot be judged",
            "compare them with docs/stores.md where they are set, or allow +config|get",
        )
    else:
        yield from _judged(settings)


def _info(server: redis.Redis) -> dict[str, Any] | None:
    import redis

    with contextlib.suppress(redis.exceptions.NoPermissionError):
        info: dict[str, Any] = server.info()
        return info
    return None


def _settings(server: redis.Redis) -> dict[str, str] | None:
    """By name; a name that the server does not know is left out. None: it does not let us ask."""
    import redis

    try:
        # One at a time: servers before Redis 7 take one name.
        found: dict[str, str] = {}
        for name in SETTINGS:
            found.update({_text(key): _text(value) for key, value in server.config_get(name).items()})
        return found
    except redis.exceptions.ResponseError:  # not allowed, or renamed away
        return None


def _name(info: dict[str, Any]) -> str:
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}, {_size(info)}"
    return f"Redis {info.get('redis_version', 'of unknown version')}, {_size(info)}"


def _size(info: dict[str, Any]) -> str:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    share = f" of {most / 2**30:,.2f}" if most else ""
    return f"{used / 2**30:,.2f}{share} GiB used, {int(info.get('evicted_keys', 0)):,} keys evicted so far"


def _memory(info: dict[str, Any], settings: dict[str, str] | None) -> Iterator[Finding]:
    change = "CONFIG SET" if settings is not None else "where the server is configured, set"
    policy = str(info.get("maxmemory_policy", ""))
    if not int(info.get("maxmemory", 0)):
        yield problem(
            ABOUT,
            "maxmemory is 0: it grows until the host runs out of memory",
            f"{change} maxmemory 8gb (or what the host can spare)",
        )
    elif policy == "noeviction":
        yield problem(
            ABOUT,
            "maxmemory-policy is noeviction: once it is full, nothing new can be kept",
            f"{change} maxmemory-policy {_EVICTING}",
        )
    elif policy in ("allkeys-random", "volatile-random", "volatile-ttl"):
        yield note(
            ABOUT,
            f"maxmemory-policy is {policy}: blocks in use are evicted as soon as others",
            f"{change} maxmemory-policy {_EVICTING}",
        )
    elif policy:
        yield ok(ABOUT, f"maxmemory-policy is {policy}")


def _judged(settings: dict[str, str]) -> Iterator[Finding]:
    limit = settings.get("client-output-buffer-limit", "")
    if "normal 0 0 0" in limit:
        yield note(
            ABOUT,
            "client-output-buffer-limit has none for normal clients: stalled readers can fill its memory",
            'CONFIG SET client-output-buffer-limit "normal 256mb 128mb 30"',
        )
    if settings.get("maxmemory-clients") == "0":
        yield note(
            ABOUT,
            "maxmemory-clients is 0: what clients have in flight can push out the data",
            "CONFIG SET maxmemory-clients 25%",
        )
    if settings.get("appendonly") == "yes" or settings.get("save"):
        yield note(
            ABOUT,
            "appendonly or save is on: a cache is written to disk for nothing, and a fork of it takes memory",
            'CONFIG SET save "" and CONFIG SET appendonly no',
        )
    if settings.get("lazyfree-lazy-eviction") == "no":
        yield note(
            ABOUT,
            "lazyfree-lazy-eviction is no: evictions hold up every other client",
            "CONFIG SET lazyfree-lazy-eviction yes",
        )
    events = settings.get("notify-keyspace-events", "")
    if not ("E" in events and ("e" in events or "A" in events)):
        yield note(
            ABOUT,
            "notify-keyspace-events does not tell of evictions: an index learns of them by misses only",
            "CONFIG SET notify-keyspace-events Ee",
        )


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
