"""The document of an engine's traffic: what it was asked for, a sample of the blocks, and the news of its audits.

It is read where numpy may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import msgpack

from kvpool.discovery.audit_news import AuditNews, pack_news, unpack_news

WINDOWS: Mapping[str, float] = {"15m": 900.0, "1h": 3600.0, "24h": 86400.0}
MAX_DOCUMENT_NBYTES = 56 << 10
MAX_ENGINES = 1024  # of a tenant, whose documents are read
MAX_TOKENS = 1e15
VERSION = 2


@dataclass
class Seen:
    """Traffic of a time span: ``block_tokens`` in whole blocks, ``spared_tokens`` not computed."""

    blocks: int = 0
    block_tokens: int = 0
    prompt_tokens: int = 0
    spared_tokens: int = 0

    def include(self, other: Seen) -> None:
        self.blocks += other.blocks
        self.block_tokens += other.block_tokens
        self.prompt_tokens += other.prompt_tokens
        self.spared_tokens += other.spared_tokens

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens that were not computed; 0 without requests."""
        return self.spared_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class TrafficDocument(NamedTuple):
    """``sample``: for ``unpack_sample``; None: no request has a sampled block. ``audits``: None: none, or nonsense."""

    windows: dict[str, Seen]
    sample: Any
    audits: AuditNews | None = None


def pack_traffic(
    windows: Mapping[str, Seen], sample: Mapping[str, Any] | None = None, audits: AuditNews | None = None
) -> bytes:
    """``sample``: of ``SampleWindow``."""
    table = {
        name: [seen.blocks, seen.block_tokens, seen.prompt_tokens, seen.spared_tokens]
        for name, seen in windows.items()
    }
    parts = {"version": VERSION, "windows": table, "sample": sample}
    document: bytes = msgpack.packb(parts if audits is None else parts | {"audits": pack_news(audits)})
    return document


def unpack_traffic(document: bytes) -> TrafficDocument | None:
    """The inverse of ``pack_traffic``; None when this version cannot read it."""
    if len(document) > MAX_DOCUMENT_NBYTES:
        return None
    try:
        record: Any = msgpack.unpackb(document, max_map_len=16, max_array_len=16, max_ext_len=0)
        if record["version"] != VERSION:
            return None
        windows = {name: _seen(*record["windows"][name]) for name in WINDOWS}
        return TrafficDocument(windows, record["sample"], unpack_news(record.get("audits")))
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        return None


def audits_of(documents: Mapping[str, bytes]) -> list[AuditNews]:
    """Of engines' documents, those with news."""
    found = map(unpack_traffic, islice(documents.values(), MAX_ENGINES))
    return [one.audits for one in found if one is not None and one.audits is not None]


def _seen(*counts: Any) -> Seen:
    if len(counts) != 4 or not all(type(count) is int and 0 <= count <= MAX_TOKENS for count in counts):
        raise ValueError("no counts")
    return Seen(*counts)
