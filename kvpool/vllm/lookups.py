"""The existence check of one request: what it asks, whether it has ended, and what it found.

Nothing here knows the engine's state or a clock. Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool import _native
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.key.key import MIN_HASH_NBYTES
from kvpool.store import Lookup, LookupGroup
from kvpool.vllm.plan import Group

FRESH_S = 10.0  # an answer that is older is asked again before it is offered
LOOKUP_GRACE_S = 0.25  # how long after its own deadline a lookup may still be stopping


class RequestLookup:
    """One lookup under way, or its answer.

    ``present``, once it has ended well: by group a byte for each record, 1 where the pool has it. Behind the first
    record that is missing under full attention, most were not asked for and count as missing.
    ``failure``: why there is no answer, and will be none; "" else.
    """

    def __init__(self, lookup: Lookup, started_s: float, timeout_s: float) -> None:
        self._lookup, self._started_s = lookup, started_s
        self._gives_up_s = started_s + timeout_s + LOOKUP_GRACE_S
        self.present: list[bytes] | None = None
        self.failure = ""

    def ended(self, now_s: float) -> bool:
        """Whether there is an answer, or none to come. Never blocks."""
        if self.present is None and not self.failure:
            if self._lookup.done():
                try:
                    self.present = self._lookup.wait()
                except StoreUnavailable:
                    self.failure = "store_unavailable"
            elif now_s > self._gives_up_s:
                self.failure = "timeout"
                self._lookup.cancel()
        return self.present is not None or bool(self.failure)

    def is_stale(self, now_s: float) -> bool:
        """Whether the pool is to be asked again before anything is offered."""
        return self.present is not None and now_s - self._started_s > FRESH_S

    def cancel(self) -> None:
        """Nobody waits for it any more. Never blocks."""
        self._lookup.cancel()


def groups_to_ask(
    groups: Sequence[Group], hashes: Sequence[Sequence[bytes]], ranks: int
) -> list[LookupGroup]:
    """What is to be asked for a prompt. ``hashes``: by group, those of its records. ``ranks``: of the engine.

    Errors: ``ConfigError``.
    """
    asked = []
    for index, (group, known) in enumerate(zip(groups, hashes, strict=True)):
        try:
            packed = _native.pack_hashes(known)
        except ValueError as error:
            raise ConfigError(f"a request cannot be looked up: {error}") from error
        asked.append(
            LookupGroup(
                group=index,
                hashes=packed,
                hash_nbytes=len(known[0]) if known else MIN_HASH_NBYTES,
                ranks=len(group.key_ranks(ranks)),
                record_tokens=group.record_tokens,
                windowed=group.window is not None,
            )
        )
    return asked
