from __future__ import annotations

from unittest import mock

import msgpack
import pytest

from kvpool.discovery.facts import LEASE_S, UPDATE_LEASE_S, announce_facts, announced_namespaces
from kvpool.key.key import MAX_FACTS, Namespace
from kvpool.store.store import Store

OURS = {"model": "m", "kv_dtype": "bfloat16", "tp": 2, "prefix": True, "isa": "avx512"}


def test_as_many_facts_as_a_namespace_has_are_readable(store: Store) -> None:
    namespace = Namespace("t", {str(number): 1 for number in range(MAX_FACTS - 1)})
    announce_facts(store, namespace, "m")
    assert announced_namespaces(store, "t") == {"m": [namespace]}


def test_alone_nothing_differs(store: Store) -> None:
    namespace = Namespace("t", OURS)
    assert announce_facts(store, namespace, "m") == []
    assert announce_facts(store, namespace, "m") == []
    (document,) = store.announcements(namespace.facts_key).values()
    assert msgpack.unpackb(document) == {"version": 1, "model": "m", "facts": {**OURS, "record_version": 2}}
    assert LEASE_S == 30 * 86400


def test_the_facts_that_differ_are_named(store: Store) -> None:
    theirs = {"model": "m", "kv_dtype": "fp8_e4m3", "tp": 2, "prefix": False, "rope": 10000}
    other = Namespace("t", theirs)
    announce_facts(store, other, "m")
    (sentence,) = announce_facts(store, Namespace("t", OURS), "m")
    assert sentence == (
        f'namespace {other.hex[:8]} of model "m" holds blocks that this worker cannot share: '
        'kv_dtype is "bfloat16" here and "fp8_e4m3" there (--kv-cache-dtype, else --dtype); '
        'isa is "avx512" here and absent there; '
        "prefix is true here and false there; rope is absent here and 10000 there"
    )


def test_the_option_that_differs_leads_and_what_follows_from_it_is_behind(store: Store) -> None:
    """bfloat16 beside float32 led with a size and a digest."""
    ours = {
        "kv_dtype": "bfloat16",
        "weights_dtype": "bfloat16",
        "rope": "09af",
        "group0.payload_nbytes": 4096,
    }
    theirs = {
        "kv_dtype": "float32",
        "weights_dtype": "float32",
        "rope": "17bc",
        "group0.payload_nbytes": 8192,
    }
    announce_facts(store, Namespace("t", theirs), "m")
    (sentence,) = announce_facts(store, Namespace("t", ours), "m")
    assert sentence.partition("cannot share: ")[2] == (
        'kv_dtype is "bfloat16" here and "float32" there (--kv-cache-dtype, else --dtype); '
        'weights_dtype is "bfloat16" here and "float32" there (--dtype); '
        'group0.payload_nbytes is 4096 here and 8192 there; rope is "09af" here and "17bc" there'
    )


def test_a_difference_of_type_alone_is_named(store: Store) -> None:
    announce_facts(store, Namespace("t", {**OURS, "prefix": 1}), "m")
    (sentence,) = announce_facts(store, Namespace("t", OURS), "m")
    assert sentence.endswith("cannot share: prefix is true here and 1 there")


def test_every_other_namespace_has_a_sentence_in_a_stable_order(store: Store) -> None:
    others = sorted((Namespace("t", {**OURS, "tp": tp}) for tp in (1, 4, 8)), key=lambda other: other.hex)
    for other in others:
        announce_facts(store, other, "m")
    sentences = announce_facts(store, Namespace("t", OURS), "m")
    assert [sentence.split()[1] for sentence in sentences] == [other.hex[:8] for other in others]
    assert announce_facts(store, Namespace("t", OURS), "m") == sentences


def test_updates_of_weights_are_no_difference_to_tell(store: Store) -> None:
    """A trainer makes one every few minutes."""
    updated = [Namespace("t", {**OURS, "weights_in_memory": digest}) for digest in ("01", "02")]
    assert [announce_facts(store, one, "m") for one in updated] == [[], []]
    assert announce_facts(store, Namespace("t", OURS), "m") == []
    assert announce_facts(store, updated[0], "m") == []


def test_what_an_update_left_is_forgotten_sooner(store: Store) -> None:
    with mock.patch.object(store, "announce") as announce:
        announce_facts(store, Namespace("t", OURS), "m")
        announce_facts(store, Namespace("t", {**OURS, "weights_in_memory": "01"}), "m")
    assert [one.kwargs["lease_s"] for one in announce.call_args_list] == [LEASE_S, UPDATE_LEASE_S]
    assert UPDATE_LEASE_S == 2 * 86400


def test_other_tenants_and_models_are_none_of_ours(store: Store) -> None:
    announce_facts(store, Namespace("u", {**OURS, "tp": 1}), "m")
    announce_facts(store, Namespace("t", {**OURS, "model": "n"}), "n")
    assert announce_facts(store, Namespace("t", OURS), "m") == []


def test_the_same_weights_under_another_name_are_ours(store: Store) -> None:
    other = Namespace("t", {"weights": "0123", "tp": 4})
    announce_facts(store, other, "n")
    announce_facts(store, Namespace("t", {"weights": "4567", "tp": 2}), "o")
    (sentence,) = announce_facts(store, Namespace("t", {"weights": "0123", "tp": 2}), "m")
    assert sentence == (
        f'namespace {other.hex[:8]} of model "n" holds blocks that this worker cannot share: tp is 2 here and 4 there'
    )


@pytest.mark.parametrize(
    "document",
    [
        b"\xc1",
        b"\x00",
        msgpack.packb([1, 2]),
        msgpack.packb({"version": 2, "model": "m", "facts": {"tp": 1}}),
        msgpack.packb({"version": 1, "model": "m", "facts": [1]}),
        msgpack.packb({"version": 1, "model": "m", "facts": {"tp": 1.5}}),
        msgpack.packb({"version": 1, "model": "m", "facts": {b"tp": 1}}),
        msgpack.packb({"version": 1, "model": "m", "facts": {"tp": 1, "forged": True}}),
        msgpack.packb({"version": 1, "model": "m", "facts": {}}),
    ],
)
def test_a_record_that_does_not_prove_itself_is_passed_over(store: Store, document: bytes) -> None:
    store.announce(Namespace("t", {"tp": 1}).facts_key, document, lease_s=60)
    store.announce("kvpool:t:worker", b"\x81", lease_s=60)
    assert announce_facts(store, Namespace("t", OURS), "m") == []
