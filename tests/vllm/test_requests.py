"""What a request may ask of the pool, and that nothing it says can do harm."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.vllm.requests import WITHOUT_POOL, ParamsReader, RequestParams

pytestmark = [pytest.mark.vllm]


@pytest.mark.parametrize(
    "given",
    [None, {}, {"kvpool": {}}, {"do_remote_prefill": True, "remote_host": "x"}, 7, "kvpool", ["kvpool"]],
)
def test_who_asks_for_nothing_gets_the_pool(given: object) -> None:
    assert ParamsReader().read(given) == RequestParams(load=True, store=True, priority=0)


def test_what_is_asked_for_is_understood() -> None:
    asked = {"do_remote_decode": True, "kvpool": {"load": False, "priority": -3}}
    assert ParamsReader().read(asked) == RequestParams(load=False, store=True, priority=-3)
    assert ParamsReader().read({"kvpool": {"store": False}}) == RequestParams(store=False)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"stor": False}, 'unknown field "stor"; did you mean "store"?'),
        ({"store": False, 5: 1}, 'unknown field "5"'),
        ({"store": "no"}, "store should be a valid boolean, got 'no'"),
        ({"load": 0}, "load should be a valid boolean, got 0"),
        ({"priority": True}, "priority should be a valid integer, got True"),
        ({"priority": 1 << 40}, "priority should be less than"),
        (None, "None is not an object"),
        ([["store", False]], "is not an object"),
        ("x" * 10_000, "is not an object"),
    ],
)
def test_what_is_not_understood_goes_without_the_pool_and_is_said_once(
    asked: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("kvpool.vllm.requests.logger.warning", lambda text, *of: said.append(text % of))
    reader = ParamsReader()
    assert [reader.read({"kvpool": asked}) for _ in range(3)] == [WITHOUT_POOL] * 3
    (line,) = said
    assert words in line
    assert len(line) < 500
