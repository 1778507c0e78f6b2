from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.key.key import (
    BlockKey,
    FoundKey,
    GroupLayout,
    Layout,
    Namespace,
    differing_facts,
    is_request_key,
    parse_facts_key,
    parse_key,
    parse_tenant,
    parse_worker_key,
    rank_key,
    request_key,
    split_key,
    tenant_prefix,
    worker_key,
    workers_prefix,
    writer_name,
)

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "namespaces.json").read_text()
)
FACTS: dict[str, str | int | bool] = {"model": "tiny", "kv_dtype": "bfloat16", "tp": 1, "eager": True}
FULL = GroupLayout(
    block_tokens=32, layers=3, payload_nbytes=3 * 65536,
    shapes=((2, 32, 8, 64),) * 3, strides=((16384, 512, 64, 1),) * 3,
)  # fmt: skip

facts = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    st.one_of(
        st.text(st.characters(codec="utf-8"), max_size=20),
        st.integers(-(1 << 63), (1 << 63) - 1),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("row", GOLDEN, ids=range(len(GOLDEN)))
def test_golden_namespaces(row: dict[str, Any]) -> None:
    namespace = Namespace(row["tenant"], row["facts"])
    assert namespace.hex == row["namespace"]
    assert namespace.fingerprint.hex() == row["namespace"]
    assert namespace.facts_key == row["facts_key"]
    assert namespace.key(bytes.fromhex(row["hash"]), row["group"], row["rank"]) == row["key"]


def test_keys_are_spelled_as_designed() -> None:
    namespace = Namespace("team_a", FACTS)
    blocks = [bytes(32), bytes(range(32)), b"\xff" * 8, b"\x01" * 64]
    assert namespace.keys(blocks, 3, 65535) == [
        f"kvpool:team_a:{namespace.hex}:{block.hex()}:3:65535" for block in blocks
    ]
    assert namespace.keys([], 0, 0) == []
    assert tenant_prefix("team_a") == "kvpool:team_a:"
    assert namespace.key(bytes(32), 0, 0).startswith(tenant_prefix("team_a"))


@given(st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True), st.binary(min_size=8, max_size=64),
       st.integers(0, 65535), st.integers(0, 65535))  # fmt: skip
def test_a_key_can_be_read_back(tenant: str, block: bytes, group: int, rank: int) -> None:
    namespace = Namespace(tenant, FACTS)
    key = namespace.key(block, group, rank)
    assert key.isascii()
    assert key.isprintable()
    assert parse_key(key) == BlockKey(tenant, namespace.fingerprint, block, group, rank)
    assert parse_facts_key(namespace.facts_key) == (tenant, namespace.hex)
    assert parse_facts_key(key) is None


@pytest.mark.parametrize("bad", ["", "a" * 65, "a:b", "a b", "a{b}", "ü", "a\n", "a*", None, 5])
def test_a_tenant_that_does_not_fit_a_key(bad: Any) -> None:
    with pytest.raises(ConfigError, match="use 1 to 64 letters, digits, underscores or hyphens"):
        Namespace(bad, FACTS)
    with pytest.raises(ConfigError):
        tenant_prefix(bad)


@pytest.mark.parametrize("index", [-1, 65536, 1.0, True, "1", None])
def test_a_bad_group_or_rank(index: Any) -> None:
    namespace = Namespace("t", FACTS)
    with pytest.raises(ConfigError, match="group is a whole number from 0 to 65535"):
        namespace.key(bytes(32), index, 0)
    with pytest.raises(ConfigError, match="rank is a whole number from 0 to 65535"):
        namespace.keys([bytes(32)], 0, index)


def test_a_worker_has_a_key_for_each_rank() -> None:
    key = worker_key("team_a", "[fd00::7]:5557", 65535)
    assert key == "kvpool:team_a:worker:65535:[fd00::7]:5557"
    assert key.startswith(workers_prefix("team_a"))
    assert parse_worker_key(key) == ("team_a", "[fd00::7]:5557", 65535)
    assert parse_tenant(key) == "team_a"
    assert parse_worker_key(Namespace("t", FACTS).facts_key) is None
    assert parse_worker_key("kvpool:t:worker:65536:w") is None


def test_a_request_lies_beside_the_record_and_is_none() -> None:
    key = worker_key("t", "w", 3)
    assert request_key(key) == "kvpool:t:worker:3:w?"
    assert request_key(key).startswith(key)
    assert is_request_key(request_key(key))
    assert parse_worker_key(request_key(key)) is None
    for other in (
        key,
        "?",
        "kvpool:t:worker:3:?",
        "kvpool:t:worker:3:w??",
        Namespace("t", FACTS).facts_key + "?",
    ):
        assert not is_request_key(other)
    assert parse_tenant("kvpool::x") is None
    for tenant, name, rank in (
        ("a:b", "w", 0),
        ("t", "", 0),
        ("t", "a b", 0),
        ("t", "w" * 129, 0),
        ("t", "w", -1),
    ):
        with pytest.raises(ConfigError):
            worker_key(tenant, name, rank)


