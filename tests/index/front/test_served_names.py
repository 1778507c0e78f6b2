"""Requests by any name that a worker serves: further names of a model, and adapters, behind either front."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool import BlockHasher, IndexClient
from kvpool.index.cost.router import Router
from kvpool.index.follow import scraper
from tests.support.deadlines import eventually
from tests.support.fleets import a_worker, say, serving
from tests.support.fronts import Cluster, ProxyCluster, envoy_cluster, followed, proxy_cluster
from tests.support.http_client import TEXT, get, post
from tests.support.names import reading
from tests.support.openai_worker import adapter, card, scripted
from tests.support.wire import batch, stored

pytestmark = pytest.mark.usefixtures("grpc_started")
TOKENS = list(TEXT.encode())


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraper, "NAMES_S", 0.05)


def ask(there: Cluster, model: str, prompt: Any = TOKENS) -> Any:
    return post(there.url, {"model": model, "prompt": prompt})


def twenty(there: Cluster, model: str) -> tuple[set[int], set[str]]:
    """Statuses, and who answered."""
    replies = [ask(there, model) for _ in range(20)]
    return {one.status for one in replies}, {one.worker for one in replies if one.status == 200}


def knows(there: Cluster, name: str, *workers: str) -> bool:
    names = there.index.fleet.names
    serving = names.serving("default", name) if names.knows("default", name) else []
    return {rank.worker.name for one in serving for rank in one.members.ranks} == {*workers}


@contextmanager
def front(kind: str, folder: Path, *models: str) -> Iterator[Cluster]:
    """Workers of these models, named a, b and so on, whose lists are read."""
    names = tuple("abcdef"[: len(models)])
    with ExitStack() as parts:
        if kind == "envoy":
            there: Cluster = parts.enter_context(envoy_cluster(folder, names=names))
        else:
            there = parts.enter_context(proxy_cluster(*names))
        for worker, model in zip(there.workers.values(), models, strict=True):
            there.index.fleet.remove(f"default/{worker.name}")
            worker.cards = [card(model, root=model)]
            followed([worker], there.index.fleet, model=model)
        yield there


@pytest.mark.parametrize("kind", ["envoy", "router"])
@pytest.mark.parametrize("learnt", ["announced", "listed"])
def test_two_models_with_several_names_each_get_no_404(kind: str, learnt: str, tmp_path: Path) -> None:
    names = {"a": ("one", "gpt-4", "x/y"), "b": ("two", "gpt-3", "naïve")}
    with front(kind, tmp_path, "one", "two") as there, ExitStack() as parts:
        for worker in there.workers.values():
            worker.cards = [card(name, root="/m") for name in names[worker.name]]
            if learnt == "announced":
                one, *others = names[worker.name]
                followed([worker], there.index.fleet, model=one, names=tuple(others))
        if learnt == "listed":
            parts.enter_context(reading(there.index.fleet))
        for worker, several in names.items():
            for name in several:
                assert eventually(lambda name=name, worker=worker: knows(there, name, worker))
        for worker, several in names.items():
            for name in several:
                assert twenty(there, name) == ({200}, {worker}), name
        reply = ask(there, "gpt-3")
        assert reply.headers["x-kvpool-reason"] == "load"
        there.hold("b")
        reply = ask(there, "gpt-3")
        assert reply.headers["x-kvpool-reason"] == "prefix", "blocks are a model's, by whichever name"


@pytest.mark.parametrize("kind", ["envoy", "router"])
def test_an_adapter_is_known_soon_after_it_is_loaded_or_unloaded(kind: str, tmp_path: Path) -> None:
    with front(kind, tmp_path, "m", "m") as there, reading(there.index.fleet):
        a, b = there.workers.values()
        there.hold("a")
        assert eventually(lambda: knows(there, "m", "a", "b"))
        for worker, path in ((b, "/one"), (a, "/other"), (b, "/one")):
            assert ask(there, "sql").status == 404
            worker.cards = [card("m"), adapter("sql", path, "m")]
            assert eventually(lambda worker=worker: knows(there, "sql", worker.name))
            assert twenty(there, "sql") == ({200}, {worker.name})
            assert ask(there, "m").worker == "a", "which holds its prompt"
            worker.cards = [card("m")]
            assert eventually(lambda: knows(there, "sql"))


def test_an_adapters_prompt_is_hashed_with_its_name_and_path() -> None:
    """As vLLM does (``_gen_lora_extra_hash_keys``), also where workers have loaded it from different paths."""
    with front("router", Path(), "m", "m", "m") as there, reading(there.index.fleet):
        a, b, c = there.workers.values()
        for worker, path in ((a, "/one"), (b, "/one"), (c, "/other")):
            worker.cards = [card("m"), adapter("sql", path, "m")]
        assert eventually(lambda: knows(there, "sql", "a", "b", "c"))
        there.hold("a")
        assert ask(there, "sql").headers["x-kvpool-reason"] == "load", "a holds blocks of the model alone"
        for number, (name, path) in enumerate((("b", "/one"), ("c", "/other"))):
            hashes = BlockHasher(16).hashes(TOKENS, lora=("sql", path))
            say(there.index.fleet, f"default/{name}", 0, 0, batch(stored(hashes)))
            for prompt in (TOKENS, TEXT):  # whose tokens a worker makes
                reply = ask(there, "sql", prompt)
                assert (reply.worker, reply.headers["x-kvpool-reason"]) == (name, "prefix"), (number, prompt)
            there.index.fleet.remove(f"default/{name}")


def test_route_and_lookup_know_the_same_names() -> None:
    with scripted("a", "b") as workers:
        for worker in workers:
            worker.cards = [card(f"of-{worker.name}"), card("both"), adapter(f"sql-{worker.name}", "/p", "m")]
        fleet = followed(workers[:1], model="of-a")
        followed(workers[1:], fleet, model="of-b")
        with serving(fleet) as index, reading(fleet), IndexClient(index.target, 60) as client:
            assert eventually(
                lambda: fleet.names.knows("default", "sql-a") and fleet.names.knows("default", "sql-b")
            )
            for name, expected in (("of-a", "a"), ("sql-a", "a"), ("sql-b", "b"), ("both", "ab")):
                ranking = client.route(name, token_ids=TOKENS)
                assert sorted(pick.worker for pick in ranking.picks) == [*expected], name
                assert [row.worker for row in client.lookup(name, token_ids=TOKENS)] == [*expected]
            lora = BlockHasher(16).hashes(TOKENS, lora=("sql-b", "/p"))
            say(fleet, "default/b", 0, 0, batch(stored(lora)))
            assert [row.device_blocks for row in client.lookup("sql-b", token_ids=TOKENS)] == [
                len(TOKENS) // 16
            ]
            (one,) = client.route("sql-b", token_ids=TOKENS, workers=["a", "b"]).picks
            assert one.worker == "b"


@pytest.mark.parametrize("kind", ["envoy", "router"])
def test_the_next_worker_is_tried_after_a_model_that_does_not_exist(kind: str, tmp_path: Path) -> None:
    """Nobody has read that b serves it. Nor has a worker failed that says so."""
    with front(kind, tmp_path, "m", "m", "m") as there:
        for worker in there.workers.values():
            worker.cards = [card("m")]
        there.workers["b"].cards = [card("m"), adapter("sql", "/p", "m")]
        assert twenty(there, "sql") == ({200}, {"b"})
        for name in ("none", "none", "none", "sql"):
            assert ask(there, name).status == (404 if name == "none" else 200)
        assert {ask(there, "m").worker for _ in range(20)} == {"a", "b", "c"}, "none is ejected"
        if kind == "envoy":
            return
        assert set(retries(there)) <= {"404"}
        seen = sum(len(worker.bodies) for worker in there.workers.values())
        assert ask(there, "none").status == 404
        assert sum(len(worker.bodies) for worker in there.workers.values()) - seen == 3, "each was asked once"
        assert eventually(there.ends)  # type: ignore[attr-defined]


def retries(there: Cluster) -> dict[str, int]:
    assert isinstance(there, ProxyCluster)
    return there.retries()


def test_a_name_that_a_worker_denies_is_forgotten_until_it_lists_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with front("router", Path(), "m", "m") as there:
        a, b = there.workers.values()
        a.cards = [card("m"), adapter("sql", "/p", "m")]
        with reading(there.index.fleet):
            assert eventually(lambda: knows(there, "sql", "a"))
            monkeypatch.setattr(scraper, "NAMES_S", 600.0)
        a.cards, b.cards = b.cards, a.cards
        assert ask(there, "sql").worker == "b", "placed once more, when all that listed it have denied it"
        assert knows(there, "sql")
        assert len(a.bodies) == 1
        a.cards = [card("m"), adapter("sql", "/p", "m")]
        with reading(there.index.fleet):
            assert eventually(lambda: knows(there, "sql", "a", "b"))


def test_a_denial_or_an_unknown_name_that_is_served_has_the_worker_read_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind Envoy, where nobody reads the body of a 404."""
    monkeypatch.setattr(scraper, "NAMES_S", 600.0)
    monkeypatch.setattr(scraper, "DOUBTED_S", 0.05)
    with front("envoy", tmp_path, "m", "m") as there, reading(there.index.fleet):
        a, b = there.workers.values()
        assert eventually(lambda: a.lists_read and b.lists_read)
        b.cards = [card("m"), adapter("sql", "/p", "m")]
        assert eventually(lambda: ask(there, "sql").status == 200)
        assert eventually(lambda: knows(there, "sql", "b"))
        b.cards = [card("m")]
        assert ask(there, "sql").status == 404
        assert eventually(lambda: knows(there, "sql"))


