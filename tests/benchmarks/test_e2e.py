"""``python -m benchmarks e2e`` without engines: its workload, and what it makes of answers."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.e2e import Asked, ask, emptied
from benchmarks.e2e_report import HOST, OFF, OWN, Answer, Report, show
from benchmarks.e2e_workload import QUESTIONS, TURNS, Conversations, draw_workload, longest_prompt_tokens
from demo.engine_process import EngineProcess
from kvpool.store import open_store
from tests.support.command_line import benchmark_refused
from tests.support.servers import running

ANSWER = list(range(16))


def _prompts(seed: int) -> Iterator[tuple[str, int, list[int]]]:
    """What is asked when every answer is ``ANSWER``."""
    workload = draw_workload(seed=seed, chats=3, documents=2, prompt_tokens=600, probes=2)
    said = Conversations(workload)
    for request in workload.requests:
        prompt = said.prompt(request)
        yield request.kind, request.session, prompt
        said.answered(request, prompt, ANSWER)


def test_a_workload_of_one_seed_is_one_workload() -> None:
    assert list(_prompts(7)) == list(_prompts(7))
    assert list(_prompts(7)) != list(_prompts(8))


def test_a_chat_grows_by_answers_and_documents_are_shared() -> None:
    asked = list(_prompts(7))
    assert len({session for kind, session, _ in asked if kind == "chat"}) == 3
    opening = {tuple(prompt[:260]) for kind, _, prompt in asked if kind == "chat"}
    assert len(opening) == 1, "all chats begin with one system prompt"
    for chat in range(3):
        turns = [prompt for kind, session, prompt in asked if (kind, session) == ("chat", chat)]
        assert len(turns) == TURNS
        for earlier, later in itertools.pairwise(turns):
            assert later[: len(earlier) + len(ANSWER)] == earlier + ANSWER
            assert len(later) > len(earlier) + len(ANSWER)
    for document in range(2):
        about = [prompt for kind, session, prompt in asked if (kind, session) == ("document", document)]
        assert len(about) == QUESTIONS
        assert len({tuple(prompt[:600]) for prompt in about}) == 1
        assert len({tuple(prompt) for prompt in about}) == QUESTIONS
    assert [kind for kind, _, _ in asked] != sorted(kind for kind, _, _ in asked), "they are mixed"
    assert max(len(prompt) for _, _, prompt in asked) <= longest_prompt_tokens(600, len(ANSWER))


def _answer(arm: str, kind: str, number: int, first_token_s: float, loaded_tokens: int = 0) -> Answer:
    return Answer(
        arm=arm, kind=kind, number=number, prompt_tokens=1000,
        cached_tokens=max(loaded_tokens, 500 if kind == "again" else 0), loaded_tokens=loaded_tokens,
        answer_tokens=10, first_token_s=first_token_s, finished_s=first_token_s + 0.5, identical=True,
    )  # fmt: skip


def _report() -> Report:
    """Two arms; kvpool's probes take a tenth, a half and a quarter of recomputing them."""
    computed, loaded = (1.0, 2.0, 4.0), (0.1, 1.0, 1.0)
    answers = [_answer(arm, "chat", number, 0.1 * number) for arm in (OFF, OWN) for number in range(1, 5)]
    answers += [_answer(OWN, "document", 5, 0.1, 900)]
    for number in (2, 0, 1):  # the arms have them in orders of their own
        answers += [_answer(OFF, "probe", number, computed[number]), _answer(OFF, "again", number, 0.5)]
    for number in (0, 1, 2):
        answers += [_answer(OWN, "probe", number, loaded[number], 896), _answer(OWN, "again", number, 0.6)]
    return Report("a directory", 7, 1000, 128, 4000, 8192, {HOST: "RuntimeError: no [device]"}, answers)


def test_report_compares_prompt_by_prompt() -> None:
    report = _report()
    assert report.faults == []
    off, own = report.probes()
    assert (off.arm, off.first_s, off.again_s, off.over_recompute) == (OFF, 2.0, 0.5, None)
    assert (own.first_s, own.again_s, own.loaded_ratio) == (1.0, 0.6, 0.896)
    assert own.over_recompute == 0.25, "not the ratio of the medians, which is a half"
    assert own.over_local_hit == 2.0
    chats, _, documents = report.rows()
    assert (chats.arm, chats.kind, chats.requests, chats.ttft_p99_s) == (OFF, "chat", 4, 0.4)
    assert chats.tokens_per_s == pytest.approx(4 * 1010 / (1.0 + 4 * 0.5))
    assert (chats.hit_ratio, documents.hit_ratio, documents.loaded_ratio) == (0, 0.9, 0.9)
    assert chats.compared_tokens == 40


def test_other_tokens_and_probes_that_were_not_loaded_are_faults(capsys: pytest.CaptureFixture[str]) -> None:
    report = _report()
    wrong = replace(report.answers[0], identical=False)
    assert replace(report, answers=[wrong, *report.answers[1:]]).faults == [
        "pool off gave other tokens for 1 of its requests"
    ]
    computed = [
        replace(one, loaded_tokens=700) if (one.arm, one.kind) == (OWN, "probe") else one
        for one in report.answers
    ]
    show(replace(report, answers=[wrong, *computed[1:]]), as_json=False)
    said = capsys.readouterr().out
    assert "1 WRONG" in said
    assert "pool off gave other tokens" in said
    assert "did not find 3 of the probes" in said


def test_report_is_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = _report()
    show(report, as_json=False)
    said = capsys.readouterr().out
    assert "RuntimeError: no [device]" in said
    assert max(map(len, said.splitlines())) <= 80
    show(report, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["faults"] == []
    assert [each["arm"] for each in shown["probes"]] == [OFF, OWN]
    assert len(shown["answers"]) == len(report.answers)


class _Engine(EngineProcess):
    """Answers at once, and always the same."""

    def __init__(self) -> None:
        pass

    def generate(self, tokens: list[int], max_tokens: int = 16) -> dict[str, Any]:
        return {
            "tokens": ANSWER[:max_tokens],
            "cached_tokens": 2,
            "pool_tokens": 1.0,
            "first_token_s": 0.5,
            "finished_s": 1.5,
        }


def test_an_answer_is_held_against_the_first_engines() -> None:
    same = ask(_Engine(), OWN, Asked("chat", 3, [1, 2, 3], ANSWER))
    assert same == Answer(OWN, "chat", 3, 3, 2, 1, len(ANSWER), 0.5, 1.5, identical=True)
    for other in (ANSWER[::-1], ANSWER[:-1], []):
        assert not ask(_Engine(), OWN, Asked("chat", 3, [1, 2, 3], other)).identical


def test_what_a_run_put_into_a_pool_goes_and_nothing_else(tmp_path: Path) -> None:
    ours, theirs = (
        f"kvpool:{tenant}:{'0' * 32}:{'ab' * 32}:0:0" for tenant in ("bench-e2e-1", "bench-e2e-12")
    )
    with running("valkey-server", tmp_path) as server:
        with (
            contextlib.suppress(KeyboardInterrupt),
            emptied(server.url, "bench-e2e-1"),
            open_store(server.url) as store,
        ):
            assert store.put_many([ours, theirs], [b"x" * 1000] * 2) == [True, True]
            raise KeyboardInterrupt
        assert server.client.keys() == [theirs.encode()]


def test_peer_that_is_not_installed_is_told_before_an_engine_starts(tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as server:
        arguments = ["e2e", "--pool", server.url, "--peers", "--peers-folder", str(tmp_path)]
        assert "make bench-peers" in benchmark_refused(*arguments)
        assert server.client.keys() == []
