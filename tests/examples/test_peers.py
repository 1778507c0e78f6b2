"""``examples/routers`` and ``docs/how-to/prefill-decode.md`` for others' routers, run by these in front of scripted
workers. ``make bench-peers`` gets them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from demo.engine_process import free_ports
from kvpool import BlockHasher
from tests.support.deadlines import eventually
from tests.support.feeds import misbehaving
from tests.support.http_client import TEXT, post
from tests.support.openai_worker import ScriptedWorker, scripted
from tests.support.recipes import ROUTERS, SPLIT_PAGE, put_in, recipe, started
from tests.support.wire import batch, stored

PEERS = Path(__file__).parents[2] / ".cache/peers"
POOL = {
    "medium": "STORAGE",
    "locality": "REMOTE",
    "ownership": "kvpool",
}  # as the connector tells of the pool
PARAMS = {"kv_transfer_params": {"kvpool": {"store": False}}}  # no router knows of it


def command_of(text: str, places: Mapping[str, str]) -> tuple[list[str], str]:
    """The command of a recipe, for the program in its environment, with other addresses; and its URL."""
    listen, metrics = free_ports(2)
    words = shlex.split(
        put_in(text, {**places, "0.0.0.0": "127.0.0.1", "8080": str(listen)}).replace("\\\n", " "),
        comments=True,
    )
    program = PEERS / words[0] / "bin" / words[0]
    if not program.exists():
        pytest.skip(f"there is no {program}: make bench-peers gets it")
    more = [f"--prometheus-port={metrics}", "--worker-startup-check-interval=1"]
    return [str(program), *words[1:], *more], f"http://127.0.0.1:{listen}"


@contextmanager
def routed(folder: Path, text: str, places: Mapping[str, str]) -> Iterator[str]:
    command, url = command_of(text, places)
    with started(command, folder / "router.log", f"{url}/health"):
        assert eventually(lambda: ask(url, "is it ready?") != "")
        yield url


def ask(url: str, prompt: str, **more: object) -> str:
    """The worker that served it; empty: none."""
    reply = post(url, {"model": "m", "prompt": prompt, **more})
    return reply.worker if reply.status == 200 else ""


def last_body(worker: ScriptedWorker) -> dict[str, object]:
    return json.loads(worker.bodies[-1])  # type: ignore[no-any-return]


def at(workers: Sequence[ScriptedWorker]) -> dict[str, str]:
    return {f"10.0.0.{number}:8000": worker.at for number, worker in enumerate(workers, 1)}


def events(text: str, medium: Mapping[str, str]) -> bytes:
    """All whole blocks of a text, a byte a token."""
    tokens = list(text.encode())
    hashes = BlockHasher(16).hashes(tokens)
    return batch(
        *(
            stored(
                [one],
                parent=hashes[number - 1] if number else None,
                token_ids=tokens[16 * number : 16 * number + 16],
                **medium,  # type: ignore[arg-type]
            )
            for number, one in enumerate(hashes)
        )
    )


def test_sglangs_router_goes_by_what_it_has_sent(tmp_path: Path) -> None:
    with (
        scripted("a", "b") as workers,
        routed(tmp_path, (ROUTERS / "smg.sh").read_text(), at(workers)) as url,
    ):
        first = ask(url, TEXT)
        assert {ask(url, TEXT + " and more") for _ in range(6)} == {first}
        holder, other = sorted(workers, key=lambda worker: worker.name != first)
        assert ask(url, TEXT, **PARAMS) == first
        assert last_body(holder).items() >= PARAMS.items()
        holder.stop()
        assert eventually(lambda: ask(url, TEXT) == other.name), "from the pool"


def test_vllms_router_follows_the_events_of_kvpools_workers(tmp_path: Path) -> None:
    with ExitStack() as parts:
        workers = parts.enter_context(scripted("a", "b"))
        publishers = [parts.enter_context(misbehaving()) for _ in workers]
        places = {**at(workers), "MODEL": "m"}
        for number, one in enumerate(publishers, 1):
            places[f"tcp://10.0.0.{number}:5557"] = one.publisher.events
            places[f"tcp://10.0.0.{number}:5657"] = one.publisher.replay
        text = (ROUTERS / "vllm-router.sh").read_text()
        url = parts.enter_context(routed(tmp_path, text, places))
        for number, (name, medium) in enumerate([("a", {}), ("b", {}), ("a", POOL), ("b", POOL)]):
            prompt = f"{number} {TEXT}"

            def credited(
                prompt: str = prompt, name: str = name, batches: bytes = events(prompt, medium)
            ) -> bool:
                publishers["ab".index(name)].publish(batches)  # again: it may not have listened yet
                return {ask(url, prompt) for _ in range(3)} == {name}

            assert eventually(credited), (name, medium)
        served = ask(url, TEXT, **PARAMS)
        assert last_body(workers["ab".index(served)]).items() >= PARAMS.items()


def test_vllms_router_sends_a_prompt_to_one_group_and_the_request_to_the_other(tmp_path: Path) -> None:
    with scripted("p1", "p2", "d1", "d2") as workers:
        ends = ("10.0.0.1", "10.0.0.2", "10.0.1.1", "10.0.1.2")
        places = {f"{end}:8000": worker.at for end, worker in zip(ends, workers, strict=True)}
        with routed(tmp_path, recipe(SPLIT_PAGE, "## Behind vLLM's router", "sh"), places) as url:
            for worker in workers:
                worker.bodies.clear()
            for number in range(4):
                assert ask(url, f"{number} {TEXT}", max_tokens=5, **PARAMS) in ("d1", "d2")
        prefilled, decoded = (
            [json.loads(body) for worker in group for body in worker.bodies]
            for group in (workers[:2], workers[2:])
        )
        assert [(body["max_tokens"], "kvpool" in body["kv_transfer_params"]) for body in prefilled] == [
            (1, False)
        ] * 4
        assert [(body["max_tokens"], body["kv_transfer_params"]) for body in decoded] == [
            (5, PARAMS["kv_transfer_params"])
        ] * 4
        assert sorted(body["prompt"] for body in prefilled) == sorted(body["prompt"] for body in decoded)
