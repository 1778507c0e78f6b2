"""PageKeys: under which keys the pool has the pages of this server.

Pages come in two forms that never meet, each with a namespace of its own: as they lie in host memory (``parts``), and
as one flat tensor each (``flat``). When SGLang flushes its caches, or is given other weights, the namespaces become
this rank's own (``epoch.py``).

Threads: any; ``_lock`` guards ``_namespaces``.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from itertools import chain
from typing import Literal, NamedTuple

from kvpool.key.key import Fact, Namespace
from kvpool.sglang.epoch import Epoch

logger = logging.getLogger(__name__)

_HASH = re.compile(r"(?:[0-9a-f]{2}){8,64}")  # as a key of kvpool has it

Form = Literal["parts", "flat"]


class _Namespaces(NamedTuple):
    """Those of one epoch, by the form of pages."""

    epoch: str
    parts: Namespace
    flat: Namespace


class PageKeys:
    """``rank``: this rank's place in keys. ``weights_never_change``: a flush begins no epoch."""

    def __init__(
        self, tenant: str, facts: Mapping[str, Fact], rank: int, epoch: Epoch, *, weights_never_change: bool
    ) -> None:
        self._tenant, self._facts, self._rank = tenant, dict(facts), rank
        self._epoch, self._weights_never_change = epoch, weights_never_change
        self._lock = threading.Lock()
        self._namespaces = self._of_epoch("")

    def namespace(self, form: Form) -> Namespace:
        """That of the current epoch."""
        epoch = self._epoch.since_update if self._weights_never_change else self._epoch.since_flush
        with self._lock:
            left = self._namespaces.epoch != epoch
            if left:
                self._namespaces = self._of_epoch(epoch)
            found: Namespace = getattr(self._namespaces, form)
        if left:
            logger.warning(
                "kvpool: the caches were flushed, or weights changed: until it restarts, rank %d of this server goes "
                "on in a namespace of its own, %s, and shares with no other server; where its weights never change in "
                "place, set weights_never_change to true",
                self._rank, found.hex[:8],
            )  # fmt: skip
        return found

    def keys(self, form: Form, hashes: list[bytes], width: int) -> list[str]:
        """The keys of all ``width`` buffers of each page: those of one page follow each other."""
        namespace = self.namespace(form)
        return list(
            chain.from_iterable(
                zip(*(namespace.keys(hashes, part, self._rank) for part in range(width)), strict=True)
            )
        )

    def _of_epoch(self, epoch: str) -> _Namespaces:
        facts = self._facts | ({"epoch": epoch} if epoch else {})
        parts, flat = (Namespace(self._tenant, {**facts, "page_form": form}) for form in ("parts", "flat"))
        return _Namespaces(epoch, parts, flat)


def is_hash(key: object) -> bool:
    """Whether it is the hash of a page, as SGLang writes it."""
    return isinstance(key, str) and _HASH.fullmatch(key) is not None
