"""Names that resolve, that do not, and that hang: nobody waits for the names of others."""

from __future__ import annotations

import pytest

from kvpool.index.net import resolver as module
from kvpool.index.net.resolver import Resolver, Unresolved, addresses_of
from tests.support.deadlines import eventually
from tests.support.fleets import Clock
from tests.support.networks import WITHIN_S, Names


def test_an_address_is_looked_up_again_when_it_is_no_longer_fresh(names: Names) -> None:
    clock = Clock()
    resolver = Resolver(clock=clock)
    assert resolver.resolve("127.0.0.9").result(0) == ("127.0.0.9",)
    assert resolver.resolve("::1").result(0) == ("::1",)
    for _ in range(3):
        assert resolver.resolve("a.test").result(WITHIN_S) == ("127.0.0.1",)
    assert names.asked == ["a.test"]
    names.known["a.test"] = "127.0.0.2"
    clock.now_s += module.FRESH_S
    assert resolver.resolve("a.test").result(WITHIN_S) == ("127.0.0.2",)


def test_a_name_that_does_not_resolve_is_tried_again_later_and_later(names: Names) -> None:
    clock = Clock()
    resolver = Resolver(clock=clock)
    for attempt, backoff_s in enumerate((0.5, 1, 2, 4, 8, 16, 30, 30), 1):
        for _ in range(2):
            with pytest.raises(
                Unresolved, match=r"the name b\.test does not resolve: Name or service not known"
            ):
                resolver.resolve("b.test").result(WITHIN_S)
        assert len(names.asked) == attempt
        clock.now_s += backoff_s
    names.known["b.test"] = "127.0.0.3"
    assert resolver.resolve("b.test").result(WITHIN_S) == ("127.0.0.3",)


@pytest.mark.anyio
async def test_who_waits_for_a_name_leaves_nothing_in_its_answer(names: Names) -> None:
    answer = Resolver(clock=Clock()).resolve("b.test")
    errors = []
    for _ in range(2):
        with pytest.raises(Unresolved, match=r"b\.test does not resolve") as caught:
            await addresses_of(answer)
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    error = answer.exception()
    assert error is not None
    assert error.__traceback__ is None


def test_addresses_that_are_not_allowed_are_none(names: Names) -> None:
    """Else a name would lead where its numeric address may not."""
    allowed = {"10.0.0.7"}
    resolver = Resolver(allows=lambda owner, address: address in allowed, trusted={("x", "mine.test", 5557)})
    names.known = {"a.test": "127.0.0.1", "Mine.test": "127.0.0.1", "b.test": "10.0.0.7"}
    with pytest.raises(Unresolved, match="its addresses are not in --worker-networks"):
        resolver.resolve("a.test").result(WITHIN_S)
    assert resolver.resolve("b.test").result(WITHIN_S) == ("10.0.0.7",)
    assert resolver.resolve("Mine.test", "x", 5557).result(WITHIN_S) == ("127.0.0.1",)
    for owner, port in (("y", 5557), ("x", 6379)):
        with pytest.raises(Unresolved, match="its addresses are not in --worker-networks"):
            resolver.resolve("Mine.test", owner, port).result(WITHIN_S)


def test_names_that_hang_hold_up_no_name_of_another_owner(names: Names) -> None:
    resolver = Resolver()
    hanging = [resolver.resolve(f"hang-{number}.test", "x") for number in range(50)]
    assert resolver.resolve("a.test", "y").result(WITHIN_S) == ("127.0.0.1",)
    assert len(names.asked) == module.MAX_LOOKUPS_OF_OWNER + 1
    assert resolver.resolve("hang-0.test", "x") is hanging[0]
    assert not hanging[0].cancel(), "others wait for it"
    names.go_on.set()
    assert eventually(lambda: all(one.done() for one in hanging))


def test_a_resolver_remembers_so_many_names_and_no_more(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_NAMES", 3)
    resolver = Resolver()
    for number in range(9):
        with pytest.raises(Unresolved):
            resolver.resolve(f"b-{number}.test").result(WITHIN_S)
    assert len(resolver._names) == 3
    for number in range(3):
        resolver.resolve(f"hang-{number}.test")
    with pytest.raises(Unresolved, match=r"a\.test is not looked up: 3 others are"):
        resolver.resolve("a.test").result(WITHIN_S)
