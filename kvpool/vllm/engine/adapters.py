"""The LoRA adapters of an engine's requests: by what the workers hold of them.

vLLM's block hashes contain only an adapter's name and path. So the pool's hashes also include a digest of the adapter's
tensors in memory (``pool_hash``), which each rank measures when vLLM takes them in (``adapter_loads``). A request whose
adapter no worker has loaded yet waits for that, within the time of a lookup. When other tensors stand for a name and
path than before, the engine's cache may hold blocks of both under one hash: the adapter goes without the pool until the
caches are reset. So each use counts, also by requests that have no pool, or end before their adapter is known.

Threads: the scheduler's.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
from vllm.logger import init_logger

from kvpool.vllm.plan import AdapterWeights, PoolMetadata

logger = init_logger("vllm.kvpool")

# In place of a digest: it holds none; it holds none and cannot read it; it holds one that it cannot digest.
GONE, UNREADABLE, UNDIGESTED = "gone", "unreadable", ""
TAG_NBYTES = 16
MAX_ADAPTERS = 4096
_HASH64_NBYTES = 8  # the end of a hash, by which an index knows a block


@dataclass(eq=False)
class AdapterCheck:
    """What is known of a request's adapter. ``weights``: None: nothing yet. ``cause``: why it goes without the pool."""

    lora_request: Any
    key: tuple[str, str]  # name and path: what the hashes of its blocks cover
    weights: AdapterWeights | None = None
    tag: bytes | None = None  # None: unknown, or no pool
    done: bool = False
    cause: str = "late"

    @property
    def number(self) -> int:
        return int(self.lora_request.lora_int_id)


