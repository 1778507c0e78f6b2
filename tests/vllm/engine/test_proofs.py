"""A hash of the engine's is believed when it is that of the request's tokens: on the scheduler half."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from kvpool import _native, metrics
from kvpool.store import Store
from kvpool.vllm.engine import proofs
from kvpool.vllm.geometry import Group
from kvpool.vllm.plan import PoolWorkerMetadata
from kvpool.vllm.scheduler import SchedulerHalf
from tests.support.deadlines import eventually
from tests.support.scheduler import (
    BLOCK_TOKENS,
    TABLE,
    TOKENS,
    answer,
    half,
    output,
    planted,
    put,
    request,
    request_with,
)

pytestmark = [pytest.mark.vllm]

REFUSED = f"{metrics.STORE_SKIPPED_BLOCKS.name}/wrong_hash"
OLD, NEW = 4000, 5000  # the token that a session discards, and what it goes on with


def session(prompt_tokens: int = 47) -> Request:
    """A streaming session that has sampled a token."""
    asked = request("session", prompt_tokens)
    asked.resumable = True
    asked.append_output_token_ids(OLD)
    return asked


def goes_on(asked: Request, *, rehashes: bool, tokens: int = 52) -> None:
    """The session's next turn, as vLLM's scheduler begins it; ``rehashes``: from 0.32 on."""
    kept = asked.num_tokens - 1
    del asked._all_token_ids[kept:]
    if rehashes:
        del asked.block_hashes[kept // BLOCK_TOKENS :]
    asked._output_token_ids.clear()
    asked._all_token_ids.extend(range(NEW, NEW + tokens))
    asked.update_block_hashes()
    asked.num_prompt_tokens = asked.num_tokens


def steps(scheduler: SchedulerHalf, asked: Request, tokens: int, table: Any = TABLE) -> list[bytes]:
    """What is stored of a step that computes the next ``tokens`` of a request, and reported as stored."""
    step = scheduler.plan(output(asked, tokens, table))
    asked.num_computed_tokens += tokens
    stored = [block.block_hash for block in step.stores]
    tags = dict.fromkeys(step.tags, 1)
    scheduler.update(PoolWorkerMetadata(staged=tags, stored=tags), (), ())
    return stored


def refused(scheduler: SchedulerHalf) -> float:
    count = scheduler.counters.take().get(REFUSED, 0.0)
    assert isinstance(count, float | int)
    return count


def false_session(scheduler: SchedulerHalf) -> Request:
    """A session whose third hash is of the discarded token; all of it is computed."""
    asked = session()
    scheduler.allocated(asked, TABLE, 0)
    steps(scheduler, asked, 47)
    goes_on(asked, rehashes=False)
    steps(scheduler, asked, 52)
    return asked


def old(name: str) -> Request:
    """An ordinary request with the tokens that the session's hashes are of."""
    asked = request(name, 47)
    asked.append_output_token_ids([OLD, *range(NEW + 1, NEW + 52)])
    return asked


