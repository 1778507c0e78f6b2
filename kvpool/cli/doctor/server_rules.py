"""What the settings of a Valkey or Redis should be for a pool, and what goes wrong otherwise.

``RULES`` and ``deploy/valkey.conf`` say the same; a test starts real servers with the file, and with each setting wrong
in turn. docs/decisions/0022-always-verify-certificates.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvpool.cli.doctor.finding import Level

MIB = 1 << 20
# A connection that puts a value holds up to twice its size on the server while the value arrives: 8 MiB for 4 MiB.
LEAST_CLIENTS_NBYTES = 32 * MIB
# A reply that is larger than the hard limit ends its connection, however fast the reader is.
LEAST_REPLY_NBYTES = 16 * MIB
MOST_LISTPACK_NBYTES = 4096

Info = Mapping[str, Any]
"""What the server answers to INFO."""


class Rule(NamedTuple):
    """``wanted``: the value in deploy/valkey.conf.

    ``judge``: given a value as CONFIG GET spells it (sizes in bytes, lists in one string), how bad it is and what goes
    wrong; None: nothing. ``live``: whether CONFIG SET may change it on a running server.
    """

    name: str
    wanted: str
    judge: Callable[[str, Info], tuple[Level, str] | None]
    live: bool = True


def _maxmemory(value: str, info: Info) -> tuple[Level, str] | None:
    if value == "0":
        return "fail", "maxmemory is 0: it grows until the host runs out of memory"
    host_nbytes = int(info.get("total_system_memory", 0))
    if 0 < host_nbytes < int(value):
        return "fail", "maxmemory is more than the memory of its host: it is killed before it is full"
    return None


def _policy(value: str, info: Info) -> tuple[Level, str] | None:
    if value == "noeviction":
        return "fail", "maxmemory-policy is noeviction: once it is full, nothing new can be kept"
    if value in ("allkeys-random", "volatile-random", "volatile-ttl"):
        return "warn", f"maxmemory-policy is {value}: blocks in use are evicted as soon as others"
    return None


def _save(value: str, info: Info) -> tuple[Level, str] | None:
    if not value:
        return None
    return "warn", (
        "save is on: a cache is written to disk for nothing, the fork for it takes memory, and when the disk "
        "is full the server refuses to keep anything"
    )


def _appendonly(value: str, info: Info) -> tuple[Level, str] | None:
    if value == "no":
        return None
    return "warn", "appendonly is on: every block is written to disk as well, for nothing"


def _output_limit(value: str, info: Info) -> tuple[Level, str] | None:
    words = value.split()
    if "normal" not in words:
        return None
    hard, soft = (int(word) for word in words[words.index("normal") + 1 :][:2])
    if hard == 0 and soft == 0:
        return "warn", (
            "client-output-buffer-limit has none for normal clients: readers that stall fill its memory with "
            "replies, and blocks are evicted for them"
        )
    if 0 < hard < LEAST_REPLY_NBYTES:
        return "fail", (
            f"client-output-buffer-limit ends connections at {hard / MIB:.3g} MiB of replies: larger blocks "
            "can never be read"
        )
    return None


def _clients(value: str, info: Info) -> tuple[Level, str] | None:
    most_nbytes = int(info["maxmemory"])
    if value == "0":
        return "warn", "maxmemory-clients is 0: what clients have in flight can push out the data"
    if value.endswith("%") and most_nbytes == 0:  # then it is no limit, and maxmemory is what is wrong
        return None
    allowed = int(value[:-1]) * most_nbytes // 100 if value.endswith("%") else int(value)
    if allowed < LEAST_CLIENTS_NBYTES:
        return "fail", (
            f"maxmemory-clients allows {allowed / MIB:.3g} MiB for all clients together: it ends connections on "
            "which large blocks arrive, each of which takes twice its size"
        )
    return None


def _flush(value: str, info: Info) -> tuple[Level, str] | None:
    if value == "yes":
        return None
    return "warn", (
        "lazyfree-lazy-user-flush is no: a FLUSHALL blocks all clients for a tenth of a second for each GiB"
    )


def _listpack(value: str, info: Info) -> tuple[Level, str] | None:
    if int(value) <= MOST_LISTPACK_NBYTES:
        return None
    return "warn", (
        f"hash-max-listpack-value is {value}: blocks up to this size take 1.25 times their memory"
    )


def _io_threads(value: str, info: Info) -> tuple[Level, str] | None:
    if int(value) <= 1:
        return None
    return "warn", (
        f"io-threads is {value}: threads were not seen to move large blocks faster, and slow everything down where "
        "they have no cores of their own"
    )


def _timeout(value: str, info: Info) -> tuple[Level, str] | None:
    if value == "0":
        return None
    return "warn", (
        f"timeout is {value}: connections that are idle so many seconds are ended, and the next batch of their "
        "worker begins with dialling, or fails when it is sent in that moment"
    )


def _keepalive(value: str, info: Info) -> tuple[Level, str] | None:
    if value != "0":
        return None
    return (
        "warn",
        "tcp-keepalive is 0: connections of hosts that vanished stay, with what they hold, for ever",
    )


RULES = (
    Rule("maxmemory", "1gb", _maxmemory),
    Rule("maxmemory-policy", "allkeys-lru", _policy),
    Rule("save", '""', _save),
    Rule("appendonly", "no", _appendonly),
    Rule("client-output-buffer-limit", "normal 256mb 64mb 10", _output_limit),
    Rule("maxmemory-clients", "20%", _clients),
    Rule("lazyfree-lazy-user-flush", "yes", _flush),
    Rule("hash-max-listpack-value", "64", _listpack),
    Rule("io-threads", "1", _io_threads, live=False),
    Rule("timeout", "0", _timeout),
    Rule("tcp-keepalive", "60", _keepalive),
)
