"""RFC 1403: what is read, what is refused in one line, and every spelling of an answer."""

from __future__ import annotations

import json
import struct
from array import array
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import ConfigError, UnknownModel
from kvpool.index import Publisher, Worker
from kvpool.index.answer import TierRow
from kvpool.index.prompt import Prompt
from kvpool.index.serve import rfc1403
from kvpool.index.serve.encoding import Encoding
from kvpool.key.hashing import seed_id


def packed(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


# ---- requests


def test_a_question_as_mooncake_spells_it() -> None:
    raw = packed(
        model="deepseek", lora_name="sql-adapter", lora_path="/sql", token_ids=[101, 15, 0], tenant_id="t",
        instance_id="vllm-1", block_size=64, cache_salt="w8a8", medium=["G1"],
    )  # fmt: skip
    query = rfc1403.decode_query(raw, by_hash=False)
    assert query[1:] == (64, False, Encoding.JSON)
    assert query.prompt == Prompt(
        "deepseek", token_ids=array("I", [101, 15, 0]), tenant="t", workers=["vllm-1"], lora=("sql-adapter", "/sql"),
        cache_salt="w8a8",
    )  # fmt: skip


def test_a_question_as_dynamo_spells_it() -> None:
    query = rfc1403.decode_query(packed(model_name="m", token_ids=[1], lora_name=None), by_hash=False)
    assert query == (Prompt("m", token_ids=array("I", [1])), None, True, Encoding.JSON)


def test_a_routing_group_is_a_tenant() -> None:
    """As Dynamo has called it since 1.3."""

    def tenant(**fields: Any) -> str:
        return rfc1403.decode_query(
            packed(model_name="m", token_ids=[1], **fields), by_hash=False
        ).prompt.tenant

    assert (
        tenant(routing_group="g") == tenant(tenant_id="g") == tenant(tenant_id="g", routing_group="g") == "g"
    )
    assert tenant(routing_group=None) == "default"
    with pytest.raises(ConfigError, match="mean the same here, and differ"):
        tenant(routing_group="g", tenant_id="t")


@pytest.mark.parametrize("prompt", [{"token_ids": []}, {"seq_hashes": []}])
def test_an_empty_prompt_is_a_question(prompt: dict[str, Any]) -> None:
    query = rfc1403.decode_query(packed(model="m", **prompt), by_hash="seq_hashes" in prompt)
    assert query.prompt.is_empty


def test_ids_may_be_numbers() -> None:
    raw = packed(model="m", token_ids=[1], tenant_id=99, instance_id=7, cache_salt=334455, lora_id=-1)
    prompt = rfc1403.decode_query(raw, by_hash=False).prompt
    assert (prompt.tenant, prompt.workers, prompt.cache_salt) == ("99", ["7"], "334455")


@pytest.mark.parametrize("field", ["seq_hashes", "block_hash", "block_hashes"])
def test_hashes(field: str) -> None:
    raw = packed(model="m", cache_salt="s", lora_name="l", **{field: [7, -1, -(1 << 63), (1 << 63) + 5]})
    expected = [7, (1 << 64) - 1, 1 << 63, (1 << 63) + 5]
    assert rfc1403.decode_query(raw, by_hash=True).prompt == Prompt("m", hashes64=array("Q", expected))
    assert array("Q", expected).tobytes() == struct.pack("<4Q", *expected)


TOKENS, HASHES = {"model": "m", "token_ids": [1]}, {"model": "m", "seq_hashes": [1]}


@pytest.mark.parametrize(
    ("by_hash", "raw", "says"),
    [
        (False, b"", "the request is not JSON"),
        (False, b"{", "the request is not JSON"),
        (False, b"\xff\xfe{", "the request is not JSON"),
        (False, b"[" * 100_000, "not a JSON object"),
        (False, b'{"token_ids": [%s]}' % (b"1" * 10_000), "from 0 to 4294967295"),
        (False, b"[1]", "not a JSON object"),
        (False, packed(token_ids=[1]), "name the model, as model or as model_name"),
        (False, packed(**TOKENS, model_name="m"), "and not as both"),
        (False, packed(model=[], token_ids=[1]), "model is text, not list"),
        (False, packed(model={"a": [[1]]}, token_ids=[1]), "model is text, not dict"),
        (False, packed(model="m"), "token_ids is a list of whole numbers"),
        (False, packed(model="m", token_ids="1"), "token_ids is a list"),
        (False, packed(model="m", token_ids=[1, True]), "token_ids is a list of whole numbers"),
        (False, packed(model="m", token_ids=[1.0]), "token_ids is a list of whole numbers"),
        (False, packed(model="m", token_ids=[None]), "token_ids is a list of whole numbers"),
        (False, packed(model="m", token_ids=[-1]), "token_ids are whole numbers from 0 to 4294967295"),
        (False, packed(model="m", token_ids=[1 << 32]), "from 0 to 4294967295"),
        (False, packed(**TOKENS, block_size=-1), "block_size is a whole number from 0"),
        (
            False,
            packed(**TOKENS, block_size="16"),
            'block_size is a whole number from 0 to 1048576, not "16"',
        ),
        (False, packed(**TOKENS, block_size=True), "block_size is a whole number"),
        (False, packed(**TOKENS, tenant_id=True), "tenant_id is text"),
        (False, packed(**TOKENS, instance_id={"a": 1}), "instance_id is text"),
        (False, packed(**TOKENS, lora_name="l"), "lora_path is missing"),
        (False, packed(**TOKENS, lora_id=12), "lora_id does not say which adapter"),
        (True, packed(model="m"), "give the hashes, once, as seq_hashes"),
        (True, packed(**HASHES, block_hash=[1]), "give the hashes, once"),
        (True, packed(model="m", seq_hashes=["1"]), "seq_hashes is a list of whole numbers"),
        (True, packed(model="m", seq_hashes=[1 << 64]), "seq_hashes are whole numbers"),
        (True, packed(model="m", block_hashes=[1, -(1 << 63) - 1]), "block_hashes are whole numbers"),
    ],
)
def test_what_is_no_question(by_hash: bool, raw: bytes, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rfc1403.decode_query(raw, by_hash=by_hash)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def _values(integers: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none() | st.booleans() | integers | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    )


JSON = _values(st.integers())
SMALL_JSON = _values(st.integers(-(1 << 63), (1 << 64) - 1))  # what msgpack can say
FIELDS = (
    "model", "model_name", "modelname", "token_ids", "seq_hashes", "block_hash", "tenant_id", "instance_id", "type",
    "block_size", "cache_salt", "lora_name", "lora_id", "dp_rank", "endpoint", "hash_profile", "routing_group",
)  # fmt: skip


@given(
    st.binary(max_size=40)
    | st.dictionaries(st.sampled_from(FIELDS), JSON).map(lambda f: json.dumps(f).encode())
    | st.dictionaries(st.sampled_from(FIELDS), st.binary(max_size=9) | SMALL_JSON).map(msgpack.packb),
    st.sampled_from(Encoding),
)
def test_whatever_is_sent_is_read_or_refused(raw: bytes, encoding: Encoding) -> None:
    for decode in (
        lambda: rfc1403.decode_query(raw, by_hash=False, encoding=encoding),
        lambda: rfc1403.decode_query(raw, by_hash=True, encoding=encoding),
        lambda: rfc1403.decode_registration(raw, encoding), lambda: rfc1403.decode_removal(raw, encoding),
    ):  # fmt: skip
        says = ""
        try:
            decode()
        except ConfigError as error:
            says = str(error)
        assert "\n" not in says


# ---- registrations


REGISTER = {
    "endpoint": "tcp://1.1.1.1:5557", "replay_endpoint": "tcp://1.1.1.1:5558", "type": "vLLM", "modelname": "deepseek",
    "lora_name": "sql-adapter", "tenant_id": "t", "instance_id": "vllm-prefill-node1", "block_size": 128, "dp_rank": 1,
    "additionalsalt": "w8a8",
}  # fmt: skip
PROFILE = {
    "strategy": "vllm_v1", "algorithm": "sha256_cbor", "python_hash_seed": "7", "index_projection": "low64_be",
}  # fmt: skip


def test_a_registration_as_published() -> None:
    asked = rfc1403.decode_registration(json.dumps(REGISTER).encode())
    publisher = Publisher(1, "tcp://1.1.1.1:5557", "tcp://1.1.1.1:5558")
    assert asked == ("t", "vllm-prefill-node1", "deepseek", 128, publisher, False, "sha256_cbor", "")
    dynamo = packed(instance_id=1, endpoint="tcp://h:1", model_name="m", block_size=16)
    assert rfc1403.decode_registration(dynamo) == rfc1403.Registration(
        "default", "1", "m", 16, Publisher(0, "tcp://h:1"), as_dynamo=True
    )
    removal = packed(instance_id="a", tenant_id="t", dp_rank=3, type="vLLM", modelname="m")
    assert rfc1403.decode_removal(removal) == ("t", "a", 3, False)
    assert rfc1403.decode_removal(packed(instance_id=1, model_name="m")) == ("default", "1", None, True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"endpoint": None}, "endpoint is missing"),
        ({"instance_id": ""}, "instance_id is missing"),
        ({"block_size": 0}, "block_size is missing"),
        ({"modelname": None}, "name the model"),
        ({"type": "Mooncake"}, 'type "Mooncake" is not followed'),
        ({"dp_rank": 65536}, "dp_rank is a whole number from 0 to 65535, not 65536"),
        ({"hash_profile": "vllm"}, 'hash_profile is an object, not "vllm"'),
        ({"hash_profile": {**PROFILE, "strategy": "sglang_v1"}}, 'strategy "sglang_v1" is not followed'),
        ({"hash_profile": {**PROFILE, "index_projection": "high64"}}, "only low64_be is"),
        ({"hash_profile": {**PROFILE, "algorithm": ""}}, "hash_profile needs algorithm"),
        ({"hash_profile": {**PROFILE, "python_hash_seed": None}}, "needs algorithm and python_hash_seed"),
    ],
)
def test_what_is_no_registration(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        rfc1403.decode_registration(json.dumps({**REGISTER, **change}).encode())


def test_ranks_are_put_together() -> None:
    def asked(rank: int, model: str = "m", block_tokens: int = 16, port: int = 1) -> rfc1403.Registration:
        publisher = Publisher(rank, f"tcp://h:{port}")
        return rfc1403.Registration("t", "w", model, block_tokens, publisher)

    first = rfc1403.with_rank(asked(1), None, "0" * 16)
    assert first == Worker("w", "m", 16, "0" * 16, (Publisher(1, "tcp://h:1"),), "t")
    both = rfc1403.with_rank(asked(0, port=2), first, "f" * 16)
    assert [one.dp_rank for one in both.publishers] == [0, 1]
    assert both.hash_seed_id == "0" * 16
    assert rfc1403.with_rank(asked(1, port=3), both, "").publishers[1].events == "tcp://h:3"
    assert len(rfc1403.with_rank(asked(0, model="n"), both, "0" * 16).publishers) == 1
    assert len(rfc1403.with_rank(asked(0, block_tokens=32), both, "0" * 16).publishers) == 1
    assert rfc1403.without_rank(both, 0) == first
    assert rfc1403.without_rank(first, 1) is None


def test_a_worker_that_hashes_otherwise_than_the_index_is_refused() -> None:
    def asked(**profile: Any) -> rfc1403.Registration:
        said = {**REGISTER, "hash_profile": {**PROFILE, **profile}}
        return rfc1403.decode_registration(json.dumps(said).encode())

    worker = rfc1403.with_rank(asked(), None, seed_id("7"))
    assert (worker.hash_algorithm, worker.hash_seed_id) == ("sha256_cbor", seed_id("7"))
    for seed in (None, "0", "07"):
        with pytest.raises(ConfigError, match=r'"7" is not the seed of this index, .* PYTHONHASHSEED'):
            rfc1403.with_rank(asked(), None, seed_id(seed))
    assert (
        rfc1403.with_rank(asked(algorithm="xxhash_cbor"), worker, seed_id("7")).hash_algorithm
        == "xxhash_cbor"
    )
    further = asked()._replace(publisher=Publisher(0, "tcp://h:1"))
    assert len(rfc1403.with_rank(further, worker, seed_id("7")).publishers) == 2
    assert (
        len(rfc1403.with_rank(further, replace(worker, hash_seed_id="0" * 16), seed_id("7")).publishers) == 1
    )


# ---- answers


ROWS = [  # where rank 0 of a ends, its pool goes on
    TierRow("a", 0, 16, 10, 4, 6, 0, local_blocks=7, pool_blocks=2, memory_blocks=6, loadable_blocks=9),
    TierRow("a", 1, 16, 10, 5, 0, 3, local_blocks=5, pool_blocks=2, memory_blocks=5, loadable_blocks=5),
    TierRow("b", 0, 32, 5, 0, 0, 0, local_blocks=0, pool_blocks=1, memory_blocks=0, loadable_blocks=1),
]
BY_MEDIUM = {
    "a": {"longest_matched": 144, "GPU": 80, "DP": {"0": 64, "1": 80}, "CPU": 96, "DISK": 48, "POOL": 32},
    "b": {"longest_matched": 32, "GPU": 0, "DP": {"0": 0}, "CPU": 0, "DISK": 0, "POOL": 32},
}
CUMULATIVE = {
    "a": {"longest_matched": 144, "gpu": 80, "dp": {"0": 64, "1": 80}, "cpu": 96, "disk": 144},
    "b": {"longest_matched": 32, "gpu": 0, "dp": {"0": 0}, "cpu": 0, "disk": 32},
}
CONDUCTOR = {
    "a": {
        **CUMULATIVE["a"],
        "rank_matches": {
            "0": {"gpu": 64, "cpu": 96, "disk": 144}, "1": {"gpu": 80, "cpu": 80, "disk": 80},
        },
    },
    "b": {**CUMULATIVE["b"], "rank_matches": {"0": {"gpu": 0, "cpu": 0, "disk": 32}}},
}  # fmt: skip


def question(encoding: Encoding = Encoding.JSON, **fields: Any) -> rfc1403.Query:
    raw = encoding.encode({"token_ids": [1], **fields})
    return rfc1403.decode_query(raw, by_hash=False, encoding=encoding)


def test_an_answer_in_json_is_as_mooncake_spelt_it_in_april_and_since_july() -> None:
    """Their questions are the same."""
    assert rfc1403.encode_answer(question(model="m", tenant_id="t"), ROWS) == {
        "t": BY_MEDIUM, "instances": CONDUCTOR,
    }  # fmt: skip
    assert rfc1403.encode_answer(question(model="m"), []) == {"default": {}, "instances": {}}


def test_a_tenant_may_be_called_instances() -> None:
    answer = rfc1403.encode_answer(question(model="m", tenant_id="instances"), ROWS)
    for form in (BY_MEDIUM, CONDUCTOR):
        assert all(fields.items() <= answer["instances"][name].items() for name, fields in form.items())


def test_an_answer_in_msgpack_is_as_mooncakes_conductor_spells_it() -> None:
    answer = rfc1403.encode_answer(question(Encoding.MSGPACK, model="m", tenant_id="t"), ROWS)
    assert answer == {"instances": CONDUCTOR}
    assert Encoding.MSGPACK.decode(Encoding.MSGPACK.encode(answer)) == answer


def test_an_answer_as_dynamo_spells_it() -> None:
    assert rfc1403.encode_answer(question(model_name="m"), ROWS) == {
        "scores": {"a": {"0": 64, "1": 80}, "b": {"0": 0}},
        "frequencies": [],
        "tree_sizes": {},
        "instances": CUMULATIVE,
    }


def test_an_answer_is_of_one_block_size_where_one_is_named() -> None:
    assert list(rfc1403.encode_answer(question(model="m", block_size=32), ROWS)["default"]) == ["b"]
    with pytest.raises(
        UnknownModel, match='no worker of model "m" has blocks of 64 tokens; known are 16, 32'
    ):
        rfc1403.encode_answer(question(model="m", block_size=64), ROWS)