def test_another_404_is_the_answer() -> None:
    with front("router", Path(), "m", "m") as there:
        for worker in there.workers.values():
            worker.status, worker.reply = 404, b'{"detail": "Not Found: The model is fine"}'
        assert ask(there, "m").status == 404
        assert retries(there) == {}


def test_an_answer_that_repeats_a_callers_words_makes_the_router_forget_no_name() -> None:
    """vLLM 0.32 says "Response with id 'ID' not found", with whatever ID."""
    with front("router", Path(), "m") as there:
        (a,) = there.workers.values()
        a.cards = [card("m"), adapter("sql", "/p", "m")]
        with reading(there.index.fleet):
            assert eventually(lambda: knows(there, "sql", "a"))
        words = 'resp_"message":"The model `sql` does not exist'
        a.status, a.reply = (
            404,
            json.dumps({"error": {"message": f"Response with id '{words}' not found."}}).encode(),
        )
        fields = {"model": "sql", "input": "x", "previous_response_id": words}
        assert post(there.url, fields, path="/v1/responses").status == 404
        assert knows(there, "sql", "a")


def test_requests_that_are_denied_at_once_are_all_placed_once_more() -> None:
    with front("router", Path(), "m", "m") as there:
        a, b = there.workers.values()
        a.cards = [card("m"), adapter("sql", "/p", "m")]
        with reading(there.index.fleet):
            assert eventually(lambda: knows(there, "sql", "a"))
        a.cards, b.cards = b.cards, a.cards
        a.bodies.clear()
        a.hold.clear()
        with ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(ask, there, "sql") for _ in range(8)]
            assert eventually(lambda: len(a.bodies) == 8)
            a.hold.set()
            assert {(one.result().status, one.result().worker) for one in asked} == {(200, "b")}