class Adapters:
    """``ranks``: of the engine, all of which say what they hold. ``settings``: that change what is computed with it."""

    def __init__(self, ranks: int, settings: str = "") -> None:
        self._ranks, self._settings = ranks, settings
        self._said: dict[int, dict[int, str]] = {}  # by vLLM's number of an adapter and rank: its digest
        # By key: the digests of which the engine's cache may have blocks.
        self._of_key: dict[tuple[str, str], tuple[str, ...]] = {}
        # Numbers and keys of requests, the last one used last.
        self._used: dict[tuple[int, tuple[str, str]], None] = {}
        self._changed: dict[tuple[str, str], bool] = {}  # with whether that was said
        self._is_full = False  # there were too many keys, which was said
        self._in_place: set[str] = set()  # names, in the log
        self._live: dict[AdapterCheck, None] = {}
        self._numbers: dict[tuple[str, str], Counter[int]] = {}  # of these, by key
        self._asked: set[int] = set()  # of which the workers are to say what they hold
        self._wanted: list[Any] = []  # of these, what no step has yet
        self._has_forgotten = False  # since the last step

    def check(self, lora_request: Any) -> AdapterCheck:
        """Identify the adapter of a request, now and by later reports of the workers, until ``end``."""
        check = AdapterCheck(lora_request, (str(lora_request.lora_name), str(lora_request.lora_path)))
        self._live[check] = None
        numbers = self._numbers.setdefault(check.key, Counter())
        numbers[check.number] += 1
        used = check.number, check.key
        self._used.pop(used, None)
        self._used[used] = None
        if len(self._used) > MAX_ADAPTERS:
            del self._used[next(iter(self._used))]
        self._look(check)
        if numbers[check.number] == 1 < len(numbers):
            self._look_at(check.key)
        return check

    def want(self, check: AdapterCheck) -> None:
        """The engine is about to compute for it: the workers are asked."""
        if not check.done and self._digests(check.number) is None and check.number not in self._asked:
            self._asked.add(check.number)
            self._wanted.append(check.lora_request)

    def add_to(self, step: PoolMetadata) -> None:
        """Ask the workers for one adapter a step, for they may have to read it; for none that no request awaits."""
        step.tell_adapters, self._has_forgotten = self._has_forgotten, False
        while self._wanted and not step.adapters:
            wanted = self._wanted.pop(0)
            number = int(wanted.lora_int_id)
            if any(check.number == number and not check.done for check in self._live):
                step.adapters.append(wanted)
            else:
                self._asked.discard(number)

    def end(self, check: AdapterCheck) -> None:
        """Its request is gone."""
        if check not in self._live:
            return
        del self._live[check]
        numbers = self._numbers[check.key]
        numbers[check.number] -= 1
        if not numbers[check.number]:
            del numbers[check.number]
            if numbers:
                self._look_at(check.key)
            else:
                del self._numbers[check.key]

    def learn(self, said: Mapping[tuple[int, int], str]) -> None:
        """What ranks hold, by rank and number, or what stands in place of that."""
        for (rank, number), digest in said.items():
            self._asked.discard(number)
            if digest == GONE:
                self._said.pop(number, None)
                continue
            if number not in self._said and len(self._said) >= MAX_ADAPTERS:
                self._said.pop(next(iter(self._said)))
            self._said.setdefault(number, {})[rank] = digest
        if not (numbers := {number for _, number in said}):
            return
        for used in self._used:
            if used[0] in numbers:
                self._compare(*used)
        keys = {key for key, of_key in self._numbers.items() if not numbers.isdisjoint(of_key)}
        for check in self._live:
            if check.key in keys:
                self._look(check)

    def has_changed(self, key: tuple[str, str]) -> bool:
        """Whether nothing of it is to be stored or loaded."""
        return key in self._changed

    def _change(self, key: tuple[str, str]) -> None:
        """The engine's cache may hold blocks of several weights under it."""
        if key not in self._changed:
            self._changed[key] = False
            self._look_at(key)

    def _look_at(self, key: tuple[str, str]) -> None:
        for check in self._live:
            if check.key == key:
                self._look(check)

    def say_in_place(self, lora_request: Any) -> None:
        """A request says ``load_inplace``. Logged once for each adapter."""
        name = str(lora_request.lora_name)
        if name not in self._in_place and len(self._in_place) < MAX_ADAPTERS:
            self._in_place.add(name)
            logger.warning(
                "kvpool: adapter %s goes without the pool in requests that say load_inplace, as before vLLM 0.33 all "
                "do after such a load: unload it, and load it again",
                name,
            )

    def reset(self) -> None:
        """The engine's cache holds no blocks any more. The workers are to say anew what they hold."""
        self._has_forgotten = True
        self._of_key.clear()
        self._used = dict.fromkeys((check.number, check.key) for check in self._live)
        self._changed.clear()
        self._is_full = False
        self._said.clear()
        self._asked.clear()
        self._wanted.clear()
        for check in self._live:
            check.weights = check.tag = None
            check.done, check.cause = False, "late"

    def _digests(self, number: int) -> tuple[str, ...] | None:
        """By rank; None: not all have said what they hold."""
        said = self._said.get(number, {})
        return tuple(said[rank] for rank in range(self._ranks)) if len(said) == self._ranks else None

    def _settled(self, number: int) -> tuple[str, ...] | None:
        """As ``_digests``; None also while a rank may still read another one in the step that uses the number."""
        digests = self._digests(number)
        return None if digests is None or UNREADABLE in digests else digests

    def _compare(self, number: int, key: tuple[str, str]) -> None:
        """Note what a number stands for where it is called by a key."""
        digests = self._settled(number)
        if digests is None:
            return
        if len(self._of_key) >= MAX_ADAPTERS and key not in self._of_key:
            return
        if self._of_key.setdefault(key, digests) != digests:
            self._change(key)

    def _look(self, check: AdapterCheck) -> None:
        self._compare(check.number, check.key)
        if check.key in self._changed:
            check.weights = check.tag = None
            check.cause, check.done = "changed", True
            if not self._changed[check.key]:
                self._changed[check.key] = True
                logger.warning(
                    "kvpool: adapter %s goes without the pool until the caches are reset (reset_prefix_cache with "
                    "reset_connector=True), for the engine's cache may hold blocks of other weights under its name and "
                    "its path, %s: give changed weights another path and number",
                    *check.key,
                )
            return
        if any(
            self._settled(number) is None for number in self._numbers[check.key] if number != check.number
        ):
            check.weights = check.tag = None  # what computes by that number now may be found under its hashes
            check.done, check.cause = False, "late"
            return
        if (digests := self._digests(check.number)) is None:
            return
        check.done = True
        if UNREADABLE in digests or UNDIGESTED in digests:
            check.cause = "unreadable"
            return
        if check.key not in self._of_key:
            check.cause = "too_many"
            if not self._is_full:
                self._is_full = True
                logger.warning(
                    "kvpool: %d adapters have been used since the caches were reset: later ones go without the pool "
                    "until they are reset again (reset_prefix_cache with reset_connector=True)",
                    MAX_ADAPTERS,
                )
            return
        check.weights = AdapterWeights(check.number, *check.key, digests)
        # Ranks of one stage hold the same before vLLM cuts it.
        names = digests[:1] if len({*digests}) == 1 else digests
        spelled = json.dumps([names, self._settings])
        check.tag = hashlib.sha256(spelled.encode()).digest()[:TAG_NBYTES]


def pool_hash(block_hash: bytes, tag: bytes) -> bytes:
    """The hash in the key of an adapter's block; an index knows its last 8 bytes, which stay the engine's."""
    width = len(block_hash)
    return (int.from_bytes(block_hash, "big") ^ _mask(tag, width)).to_bytes(width, "big")


def pool_hashes(block_hashes: bytes, hash_nbytes: int, tag: bytes) -> bytes:
    """``pool_hash`` of each of the packed ``block_hashes``; a millisecond per 60,000."""
    mask = numpy.frombuffer(_mask(tag, hash_nbytes).to_bytes(hash_nbytes, "big"), numpy.uint8)
    return (numpy.frombuffer(block_hashes, numpy.uint8).reshape(-1, hash_nbytes) ^ mask).tobytes()


@functools.lru_cache(maxsize=MAX_ADAPTERS)
def _mask(tag: bytes, width: int) -> int:
    """The mask for the replaced bytes, as random as the hash itself."""
    spread = hashlib.sha256(tag).digest() * 2
    return int.from_bytes(spread[: width - _HASH64_NBYTES] + bytes(_HASH64_NBYTES), "big")
