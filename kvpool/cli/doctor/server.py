"""Servers for ``kvpool doctor``: rights, INFO and CONFIG GET; and this host's TCP.

Managed servers forbid CONFIG GET; then INFO replaces it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool.cli.doctor import rules
from kvpool.cli.doctor.rules import Finding, judge
from kvpool.cli.doctor.subjects import Server, Setting, Shards
from kvpool.errors import KVPoolError
from kvpool.store.server.connection import connect
from kvpool.store.server.notices import refusal
from kvpool.store.server.server import refused_commands, server_name
from kvpool.store.server.topology import LAST_SLOT, Primaries
from kvpool.store.url import StoreURL
from kvpool.text import is_ip_address

if TYPE_CHECKING:
    import redis

TIMEOUT_S = 2.0
ABOUT = "server"
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")

Info = Mapping[str, Any]
"""What the server answers to INFO."""


def congestion_control_name(path: Path = CONGESTION_CONTROL) -> str:
    """TCP's congestion control on this host; empty: hidden from this container."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def host_findings(congestion_control: Path = CONGESTION_CONTROL) -> Iterator[Finding]:
    """Examine this host (in a container: the container's own network). Never raises."""
    return judge("host", rules.HOST, congestion_control_name(congestion_control))


def server_findings(url: StoreURL) -> list[Finding]:
    """Examine each server of ``url``. Blocking, for a few requests of 2 seconds each at most. Never raises."""
    found: list[Finding] = []
    try:
        primaries = Primaries(url, server_name(url))
        servers = primaries.urls()
        if url.scheme == "valkey+cluster":
            shards = primaries.find()
            slots = sum(last - first + 1 for shard in shards for first, last in shard.slots)
            cluster = Shards(len(shards), slots, all_slots=LAST_SLOT + 1)
            found += judge(ABOUT, rules.SHARDS, cluster, first=True)
    except KVPoolError as error:
        return [Finding("fail", ABOUT, str(error), "see that its nodes or sentinels run and can be reached")]
    for server in servers:
        about = f"{ABOUT} {server.host}:{server.port}" if url.nodes else ABOUT
        found += _server_findings(server, about, in_cluster=url.scheme == "valkey+cluster")
    return found


def _server_findings(url: StoreURL, about: str, *, in_cluster: bool) -> list[Finding]:
    import redis

    try:
        with connect(url, timeout_s=TIMEOUT_S, role="doctor") as server:
            found = list(_settings_findings(server, about, in_cluster=in_cluster, cores=_cores(url)))
        for refused in refused_commands(url):
            found += judge(about, rules.RIGHT, refused, first=True)
        return [*found, *judge(about, rules.NOTICES, refusal(url))]
    except (redis.ConnectionError, redis.TimeoutError) as error:
        change = "start it, or see that this host can reach it"
        return [Finding("fail", about, f"it does not answer: {error}", change)]
    except redis.RedisError as error:
        change = "allow INFO to this user, or ask its operator"
        return [Finding("warn", about, f"its settings cannot be read: {error}", change)]


def _settings_findings(server: redis.Redis, about: str, *, in_cluster: bool, cores: int) -> Iterator[Finding]:
    info = _info(server)
    if info is None:
        yield rules.NO_INFO._replace(about=about)
        return
    asked = _settings(server)
    settings = _of_info(info) | (asked or {})
    unknown = [f"{name} {wanted}" for name, wanted in rules.WANTED.items() if name not in settings]
    subject = Server(
        name=_name(info),
        info=info,
        in_cluster=in_cluster,
        unknown="" if asked is not None else "; ".join(unknown),
    )
    yield from judge(about, rules.SERVER, subject)
    for name, value in settings.items():
        setting = Setting(value, info, cores)
        with contextlib.suppress(KeyError, ValueError):  # spelled in another way
            for finding in judge(about, rules.SETTINGS[name], setting, first=True):
                change = finding.change or _change(name, live=asked is not None)
                yield finding._replace(change=change)


def _change(name: str, *, live: bool) -> str:
    wanted = rules.WANTED[name]
    size = ", or what its host or container can spare" if name == "maxmemory" else ""
    if not live:
        return f"where the server is configured, set {name} {wanted}{size}"
    value = f'"{wanted}"' if " " in wanted else wanted
    return f"CONFIG SET {name} {value}{size}"


def _cores(url: StoreURL) -> int:
    """Of the server's host, where the URL says that it is this one; else 0: no server tells them."""
    is_loopback = is_ip_address(url.host) and ipaddress.ip_address(url.host).is_loopback
    return os.cpu_count() or 0 if url.path or is_loopback or url.host == "localhost" else 0


def _info(server: redis.Redis) -> Info | None:
    import redis

    with contextlib.suppress(redis.exceptions.NoPermissionError):
        info: Info = server.info()
        return info
    return None


def _settings(server: redis.Redis) -> dict[str, str] | None:
    """By name, without names unknown to the server. None: not allowed."""
    import redis

    try:
        # One at a time: servers before Redis 7 take one name.
        found: dict[str, str] = {}
        for name in rules.SETTINGS:
            found.update({_text(key): _text(value) for key, value in server.config_get(name).items()})
        return found
    except redis.exceptions.ResponseError:  # not allowed, or renamed away
        return None


def _of_info(info: Info) -> dict[str, str]:
    found = {"maxmemory": info.get("maxmemory"), "maxmemory-policy": info.get("maxmemory_policy")}
    if "aof_enabled" in info:
        found["appendonly"] = "yes" if info["aof_enabled"] else "no"
    return {name: str(value) for name, value in found.items() if value is not None}


def _name(info: Info) -> str:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    share = f" of {most / 2**30:,.2f}" if most else ""
    size = f"{used / 2**30:,.2f}{share} GiB used, {int(info.get('evicted_keys', 0)):,} keys evicted so far"
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}, {size}"
    return f"Redis {info.get('redis_version', 'of unknown version')}, {size}"


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