def test_a_hash_of_other_tokens_is_not_stored_and_none_behind_it(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, asked = half(store), session()
    scheduler.allocated(asked, TABLE, 0)
    assert steps(scheduler, asked, 47) == asked.block_hashes[:2]
    goes_on(asked, rehashes=False)
    assert asked.block_hashes[2] == old("old").block_hashes[2]
    with caplog.at_level(logging.WARNING, "vllm.kvpool"):
        assert steps(scheduler, asked, 33) == []
        assert steps(scheduler, asked, 19) == []
    assert len(asked.block_hashes) == 6
    assert refused(scheduler) == 4
    assert sum("block 2 of request session" in record.getMessage() for record in caplog.records) == 1


def test_a_session_whose_hashes_follow_its_tokens_is_stored(store: Store) -> None:
    scheduler, asked = half(store), session()
    scheduler.allocated(asked, TABLE, 0)
    steps(scheduler, asked, 47)
    goes_on(asked, rehashes=True)
    assert steps(scheduler, asked, 52) == asked.block_hashes[2:6]
    assert refused(scheduler) == 0


def test_tokens_that_are_replaced_behind_a_proof_are_proven_again(store: Store) -> None:
    """No version is known to do that."""
    scheduler, asked = half(store), request("a", 99)
    scheduler.allocated(asked, TABLE, 0)
    assert len(steps(scheduler, asked, 64)) == 4
    asked._all_token_ids[60] = NEW
    assert steps(scheduler, asked, 35) == []
    assert refused(scheduler) == 2


def test_what_an_engine_has_under_a_false_hash_spoils_what_begins_with_it(store: Store) -> None:
    """Its own cache believes the hash, too: an honest request goes on behind the KV of other tokens."""
    scheduler = half(store)
    false_session(scheduler)
    refused(scheduler)
    for name in ("old", "again"):
        asked = old(name)
        scheduler.allocated(asked, TABLE, 0)
        asked.num_computed_tokens = 64
        assert steps(scheduler, asked, 35) == []
        assert refused(scheduler) == 2, "those that it computes"
        scheduler.finished(asked)
    asked = old("begins with less")
    scheduler.allocated(asked, TABLE, 0)
    asked.num_computed_tokens = 32
    assert steps(scheduler, asked, 67) == asked.block_hashes[2:6], "computed, and not from there"


def test_what_is_held_under_a_false_hash_is_not_stored_where_the_pool_lacks_it(store: Store) -> None:
    scheduler = half(store)
    false_session(scheduler)
    asked = old("old")
    assert answer(scheduler, asked, local_tokens=80) == 0
    scheduler.allocated(asked, TABLE, 0)
    asked.num_computed_tokens = 80
    assert steps(scheduler, asked, 3) == asked.block_hashes[:2]


@pytest.mark.parametrize("false_at", ["before", "while it is awaited"])
def test_nor_when_the_answer_comes_late(store: Store, false_at: str) -> None:
    scheduler = half(store)
    pool = BlockPool(32, True, BLOCK_TOKENS)
    scheduler.bind_block_pool(pool)
    asked = old("old")
    blocks = pool.get_new_blocks(6)
    pool.cache_full_blocks(asked, blocks, 0, 6, BLOCK_TOKENS, 0)
    table = ([block.block_id for block in blocks] + [30],)
    if false_at == "before":
        false_session(scheduler)
    scheduler.seen(asked)
    lookup = scheduler._requests["old"].found.lookup
    assert lookup is not None
    done, lookup._lookup.done = lookup._lookup.done, lambda: False  # type: ignore[method-assign]
    scheduler.matched_tokens(asked, 96)
    scheduler.allocated(asked, table, 0)
    asked.num_computed_tokens = 96
    assert steps(scheduler, asked, 3, table) == []
    if false_at != "before":
        false_session(scheduler)
    lookup._lookup.done = done  # type: ignore[method-assign]
    assert eventually(done)
    other = request("other", 4)
    scheduler.allocated(other, ([],), 0)
    assert steps(scheduler, other, 4, ([],)) == asked.block_hashes[:2]


def test_what_is_computed_in_the_step_of_a_false_hash_is_spoilt_too(store: Store) -> None:
    """vLLM's cache gives a block to others in the step that computes it."""
    scheduler, asked, other = half(store), session(), old("other")
    scheduler.allocated(asked, TABLE, 0)
    steps(scheduler, asked, 47)
    goes_on(asked, rehashes=False)
    scheduler.allocated(other, TABLE, 0)
    other.num_computed_tokens = 48
    both = output(other, 51, TABLE)
    of_session = output(asked, 52, TABLE)
    for name in ("req_ids", "num_computed_tokens", "num_output_tokens", "new_block_ids"):
        getattr(both.scheduled_cached_reqs, name).extend(getattr(of_session.scheduled_cached_reqs, name))
    both.num_scheduled_tokens |= of_session.num_scheduled_tokens
    both.total_num_scheduled_tokens += 52
    assert scheduler.plan(both).stores == []


@pytest.mark.parametrize("mixes", [True, False])
def test_what_a_cpu_computes_beside_adapters_is_stored_for_adapters_alone(store: Store, mixes: bool) -> None:
    """vLLM's kernels there compute tokens without an adapter with the last slot's."""
    scheduler = half(store)
    assert scheduler._mixes_adapters, "these tests run on a CPU"
    scheduler._mixes_adapters = mixes
    adapted = request_with("adapted", lora=("adapter", "unknown"))
    plain = request("plain")
    for one in (adapted, plain):
        scheduler.allocated(one, TABLE, 0)
    assert steps(scheduler, plain, 40) == plain.block_hashes[:2], "alone"
    step = output(plain, 32, TABLE)
    other = output(adapted, 32, TABLE)
    step.num_scheduled_tokens |= other.num_scheduled_tokens
    cached, more = step.scheduled_cached_reqs, other.scheduled_cached_reqs
    for name in ("req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"):
        getattr(cached, name).extend(getattr(more, name))
    stored = [block.block_hash for block in scheduler.plan(step).stores]
    assert stored == ([] if mixes else plain.block_hashes[2:4])
    plain.num_computed_tokens = 72
    assert steps(scheduler, plain, 24) == ([] if mixes else plain.block_hashes[4:6]), "it goes on from there"
    again = request("again")
    scheduler.allocated(again, TABLE, 0)
    again.num_computed_tokens = 64
    assert len(steps(scheduler, again, 32)) == (0 if mixes else 2), "and so does who begins with it"


def test_what_an_encoders_earlier_weights_have_encoded_is_not_stored_as_of_the_new_ones(store: Store) -> None:
    """vLLM keeps an encoder's outputs through updates and resets of its prefix cache (verl-project/verl#6523)."""
    scheduler, encoded = half(store), {"old", "new"}
    scheduler._encoded = lambda: encoded
    scheduler._leave()
    encoded.add("later")
    encoded.discard("new")
    asked = {
        name: request_with(name, multimodal=[("small", 2, 4), (name, 40, 8)])
        for name in ("old", "new", "later")
    }
    for one in asked.values():
        scheduler.allocated(one, TABLE, 0)
    assert steps(scheduler, asked["old"], 48) == asked["old"].block_hashes[:2]
    assert steps(scheduler, asked["old"], 48) == [], "it goes on from there"
    again = request_with("again", multimodal=[("small", 2, 4), ("old", 40, 8)])
    encoded.clear()
    again.num_computed_tokens = 48
    scheduler.allocated(again, TABLE, 0)
    assert steps(scheduler, again, 48) == [], "and so does who begins with it"
    encoded.add("new")
    for name in ("new", "later"):
        assert steps(scheduler, asked[name], 96) == asked[name].block_hashes[:6]
    scheduler.close()


def test_a_request_that_stores_nothing_spoils_no_other_one(store: Store) -> None:
    scheduler, asked = half(store), session()
    asked.kv_transfer_params = {"kvpool": {"store": False}}
    scheduler.allocated(asked, TABLE, 0)
    steps(scheduler, asked, 47)
    goes_on(asked, rehashes=False)
    steps(scheduler, asked, 52)
    other = old("other")
    scheduler.allocated(other, TABLE, 0)
    other.num_computed_tokens = 48
    assert steps(scheduler, other, 51) == []


STATES = (Group(BLOCK_TOKENS), Group(BLOCK_TOKENS, 2, state=True))


@pytest.mark.parametrize("tokens", [96, 92])
def test_states_and_tails_behind_a_false_hash_are_not_stored(store: Store, tokens: int) -> None:
    wanted = {}
    for rehashes in (True, False):
        scheduler = half(store, groups=STATES, hash_block_tokens=4, match_tokens=4)
        asked = request(f"rehashes {rehashes}", 47, hash_tokens=4)
        asked.append_output_token_ids(OLD)
        tables = (list(range(1, 8)), [0] * 5 + [20, 21])
        scheduler.allocated(asked, tables, 0)
        steps(scheduler, asked, 47, tables)
        kept = asked.num_tokens - 1
        del asked._all_token_ids[kept:]
        if rehashes:
            del asked.block_hashes[kept // 4 :]
        asked._all_token_ids.extend(range(NEW, NEW + 50))
        asked.update_block_hashes()
        asked.num_prompt_tokens = asked.num_tokens
        step = output(asked, tokens - 47, tables)
        assert step.kv_connector_block_state is not None
        step.kv_connector_block_state.boundary_state_offloads[asked.request_id] = [(1, 30, tokens)]
        wanted[rehashes] = [(one.group, one.block_ids) for one in scheduler.plan(step).stores]
    assert (1, (30,)) in wanted[True]
    assert wanted[False] == []


def test_records_of_several_blocks_are_proven_by_all_of_them(store: Store) -> None:
    scheduler, asked = half(store, blocks_per_record=2), session()
    scheduler.allocated(asked, TABLE, 0)
    assert steps(scheduler, asked, 47) == asked.block_hashes[1:2]
    goes_on(asked, rehashes=False)
    assert steps(scheduler, asked, 52) == []
    assert refused(scheduler) == 2


def test_each_block_is_hashed_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    chain = _native.hash_chain

    def counts(algorithm: str, parent: bytes, tokens: list[int], size: int, extras: Any) -> list[bytes]:
        hashed.append(len(tokens) // size)
        return chain(algorithm, parent, tokens, size, extras)

    monkeypatch.setattr(proofs._native, "hash_chain", counts)
    scheduler, asked = half(store), request("a")
    scheduler.allocated(asked, TABLE, 0)
    for _ in range(10):
        steps(scheduler, asked, 10)
    assert sum(hashed) == 6
    scheduler.allocated(asked, TABLE, 0)
    asked.num_computed_tokens = 0
    steps(scheduler, asked, 100)
    assert sum(hashed) == 6, "preempted, with the same tokens"


def test_a_hasher_that_fails_costs_its_request_the_pool(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, asked = half(store), request("a")
    scheduler.allocated(asked, TABLE, 0)
    monkeypatch.setattr(proofs._native, "hash_chain", planted)
    assert steps(scheduler, asked, 100) == []
    assert scheduler.counters.take()[f"{metrics.REQUEST_FAULTS.name}/store"] == 1


def test_a_session_is_not_looked_up_by_hashes_of_other_tokens(store: Store) -> None:
    """vLLM's own cache would be: after a preemption, in versions before 0.32."""
    put(store, old("old").block_hashes)
    for rehashes, found in ((False, 0), (True, 32)):
        asked = session()
        goes_on(asked, rehashes=rehashes)
        scheduler = half(store)
        assert answer(scheduler, asked) == found
        scheduler.close()


def test_false_hashes_are_forgotten_when_the_engine_no_longer_has_their_blocks(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "MIN_PRUNED", 3)
    scheduler = half(store)
    scheduler._proofs._most_false = 3
    pool = BlockPool(32, True, BLOCK_TOKENS)
    scheduler.bind_block_pool(pool)
    asked = old("old")
    pool.cache_full_blocks(asked, pool.get_new_blocks(3), 0, 3, BLOCK_TOKENS, 0)
    false_session(scheduler)
    assert scheduler._proofs._false == {asked.block_hashes[2]}


# What the hashes cover beside tokens.

FEATURES: dict[str, Callable[[], Request]] = {
    "plain": lambda: request_with("a"),
    "adapter": lambda: request_with("a", lora=("adapter", "unknown")),
    "salt": lambda: request_with("a", cache_salt="tenant"),
    "images": lambda: request_with("a", multimodal=[("one", 4, 20), ("two", 40, 30), ("three", 75, 1)]),
    "all": lambda: request_with("a", ("adapter", "unknown"), "tenant", [("one", 4, 20), ("two", 40, 30)]),
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("step_tokens", [100, 16, 40])
def test_hashes_that_cover_more_than_tokens_are_proven_with_it(feature: str, step_tokens: int) -> None:
    asked = FEATURES[feature]()
    proof = proofs.HashProofs("sha256_cbor", BLOCK_TOKENS, lambda _: True)
    for computed in [*range(step_tokens, len(TOKENS), step_tokens), len(TOKENS)]:
        proof.prove(asked, computed)
        assert proof.proven_tokens(asked) == computed // BLOCK_TOKENS * BLOCK_TOKENS
    assert proof.is_true(asked)
    asked.cache_salt = "another"
    assert not proof.is_true(asked)


def test_embeddings_are_proven_by_their_digests() -> None:
    given = request("a", 48)
    asked = Request(
        "embeds", None, given.sampling_params, None, prompt_embeds=torch.rand(40, 8),
        block_hasher=given._block_hasher,
    )  # fmt: skip
    asked.append_output_token_ids(list(range(60)))
    proof = proofs.HashProofs("sha256_cbor", BLOCK_TOKENS, lambda _: True)
    proof.prove(asked, 100)
    assert proof.proven_tokens(asked) == 96
    asked._prompt_embeds_per_block_hashes.clear()
    asked.prompt_embeds = torch.rand(40, 8)
    assert not proof.is_true(asked)
