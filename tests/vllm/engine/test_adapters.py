"""LoRA adapters are told apart by what the workers hold of them, whatever they are called and wherever they lie."""

from __future__ import annotations

import pytest
from vllm.lora.request import LoRARequest

from kvpool import metrics
from kvpool.store import Store
from kvpool.vllm.engine import adapters
from kvpool.vllm.engine.adapters import GONE, UNDIGESTED, UNREADABLE, AdapterCheck, Adapters, pool_hash
from kvpool.vllm.plan import PoolMetadata
from tests.support.scheduler import (
    NAMESPACE,
    TABLE,
    TOKENS,
    answer,
    computed,
    half,
    hold,
    output,
    request_with,
)

pytestmark = [pytest.mark.vllm]

HASHES = [bytes([number]) * 32 for number in range(4)]
LORA = ("adapter", "/adapters/a")


def lora(number: int = 1, name: str = "adapter", path: str = "/adapters/a") -> LoRARequest:
    return LoRARequest(name, number, path)


def known(*digests: str, settings: str = "", number: int = 1) -> AdapterCheck:
    """What an engine knows whose ranks hold these."""
    one = Adapters(len(digests), settings)
    one.learn({(rank, number): digest for rank, digest in enumerate(digests)})
    return one.check(lora(number))


def wanted(one: Adapters) -> list[LoRARequest]:
    """What the workers are asked for by the next step."""
    step = PoolMetadata()
    one.add_to(step)
    return step.adapters


def test_equal_tensors_are_one_adapter_on_any_number_of_ranks() -> None:
    tag = known("one").tag
    assert tag is not None
    assert known("one", "one", "one").tag == tag == known("one", number=7).tag
    others = [
        known("two").tag,
        known("one", "two").tag,
        known("two", "one").tag,
        known("one", settings="s").tag,
    ]
    assert None not in others
    assert len({tag, *others}) == 5
    undigested = known("one", UNDIGESTED)
    assert (undigested.done, undigested.tag, undigested.cause) == (True, None, "unreadable")


def test_an_adapter_is_known_when_all_ranks_have_said_what_they_hold() -> None:
    one = Adapters(2)
    before, other = one.check(lora()), one.check(lora(2, "other", "/adapters/b"))
    one.learn({(0, 1): "one"})
    assert not before.done
    one.learn({(1, 1): "one"})
    assert (before.done, before.weights and before.weights.digests) == (True, ("one", "one"))
    assert not other.done
    assert one.check(lora()).tag == before.tag


def test_workers_are_asked_once_for_an_adapter_that_is_not_known() -> None:
    one = Adapters(1)
    first, second = one.check(lora()), one.check(lora())
    for check in (first, second, first):
        one.want(check)
    assert wanted(one) == [first.lora_request]
    one.want(second)
    other = one.check(lora(2, "other", "/adapters/b"))
    one.want(other)
    one.want(one.check(lora(3, "third", "/adapters/c")))
    assert wanted(one) == [other.lora_request], "a step is for one"
    assert len(wanted(one)) == 1
    assert wanted(one) == []
    one.learn({(0, 1): UNREADABLE})
    assert [(check.done, check.tag, check.cause) for check in (first, second)] == [
        (True, None, "unreadable")
    ] * 2


@pytest.mark.parametrize("named", ["in the place of the first", "by another number"])
def test_other_tensors_under_one_name_and_path_go_without_the_pool_until_the_caches_are_reset(
    named: str,
) -> None:
    one, number = Adapters(1), 1 if named == "in the place of the first" else 2
    one.learn({(0, 1): "one"})
    first = one.check(lora())
    assert first.tag is not None
    one.learn({(0, number): "two"})
    second = one.check(lora(number))
    assert (second.done, second.tag, second.cause) == (True, None, "changed")
    third = one.check(lora(3))
    assert third.cause == "changed", "the name and path stand in vLLM's hashes"
    one.learn({(0, 4): "three"})
    assert one.check(lora(4, "other", "/adapters/b")).tag is not None
    kept = one.check(lora(4, "other", "/adapters/b"))
    for check in (first, third):
        one.end(check)
    one.reset()
    again = one.check(lora(number))
    assert [(check.done, check.tag, check.weights, check.cause) for check in (second, kept)] == [
        (False, None, None, "late")
    ] * 2
    one.learn({(0, number): "two"})
    assert second.tag == again.tag == known("two").tag


