"""What a live Redis or Valkey server's own settings mean for a pool, and what to change.

Read with INFO and CONFIG GET, judged by ``RULES``; managed servers forbid the second one, and then INFO has to do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvpool.cli.doctor.finding import Finding, Level, fail, ok, warn
from kvpool.cli.doctor.server_rules import RULES, Info, Rule
from kvpool.errors import KVPoolError
from kvpool.store.server.connection import connect
from kvpool.store.server.notices import ADVICE, refusal
from kvpool.store.server.rights import COSTS, refused_commands
from kvpool.store.server.server import server_name
from kvpool.store.server.topology import LAST_SLOT, Primaries, Primary
from kvpool.store.url import StoreURL

if TYPE_CHECKING:
    import redis

TIMEOUT_S = 2.0
ABOUT = "server"


def server_findings(url: StoreURL) -> list[Finding]:
    """Look at each server of ``url``. Blocking, for a few requests of 2 seconds each at most. Never raises."""
    primaries = Primaries(url, server_name(url))
    try:
        servers = primaries.urls()
        findings = list(_shards(primaries.find())) if url.scheme == "valkey+cluster" else []
    except KVPoolError as error:
        return [fail(ABOUT, str(error), "see that its nodes or sentinels run and can be reached")]
    for server in servers:
        about = f"{ABOUT} {server.host}:{server.port}" if url.nodes else ABOUT
        findings += [finding._replace(about=about) for finding in _server_findings(server, url)]
    return findings


def _server_findings(url: StoreURL, pool: StoreURL) -> list[Finding]:
    """What there is to say of one server of ``pool``."""
    import redis

    try:
        with connect(url, timeout_s=TIMEOUT_S, role="doctor") as server:
            found = list(_findings(server, in_cluster=pool.scheme == "valkey+cluster"))
        return found + list(_rights(url)) + list(_notices(url))
    except (redis.ConnectionError, redis.TimeoutError) as error:
        return [fail(ABOUT, f"it does not answer: {error}", "start it, or see that this host can reach it")]
    except redis.RedisError as error:
        return [
            warn(
                ABOUT, f"its settings cannot be read: {error}", "allow INFO to this user, or ask its operator"
            )
        ]


def _shards(primaries: Sequence[Primary]) -> Iterator[Finding]:
    """Whether each key of a cluster has a server."""
    slots = sum(last - first + 1 for primary in primaries for first, last in primary.slots)
    if slots == LAST_SLOT + 1:
        yield ok(ABOUT, f"{len(primaries)} shards serve all {slots:,} slots of the cluster")
    else:
        yield fail(
            ABOUT,
            f"{len(primaries)} shards serve {slots:,} of {LAST_SLOT + 1:,} slots: keys of the others are misses",
            "start the nodes that are missing, or assign their slots (CLUSTER NODES shows who has which)",
        )


def _rights(url: StoreURL) -> Iterator[Finding]:
    for refused in refused_commands(url):
        puts_or_loads = COSTS[refused.command].startswith("nothing")
        yield (fail if puts_or_loads else warn)(
            ABOUT, refused.says, f"allow +{refused.command.lower()} to this user"
        )


def _notices(url: StoreURL) -> Iterator[Finding]:
    if why := refusal(url):
        yield warn(
            ABOUT,
            f"it does not tell this user which keys change ({why}): an index with this user sees evictions later, "
            "when it looks through the pool",
            f"for the user of an index, {ADVICE}",
        )


def _findings(server: redis.Redis, *, in_cluster: bool) -> Iterator[Finding]:
    info = _info(server)
    if info is None:
        yield warn(
            ABOUT, "INFO is not allowed to this user, so nothing is known of its memory", "allow +info"
        )
        return
    yield ok(ABOUT, _name(info))
    if info.get("role") == "slave":
        yield fail(ABOUT, "it is a replica, which takes no writes", "name its primary in the pool's URL")
    if info.get("cluster_enabled") == 1 and not in_cluster:
        yield fail(
            ABOUT,
            "it is a node of a cluster: keys of other nodes cannot be reached",
            "write valkey+cluster:// in the pool's URL",
        )
    asked = _settings(server)
    settings = _told(info) | (asked or {})
    for rule in RULES:
        if rule.name in settings and (wrong := _judged(rule, settings[rule.name], info)) is not None:
            level, says = wrong
            yield Finding(level, ABOUT, says, _change(rule, live=asked is not None))
    if ended := int(info.get("evicted_clients", 0)):
        yield warn(
            ABOUT,
            f"it ended {ended:,} connections because all clients together held more than maxmemory-clients; "
            "their batches failed",
            "raise it: each connection that puts needs twice the size of a block (CONFIG RESETSTAT starts the "
            "count anew)",
        )
    if asked is None:
        unknown = "; ".join(f"{rule.name} {rule.wanted}" for rule in RULES if rule.name not in settings)
        yield warn(
            ABOUT,
            "CONFIG is not allowed, as on managed servers: most settings cannot be judged",
            f"check in its console, under the names that it has for them: {unknown}; or allow +config|get",
        )


def _judged(rule: Rule, value: str, info: Info) -> tuple[Level, str] | None:
    try:
        return rule.judge(value, info)
    except (KeyError, ValueError):  # a server that spells it in another way
        return None


def _change(rule: Rule, *, live: bool) -> str:
    if not rule.live:
        return f"write {rule.name} {rule.wanted} into its configuration, and start it anew"
    value = f'"{rule.wanted}"' if " " in rule.wanted else rule.wanted
    size = ", or what its host or container can spare" if rule.name == "maxmemory" else ""
    if not live:
        return f"where the server is configured, set {rule.name} {rule.wanted}{size}"
    return f"CONFIG SET {rule.name} {value}{size}"


def _info(server: redis.Redis) -> Info | None:
    import redis

    with contextlib.suppress(redis.exceptions.NoPermissionError):
        info: Info = server.info()
        return info
    return None


def _settings(server: redis.Redis) -> dict[str, str] | None:
    """By name; a name that the server does not know is left out. None: it does not let us ask."""
    import redis

    try:
        # One at a time: servers before Redis 7 take one name.
        found: dict[str, str] = {}
        for rule in RULES:
            found.update({_text(key): _text(value) for key, value in server.config_get(rule.name).items()})
        return found
    except redis.exceptions.ResponseError:  # not allowed, or renamed away
        return None


def _told(info: Info) -> dict[str, str]:
    """What INFO has of the settings, as CONFIG GET would say it."""
    told = {"maxmemory": info.get("maxmemory"), "maxmemory-policy": info.get("maxmemory_policy")}
    if "aof_enabled" in info:
        told["appendonly"] = "yes" if info["aof_enabled"] else "no"
    return {name: str(value) for name, value in told.items() if value is not None}


def _name(info: Info) -> str:
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}, {_size(info)}"
    return f"Redis {info.get('redis_version', 'of unknown version')}, {_size(info)}"


def _size(info: Info) -> str:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    share = f" of {most / 2**30:,.2f}" if most else ""
    return f"{used / 2**30:,.2f}{share} GiB used, {int(info.get('evicted_keys', 0)):,} keys evicted so far"


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
