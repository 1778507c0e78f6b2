"""``python -m benchmarks lengths --scripted-tokens N``: first tokens of the engines of a host, on scripted devices.

Stores, servers and movers are those of workers. An engine's KV cache is main memory, and ``EngineModel`` says how long
it computes. Its tokens have the bytes of DeepSeek-V3's latents. Each engine looks the same prompt up, loads what a pool
has, and stores what it computed: first with a server alone, then with a near pool of each host before the server.

N tokens are measured. What is stated of ``STATED_TOKENS`` has lookups, loads and bytes in proportion to tokens.
"""

from __future__ import annotations

import json
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.agents_model import LINK_NBYTES_S, NEAR_NBYTES_S, EngineModel
from benchmarks.first_token import TAIL_TOKENS
from benchmarks.measure import CACHES
from benchmarks.valkey_shards import ValkeyShards, find_server
from kvpool.errors import KVPoolError
from kvpool.key.key import Namespace
from kvpool.metrics import Counters
from kvpool.store import LookupGroup, open_store
from kvpool.transfer import Block, BlockCopier, KVCacheMover
from tests.support.proxy import proxied

[CACHE] = [cache for cache in CACHES if cache.model == "DeepSeek-V3"]
BLOCK_TOKENS = 64
TOKEN_NBYTES = CACHE.block_nbytes(1)
BLOCK_NBYTES = BLOCK_TOKENS * TOKEN_NBYTES
STATED_TOKENS = 100_000
STAGED_BLOCKS = 64
HASH_NBYTES = 32
TIMEOUT_S = 600.0
POLL_S = 0.002  # as a worker's empty step
MEMORY = Path("/dev/shm")  # noqa: S108
SEED = 17


@dataclass(frozen=True)
class First:
    """An engine's first token. ``how``: computed, cold (beside empty pools), local (its own cache), near, far, pool
    (the server alone). ``lookup_s``, ``load_s``: measured; ``compute_s``: of the model. ``sent_nbytes``,
    ``received_nbytes``: by the server, for its prompt. ``stated_s``, ``stated_gb``: of ``STATED_TOKENS``; bytes both
    ways. ``model_s``: of them, if the bytes moved with the model's speeds, too.
    """

    engine: str
    how: str
    hit_tokens: int
    lookup_s: float
    load_s: float
    compute_s: float
    sent_nbytes: int
    received_nbytes: int
    first_token_s: float
    stated_s: float
    model_s: float
    stated_gb: float
    identical: bool