@pytest.mark.parametrize("nbytes", [0, 7, 65])
def test_a_bad_hash(nbytes: int) -> None:
    with pytest.raises(ConfigError, match="8 to 64 bytes"):
        Namespace("t", FACTS).keys([bytes(32), bytes(nbytes)], 0, 0)


GOOD_KEY = Namespace("t", FACTS).key(bytes(16), 1, 2)


@pytest.mark.parametrize(
    "bad",
    [
        "", "x", GOOD_KEY[:-1], GOOD_KEY + "0" * 5, GOOD_KEY + "\n", " " + GOOD_KEY, GOOD_KEY + ":1",
        GOOD_KEY.replace(":1:2", ":01:2"), GOOD_KEY.replace(":1:2", ":1:-2"),
        GOOD_KEY.replace(":1:2", ":1:65536"),
        GOOD_KEY.replace(":1:2", ":99999:2"), GOOD_KEY.replace("00:1:2", "0:1:2"),
        GOOD_KEY.replace("00:1:2", "0G:1:2"), GOOD_KEY.replace("00:1:2", "0A:1:2"),
        GOOD_KEY.replace(":1:2", ":\u0661:2"), GOOD_KEY.encode(), None,
    ],
)  # fmt: skip
def test_what_is_no_key(bad: Any) -> None:
    with pytest.raises(ConfigError, match="is not a kvpool key"):
        parse_key(bad)


@given(facts, facts)
def test_namespaces_are_equal_when_their_facts_are(ours: Any, theirs: Any) -> None:
    one, other = Namespace("t", ours), Namespace("t", theirs)
    same = differing_facts(ours, theirs) == []
    assert (one == other) == same == (one.hex == other.hex)
    assert one == Namespace("t", dict(reversed(ours.items())))
    assert hash(one) == hash(Namespace("t", ours))
    assert one != Namespace("u", ours)


def test_every_fact_and_its_type_count() -> None:
    fingerprints = {
        Namespace("t", changed).hex
        for changed in (FACTS, {**FACTS, "tp": 2}, {**FACTS, "tp": True}, {**FACTS, "tp": "1"},
                        {**FACTS, "pp": 1},
                        {**FACTS, "eager": 1}, {name: FACTS[name] for name in ("model", "kv_dtype", "tp")})
    }  # fmt: skip
    assert len(fingerprints) == 7


def test_of_a_subclass_of_text_the_characters_count() -> None:
    """vLLM hands out such objects, which know more than they spell (``huggingface_hub.ResolvedRevision``)."""

    class Revision(str):
        resolved = "0123"

        def __str__(self) -> str:
            return self.resolved

    namespace = Namespace("t", {**FACTS, Revision("revision"): Revision("main")})
    assert namespace == Namespace("t", {**FACTS, "revision": "main"})
    assert {type(one) for pair in namespace.facts.items() for one in pair} == {str, int, bool}
    with pytest.raises(ConfigError, match="at most 4096 characters"):
        Namespace("t", {"revision": Revision("x" * 4097)})


