"""``python -m benchmarks route``: its traffic, its worker, and a short run. No figure is promised here."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import tokenizers
import zmq

from benchmarks import route_dynamo, route_runs
from benchmarks.publisher import Publishers
from benchmarks.route_caller import Answer, Caller
from benchmarks.route_fleet import RouteFleet, cpu_s, post
from benchmarks.route_fronts import DIRECT, Running
from benchmarks.route_traffic import BLOCK_TOKENS, MODEL, TOKENIZER_FILE, Traffic, number_of
from benchmarks.route_worker import CHUNKS, PrefixCache, Settings, Worker
from kvpool.errors import ConfigError, KVPoolError
from kvpool.index.prompt import Chat
from kvpool.index.tokens.tokenizer import Tokenizer
from kvpool.key.hashing import BlockHasher
from tests.support.command_line import benchmark, benchmark_refused
from tests.support.deadlines import eventually

CHAT = "/v1/chat/completions"


def traffic(folder: Path) -> Traffic:
    return Traffic(folder / "tokenizer", 5)


@contextmanager
def fleet(
    folder: Path, made: Traffic, *, count: int = 1, blocks: int = 1000, token_s: float = 0.0
) -> Iterator[RouteFleet]:
    with RouteFleet(folder, made.plan, made.folder, count=count, blocks=blocks, token_s=token_s) as started:
        yield started


def test_a_prompt_has_the_tokens_and_hashes_that_an_engine_would_make(tmp_path: Path) -> None:
    made = traffic(tmp_path)
    talked = made.conversations(2, systems=1, system_words=100, turns=3, words=40)
    long = made.follow_ups(2, nbytes=9_000, turns=2)
    tokenizer = Tokenizer.load(MODEL, str(made.folder))
    hasher = BlockHasher(BLOCK_TOKENS)
    for turn in [*(turn for turns in talked for turn in turns), *long]:
        body = json.loads(turn.body(stream=True))
        tokens = tokenizer.of_chat(Chat.of_request(body))
        prompt = made.plan.prompts[body["seed"]]
        assert (prompt.tokens, prompt.blocks) == (len(tokens), len(tokens) // BLOCK_TOKENS)
        said = [msgpack.unpackb(made.plan.segments[number].stored) for number in prompt.segments]
        hashes = [one for event in said for one in event["block_hashes"]]
        wanted = list(memoryview(hasher.hashes64(tokens)).cast("Q"))
        assert hashes[: prompt.blocks] == wanted
        assert [token for event in said for token in event["token_ids"]][
            : prompt.blocks * BLOCK_TOKENS
        ] == list(tokens[: prompt.blocks * BLOCK_TOKENS])
        parents = [event["parent_block_hash"] for event in said]
        assert parents == [None, *(event["block_hashes"][-1] for event in said[:-1])]
    assert 9_000 <= len(long[0].body(stream=False)) < 12_000
    assert len({turn.body(stream=False) for turn in long}) == len(long)


def test_what_a_turn_leaves_behind_is_where_its_follow_up_begins(tmp_path: Path) -> None:
    made = traffic(tmp_path)
    [one, other] = made.conversations(2, systems=1, system_words=100, turns=3, words=40)
    cache = PrefixCache(made.plan, 1000)
    for at, turn in enumerate(one):
        prompt = made.plan.prompts[turn.number]
        assert cache.take(prompt) == (prompt.earlier * BLOCK_TOKENS if at else 0)
    first = made.plan.prompts[other[0].number]
    assert cache.take(first) == first.earlier * BLOCK_TOKENS > 0  # the system prompt, which both begin with


def test_a_cache_that_is_full_gives_up_what_was_used_longest_ago_from_its_end(tmp_path: Path) -> None:
    made = traffic(tmp_path)
    talked = made.conversations(3, systems=3, system_words=100, turns=1, words=40)
    prompts = [made.plan.prompts[turns[0].number] for turns in talked]
    nbytes = [sum(made.plan.segments[number].blocks for number in prompt.segments) for prompt in prompts]
    cache = PrefixCache(made.plan, nbytes[0] + nbytes[1] + 1)
    for prompt in prompts:
        assert cache.take(prompt) == 0
    gone = [msgpack.unpackb(event) for event in cache.events if b"BlockRemoved" in event]
    last = made.plan.segments[prompts[0].segments[-1]]
    assert gone[0]["block_hashes"] == msgpack.unpackb(last.stored)["block_hashes"]
    assert cache.take(prompts[1]) == prompts[1].blocks * BLOCK_TOKENS
    assert cache.blocks <= nbytes[0] + nbytes[1] + 1


def test_the_number_of_a_prompt_is_found_in_whatever_a_proxy_has_made_of_its_body(tmp_path: Path) -> None:
    [turn] = traffic(tmp_path).follow_ups(1, nbytes=1000, turns=1)
    body = json.loads(turn.body(stream=False))
    for sent in (turn.body(stream=False), json.dumps(body, sort_keys=True, indent=1).encode()):
        assert number_of(sent) == turn.number
    with pytest.raises(ValueError, match="no seed"):
        number_of(b"{}")


def test_a_worker_answers_as_vllm_does_and_says_what_it_had_cached(tmp_path: Path) -> None:
    made = traffic(tmp_path)
    [turns] = made.conversations(1, systems=1, system_words=100, turns=2, words=40)
    with fleet(tmp_path, made, token_s=1e-5) as started:
        url = f"http://{started.targets[0]}"
        [_, events, replay] = started.endpoints()[0]
        first = post(url + CHAT, turns[0].body(stream=False))
        assert first["system_fingerprint"] == "worker-0"
        assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        request = urllib.request.Request(url + CHAT, turns[1].body(stream=True))
        with urllib.request.urlopen(request, timeout=60) as reply:
            lines = [line for line in reply.read().decode().split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        last = json.loads(lines[-2].removeprefix("data: "))
        prompt = made.plan.prompts[turns[1].number]
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": prompt.earlier * BLOCK_TOKENS}
        rendered = post(f"{url}{CHAT}/render", turns[1].body(stream=False))["token_ids"]
        assert len(rendered) == prompt.tokens
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as page:
            assert b'vllm:num_requests_waiting{engine="0",model_name="bench"} 0.0' in page.read()

        def replayed() -> list[int]:
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.connect(replay)
                dealer.send_multipart((b"", (0).to_bytes(8, "big")))
                hashes: list[int] = []
                while (frames := dealer.recv_multipart())[-1]:
                    for event in msgpack.unpackb(frames[-1])[1]:
                        hashes += event["block_hashes"]
                return hashes

        stored = [made.plan.segments[number].stored for number in prompt.segments]
        wanted = [one for event in stored for one in msgpack.unpackb(event)["block_hashes"]]
        assert eventually(lambda: replayed() == wanted)
        assert events != replay


def test_a_worker_that_is_started_again_has_nothing_cached(tmp_path: Path) -> None:
    made = traffic(tmp_path)
    [turn] = made.follow_ups(1, nbytes=2_000, turns=1)
    with fleet(tmp_path, made) as started:
        url = f"http://{started.targets[0]}{CHAT}"

        def cached() -> int:
            usage = post(url, turn.body(stream=False))["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert (cached(), cached() > 0) == (0, True)
        assert cpu_s(started.pids) > 0
        started.kill("worker-0")
        started.start_again("worker-0")
        assert cached() == 0


@pytest.mark.parametrize(("token_s", "parts"), [(0.0, 1), (1e-6, CHUNKS)])
def test_dynamos_worker_answers_with_its_name_and_says_what_it_had_cached(
    tmp_path: Path, token_s: float, parts: int
) -> None:
    """Dynamo is not needed for it."""
    made = traffic(tmp_path)
    [turns] = made.conversations(1, systems=1, system_words=100, turns=2, words=40)
    plan = tmp_path / "plan"
    plan.write_bytes(made.plan.pack())
    settings = Settings("worker-3", (0, 0, 0), str(plan), str(made.folder), 1000, token_s)
    tokenizer = tokenizers.Tokenizer.from_file(str(made.folder / TOKENIZER_FILE))

    async def answers(worker: Worker) -> list[list[dict[str, Any]]]:
        found = []
        for turn in turns:
            request = {"sampling_options": {"seed": turn.number}}
            said = route_dynamo.words(worker)
            found.append([part async for part in route_dynamo.answer(worker, said, request)])
        return found

    with Publishers(1) as publishers:
        answered = asyncio.run(answers(Worker(settings, publishers)))
    for turn, answer, follows in zip(turns, answered, (False, True), strict=True):
        prompt = made.plan.prompts[turn.number]
        assert tokenizer.decode(answer[0]["token_ids"]) == "worker-3"
        assert [part.get("finish_reason") for part in answer] == [None] * (parts - 1) + ["stop"]
        usage = answer[-1]["completion_usage"]
        assert usage["prompt_tokens"] == prompt.tokens
        cached = prompt.earlier * BLOCK_TOKENS if follows else 0
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}


def test_a_worker_that_does_not_come_up_is_one_clear_error(tmp_path: Path) -> None:
    made = traffic(tmp_path)
    started = RouteFleet(tmp_path, made.plan, tmp_path / "nothing", count=1, blocks=1000, token_s=0.0)
    with pytest.raises(KVPoolError, match="worker-0 does not answer"), started:
        pass


def test_each_phase_of_a_speed_sends_its_requests_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where answers come together: the callers go on in one step of the loop."""
    tallies: list[route_runs._Tally] = []

    class Kept(route_runs._Tally):
        def __init__(self, traffic: Traffic) -> None:
            super().__init__(traffic)
            tallies.append(self)

    async def answer(*_: Any) -> Answer:
        await asyncio.sleep(0)
        return Answer(200, 0.1, 0.1)

    staged = SimpleNamespace(pids=[]), Running(["http://127.0.0.1:1"], [])
    monkeypatch.setattr(route_runs, "_Tally", Kept)
    monkeypatch.setattr(route_runs, "stage", lambda *_, **__: nullcontext(staged))
    monkeypatch.setattr(route_runs, "in_loop", lambda work: asyncio.run(work()))
    monkeypatch.setattr(Caller, "ask", answer)
    made = traffic(tmp_path)
    turns = made.follow_ups(4, nbytes=2_000, turns=10)
    route_runs.run_speed(made, turns, DIRECT, workers=8, callers=4, warm=6, alone=5, most_s=60, every_s=0.01)
    assert [len(tally.first_s) for tally in tallies] == [6, 5, 29]


