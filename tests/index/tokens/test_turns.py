"""Whose piece is made into tokens next."""

from __future__ import annotations

import threading

import pytest

from kvpool.index.tokens.text_work import MAX_STEPS, SHORT, WHOLE, LongText, TextWork, TooMuchText
from kvpool.index.tokens.turns import UNIT_CHARS, Turn, Turns
from tests.support.deadlines import eventually


class Texts:
    """Each has a thread and notes its pieces. The first one holds its turn until ``go``."""

    def __init__(self) -> None:
        self.turns, self.order = Turns(), list[str]()
        self._threads: list[threading.Thread] = []
        self._go = threading.Event()
        self.ended: list[str] = []
        self.of: dict[str, Turn] = {}

    def add(self, name: str, pieces: int, tenant: str = "t", chars: int = UNIT_CHARS) -> None:
        there = len(self.turns)
        turn = self.of[name] = Turn(self.turns, tenant, pieces * chars)

        def work() -> None:
            try:
                with turn:
                    if not there:
                        assert self._go.wait(60)
                    for left in range(pieces, 0, -1):
                        turn.go_on(left * chars, chars)
                        self.order.append(name)
            except LongText:
                self.ended.append(name)

        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()
        eventually(lambda: len(self.turns) == there + 1)

    def go(self) -> str:
        self._go.set()
        for one in self._threads:
            one.join(60)
            assert not one.is_alive()
        assert not self.turns._had
        return "".join(self.order)


@pytest.fixture
def texts() -> Texts:
    return Texts()


def test_of_a_tenants_texts_the_one_with_the_fewest_characters_left_goes_first(texts: Texts) -> None:
    for name, pieces in (("h", 9), ("a", 3), ("b", 2)):
        texts.add(name, pieces)
    assert texts.go() == "bbaaa" + "h" * 9


def test_a_long_text_waits_for_about_its_own_length_of_shorter_ones(texts: Texts) -> None:
    with Turn(texts.turns, "t") as first:
        texts.add("h", 9)
        first.go_on(0, 8 * UNIT_CHARS)
        texts.add("a", 1)
        first.go_on(0, 2 * UNIT_CHARS)
        texts.add("b", 1)
    assert texts.go() == "h" * 9 + "ab"


def test_tenants_share_the_time_however_many_and_long_their_texts_are(texts: Texts) -> None:
    for name, pieces, tenant in (("a", 2, "t"), ("b", 2, "t"), ("c", 2, "t"), ("u", 6, "u")):
        texts.add(name, pieces, tenant)
    order = texts.go()
    assert sorted(order) == sorted("aabbccuuuuuu")
    assert order.index("u") < 3, order
    assert order.rindex("c") > 8, order


def test_a_tenant_that_comes_later_owes_nothing_and_is_owed_nothing(texts: Texts) -> None:
    first = Turn(texts.turns, "t")
    with first:
        first.go_on(1, 50 * UNIT_CHARS)
        texts.add("u", 1, "u")
        assert texts.turns._had["u"] == 50 * UNIT_CHARS
    assert texts.go() == "u"


def test_what_nobody_waits_for_goes_on_while_it_is_alone(texts: Texts) -> None:
    texts.add("a", 3)
    texts.of["a"].give_up()
    assert texts.go() == "aaa"
    assert not texts.ended


def test_what_nobody_waits_for_leaves_the_line_to_others(texts: Texts) -> None:
    for name in "abc":
        texts.add(name, 3)
    texts.of["c"].give_up()
    eventually(lambda: texts.ended == ["c"])
    texts.of["a"].give_up()
    assert texts.go() == "bbb"
    assert texts.ended == ["c", "a"]


def test_all_end_at_their_next_piece_when_the_process_does(texts: Texts) -> None:
    for name in "ab":
        texts.add(name, 3)
    texts.turns.close()
    eventually(lambda: texts.ended == ["b"])
    assert not texts.go()
    assert texts.ended == ["b", "a"]


def test_a_template_that_takes_long_is_asked_for_its_turn_on_the_way() -> None:
    asked: list[tuple[int, int]] = []

    class Asked:
        def go_on(self, left: int, cost: int) -> None:
            asked.append((left, cost))

    work = TextWork(WHOLE, turn=Asked())
    work.step(3 * SHORT.steps)
    assert asked == [(2 * SHORT.steps, SHORT.steps), (3 * SHORT.steps, SHORT.steps)]
    with pytest.raises(TooMuchText):
        work.step(MAX_STEPS)