def test_a_request_that_waits_through_a_reset_and_ends_before_its_adapter_is_known_counts() -> None:
    one = Adapters(1)
    waiting = one.check(lora())
    one.end(one.check(lora(2, "other")))
    one.reset()
    one.end(waiting)  # in the step of which the report comes now
    for number in (1, 2):
        one.learn({(0, number): "one"})
        one.learn({(0, number): "two"})
    assert one.check(lora()).cause == "changed"
    assert one.check(lora(2, "other")).tag == known("two").tag, "nothing has computed with it since"


def test_what_changed_and_changed_back_while_nobody_asked_goes_without_the_pool() -> None:
    """Blocks of between may wait to be stored."""
    one = Adapters(1)
    one.learn({(0, 1): "one"})
    one.end(one.check(lora()))
    one.learn({(0, 1): "two"})
    assert one.has_changed(LORA)
    one.learn({(0, 1): "one"})
    assert one.check(lora()).cause == "changed"


def test_a_number_that_stands_for_nothing_any_more_is_asked_for_again() -> None:
    one = Adapters(1)
    one.learn({(0, 1): "one"})
    assert one.check(lora()).done
    one.learn({(0, 1): GONE})
    for _ in range(2):
        again = one.check(lora(1, "other", "/adapters/b"))
        one.want(again)
        assert (again.done, wanted(one)) == (False, [again.lora_request])
        one.learn({(0, 1): "one"})
        one.learn({(0, 1): GONE})


def test_workers_are_asked_for_nothing_that_nobody_waits_for() -> None:
    """Clients leave while many adapters wait to be read, of which each takes a step."""
    one = Adapters(1)
    gone, known_by_now, first, second = (one.check(lora(number, f"{number}")) for number in (1, 2, 3, 3))
    for check in (gone, known_by_now, first):
        one.want(check)
    one.end(gone)
    one.end(first)
    one.learn({(0, 2): "one"})
    assert wanted(one) == [second.lora_request]
    again = one.check(lora(1, "1"))
    one.want(again)
    assert wanted(one) == [again.lora_request]


def test_after_a_reset_workers_tell_all_that_they_hold_at_once() -> None:
    one = Adapters(1)
    asked = [one.check(lora(number, f"{number}")) for number in range(1, 21)]
    one.learn({(0, number): "one" for number in range(1, 21)})
    told = []
    for _ in range(3):
        step = PoolMetadata()
        one.add_to(step)
        told.append(step.tell_adapters)
        one.reset()
    assert told == [False, True, True]
    for _ in range(2):
        one.want(asked[0])
        one.reset()
    one.want(asked[0])
    assert [len(wanted(one)), len(wanted(one))] == [1, 0]
    one.reset()
    for check in asked:
        one.want(check)
    assert len(wanted(one)) == 1
    one.learn({(0, number): "one" for number in range(1, 21)})
    assert all(check.tag for check in asked)
    assert wanted(one) == []


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 2)
    one = Adapters(1)
    for number in (1, 2, 3):
        one.learn({(0, number): "one"})
        check = one.check(lora(number, f"adapter {number}"))
        assert (check.tag is None) == (number == 3)
    assert check.cause == "too_many"
    assert set(one._said) == {2, 3}
    one.end(check)
    assert check not in one._live
    for number in range(4, 40):
        one.learn({(0, number): "one"})
        one.end(one.check(lora(number, "adapter 1")))
        one.learn({(0, number): GONE})
    assert len(one._used) == 2