def test_bench_route_measures_a_front_beside_none() -> None:
    """Envoy with the index, and round robin."""
    arguments = [
        "--workers",
        "3",
        "--replicas",
        "1",
        "--conversations",
        "16",
        "--rounds",
        "1",
        "--seconds",
        "0.3",
    ]
    ended = benchmark(
        "route", *arguments, "--only", "Envoy + kvpool, duplex", "--only", "round robin", "--json"
    )
    report = json.loads(ended.stdout)
    assert report["workers"] == 3
    rows = {row["front"]: row for row in report["rows"]}
    assert list(rows) == ["Envoy + kvpool, duplex", "round robin"]
    for row in rows.values():
        assert 0 <= row["hit_ratios"]["1"] <= 1
        assert 0 <= row["returned_ratio"] <= 1
        assert [speed["nbytes"] for speed in row["speeds"]] == [2_000, 220_000, 740_000]
        assert all(speed["requests_s"] > 0 and speed["failed"] == 0 for speed in row["speeds"])
        assert row["failed"] == 0
    assert rows["Envoy + kvpool, duplex"]["hit_ratios"]["1"] > rows["round robin"]["hit_ratios"]["1"]


def test_peers_that_are_not_there_are_named_with_what_makes_them(tmp_path: Path) -> None:
    assert "make bench-peers makes it" in benchmark_refused(
        "route", "--peers", "--peers-folder", str(tmp_path)
    )
    with pytest.raises(ConfigError, match="make bench-peers makes it"):
        route_dynamo.installed(tmp_path)
    assert "the fronts are Envoy + kvpool" in benchmark_refused("route", "--only", "nginx")