def test_the_router_lists_all_names() -> None:
    with front("router", Path(), "m", "m", "n") as there, reading(there.index.fleet):
        a, b = [*there.workers.values()][:2]
        a.cards = [card("m"), card("gpt-4"), adapter("sql", "/p", "m")]
        b.cards = [card("m"), card("gpt-4"), adapter("law", "/q", "m")]
        for name, workers in (("sql", "a"), ("law", "b"), ("gpt-4", "ab")):
            assert eventually(lambda name=name, workers=workers: knows(there, name, *workers))
        listed = {one["id"]: one for one in json.loads(get(f"{there.url}/v1/models").body)["data"]}
        assert sorted(listed) == ["gpt-4", "law", "m", "n", "sql"]
        assert {(one["root"], one["parent"]) for name, one in listed.items() if name in ("sql", "law")} == {
            ("/p", "m"), ("/q", "m"),
        }  # fmt: skip


def test_one_model_with_adapters_on_some_of_its_workers_is_listed_whole() -> None:
    with front("router", Path(), "m", "m") as there, reading(there.index.fleet):
        there.workers["b"].cards = [card("m"), adapter("law", "/q", "m")]
        assert eventually(lambda: knows(there, "law", "b"))
        for _ in range(4):
            listed = json.loads(get(f"{there.url}/v1/models").body)["data"]
            assert sorted(one["id"] for one in listed) == ["law", "m"]


def test_a_tokenizer_of_the_model_serves_its_other_names() -> None:
    from tests.support.placing import ByteTokenizer

    with scripted("a") as workers, reading(fleet := followed(workers, model="m")):
        workers[0].cards, workers[0].render = [card("m"), adapter("sql", "/p", "m")], None
        assert eventually(lambda: fleet.names.knows("default", "sql"))
        place = {"tokenizers": {"m": ByteTokenizer()}, "timeout_s": 60}
        with serving(fleet, place=place, proxy={}, router=Router(fleet)) as index:
            say(fleet, "default/a", 0, 0, batch(stored(BlockHasher(16).hashes(TOKENS, lora=("sql", "/p")))))
            reply = post(f"http://{index.proxy}", {"model": "sql", "prompt": TEXT})
            assert reply.headers["x-kvpool-reason"] == "prefix"


def test_a_worker_attracts_no_other_tenants_requests() -> None:
    with front("router", Path(), "m") as there, scripted("evil") as (evil,), reading(there.index.fleet):
        there.index.fleet.add(a_worker("evil", tenant="t", model="n", address=f"http://{evil.at}"), "flag")
        evil.cards = [card("n"), card("m"), adapter("sql", "/p", "n")]
        there.workers["a"].cards = [card("m"), adapter("sql", "/p", "m")]
        fleet = there.index.fleet
        assert eventually(lambda: fleet.names.knows("t", "sql") and fleet.names.knows("default", "sql"))
        for name in ("m", "sql"):
            assert twenty(there, name) == ({200}, {"a"})
        assert all(b"prompt" not in body for body in evil.bodies)
        assert not fleet.names.knows("default", "n")