def test_what_was_used_last_is_remembered_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 2)
    one, of_one, of_two = Adapters(1), ("1", "/adapters/a"), ("2", "/adapters/a")
    for number in (1, 2):
        one.learn({(0, number): "one"})
    for number, name in ((1, "1"), (2, "2"), (1, "1"), (3, "2")):
        one.end(one.check(lora(number, name)))
    one.learn({(0, 2): "one"})
    assert set(one._said) == {1, 2}, "one that is known takes no other's place"
    one.learn({(0, 2): "two"})
    assert not one.has_changed(of_two)
    one.learn({(0, 3): "two"})
    one.learn({(0, 1): "two"})
    assert one.has_changed(of_two)
    assert one.has_changed(of_one), "also of those that are known among too many"


def test_that_there_are_too_many_is_said_once_after_each_reset(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 2)
    one = Adapters(1)
    for _ in range(2):
        one.learn({(0, 1): "one"})
        for number in range(4):
            one.check(lora(1, f"adapter {number}"))
        one.reset()
    assert ["2 adapters" in record.getMessage() for record in caplog.records] == [True, True]


def test_an_adapter_that_cannot_be_read_now_stands_for_no_other_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A file system that did not answer once."""
    one = Adapters(2)
    both = {(0, 1): "one", (1, 1): "one"}
    one.learn(both)
    one.end(one.check(lora()))
    one.learn(dict.fromkeys(both, GONE))
    asked = one.check(lora())
    one.learn({(0, 1): "one", (1, 1): UNREADABLE})
    assert (asked.done, asked.tag, asked.cause) == (True, None, "unreadable")
    one.learn(both)
    assert asked.tag == one.check(lora()).tag == known("one").tag
    assert caplog.records == []


def test_a_number_that_is_given_to_another_path_is_no_fault_of_the_former(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Trainers keep the number, and write each checkpoint to a path of its own."""
    one = Adapters(1)
    for version in ("one", "two", "three"):
        one.learn({(0, 1): version})
        check = one.check(lora(path=f"/adapters/{version}"))
        assert check.tag == known(version).tag
        one.end(check)
    assert caplog.records == []
    assert one.check(lora(path="/adapters/one")).cause == "changed"
    assert one.check(lora(path="/adapters/one")).cause == "changed"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "/adapters/one" in said[0]


def test_a_key_is_open_while_it_is_not_known_what_one_of_its_numbers_stands_for() -> None:
    """A request of the other number may compute in this step, and its blocks are found at once."""
    one = Adapters(1)
    one.learn({(0, 1): "one"})
    first, other = one.check(lora()), one.check(lora(1, "other"))
    second = one.check(lora(2))
    assert [check.done for check in (first, other, second)] == [False, True, False]
    assert (first.tag, first.weights) == (None, None)
    one.want(first)
    one.want(second)
    assert [wanted(one), wanted(one)] == [[second.lora_request], []], "the first is known"
    one.learn({(0, 2): UNREADABLE})
    assert [(check.done, check.cause) for check in (first, second)] == [(False, "late"), (True, "unreadable")]
    one.end(second)
    one.end(second)
    assert first.tag == known("one").tag
    third = one.check(lora(3))
    assert first.tag is None
    one.learn({(0, 3): "one"})
    assert first.tag == third.tag == known("one").tag
    for check in (first, other, third):
        one.end(check)
    assert not one._numbers


def test_a_key_that_is_found_changed_is_so_for_all_requests_that_have_it() -> None:
    one = Adapters(1)
    one.learn({(0, 1): "one", (0, 2): "two"})
    first = one.check(lora())
    other = one.check(lora(1, "other"))
    assert one.check(lora(2)).cause == "changed"
    assert (first.tag, first.weights, first.cause) == (None, None, "changed")
    assert other.tag is not None
    one.end(one.check(lora(3, "third")))
    third = one.check(lora(1, "third"))
    one.learn({(0, 3): "one"})
    assert third.tag is not None
    one.learn({(0, 3): "two"})
    assert (third.tag, third.cause) == (None, "changed"), "by a number that nobody calls it by any more"


