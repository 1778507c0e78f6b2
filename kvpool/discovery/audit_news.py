"""``AuditNews``: what the audits of one engine found, as it stands beside the engine's traffic in the pool.

Whoever may write to the pool may announce any news and name any writer: a reader checks and bounds all of it, and it
proves nothing. An engine's own is cut to these bounds.
"""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, get_args

from kvpool.discovery.worker import check_text
from kvpool.errors import ConfigError
from kvpool.key.key import FINGERPRINT_NBYTES
from kvpool.store.batch import WRITER_NBYTES

Kind = Literal["record", "prefix", ""]

MAX_FINDINGS = 8  # the last
MAX_WRITERS = 4  # of a finding
MAX_PUT_AWAY = 16
MAX_VERDICTS = 16
MAX_TEXT_NBYTES = 256
MAX_DOUBTS_NBYTES = 512
MAX_COUNT = 1 << 50
MAX_DISTANCE = 1e6
# Audits that compared a block, by the verdict; others of ``metrics.AUDITS`` ended before.
SAME, DIFFERS, NO_FLOOR = "same", "differs", "no_floor"

_VERDICT = re.compile(r"[a-z_]{1,32}")


@dataclass(frozen=True)
class AuditFinding:
    """A block of the pool that is not what the engine computes.

    ``writers``: 32 hex digits each, of those that wrote it and its prefix; none: they are not named. ``kind``:
    "record": it is wrong itself; "prefix": what it follows, or the weights, differ; empty: unknown. ``layer``: the
    first that is too far. ``distance``: of all layers, relative. ``at_s``: seconds since the epoch. ``namespace``: 32
    hex digits; empty: unknown.
    """

    writers: tuple[str, ...]
    kind: Kind
    layer: str
    distance: float
    at_s: float
    namespace: str = ""


@dataclass(frozen=True)
class AuditNews:
    """``writer``: the engine's name in records, 32 hex digits. ``counts``: audits since its start, by verdict.

    ``findings``: the last, the oldest first. ``put_away``: writers whose records it takes for missing now, 32 hex
    digits each. ``doubts``: why it doubts itself and goes on without the pool; empty: it does not. ``host``: where it
    runs.
    """

    writer: str
    counts: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[AuditFinding, ...] = ()
    put_away: tuple[str, ...] = ()
    doubts: str = ""
    host: str = field(default_factory=socket.gethostname)

    @property
    def judged(self) -> int:
        """Audits that compared a block, and knew how far honest ones are."""
        return self.counts.get(SAME, 0) + self.differing

    @property
    def differing(self) -> int:
        return self.counts.get(DIFFERS, 0)

    @property
    def unjudged(self) -> int:
        """Audits that compared a block before it was known how far honest ones are."""
        return self.counts.get(NO_FLOOR, 0)


def pack_news(news: AuditNews) -> dict[str, Any]:
    """A part of a document: maps and lists of at most 16, and 6 KiB in all; of more, the last findings."""
    return {
        "writer": bytes.fromhex(news.writer),
        "counts": dict(islice(news.counts.items(), MAX_VERDICTS)),
        "findings": [
            {
                "writers": _packed(one.writers, MAX_WRITERS),
                "kind": one.kind,
                "layer": _cut(one.layer, MAX_TEXT_NBYTES),
                "distance": min(MAX_DISTANCE, one.distance) if one.distance >= 0 else MAX_DISTANCE,
                "at_s": float(one.at_s),
                "namespace": bytes.fromhex(one.namespace),
            }
            for one in news.findings[-MAX_FINDINGS:]
        ],
        "put_away": _packed(news.put_away, MAX_PUT_AWAY),
        "doubts": _cut(news.doubts, MAX_DOUBTS_NBYTES),
        "host": _cut(news.host, MAX_TEXT_NBYTES),
    }


def unpack_news(part: Any) -> AuditNews | None:
    """The inverse of ``pack_news``, without fields of later versions; None for a part that makes no sense."""
    try:
        return AuditNews(
            writer=_hex(part["writer"], WRITER_NBYTES),
            counts=_counts(part["counts"]),
            findings=tuple(map(_finding, _list(part["findings"], MAX_FINDINGS))),
            put_away=_hexes(part["put_away"], MAX_PUT_AWAY),
            doubts=check_text("doubts", part["doubts"], MAX_DOUBTS_NBYTES),
            host=check_text("host", part["host"], MAX_TEXT_NBYTES),
        )
    except (ConfigError, ValueError, TypeError, KeyError):
        return None


def _finding(part: Any) -> AuditFinding:
    if part["kind"] not in get_args(Kind):
        raise ValueError("no kind")
    return AuditFinding(
        writers=_hexes(part["writers"], MAX_WRITERS),
        kind=part["kind"],
        layer=check_text("layer", part["layer"], MAX_TEXT_NBYTES),
        distance=_number(part["distance"], MAX_DISTANCE),
        at_s=_number(part["at_s"], MAX_COUNT),
        namespace=_hex(part["namespace"], FINGERPRINT_NBYTES) if part["namespace"] != b"" else "",
    )


def _packed(names: Iterable[str], most: int) -> list[bytes]:
    return [bytes.fromhex(name) for name in islice(names, most)]


def _cut(text: str, most_nbytes: int) -> str:
    printable = "".join(one if one.isprintable() else " " for one in text)
    return printable.encode("utf-8", "replace")[:most_nbytes].decode("utf-8", "ignore")


def _hexes(raw: Any, most: int) -> tuple[str, ...]:
    return tuple(_hex(one, WRITER_NBYTES) for one in _list(raw, most))


def _hex(raw: Any, nbytes: int) -> str:
    if type(raw) is not bytes or len(raw) != nbytes:
        raise ValueError("no name")
    return raw.hex()


def _list(raw: Any, most: int) -> list[Any]:
    if type(raw) is not list or len(raw) > most:
        raise ValueError("no list")
    return raw


def _counts(raw: Any) -> dict[str, int]:
    if type(raw) is not dict or len(raw) > MAX_VERDICTS:
        raise ValueError("no counts")
    for verdict, count in raw.items():
        if not isinstance(verdict, str) or _VERDICT.fullmatch(verdict) is None:
            raise ValueError("no verdict")
        if type(count) is not int or not 0 <= count <= MAX_COUNT:
            raise ValueError("no count")
    return raw


def _number(raw: Any, most: float) -> float:
    if type(raw) is not float or not math.isfinite(raw) or not 0 <= raw <= most:
        raise ValueError("no number")
    return raw
