"""The scheduler's half of the connector on a store, and what vLLM's scheduler hands to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, SchedulerOutput
from vllm.v1.request import Request

from kvpool.clock import REAL, Clock
from kvpool.config import PoolConfig
from kvpool.key.key import Namespace
from kvpool.store import Store
from kvpool.vllm.geometry import Geometry, Group
from kvpool.vllm.plan import PoolWorkerMetadata
from kvpool.vllm.scheduler import Roles, SchedulerHalf
from tests.support.deadlines import eventually

BLOCK_TOKENS = 16
FACTS = {"model": "test", "tensor_parallel": 2}
NAMESPACE = Namespace("default", FACTS)
BUDGET_S = 60.0  # what a lookup takes on a busy machine is no fault of the tests
STEP_TOKENS = 32


def planted(*_: object, **__: object) -> Any:
    """A fault of ours, in the place of any function."""
    raise ZeroDivisionError("planted")


def request(
    name: str,
    tokens: int = 100,
    transfer_params: object = None,
    first: int = 0,
    hash_tokens: int = BLOCK_TOKENS,
    **sampling: Any,
) -> Request:
    """Its prompt has the tokens from ``first`` on."""
    init_none_hash(sha256_cbor)
    extra = None if transfer_params is None else {"kv_transfer_params": transfer_params}
    return Request(
        name,
        list(range(first, first + tokens)),
        SamplingParams(max_tokens=8, extra_args=extra, **sampling),
        None,
        block_hasher=get_request_block_hasher(hash_tokens, sha256_cbor),
    )


def half(
    store: Store,
    ranks: int = 1,
    pipeline_parallel: int = 1,
    events: bool = True,
    heard: bool = True,
    loads: bool = True,
    stores: bool = True,
    groups: Sequence[Group] = (Group(BLOCK_TOKENS),),
    hash_block_tokens: int = BLOCK_TOKENS,
    match_tokens: int = 0,
    clock: Clock = REAL,
    writer: bytes = b"",
    **settings: Any,
) -> SchedulerHalf:
    scheduler = SchedulerHalf(
        PoolConfig(
            **{"pool": "file:///unused", "lookup_timeout_s": BUDGET_S, "audit_share": 0.0, **settings}
        ),
        store,
        Geometry(
            tuple(
                group
                if group.state
                else replace(group, blocks_per_record=settings.get("blocks_per_record", 1))
                for group in groups
            ),
            ranks=ranks,
            pipeline_parallel=pipeline_parallel,
            align_tokens=BLOCK_TOKENS,
            hash_algorithm="sha256_cbor",
            hash_block_tokens=hash_block_tokens,
            match_tokens=match_tokens,
            step_tokens=STEP_TOKENS,
        ),
        roles=Roles(loads, stores, events),
        writer=writer,
        clock=clock,
    )
    scheduler.bind_block_pool(BlockPool(32, True, BLOCK_TOKENS))
    if heard:
        scheduler.update(PoolWorkerMetadata(facts=dict.fromkeys(range(ranks), FACTS)), (), ())
    return scheduler


def put(store: Store, hashes: list[bytes], ranks: int = 1) -> None:
    for rank in range(ranks):
        keys = NAMESPACE.keys(hashes, 0, rank)
        assert all(store.put_many(keys, [b"x"] * len(keys)))


def answer(scheduler: SchedulerHalf, asked: Request, local_tokens: int = 0) -> int:
    """Ask until there is an answer, as the engine does."""
    answers: list[int] = []

    def answered() -> bool:
        tokens, is_async = scheduler.matched_tokens(asked, local_tokens)
        if tokens is None:
            return False
        assert is_async == (tokens > 0)
        answers.append(tokens)
        return True

    assert eventually(answered)
    return answers[0]


def output(asked: Request, scheduled_tokens: int, tables: tuple[list[int], ...]) -> SchedulerOutput:
    """A step that computes ``scheduled_tokens`` more of a request that was scheduled before."""
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs = CachedRequestData(
        req_ids=[asked.request_id], resumed_req_ids=set(), new_token_ids=[], all_token_ids={}, new_block_ids=[None],
        num_computed_tokens=[asked.num_computed_tokens], num_output_tokens=[0],
    )  # fmt: skip
    step.num_scheduled_tokens = {asked.request_id: scheduled_tokens}
    step.total_num_scheduled_tokens = scheduled_tokens
    step.kv_connector_block_state = KVConnectorBlockState(
        req_ids={asked.request_id}, resolve_block_ids=lambda _: tables, boundary_state_offloads={}
    )
    return step


TABLE = ([7, 8, 9, 10, 11, 12, 13],)
TOKENS = list(range(100))
BLOCKS = len(TOKENS) // BLOCK_TOKENS


def request_with(
    name: str,
    lora: tuple[str, str] | None = None,
    cache_salt: str | None = None,
    multimodal: list[tuple[str, int, int]] | None = None,
    **of_adapter: Any,
) -> Request:
    init_none_hash(sha256_cbor)
    return Request(
        name,
        list(TOKENS),
        SamplingParams(max_tokens=8),
        None,
        lora_request=LoRARequest(lora[0], 1, lora[1], **of_adapter) if lora else None,
        cache_salt=cache_salt,
        mm_features=[
            MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))
            for identifier, offset, length in multimodal or ()
        ],
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256_cbor),
    )


def hold(scheduler: SchedulerHalf, digest: str, number: int = 1) -> None:
    """The workers say what they hold of an adapter."""
    scheduler.update(PoolWorkerMetadata(adapters={(0, number): digest}), (), ())


def computed(asked: Request, store: Store, digest: str = "one") -> list[BlockStored]:
    """Let a request be computed and stored, with an adapter of this digest; what is announced of it."""
    scheduler = half(store)
    hold(scheduler, digest)
    scheduler.seen(asked)
    scheduler.allocated(asked, TABLE, 0)
    step = scheduler.plan(output(asked, len(TOKENS), TABLE))
    keys = NAMESPACE.keys([block.block_hash for block in step.stores], 0, 0)
    assert all(store.put_many(keys, [b"x"] * len(keys)))
    everywhere = dict.fromkeys(step.tags, 1)
    scheduler.update(PoolWorkerMetadata(staged=everywhere, stored=everywhere), (), ())
    return [event for event in scheduler.take_events() if isinstance(event, BlockStored)]