@pytest.mark.parametrize("width", [16, 32, 64])
def test_hashes_of_different_adapters_meet_in_their_last_eight_bytes_alone(width: int) -> None:
    plain = [block_hash[:16] * (width // 16) for block_hash in HASHES]
    of_one, of_other = ([pool_hash(one, tag * 16) for one in plain] for tag in (b"a", b"b"))
    assert len({*plain, *of_one, *of_other}) == 3 * len(plain)
    for one, other, block_hash in zip(of_one, of_other, plain, strict=True):
        assert len(one) == len(other) == width
        assert one[-8:] == other[-8:] == block_hash[-8:]
        assert one[:-8] != other[:-8]


def test_a_request_of_an_adapter_that_cannot_be_read_is_computed_and_counted(store: Store) -> None:
    computed(request_with("stored", LORA), store)
    scheduler, asked = half(store), request_with("asked", LORA)
    scheduler.seen(asked)
    assert scheduler.matched_tokens(asked, 0) == (None, True) or scheduler.matched_tokens(asked, 0)[0] is None
    [wanted] = scheduler.plan(output(request_with("x"), 0, TABLE)).adapters
    assert wanted is asked.lora_request
    hold(scheduler, UNREADABLE)
    assert answer(scheduler, asked) == 0
    assert scheduler.plan(output(asked, 96, TABLE)).stores == []
    scheduler.finished(asked)
    assert scheduler.stats()[f"{metrics.ADAPTER_REQUESTS.name}/unreadable"] == 1
    scheduler.close()


@pytest.mark.parametrize("how", ["for good", "until a reset"])
def test_an_engine_that_has_no_pool_has_no_adapter_read(store: Store, how: str) -> None:
    scheduler, asked = half(store), request_with("asked", LORA)
    if how == "for good":
        scheduler.switch_off("planted")
    else:
        scheduler._namespace.is_off = True
    scheduler.seen(asked)
    assert scheduler.matched_tokens(asked, 0) == (0, False)
    assert scheduler.plan(output(request_with("x"), 0, TABLE)).adapters == []
    scheduler.close()


@pytest.mark.parametrize("digest", ["one", "two"])
def test_a_hit_is_of_the_tensors_that_this_engine_holds(store: Store, digest: str) -> None:
    computed(request_with("stored", LORA), store)
    scheduler, asked = half(store), request_with("asked", LORA)
    hold(scheduler, digest)
    scheduler.seen(asked)
    assert answer(scheduler, asked) == (96 if digest == "one" else 0)
    scheduler.close()


def test_a_request_without_the_pool_has_no_adapter_read_and_is_not_counted(store: Store) -> None:
    scheduler, asked = half(store), request_with("asked", LORA)
    asked.kv_transfer_params = {"kvpool": {"load": False, "store": False}}
    scheduler.seen(asked)
    assert scheduler.matched_tokens(asked, 0) == (0, False)
    assert scheduler.plan(output(request_with("x"), 0, TABLE)).adapters == []
    scheduler.finished(asked)
    assert not [name for name in scheduler.counters.take() if name.startswith(metrics.ADAPTER_REQUESTS.name)]
    scheduler.close()


def test_blocks_that_are_computed_before_the_adapter_is_known_are_stored_when_it_is(store: Store) -> None:
    scheduler, asked = half(store), request_with("asked", LORA)
    scheduler.seen(asked)
    scheduler.allocated(asked, TABLE, 0)
    assert scheduler.plan(output(asked, 48, TABLE)).stores == []
    hold(scheduler, "one")
    asked.num_computed_tokens = 48
    stored = scheduler.plan(output(asked, 48, TABLE)).stores
    assert [block.block_ids for block in stored] == [(block,) for block in TABLE[0][:6]]
    assert not {block.block_hash for block in stored} & set(asked.block_hashes)
    assert NAMESPACE.keys([block.block_hash for block in stored], 0, 0)
    assert len(TOKENS) > 96
    scheduler.close()
