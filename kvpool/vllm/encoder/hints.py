"""``ItemHints``: what requests hint at, for the outputs of their items, by what does it for blocks.

An output is kept, or let go, as a prefix of one record (``Retention``). What the pool has of a waiting request's items
comes from a far pool near (``Prefetches``).

Threads: the engine's scheduler thread only. Nothing here waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from vllm.v1.request import Request

from kvpool.clock import Clock
from kvpool.config import EncoderConfig
from kvpool.key.hashing import media_hash
from kvpool.key.key import Namespace
from kvpool.metrics import Counters
from kvpool.store import LookupGroup, Store
from kvpool.vllm.encoder.outputs import ASKED, THERE, Output
from kvpool.vllm.encoder.plan import Shape
from kvpool.vllm.engine.hints import Hints, read_hints
from kvpool.vllm.load.prefetch import NOTHING, Prefetches, Wanted, near_nbytes
from kvpool.vllm.requests import RequestParams
from kvpool.vllm.save.retention import Prefix, Retention

# Of a request: its hints count for the first ones, so that others' hints keep a place in Retention's queue.
MAX_ITEMS = 256


class ItemHints:
    """``space``: the namespace of outputs of this shape; None while the weights are not known."""

    def __init__(
        self,
        store: Store,
        config: EncoderConfig,
        counters: Counters,
        *,
        space: Callable[[Shape], Namespace | None],
        clock: Clock,
    ) -> None:
        self._counters, self._space = counters, space
        self._retention = Retention(
            store, config.tenant, share=config.keep_share, counters=counters, clock=clock.monotonic
        )
        self._prefetches = Prefetches(
            store,
            room_nbytes=int(config.prefetch_share * near_nbytes(store, config.pool)),
            counters=counters,
            clock=clock.monotonic,
        )

    def read(self, request: Request, params: RequestParams) -> Hints:
        """``params``: the request's own, which come before those of its envelopes."""
        given = getattr(request, "kv_transfer_params", None)
        return read_hints(params.hints, given, getattr(request, "kv_hints", None), self._counters)

    # While a request waits for its turn.

    def wait(self, request_id: str, outputs: Callable[[], Sequence[Output]], hints: Hints) -> None:
        """It arrived, and its ``outputs`` are asked for."""
        self._prefetches.wait(request_id, lambda _: self._far(outputs()), first=hints.prefetch)

    def _far(self, outputs: Sequence[Output]) -> Wanted | None:
        if any(output.state == ASKED for output in outputs):
            return None
        by_space: dict[Namespace, dict[int, list[bytes]]] = {}
        for output in outputs:
            if output.state == THERE and (space := self._space(output.shape)) is not None:
                by_size = by_space.setdefault(space, {})
                by_size.setdefault(output.nbytes, []).append(media_hash(output.identifier))
        # Of one namespace: a prompt has items of two where their outputs differ in width.
        for space, sizes in by_space.items():
            return Wanted(space, [_group(hashes, nbytes) for nbytes, hashes in sizes.items()])
        return NOTHING

    def turn(self, request_id: str, loads: Callable[[], bool]) -> None:
        """The engine asks whether it is ready: what it needs is loaded now, if it ``loads``, from wherever it is."""
        if self._prefetches.waits(request_id):
            self._prefetches.leave(request_id, used=loads())

    def step(self) -> None:
        self._prefetches.step()

    # When it is over.

    def finished(
        self, request_id: str, hints: Hints, items: Mapping[str, Shape], passed: Collection[str]
    ) -> None:
        """Do what it hinted at for its ``items``; ``passed``: those that it had of the pool, or gave it."""
        self._prefetches.leave(request_id, used=False)
        if not (hints.keep_s or hints.done or self._retention.keeps):
            return
        for identifier, shape in itertools.islice(items.items(), MAX_ITEMS):
            name = media_hash(identifier)
            if not hints.done and not (hints.keep_s and identifier in passed):
                self._retention.used([name])
            elif (space := self._space(shape)) is not None:
                record = Prefix(space, [_group([name], 0)], [name], shape.nbytes)
                if hints.done:
                    self._retention.let_go(record)
                else:
                    self._retention.keep(record, hints.keep_s)

    def forget(self) -> None:
        """Outputs have other names now."""
        self._prefetches.forget()

    def close(self) -> None:
        self.forget()
        self._retention.close()


def _group(hashes: Sequence[bytes], prefetch_nbytes: int) -> LookupGroup:
    """Records of which none needs another one."""
    return LookupGroup(
        hashes=b"".join(hashes),
        hash_nbytes=len(hashes[0]),
        group=0,
        ranks=1,
        record_tokens=1,
        sliding_window=True,
        prefetch_nbytes=prefetch_nbytes,
    )
