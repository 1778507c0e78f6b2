"""``Findings``: what follows from findings of audits: who is put away, and whether this engine doubts itself.

Two findings that name a writer put it away for a while: what it wrote counts as missing, and is deleted. Three findings
of which no two name the same writer, or two of this engine's own records of prompts that begin differently, are rather
of this engine: what it computed on one wrong prefix of another, before that was found, is wrong, too. All of this holds
unless most of what was compared since was right: of many blocks one is far by chance, whoever wrote a common prefix is
named with all who wrote behind it, and one engine that is wrong has another name after each restart.

A client that may write to the pool may give any writer's name, and so put others away. It may write wrong records and
delete right ones anyway.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from itertools import combinations

from kvpool.key.key import Namespace
from kvpool.store.header import NOBODY
from kvpool.text import listed
from kvpool.vllm.audit.floor import Judged

PUT_AWAY_S = 600.0
REMEMBERED_S = 24 * 3600.0
MAX_REMEMBERED = 32  # writers with findings
TO_PUT_AWAY = 2  # findings
TO_DOUBT = 3  # findings of others, without a common writer
TO_DOUBT_OWN = 2  # findings of its own records, of prompts that begin differently
LATELY, LATELY_OWN = 8, 16  # audits, of a writer or of all others and of itself, among which these are
MAX_SHOWN = 4


def describe(judged: Judged, writers: Collection[bytes], namespace: Namespace | None) -> str:
    """A finding, for the log."""
    first = judged.far[0]
    where = f" in namespace {namespace.hex[:8]}" if namespace is not None else ""
    names = listed((writer.hex() for writer in writers if writer != NOBODY), MAX_SHOWN)
    what = {
        "record": "the record itself is wrong, for its first layer depends on the tokens alone",
        "prefix": "its first layer is right, so the prefix differs, or the weights",
    }.get(judged.what, "the record or its prefix is wrong")
    return (
        f"a hit{where} is not what this engine computes: {first} is {judged.layers[first]:.2g} away, where honest "
        f"blocks are within {judged.limit:.2g}; with it {len(judged.far)} of {len(judged.layers)} layers, "
        f"{judged.distance:.2g} all together: {what}. The record and its prefix were written by "
        f"{names or 'nobody with a name'}; they are deleted, and nothing of this request is stored. Look for what that "
        "engine has other than this one: version, settings, weights, hardware"
    )


class Findings:
    """``own``: this engine's name in records. ``clock``: in seconds."""

    def __init__(self, own: bytes, clock: Callable[[], float]) -> None:
        self._own, self._clock = own, clock
        # By a writer with a finding, from that on: whether each audit was one.
        self._by_writer: OrderedDict[bytes, deque[tuple[float, bool]]] = OrderedDict()
        self._lately: deque[tuple[float, frozenset[bytes]]] = deque(
            maxlen=LATELY
        )  # nobody: they were the same
        self._lately_own: deque[tuple[float, frozenset[bytes]]] = deque(
            maxlen=LATELY_OWN
        )  # how prompts begin
        self._put_away: dict[bytes, float] = {}  # until when
        self.doubts = ""  # why this engine should go without the pool; empty: it should not

    def put_away(self) -> frozenset[bytes]:
        """Writers whose records count as missing now."""
        now_s = self._clock()
        self._put_away = {writer: until_s for writer, until_s in self._put_away.items() if until_s > now_s}
        return frozenset(self._put_away)

    def agree(self, writers: frozenset[bytes]) -> None:
        """Records of these were what this engine computes."""
        now_s = self._clock()
        if named := writers - {NOBODY}:
            self._of(named).append((now_s, frozenset()))
        for writer in named & self._by_writer.keys():
            self._by_writer[writer].append((now_s, False))

    def add(self, writers: frozenset[bytes], begin: bytes) -> str:
        """A finding of records of these, of a prompt whose first block has the hash ``begin``. Returns ``doubts``."""
        now_s = self._clock()
        if named := writers - {NOBODY}:
            self._of(named).append((now_s, frozenset({begin}) if named == {self._own} else named))
        for writer in named - {self._own}:
            audits = self._by_writer.pop(writer, None) or deque(maxlen=LATELY)
            self._by_writer[writer] = audits
            audits.append((now_s, True))
            if sum(found and now_s - at_s < REMEMBERED_S for at_s, found in audits) >= TO_PUT_AWAY:
                self._put_away[writer] = now_s + PUT_AWAY_S
        while len(self._by_writer) > MAX_REMEMBERED:
            self._by_writer.popitem(last=False)
        self.doubts = self.doubts or self._why_doubt(now_s)
        return self.doubts

    def _of(self, named: frozenset[bytes]) -> deque[tuple[float, frozenset[bytes]]]:
        return self._lately_own if named == {self._own} else self._lately

    def _why_doubt(self, now_s: float) -> str:
        if len(set(self._since(now_s, self._lately_own))) >= TO_DOUBT_OWN:
            return "it computes other than what it stored itself"
        if any(
            all(one.isdisjoint(other) for one, other in combinations(some, 2))
            for some in combinations(self._since(now_s, self._lately), TO_DOUBT)
        ):
            return f"it computes other than {TO_DOUBT} writers that have nothing to do with each other"
        return ""

    @staticmethod
    def _since(now_s: float, found: Collection[tuple[float, frozenset[bytes]]]) -> list[frozenset[bytes]]:
        return [named for at_s, named in found if named and now_s - at_s < REMEMBERED_S]

    def forget(self) -> None:
        """This engine is not what it was."""
        self.doubts = ""
        self._by_writer.clear()
        self._lately.clear()
        self._lately_own.clear()
        self._put_away.clear()