def run_scripted(
    *, server: Path | None, tokens: int, rounds: int, link_nbytes_s: int | None, as_json: bool
) -> bool:
    """True when all engines got the bytes that the first one computed, and from where they should have come.

    ``link_nbytes_s``: of all engines to the server, each way; None: loopback. Memory: four times the bytes of
    ``tokens``, and twice in ``MEMORY``. Errors: ``KVPoolError``.
    """
    bench, program = _Bench(tokens // BLOCK_TOKENS), find_server(server)
    firsts = [one for _ in range(rounds) for one in _round(bench, program, link_nbytes_s)]
    if as_json:
        about: dict[str, Any] = {
            "tokens": bench.tokens,
            "stated_tokens": STATED_TOKENS,
            "token_nbytes": TOKEN_NBYTES,
        }
        about |= {"link_nbytes_s": link_nbytes_s, "scripted": [asdict(one) for one in firsts]}
        print(json.dumps(about))
    else:
        _show(firsts, bench, link_nbytes_s)
    loads = [one for one in firsts if one.how in ("near", "far", "pool")]
    return all(one.identical for one in firsts) and all(one.hit_tokens == bench.tokens for one in loads)


def _round(bench: _Bench, program: str, link_nbytes_s: int | None) -> list[First]:
    firsts = [bench.first("any", "computed", None)]
    with _pools(program, link_nbytes_s) as (bench.shards, url, _):
        hows = (("first", "cold"), ("second", "pool"), ("third", "pool"))
        firsts += [bench.first(f"host 1, {name}", how, url) for name, how in hows]
    with _pools(program, link_nbytes_s) as (bench.shards, url, folder):
        for host, first in (("host 1", "cold"), ("host 2", "far")):
            near = f"file://{folder}/{host.replace(' ', '-')}?capacity={2 * bench.nbytes + (64 << 20)} {url}"
            hows = (("first", first), ("second", "near"), ("third", "near"))
            firsts += [bench.first(f"{host}, {name}", how, near) for name, how in hows]
    return [*firsts, bench.first("any", "local", None)]


@contextmanager
def _pools(program: str, link_nbytes_s: int | None) -> Iterator[tuple[ValkeyShards, str, Path]]:
    """A server, its URL over the link, and a folder in memory."""
    with ExitStack() as parts:
        where = MEMORY if MEMORY.is_dir() else None
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-", dir=where)))
        shards = parts.enter_context(ValkeyShards(program, folder / "server", shards=1, io_threads=1))
        url = shards.url
        if link_nbytes_s is not None:
            port = int(url.rpartition(":")[2])
            url = f"valkey://127.0.0.1:{parts.enter_context(proxied(port, nbytes_per_s=link_nbytes_s)).port}"
        yield shards, url, folder


class _Used(NamedTuple):
    """What a pool was to an engine."""

    hit_tokens: int
    lookup_s: float = 0.0
    load_s: float = 0.0
    identical: bool = True


class _Bench:
    """Engines, one after the other, with the same prompt. ``shards``: the server that they use."""

    def __init__(self, blocks: int) -> None:
        self.tokens, self.nbytes = blocks * BLOCK_TOKENS, blocks * BLOCK_NBYTES
        self.shards: ValkeyShards | None = None
        self._blocks = blocks
        self._model = EngineModel(block_tokens=BLOCK_TOKENS)
        self._memory = torch.zeros((blocks + 1) * BLOCK_NBYTES, dtype=torch.uint8)  # with vLLM's null block
        [layers] = CACHE.views(self._memory, BLOCK_TOKENS)
        self._layers = layers
        generator = torch.Generator().manual_seed(SEED)
        self._computed = torch.randint(0, 256, (self.nbytes,), dtype=torch.uint8, generator=generator)
        self._namespace = Namespace("bench", {"run": secrets.token_hex(16)})
        self._hashes = [at.to_bytes(HASH_NBYTES, "big") for at in range(blocks)]
        keys = self._namespace.keys(self._hashes, 0, 0)
        self._records = [Block(key, 0, (at + 1,)) for at, key in enumerate(keys)]

    def first(self, engine: str, how: str, url: str | None) -> First:
        """An engine's first token, and then what it stores. ``url``: None: it asks no pool."""
        used, sent_nbytes, received_nbytes = _Used(self.tokens if how == "local" else 0), 0, 0
        if url is not None:
            assert self.shards is not None
            before = self.shards.sent_nbytes(), self.shards.received_nbytes()
            used = self._use(url)
            sent_nbytes = self.shards.sent_nbytes() - before[0]
            received_nbytes = self.shards.received_nbytes() - before[1]
        scale, moved_s = STATED_TOKENS / self.tokens, used.lookup_s + used.load_s
        compute_s = self._compute_s(used.hit_tokens, self.tokens)
        stated_compute_s = self._compute_s(round(used.hit_tokens * scale), STATED_TOKENS)
        loaded_nbytes = used.hit_tokens * TOKEN_NBYTES if url is not None else 0
        far_nbytes = min(sent_nbytes, loaded_nbytes)
        model_s = max(far_nbytes / LINK_NBYTES_S, (loaded_nbytes - far_nbytes) / NEAR_NBYTES_S)
        return First(
            engine, how, used.hit_tokens, used.lookup_s, used.load_s, compute_s, sent_nbytes, received_nbytes,
            first_token_s=moved_s + compute_s,
            stated_s=moved_s * scale + stated_compute_s,
            model_s=model_s * scale + stated_compute_s,
            stated_gb=(sent_nbytes + received_nbytes) * scale / 1e9,
            identical=used.identical,
        )  # fmt: skip

    def _compute_s(self, cached: int, tokens: int) -> float:
        return self._model.compute_s(cached, tokens + TAIL_TOKENS - cached)

    def _use(self, url: str) -> _Used:
        """Look the prompt up, load what is there, store the rest, and wait until near and far have it."""
        self._memory.zero_()
        with open_store(url) as store:
            mover = KVCacheMover(
                store, [BlockCopier(self._layers)], staging_nbytes=STAGED_BLOCKS * BLOCK_NBYTES,
                max_store_nbytes_per_s=0, counters=Counters(),
            )  # fmt: skip
            try:
                began_s = time.perf_counter()
                group = LookupGroup(b"".join(self._hashes), HASH_NBYTES, 0, 1, BLOCK_TOKENS)
                [found] = store.submit_lookup(self._namespace, [group], timeout_s=TIMEOUT_S).records()
                lookup_s = time.perf_counter() - began_s
                hit = (found + b"\0").index(b"\0")
                load_s = self._load(mover, hit) if hit else 0.0
                nbytes = hit * BLOCK_NBYTES
                identical = torch.equal(self._content()[:nbytes], self._computed[:nbytes])
                self._store(mover, hit)
            finally:
                mover.close()
            _wait(lambda: _is_quiet(store.counters()))
        return _Used(hit * BLOCK_TOKENS, lookup_s, load_s, identical)

    def _load(self, mover: KVCacheMover, blocks: int) -> float:
        began_s = time.perf_counter()
        mover.load("prompt", self._records[:blocks], timeout_s=TIMEOUT_S, max_s=TIMEOUT_S)
        while not (loads := mover.poll(POLL_S).loads):
            pass
        if loads[0].cause:
            raise KVPoolError(f"a load failed: {loads[0].cause} {loads[0].error or ''}")
        return time.perf_counter() - began_s

    def _store(self, mover: KVCacheMover, cached: int) -> None:
        self._places().copy_(self._computed.view(torch.int16).view(self._blocks, len(self._layers), -1))
        for start in range(cached, self._blocks, mover.store_slots):
            records = self._records[start : start + mover.store_slots]
            mover.stage(records, list(range(start, start + len(records))))
            if not mover.drain(TIMEOUT_S) or any(moved.cause for moved in mover.poll().stores):
                raise KVPoolError(
                    "the server did not take the prompt: give it memory, or lower --scripted-tokens"
                )

    def _content(self) -> torch.Tensor:
        return self._places().contiguous().view(torch.uint8).view(-1)

    def _places(self) -> torch.Tensor:
        """[block, layer, element], without the null block."""
        whole = self._memory.view(torch.int16).view(len(self._layers), self._blocks + 1, -1)
        return whole[:, 1:].transpose(0, 1)


def _is_quiet(counters: Mapping[str, int]) -> bool:
    """Whether near and far, if there are two, copy nothing."""
    filled = counters.get("filled", 0) + counters.get("not_filled", 0)
    return not counters.get("behind_waiting") and filled >= counters.get("far_hits", 0)


def _wait(holds: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + TIMEOUT_S
    while not holds():
        if time.monotonic() > ends_s:
            raise KVPoolError(f"copies between near and far did not end within {TIMEOUT_S:g} s")
        time.sleep(POLL_S)


def _show(firsts: Sequence[First], bench: _Bench, link_nbytes_s: int | None) -> None:
    link = "loopback" if link_nbytes_s is None else f"{link_nbytes_s / 1e9:g} GB/s"
    table = Table(
        title=f"First tokens on scripted devices, medians: {bench.tokens:,} tokens of {TOKEN_NBYTES:,} bytes, the "
        f"server over {link}. Computing is the model's, lookups and loads are measured. Of {STATED_TOKENS:,} tokens: "
        "in proportion, with loads as fast as the model's, and what went over the network.",
        box=SIMPLE, padding=(0, 1, 0, 0),
    )  # fmt: skip
    stated = f"{STATED_TOKENS:,}: s"
    columns: dict[str, tuple[str, float, str]] = {  # field, factor, form
        "lookup ms": ("lookup_s", 1e3, ".1f"), "load s": ("load_s", 1, ".3f"), "compute s": ("compute_s", 1, ".3f"),
        "first token s": ("first_token_s", 1, ".3f"), "sent MB": ("sent_nbytes", 1e-6, ",.1f"),
        "received MB": ("received_nbytes", 1e-6, ",.1f"), stated: ("stated_s", 1, ".2f"),
        "model s": ("model_s", 1, ".2f"), "GB": ("stated_gb", 1, ".2f"),
    }  # fmt: skip
    for name in ("engine", "from"):
        table.add_column(name, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for engine, how in dict.fromkeys((one.engine, one.how) for one in firsts):
        of = [one for one in firsts if (one.engine, one.how) == (engine, how)]
        medians = (
            f"{statistics.median(getattr(one, field) for one in of) * factor:{form}}"
            for field, factor, form in columns.values()
        )
        table.add_row(engine, how, *medians)
    console = Console()
    (console if console.is_terminal else Console(width=140)).print(table)