def test_a_namespace_is_frozen() -> None:
    given_facts = dict(FACTS)
    namespace = Namespace("t", given_facts)
    given_facts["tp"] = 9
    assert namespace.facts == {**FACTS, "record_version": 2}
    with pytest.raises(TypeError):
        namespace.facts["tp"] = 9  # type: ignore[index]
    with pytest.raises(AttributeError):
        namespace.tenant = "u"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({}, "1 to 4096 facts, not 0"),
        ({str(number): 1 for number in range(4096)}, "not 4097"),
        ({"a": 1.5}, "fact 'a' is a str, int or bool, not float"),
        ({"a": None}, "not NoneType"),
        ({"a": [1]}, "not list"),
        ({"a": 1 << 63}, "does not fit in 64 bits"),
        ({"a": "x" * 4097}, "at most 4096 characters, not 4097"),
        ({"": 1}, "a fact's name"),
        ({5: 1}, "a fact's name"),
        ({"a": "\ud800"}, "not Unicode"),
    ],
)
def test_bad_facts(bad: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Namespace("t", bad)


def test_differing_facts_names_what_a_side_lacks() -> None:
    ours: dict[str, Any] = {"a": 1, "b": "x", "c": True, "e": 1}
    theirs: dict[str, Any] = {"a": 1, "b": "y", "d": 5, "e": True}
    assert differing_facts(ours, theirs) == [
        ("b", "x", "y"),
        ("c", True, None),
        ("d", None, 5),
        ("e", 1, True),
    ]
    assert differing_facts(ours, ours) == []


def test_a_writer_is_a_host_and_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = writer_name("one start"), writer_name("another start")
    assert writer_name("one start") == first
    assert (len(first), first[:8]) == (16, second[:8])
    assert first[8:] != second[8:]
    monkeypatch.setattr("socket.gethostname", lambda: "another host")
    elsewhere = writer_name("one start")
    assert elsewhere[:8] != first[:8]
    assert elsewhere[8:] == first[8:]


def test_layout_facts() -> None:
    window = GroupLayout(
        block_tokens=16, layers=2, payload_nbytes=4096, attention="sliding_window:1024",
        shapes=((2, 16), (2, 8)), strides=((16, 1), (8, 1)),
    )  # fmt: skip
    assert Layout("bfloat16", (FULL, window)).facts() == {
        "kv_dtype": "bfloat16",
        "groups": 2,
        "group0.block_tokens": 32,
        "group0.layers": 3,
        "group0.payload_nbytes": 196608,
        "group0.shapes": "3*2x32x8x64",
        "group0.strides": "3*16384x512x64x1",
        "group0.attention": "full",
        "group1.block_tokens": 16,
        "group1.layers": 2,
        "group1.payload_nbytes": 4096,
        "group1.shapes": "1*2x16,1*2x8",
        "group1.strides": "1*16x1,1*8x1",
        "group1.attention": "sliding_window:1024",
    }
    Namespace("t", Layout("bfloat16", (FULL, window)).facts())
    of_one = Layout("bfloat16", (FULL, None)).facts()
    assert of_one == Layout("bfloat16", (FULL,)).facts() | {"groups": 2}, (
        "the pool has nothing of the other group"
    )


def test_every_field_of_a_layout_is_a_fact() -> None:
    changed = [
        replace(FULL, block_tokens=16), replace(FULL, payload_nbytes=1), replace(FULL, attention="mla"),
        replace(FULL, shapes=((2, 32, 8, 32),) * 3), replace(FULL, strides=((1, 512, 64, 16384),) * 3),
        replace(FULL, layers=2, shapes=FULL.shapes[:2], strides=FULL.strides[:2]),
        replace(FULL, shapes=((2, 32, 8, 64),) * 2 + ((2, 32, 4, 128),)),
    ]  # fmt: skip
    layouts = [Layout("bfloat16", (group,)) for group in [FULL, *changed]]
    layouts += [Layout("float16", (FULL,)), Layout("bfloat16", (FULL, FULL))]
    assert len({Namespace("t", layout.facts()).hex for layout in layouts}) == len(layouts)
    assert Layout("bfloat16", (FULL,)) == Layout("bfloat16", (replace(FULL),))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_tokens": 0}, "block_tokens is a positive whole number"),
        ({"payload_nbytes": 1.0}, "payload_nbytes is a positive whole number"),
        ({"layers": 2}, "2 layers need as many shapes and strides, not 3 and 3"),
        ({"strides": ((1,),) * 3}, "do not describe one block"),
        ({"shapes": ((2, 32, 8, 0),) * 3}, "do not describe one block"),
        ({"attention": ""}, "attention is empty"),
    ],
)
def test_a_bad_layout(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(FULL, **change)
    with pytest.raises(ConfigError):
        Layout("", (FULL,))
    with pytest.raises(ConfigError):
        Layout("bfloat16", ())


@pytest.mark.parametrize("nbytes", [8, 16, 32, 64])
def test_a_found_key_says_what_events_say(nbytes: int) -> None:
    namespace = Namespace("tenant_1", {"model": "m"})
    digest = bytes(range(100, 100 + nbytes))
    key = namespace.key(digest, 12, 65535)
    found = FoundKey("tenant_1", namespace.hex, int.from_bytes(digest[-8:], "big"), 12, 65535)
    assert split_key(key) == found
    assert rank_key(key, 3) == namespace.key(digest, 12, 3)


def test_a_namespace_travels_between_processes() -> None:
    one = Namespace("t", {"model": "m", "size": 3, "flag": True})
    other = copy.deepcopy(one)  # by the same protocol as pickle
    assert other == one
    assert (other.facts, other.hex, other.key(bytes(32), 0, 0)) == (
        one.facts,
        one.hex,
        one.key(bytes(32), 0, 0),
    )
