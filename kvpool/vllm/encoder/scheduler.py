"""The scheduler's half of the encoders' connector: which items come from the pool, and which go there.

A request's items are looked up on arrival (``seen``). Before the engine schedules it, the outputs that it needs are
fetched and verified (``is_ready``), for at most ``lookup_timeout_s`` without progress. Then the engine asks item by
item (``has``), and those that it was promised go to the workers with the step (``plan``). What it computes is stored.

Over 400 lines because what vLLM's scheduler asks of an item stands together.

Threads: the engine's scheduler thread only. It waits for nothing but a measure of weights that a call may have changed.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvpool import metrics
from kvpool.clock import REAL, Clock
from kvpool.config import EncoderConfig
from kvpool.discovery.quota_watch import QuotaWatch
from kvpool.discovery.worker import MAX_MEDIA
from kvpool.errors import StoreClosed
from kvpool.key.hashing import media_hash
from kvpool.key.key import Fact, Namespace
from kvpool.metrics import Counters, Samples
from kvpool.store import Store
from kvpool.store.batch import GRACE_S
from kvpool.vllm.encoder.audits import OutputAudits, remember
from kvpool.vllm.encoder.hints import ItemHints
from kvpool.vllm.encoder.identity import EncoderNamespaces
from kvpool.vllm.encoder.outputs import ABSENT, HELD, Output, Outputs
from kvpool.vllm.encoder.plan import (
    EncoderMetadata,
    EncoderWorkerMetadata,
    Loaded,
    Shape,
    Stored,
)
from kvpool.vllm.engine import internals
from kvpool.vllm.engine.guard import RequestFaults, guarded
from kvpool.vllm.engine.hints import NO_HINTS, Hints
from kvpool.vllm.engine.internals import Item
from kvpool.vllm.plan import Measured
from kvpool.vllm.requests import WITHOUT_POOL, ParamsReader, RequestParams

logger = init_logger("vllm.kvpool")

ON_ITS_WAY_S = 10.0  # that a store may take


@dataclass
class _Asked:
    """What a request wants. ``reach``: the tokens up to the end of its last item. ``features``: at this look.

    ``bare``: of its items. ``passed``: what it had of the pool, or gave it, by identifier.
    ``queued``: the engine has not asked for it yet.
    """

    items: Sequence[Item]
    params: RequestParams
    reach: int
    features: int
    bare: Sequence[Item] = ()
    hints: Hints = NO_HINTS
    passed: dict[str, Shape] = field(default_factory=dict)
    queued: bool = False
    waits_since_s: float | None = None  # for its outputs


@dataclass(frozen=True)
class Engine:
    """What is asked of the engine. ``measure``: the weights of all workers.

    ``cached``: lists the items whose outputs the engine has; ``evict``: has it forget one; ``holds``: whether it keeps
    an item's for a request (its id). ``sizes``: by modality, the fields of an item that no encoder can run on.
    """

    measure: Callable[[], Sequence[Measured]]
    is_asleep: Callable[[], bool]
    cached: Callable[[], Collection[str]]
    evict: Callable[[str], bool] = lambda _: False
    holds: Callable[[str, str], bool] = lambda _, __: False
    sizes: Callable[[str], Collection[str]] = lambda _: ()


class EncoderScheduler:
    """``widths``: of outputs, by modality, and of others ``width``.

    ``alone``: no other connector tells how the pool is. ``needs_bytes``: the engine computes with outputs itself.
    """

    def __init__(
        self,
        config: EncoderConfig,
        store: Store,
        facts: Mapping[str, Fact],
        engine: Engine,
        *,
        stores: bool,
        needs_bytes: bool,
        widths: Mapping[str, int],
        width: int,
        dtype: str,
        writer: bytes,
        alone: bool = True,
        clock: Clock = REAL,
        random_number: Callable[[], float] | None = None,
    ) -> None:
        self._config, self._store, self._clock = config, store, clock
        self._longest_wait_s = 2 * config.lookup_timeout_s + config.max_load_s + 2 * GRACE_S
        self._stores, self._needs_bytes = stores, needs_bytes
        self._forms = {modality: (known, dtype) for modality, known in widths.items()}
        self._any_form = width, dtype  # of modalities that are not known
        self._writer, self._engine, self._alone = writer, engine, alone
        self.counters = Counters()
        self._samples: Samples = {}  # of the workers
        self._request_faults = RequestFaults(self.counters)
        self._params = ParamsReader()
        self._requests: dict[str, _Asked] = {}
        self._unavailable: set[str] = set()  # requests that can not go on
        self._broken = False
        self._audits = OutputAudits(
            config.audit_share if needs_bytes else 0.0,
            writer=writer,
            stores=stores,
            counters=self.counters,
            clock=clock.monotonic,
            random_number=random_number or random.Random().random,
        )
        self._outputs = Outputs(
            store,
            room_nbytes=config.staging_nbytes,
            lookup_timeout_s=config.lookup_timeout_s,
            max_load_s=config.max_load_s,
            is_audited=self._audits.chooses,
            put_away=self._audits.put_away,
            clock=clock.monotonic,
        )
        self._namespaces = EncoderNamespaces(
            config.tenant, facts, engine.measure, is_asleep=engine.is_asleep, leave=self._audits.leave
        )
        # Beside another connector its metrics are of blocks alone.
        self._hints = ItemHints(
            store, config, self.counters if alone else Counters(), space=self._space, clock=clock
        )
        self._quota = QuotaWatch(store, config.tenant, self.counters, logger)
        self._told: tuple[Namespace, ...] | None = None  # to the workers, as ``spaces``
        self._promised: dict[str, Loaded] = {}  # since the last step
        self._next: _Asked | None = None  # whose items the engine asks for next
        self._step = EncoderMetadata()
        self._silent = False  # a silent change that the workers have not been told of
        self._modalities: dict[str, str] = {}  # of what the workers encode, by identifier
        self._stored_s: dict[str, float] = {}  # when

    def start(self) -> None:
        """Begin to follow the tenant's quota. Does not block."""
        if self._stores:
            self._quota.start()

    @property
    def _is_off(self) -> bool:
        return self._broken or bool(self._audits.doubts)

    # A request, from its arrival to its end.

    @guarded(None, request="lookup")
    def seen(self, request: Request) -> None:
        """A request arrived."""
        if request.mm_features and not self._is_off:
            state = self._state(request)
            self._look_up(request, state)
            if self._needs_bytes:
                state.queued = True
                waiting = functools.partial(self._asked_for, request, state)
                self._hints.wait(request.request_id, waiting, state.hints)

    @guarded((), request="lookup")
    def _asked_for(self, request: Request, state: _Asked) -> Sequence[Output]:
        """What is followed for a request's items, as it stands now."""
        followed = [self._outputs.of(item.identifier) for item in state.items]
        outputs = [output for output in followed if output is not None]
        for output in outputs:
            self._outputs.advance(output, needed=False)
        return outputs

    def _state(self, request: Request) -> _Asked:
        state = self._requests.get(request.request_id)
        if state is None:
            params = self._params.read(getattr(request, "kv_transfer_params", None))
            items = internals.items_of(request, self._engine.sizes)
            reach = max((item.end for item in items), default=0)
            bare = [item for item in items if item.bare]
            hints = self._hints.read(request, params)
            state = _Asked(items, params, reach, len(request.mm_features), bare, hints)
            self._requests[request.request_id] = state
        return state

    def _look_up(self, request: Request, state: _Asked) -> None:
        if not state.params.load:
            return
        cached, wanted = self._engine.cached(), []
        for item in state.items:
            known = self._outputs.of(item.identifier)
            if (
                item.by_name
                or item.rows < 1
                or (item.identifier in cached and self._has_place(item, request))
                or (known is not None and request.request_id in known.wanted and not _is_awaited(item, known))
            ):
                continue
            shape = self._shape(item)
            if (space := self._space(shape)) is None:
                return
            wanted.append(
                (item.identifier, space.key(media_hash(item.identifier), 0, 0), shape, shape.nbytes)
            )
        self._outputs.want(request.request_id, wanted)

    def _has_place(self, item: Item, request: Request) -> bool:
        """Of an item that is cached: whether the engine needs nothing else of it for a request."""
        return self._needs_bytes and (
            not item.bare or self._engine.holds(item.identifier, request.request_id)
        )

    def _space(self, shape: Shape) -> Namespace | None:
        # A measure forgets what was stored since the last look, so the workers must have deleted it before.
        return None if self._silent else self._namespaces.of(shape.form)

    def _shape(self, item: Item) -> Shape:
        return Shape(item.rows, *self._forms.get(item.modality, self._any_form))

    def is_ready(self, request: Request, computed_tokens: int) -> bool:
        """Whether a request may be scheduled; no: what it needs of the pool is still on its way, or ``unavailable``."""
        state = self._requests.get(request.request_id)
        if (  # it goes on with tokens, as most do
            state is not None
            and computed_tokens >= state.reach
            and len(request.mm_features) == state.features
            and not (state.bare or state.queued or state.waits_since_s)
        ):
            self._next = state
            return True
        if not self._is_ready(request, computed_tokens):
            return False
        state = self._requests.get(request.request_id)
        if state is None or not state.bare or not self._lacks(state, request, computed_tokens):
            return True
        logger.warning_once(
            "kvpool: a request with embeddings that brings no tensors (image_embeds) fails: the pool lacks its output, "
            "or staging_nbytes have no room for all of them. Ask an engine that encodes first, or send the item itself"
        )
        self._unavailable.add(request.request_id)
        return False

    @guarded(True)
    def _lacks(self, state: _Asked, request: Request, computed_tokens: int) -> bool:
        """An output that neither the pool nor an encoder has for it. The engine would end for the lack of it.

        One in the engine's cache counts if nothing else has to be given a place there, which may be its own.
        """
        return not self._has_all(request, computed_tokens) and any(
            item.end > computed_tokens
            and not self._engine.holds(item.identifier, request.request_id)
            and not self._may_have(item.identifier, state)
            for item in state.bare
        )

    def _has_all(self, request: Request, computed_tokens: int) -> bool:
        """Whether nothing of a request has to be given a place in the engine's cache."""
        cached = self._engine.cached()
        return all(one in cached for one in internals.places_of(request, computed_tokens))

    def unavailable(self) -> set[str]:
        """The requests that are not ready for good; the engine ends them with an error."""
        unavailable, self._unavailable = self._unavailable, set()
        return unavailable

    @guarded(True, request="offer")
    def _is_ready(self, request: Request, computed_tokens: int) -> bool:
        state = self._requests.get(request.request_id)
        if state is None or len(request.mm_features) != state.features:
            self._requests.pop(request.request_id, None)
            state = self._state(request)
        self._next = state
        if state.queued:
            state.queued = False
            self._hints.turn(request.request_id, lambda: self._loads(state, computed_tokens))
        if computed_tokens >= state.reach and state.bare:  # the engine may have had them, and asked for none
            self._outputs.leave(request.request_id, {item.identifier for item in state.items})
        if computed_tokens >= state.reach or self._is_off or self._has_waited(state):
            return self._go_on(state)
        if state.bare and self._has_all(request, computed_tokens):
            return self._go_on(state)
        self._look_up(request, state)
        # Until the workers have heard of a silent change nothing is asked for, and who can encode does.
        cached, is_ready = self._engine.cached(), not (self._silent and state.bare)
        for item in state.items:
            output = self._outputs.of(item.identifier)
            is_cached = item.identifier in cached
            if item.end <= computed_tokens or output is None:
                continue
            if is_cached and self._has_place(item, request):
                continue
            self._outputs.advance(output, needed=self._needs_bytes, waits=item.bare)
            if (
                is_cached
                and output.why == "absent"
                and not (item.bare or self._is_on_its_way(item.identifier))
            ):
                self._engine.evict(item.identifier)  # others look for it in the pool, which has lost it
            is_settled = output.is_settled or (output.in_pool and not self._needs_bytes)
            is_ready = is_ready and is_settled and not _is_awaited(item, output)
        if is_ready:
            return self._go_on(state)
        if state.waits_since_s is None:
            state.waits_since_s = self._clock.monotonic()
        return False

    def _loads(self, state: _Asked, computed_tokens: int) -> bool:
        """Whether a request needs an output that the pool has."""
        found = [self._outputs.of(item.identifier) for item in state.items if item.end > computed_tokens]
        return any(output is not None and output.in_pool for output in found)

    def _is_on_its_way(self, identifier: str) -> bool:
        """Whether the workers may still be storing it."""
        return self._clock.monotonic() < self._stored_s.get(identifier, -ON_ITS_WAY_S) + ON_ITS_WAY_S

    def _has_waited(self, state: _Asked) -> bool:
        """Longer than any question and load: calls of the workers, and other requests, begin them anew."""
        since_s = state.waits_since_s
        return since_s is not None and self._clock.monotonic() > since_s + self._longest_wait_s

    def _go_on(self, state: _Asked) -> bool:
        if state.waits_since_s is not None:
            self.counters.observe(metrics.ENCODER_WAIT_SECONDS, self._clock.monotonic() - state.waits_since_s)
            state.waits_since_s = None
        return True

    @guarded(False)
    def has(self, identifier: str) -> bool:
        """Whether an output comes from the pool. A yes is kept, whatever happens: its bytes are here, and verified."""
        if not self._may_have(identifier, self._next):
            return False
        output = self._outputs.of(identifier)
        if self._needs_bytes and output is not None and output.payload is not None:
            self._promised[identifier] = Loaded(output.payload, output.shape)
        return True

    def _may_have(self, identifier: str, state: _Asked | None) -> bool:
        """Whether a request is given an item's output from the pool."""
        output = self._outputs.of(identifier)
        if self._is_off or output is None or (state is not None and not state.params.load):
            return False
        if not self._needs_bytes:
            return output.in_pool
        is_audited = output.audited and not any(
            identifier == item.identifier for item in (state.bare if state else ())
        )
        return output.state == HELD and not is_audited and output.payload is not None

    def allocated(self, request: Request, index: int) -> None:
        """The engine goes on with an item: with the output that it was promised, or by its encoder."""
        identifier = internals.item_at(request, index)
        promised = self._promised.pop(identifier, None)
        if promised is not None:
            self._step.loads[identifier] = promised
        self._note(request, identifier, promised)

    @guarded(None, request="store")
    def _note(self, request: Request, identifier: str, promised: Loaded | None) -> None:
        output, state = self._outputs.take(identifier), self._state(request)
        if output is not None and output.in_pool:
            state.passed[identifier] = output.shape
        if promised is not None:
            self.counters.add(metrics.ENCODER_OUTPUTS, 1, "pool")
            self.counters.add(metrics.ENCODER_LOADED_BYTES, promised.payload.nbytes)
            return
        if not self._needs_bytes and output is not None and output.in_pool:
            self.counters.add(metrics.ENCODER_OUTPUTS, 1, "pool")
            return
        self.counters.add(metrics.ENCODER_OUTPUTS, 1, "computed")
        item = next((one for one in state.items if one.identifier == identifier), None)
        self.counters.add(metrics.ENCODER_MISSES, 1, self._why(state, item, output))
        if item is not None and not self._is_off:
            self._store_it(state, item, output)

    def _why(self, state: _Asked, item: Item | None, output: Output | None) -> str:
        """Of ``metrics.ENCODER_MISS_REASONS``."""
        if self._is_off:
            return "switched_off"
        if not state.params.load:
            return "opted_out"
        if item is not None and item.by_name:
            return "adapter"
        if output is not None and output.audited:
            return "audited"
        if output is not None and not output.is_settled:
            return "too_slow"
        return output.why if output is not None and output.state == ABSENT else "fault"

    def _store_it(self, state: _Asked, item: Item, output: Output | None) -> None:
        if item.by_name or item.rows < 1:
            return
        if output is not None and output.audited and output.payload is not None:
            self._audits.begin(item.identifier, output.key)
            self._step.stores[item.identifier] = Stored("", output.shape, output.payload, output.writer)
            return
        if not self._stores and item.modality not in self._forms:  # vLLM measures those of engines that store
            remember(self._modalities, item.identifier, item.modality)
            self._step.stores[item.identifier] = Stored("", self._shape(item))
        if not self._stores or not state.params.store or (output is not None and output.in_pool):
            return
        if self._quota.is_over():
            self.counters.add(metrics.ENCODER_STORE_SKIPPED, 1, "quota")
            return
        shape = self._shape(item)
        if (space := self._space(shape)) is not None:
            remember(self._modalities, item.identifier, item.modality)
            key = space.key(media_hash(item.identifier), 0, 0)
            self._step.stores[item.identifier] = Stored(key, shape)
            state.passed[item.identifier] = shape
            remember(self._stored_s, item.identifier, self._clock.monotonic())

    def finished(self, request: Request) -> None:
        state = self._requests.pop(request.request_id, None)
        self._unavailable.discard(request.request_id)
        if state is not None:
            self._forget_request(request, state)
            self._retain(request, state)

    @guarded(None)
    def _forget_request(self, request: Request, state: _Asked) -> None:
        self._outputs.leave(request.request_id, {item.identifier for item in state.items})

    @guarded(None)
    def _retain(self, request: Request, state: _Asked) -> None:
        shapes = {item.identifier: self._shape(item) for item in state.items if not item.by_name}
        self._hints.finished(request.request_id, state.hints, {**shapes, **state.passed}, state.passed.keys())

    def plan(self, output: SchedulerOutput) -> EncoderMetadata:
        """What goes to the workers with this step."""
        self._prefetch()
        step, self._step = self._step, EncoderMetadata()
        self._promised.clear()
        cached = self._engine.cached()
        # What it has evicted again has no place.
        step.loads = {name: loaded for name, loaded in step.loads.items() if name in cached or not cached}
        step.wrong += self._outputs.wrong
        self._outputs.wrong = []
        if (spaces := self.spaces()) != self._told:
            step.spaces = self._told = spaces
        if not output.total_num_scheduled_tokens and self._needs_bytes:
            # An engine that computes nothing shows its workers no step, or shows it to no connector of encoders.
            # What it was to store it has not computed, and may compute with other weights.
            self._step = EncoderMetadata(step.loads, spaces=step.spaces, wrong=step.wrong)
            step = EncoderMetadata()
        else:
            step.silent, self._silent = self._silent, False
        step.writer = self._writer
        step.watch = not self._namespaces.asks and not self._engine.is_asleep()
        return step

    @guarded(None)
    def _prefetch(self) -> None:
        if not self._is_off:
            self._hints.step()

    @guarded(())
    def spaces(self) -> tuple[Namespace, ...]:
        """Where this engine's outputs are; empty: nowhere now. Measures nothing."""
        if self._is_off or self._namespaces.asks:
            return ()
        forms = {Shape(0, *form).form for form in self._forms.values() or [self._any_form]}
        spaces = [space for form in sorted(forms) if (space := self._namespaces.of(form)) is not None]
        return tuple(spaces[:MAX_MEDIA])

    # What the workers report.

    @guarded(None)
    def update(self, report: EncoderWorkerMetadata) -> None:
        if report.broken:
            self.switch_off(report.broken)
        metrics.add_samples(self._samples, report.samples)
        for identifier, form in report.forms.items():
            if (modality := self._modalities.pop(identifier, None)) is not None:
                self._forms[modality] = form
        for compared in report.compared:
            self._outputs.wrong += self._audits.judge(compared)
        if report.differs and not self._namespaces.asks:
            logger.error(
                "kvpool: the weights of this engine's encoder changed without a call of vLLM's. What it stored in the "
                "last seconds is deleted. Change weights by collective_rpc, of which kvpool hears"
            )
            self.called("a silent change")
            self._silent = True

    # The engine.

    @guarded(None)
    def called(self, method: str) -> None:
        """Somebody called a method of the workers, which may have changed their weights."""
        if self._namespaces.called(method):
            self._outputs.forget()
            self._hints.forget()

    @guarded(None)
    def reset(self) -> None:
        """The engine's cache of encoders was reset."""
        self._audits.forget_findings()

    def _without_pool(self, request: Request) -> None:
        state = self._requests.get(request.request_id)
        if state is None:
            bare: Sequence[Item] = ()
            with contextlib.suppress(Exception):  # it may be what failed
                bare = [item for item in internals.items_of(request, self._engine.sizes) if item.bare]
            features = len(request.mm_features)
            self._requests[request.request_id] = _Asked((), WITHOUT_POOL, 0, features, bare)
        else:
            state.params, state.reach = WITHOUT_POOL, 0
            self._forget_request(request, state)

    def switch_off(self, reason: str) -> None:
        if not self._broken:
            self._broken = True
            logger.error("kvpool is off for this engine's encoder, which goes on without it: %s", reason)

    def stats(self) -> Samples:
        self.counters.set(metrics.ENCODER_ENABLED, float(not self._is_off))
        if self._alone:
            with contextlib.suppress(StoreClosed):
                self._store.count_health(self.counters)
        samples, self._samples = self._samples, {}
        metrics.add_samples(samples, self.counters.take())
        return samples

    def close(self) -> None:
        self._outputs.forget()
        self._requests.clear()
        self._hints.close()
        self._quota.close()


def _is_awaited(item: Item, output: Output) -> bool:
    """Whether another engine may still be about to store what this one cannot encode: it is asked for again."""
    return item.bare and output.state == ABSENT and output.why not in ("fault", "put_away")
