"""Native answers: the same bytes as protobuf makes of the same rows, and requests read as protobuf reads them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvpool import ConfigError, _native
from kvpool.index import PrefixIndex
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.partition import merged
from kvpool.index.prompt import Prompt
from kvpool.index.protocol.messages import decode_lookup, decode_prompt, encode_lookup
from kvpool.index.protocol.packed import id_of, pack_responses, read_lookup, with_id
from kvpool.v1 import index_pb2 as pb
from tests.support.fleets import Clock, a_worker, say
from tests.support.wire import batch, packed64, stored

U32 = st.integers(0, (1 << 32) - 1)
U64 = st.integers(0, (1 << 64) - 1)
TEXT = st.text(max_size=20)
PROMPT = [1, 2, 3, 4]

# worker, dp_rank, address, block_tokens; blocks on the device, in the pool; sequence, heard_at_ms, stale
RANKS = st.lists(
    st.tuples(
        TEXT, U32, TEXT, U32, st.integers(0, 4), st.integers(0, 4), U64, st.integers(-(1 << 62), 1 << 62),
        st.booleans(),
    ),
    max_size=6,
)  # fmt: skip


@given(RANKS, st.integers(-(1 << 60), 1 << 60))
def test_an_answer_is_packed_as_protobuf_packs_it(ranks: list[Any], now_ms: int) -> None:
    index = PrefixIndex()
    rows, expected = [], pb.LookupResponse()
    for place, rank in enumerate(ranks):
        worker, dp_rank, address, block_tokens, device, pool, sequence, heard_at_ms, stale = rank
        state = _native.RankState()
        state.sequence, state.heard_at_ms, state.stale = sequence, heard_at_ms, stale
        rows.append((worker, dp_rank, address, block_tokens, f"rank/{place}", f"pool/{place}", "", state))
        if device:
            index.apply(f"rank/{place}", batch(stored(PROMPT[:device])))
        if pool:
            index.apply(f"pool/{place}", batch(stored(PROMPT[:pool], medium="STORAGE")))
        expected.worker.append(worker)
        expected.dp_rank.append(dp_rank)
        expected.address.append(address)
        expected.block_tokens.append(block_tokens)
        expected.prompt_blocks.append(len(PROMPT))
        expected.device_blocks.append(0 if stale else device)
        expected.local_blocks.append(0 if stale else device)
        expected.pool_blocks.append(pool)
        expected.sequence.append(sequence)
        expected.staleness_ms.append(min(max(0, now_ms - heard_at_ms), (1 << 32) - 1))
        expected.stale.append(stale)
        expected.loadable_blocks.append(max(0 if stale else device, pool))
    answer = _native.Rows(tuple(rows), True).answer(index.native, packed64(PROMPT), now_ms, False)
    assert answer.pack() == expected.SerializeToString(deterministic=True)
    assert answer.moved() == ()
    if rows:
        assert answer.most() == (
            len(PROMPT), max(expected.device_blocks), max(expected.local_blocks), max(expected.pool_blocks)
        )  # fmt: skip
        columns = [
            expected.prompt_blocks,
            expected.device_blocks,
            expected.local_blocks,
            expected.pool_blocks,
        ]
        columns += [expected.sequence, expected.staleness_ms, expected.stale, expected.loadable_blocks]
        assert answer.columns() == tuple(map(tuple, columns))
    else:
        assert answer.most() == (0, 0, 0, 0)


def test_a_rank_whose_batches_name_others_has_what_all_of_them_have() -> None:
    index = PrefixIndex()
    index.apply("a", batch(stored([1, 2, 3]), dp_rank=0))
    index.apply("a", batch(stored([1, 2], medium="CPU"), stored([1]), dp_rank=1))
    index.apply("b", batch(stored([1], medium="STORAGE")))
    index.apply("c", batch(stored([1, 2])))
    state = _native.RankState()
    state.stale = False
    rows = _native.Rows(
        (
            ("w", 0, "", 16, "d", "b", "", state),
            ("w", 1, "", 16, "a", "", "", state),
            ("x", 0, "", 16, "c", "b", "", state),
        ),
        True,
    )
    _, device, local, pool, *_ = rows.answer(index.native, packed64([1, 2, 3]), 0, False).columns()
    assert (device, local, pool) == ((0, 1, 2), (0, 2, 2), (1, 0, 1))


# ---- requests

ASCII = st.text(st.characters(max_codepoint=127), max_size=6)
SCOPES = st.builds(
    pb.Scope, model=TEXT | ASCII, tenant=ASCII, lora_name=st.just("") | TEXT, lora_path=st.just("") | ASCII,
    cache_salt=st.just("") | TEXT,
    multimodal=st.just([]) | st.just([pb.MultimodalItem(identifier="i", offset=3, length=4)]),
)  # fmt: skip
PROMPTS = st.one_of(
    st.fixed_dictionaries({"block_hashes": st.binary(max_size=300)}),
    st.fixed_dictionaries({"token_ids": st.binary(max_size=300)}),
    st.fixed_dictionaries({"text": TEXT}),
    st.just({}),
)
IDS = st.just(0) | U64
REQUESTS = st.builds(
    lambda scope, prompt, workers, number: pb.LookupRequest(scope=scope, workers=workers, id=number, **prompt),
    SCOPES, PROMPTS, st.lists(TEXT, max_size=3), IDS,
)  # fmt: skip


def same(packed: bytes) -> bool:
    """Whether the native core reads it; then it says what protobuf would."""
    asked = read_lookup(packed)
    message = pb.LookupRequest.FromString(packed)
    assert asked.id == message.id == id_of(packed)
    read = asked.prompt
    if not isinstance(read, Prompt):
        return False
    expected = decode_prompt(message)
    assert read.nbytes == expected.nbytes
    assert read == replace(expected, multimodal=tuple(expected.multimodal))
    return True


@given(REQUESTS)
def test_requests_are_read_as_protobuf_reads_them(request: pb.LookupRequest) -> None:
    is_plain = request.WhichOneof("prompt") == "block_hashes" or (
        request.WhichOneof("prompt") == "token_ids"
        and len(request.token_ids) % 4 == 0
        and not (request.scope.lora_name or request.scope.lora_path or request.scope.cache_salt)
    )
    texts = [
        request.scope.model, request.scope.lora_name, request.scope.lora_path, request.scope.cache_salt,
        *request.workers,
    ]  # fmt: skip
    is_usual = is_plain and not request.scope.multimodal and all(map(str.isascii, texts))
    assert same(request.SerializeToString()) == is_usual


@given(REQUESTS, st.data())
def test_what_is_flipped_cut_or_doubled_is_read_so_too(
    request: pb.LookupRequest, data: st.DataObject
) -> None:
    packed = bytearray(request.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(packed)))
        packed[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        same(bytes(packed))
    except DecodeError:  # neither reads it
        assert _native.read_lookup_request(bytes(packed)) is None
    except ConfigError:  # a prompt, and requests, which are not parsed
        with suppress(DecodeError):
            assert pb.LookupRequest.FromString(bytes(packed)).requests


@given(REQUESTS, st.binary(max_size=9))
def test_what_ends_like_an_id_is_one_only_as_a_field(request: pb.LookupRequest, noise: bytes) -> None:
    request.block_hashes = noise + b"\x79" + bytes(8)
    request.ClearField("workers")
    same(request.SerializeToString())


@given(st.lists(REQUESTS, max_size=4), IDS, st.booleans())
def test_many_in_one_message_are_read_as_protobuf_reads_them(
    requests: list[pb.LookupRequest], number: int, id_first: bool
) -> None:
    many = pb.LookupRequest(requests=requests)
    parts = [pb.LookupRequest(id=number).SerializeToString(), many.SerializeToString()]
    asked = read_lookup(b"".join(parts if id_first else reversed(parts)))
    assert asked.id == number
    assert list(map(bytes, asked.requests)) == [one.SerializeToString() for one in requests]
    assert (asked.prompt is None) == bool(requests)


@given(st.lists(REQUESTS, min_size=1, max_size=3), st.data())
def test_many_that_are_flipped_or_cut_are_read_so_too(
    requests: list[pb.LookupRequest], data: st.DataObject
) -> None:
    packed = bytearray(pb.LookupRequest(requests=requests, id=7).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(packed)))
        packed[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        asked = read_lookup(bytes(packed))
    except (DecodeError, ConfigError):
        return
    try:
        message = pb.LookupRequest.FromString(bytes(packed))
    except DecodeError:  # of one of them, which is refused by itself
        assert asked.prompt is None
        return
    assert asked.id == message.id
    assert len(asked.requests) == len(message.requests)


def test_replies_to_many_are_packed_as_protobuf_packs_them() -> None:
    replies = [pb.LookupResponse(worker=["w" * nbytes]) for nbytes in (0, 1, 127, 128, 20_000)]
    packed = pack_responses([reply.SerializeToString() for reply in replies])
    expected = pb.LookupResponse(responses=replies, id=1 << 63)
    assert with_id(packed, 1 << 63) == expected.SerializeToString(deterministic=True)


def test_a_fleet_answers_in_bytes_what_it_answers_in_columns() -> None:
    fleet = Fleet(clock=Clock())
    for name in ("a", "b"):
        fleet.add(a_worker(name, ranks=2, namespace="0" * 32), "flag")
        say(fleet, f"default/{name}", 1, 3, batch(stored([1, 2]), stored([1], medium="STORAGE")))
    for workers in (None, ["b"], ["unknown"]):
        answers = fleet.ask("m", hashes64=packed64([1, 2]), workers=workers)
        [answer] = answers
        reply = pb.LookupResponse.FromString(answer.rows.pack())
        assert decode_lookup(reply) == answer.lookup() == merged(answers)
        assert answer.rows.pack() == encode_lookup(answer.lookup()).SerializeToString(deterministic=True)
