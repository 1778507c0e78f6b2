"""Outputs of encoders on real engines: a picture that any of them has seen is encoded by none again, tokens equal."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import EngineProcess, encoder_config
from demo.tiny_model import SIDE, VOCABULARY
from kvpool import open_store
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.follow.pool_follower import PoolFollower
from kvpool.key.key import split_key
from kvpool.vllm.audit.floor import LEAST_PAIRS
from tests.support.deadlines import eventually
from tests.support.encoder_engines import (
    MODULES,
    WITH_VISION,
    counts,
    forget,
    generate,
    options_of,
    settle,
    sources,
    without_pool,
    words,
)
from tests.support.engine_forks import write_model
from tests.support.engines import (
    call,
    corrupt,
    passing,
    prompt,
    started,
)
from tests.support.servers import running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), WITH_VISION]

IMAGE = VOCABULARY  # the token that stands for a picture
IMAGE_TOKENS = 64


@dataclass(frozen=True)
class Asked:
    """A prompt of words and pictures, in order; a picture is its number."""

    parts: tuple[tuple[int, ...] | int, ...]

    @property
    def tokens(self) -> list[int]:
        return [token for part in self.parts for token in ([IMAGE] if isinstance(part, int) else part)]

    @property
    def media(self) -> dict[str, list[tuple[int, int]]]:
        return {"image": [(part, SIDE) for part in self.parts if isinstance(part, int)]}


def ask(engine: EngineProcess, asked: Asked) -> dict[str, Any]:
    return generate(engine, asked.tokens, asked.media)


def records(pool: Path) -> list[Path]:
    """The files of outputs, all others of the same size left out."""
    nbytes = IMAGE_TOKENS * 256 * 4
    return [
        one for one in sorted((pool / "blocks").glob("*/*")) if nbytes < one.stat().st_size < nbytes + 8192
    ]


ONE = Asked((words(1, 40), 1, words(2, 30)))
MANY = Asked((words(3, 20), 1, 2, words(4, 50), 3, words(5, 5), 1, 4, words(6, 10)))
AGAIN = Asked((words(7, 90), 3, words(8, 40), 5))
ALL = {"one": ONE, "many": MANY, "again": AGAIN}


@pytest.fixture(scope="module")
def reference(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """What an engine without a pool answers."""
    with passing("reference", tmp_path_factory.mktemp("reference"), without_pool(llava), **MODULES) as engine:
        return {name: ask(engine, asked)["tokens"] for name, asked in ALL.items()}


@pytest.fixture(scope="module")
def pool(llava: Path, tmp_path_factory: pytest.TempPathFactory, reference: dict[str, list[int]]) -> Path:
    """A pool to which one engine has stored five pictures."""
    folder = tmp_path_factory.mktemp("encoder")
    with passing("first", folder, options_of(llava, folder / "pool"), **MODULES) as first:
        assert {name: ask(first, asked)["tokens"] for name, asked in ALL.items()} == reference
        settle(first, 5)
        assert sources(first) == (0, 5), "an item is encoded once, however often it is asked for"
    return folder / "pool"


@pytest.fixture(scope="module")
def second(llava: Path, pool: Path, reference: dict[str, list[int]]) -> Iterator[EngineProcess]:
    with started("second", pool.parent, options_of(llava, pool), **MODULES) as engine:
        yield engine


def test_further_engines_encode_nothing(
    llava: Path, pool: Path, second: EngineProcess, reference: dict[str, list[int]]
) -> None:
    with passing("third", pool.parent, options_of(llava, pool), **MODULES) as third:
        for engine in (second, third):
            assert {name: ask(engine, asked)["tokens"] for name, asked in ALL.items()} == reference
            assert sources(engine) == (5, 0)
            assert counts(engine, "loaded_bytes")[""] == 5 * IMAGE_TOKENS * 256 * 4


def test_a_record_under_a_right_checksum_is_used_and_any_other_one_is_not(
    llava: Path, pool: Path, reference: dict[str, list[int]], tmp_path: Path
) -> None:
    """Else equal tokens would say nothing: an engine that never uses what it loads has them, too."""
    for name, is_right in (("right", True), ("wrong", False)):
        spoilt = tmp_path / name
        shutil.copytree(pool, spoilt)
        for record in records(spoilt):
            corrupt(record, keep_checksum=not is_right)
        with passing(name, tmp_path, options_of(llava, spoilt), **MODULES) as engine:
            said = ask(engine, ONE)["tokens"]
            assert (said == reference["one"]) is not is_right
            assert sources(engine) == ((1, 0) if is_right else (0, 1))


@pytest.mark.rare
def test_hits_of_prefixes_end_before_inside_and_behind_a_picture(llava: Path, tmp_path: Path) -> None:
    front, behind = (
        words(30, 48),
        words(31, 40),
    )  # the picture is at 48 to 111, and blocks end at 32, 64, 96, 128, ...
    stored = Asked((front, 7, behind))
    ends = {
        "before": Asked((front, 8, behind)),
        "inside": Asked((front, 7, words(32, 40))),
        "behind": Asked((front, 7, behind[:20], words(33, 30))),
    }
    with passing("without", tmp_path, without_pool(llava), **MODULES) as without:
        right = {name: ask(without, asked)["tokens"] for name, asked in ends.items()}
    both = options_of(llava, tmp_path / "pool", kv=True)
    with passing("stores", tmp_path, both, **MODULES) as stores:
        ask(stores, stored)
        settle(stores, 1)
    hits = {}
    with passing("loads", tmp_path, both, **MODULES) as loads:
        for name, asked in ends.items():
            said = ask(loads, asked)
            assert said["tokens"] == right[name]
            hits[name] = said["cached_tokens"]
            call(loads, "reset_prefix_cache")
        assert hits == {"before": 32, "inside": 96, "behind": 128}
        assert sources(loads) == (1, 1), "of the picture behind whose end the hit ends, nothing is needed"


@pytest.mark.rare
def test_an_engine_tells_indexes_whose_outputs_it_loads(llava: Path, pool: Path, tmp_path: Path) -> None:
    """Before its first request, and after it."""
    own = shutil.copytree(pool, tmp_path / "pool")
    fleet, url = Fleet(), f"file://{own}"
    with closing(fleet), closing(PoolFollower(url, fleet)) as follower:
        follower.start()
        with started("tells", tmp_path, options_of(llava, own, kv=True), **MODULES) as engine:
            assert eventually(lambda: fleet.totals().pool_media == 5)
            (worker,) = fleet.followed()
            with open_store(url) as store:
                found = [key for keys in store.scan_keys("kvpool:") for key in keys]
            namespaces = {split_key(key).namespace for key in found}
            assert namespaces - {worker.namespace} == {*worker.media_namespaces}
            ask(engine, ONE)
            assert sources(engine) == (1, 0)
            assert [one.media_namespaces for one in fleet.followed()] == [worker.media_namespaces]


def test_a_pool_that_goes_costs_encoder_runs(
    llava: Path, reference: dict[str, list[int]], tmp_path: Path
) -> None:
    options = options_of(llava, tmp_path)
    with running("valkey-server", tmp_path) as server:
        options["ec_transfer_config"] = encoder_config(server.url, {"lookup_timeout_s": 1.0})
        with passing("one", tmp_path, options, **MODULES) as engine:
            assert ask(engine, ONE)["tokens"] == reference["one"]
            settle(engine, 1)
            forget(engine)
            assert ask(engine, ONE)["tokens"] == reference["one"]
            assert sources(engine) == (1, 1)
            server.kill()
            for name, asked in ALL.items():
                forget(engine)
                assert ask(engine, asked)["tokens"] == reference[name]
            assert sources(engine)[0] == 1
            missed = counts(engine, "misses")
            assert missed["unavailable"] + missed["too_slow"] == 7


@pytest.mark.rare
def test_an_encoder_of_other_weights_has_outputs_of_its_own(llava: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", kind="llava", width=256, layers=4, seed=1)
    with passing("other", tmp_path, without_pool(other), **MODULES) as plain:
        of_other = ask(plain, ONE)["tokens"]
    with passing("a", tmp_path, options_of(llava, tmp_path / "pool"), **MODULES) as a:
        of_old = ask(a, ONE)["tokens"]
        settle(a, 1)
        call(a, "collective_rpc", "reload_weights", kwargs={"weights_path": str(other)})
        forget(a)
        assert ask(a, ONE)["tokens"] == of_other != of_old
        assert sources(a) == (0, 2)
        settle(a, 2)
        call(a, "collective_rpc", "reload_weights", kwargs={"weights_path": str(llava)})
        forget(a)
        assert ask(a, ONE)["tokens"] == of_old
        assert sources(a) == (1, 2), "it has what it had"


@pytest.mark.rare
def test_outputs_are_audited(llava: Path, tmp_path: Path) -> None:
    """An engine learns of its own outputs how far honest ones are, and finds one that is not."""
    pool = tmp_path / "pool"
    asked = [Asked((words(50, 8), 20 + number, words(51, 8))) for number in range(LEAST_PAIRS + 2)]
    verdicts: dict[str, int] = {}
    with passing(
        "audits", tmp_path, options_of(llava, pool, settings={"audit_share": 1.0}), **MODULES
    ) as engine:
        right = [ask(engine, one)["tokens"] for one in asked]
        settle(engine, len(asked))
        forget(engine)
        for one, tokens in zip(asked[:-1], right[:-1], strict=True):
            before = sum(verdicts.values())
            assert ask(engine, one)["tokens"] == tokens

            def has_ended(before: int = before) -> bool:
                engine.generate(prompt(99, 20), 2)
                verdicts.update(counts(engine, "audits"))
                return sum(verdicts.values()) > before

            assert eventually(has_ended)
        assert verdicts["no_floor"] == LEAST_PAIRS
        assert verdicts["same"] == 1
        stored = records(pool)
        for record in stored:
            corrupt(record, keep_checksum=False)
        assert ask(engine, asked[-1])["tokens"] == right[-1], "it is computed all the same"
        assert eventually(
            lambda: bool(engine.generate(prompt(99, 20), 2)) and counts(engine, "audits")["differs"] == 1
        )
        assert eventually(
            lambda: bool(engine.generate(prompt(99, 20), 2)) and len(records(pool)) == len(stored) - 1
        )


def life(seed: int, rounds: int) -> list[dict[str, Any]]:
    """Bursts of prompts with pictures, few of them new, some aborted; resets in between."""
    draw, found = random.Random(seed), []
    for _ in range(rounds):
        if draw.random() < 0.15:
            found.append({"do": "call", "method": "reset_encoder_cache", "arguments": [], "more": {}})
        if draw.random() < 0.15:
            found.append({"do": "call", "method": "reset_prefix_cache", "arguments": [], "more": {}})
        prompts = []
        for _ in range(draw.randrange(1, 6)):
            parts: list[tuple[int, ...] | int] = [words(draw.randrange(8), draw.choice((3, 32, 48, 90)))]
            for _ in range(draw.choice((0, 1, 1, 2, 3, 6))):
                parts += [draw.randrange(14), words(draw.randrange(8), draw.choice((1, 16, 40)))]
            prompts.append(Asked(tuple(parts)))
        aborted = [place for place in range(len(prompts)) if draw.random() < 0.1]
        found.append(
            {
                "do": "burst",
                "prompts": [one.tokens for one in prompts],
                "media": [one.media for one in prompts],
                "max_tokens": draw.choice((1, 4, 12)),
                "aborted": aborted,
            }
        )
    return found


def answers(engine: EngineProcess, command: dict[str, Any]) -> list[list[int]]:
    """Of the prompts that were not aborted."""
    said = engine.ask(command).get("answers", [])
    return [tokens for place, tokens in enumerate(said) if place not in command["aborted"]]


def live(llava: Path, folder: Path, rounds: int, **more: Any) -> tuple[int, int]:
    """The same life of two engines on a pool, and of one without; returns their outputs' sources."""
    commands = life(7, rounds)
    small = {"kv_cache_memory_bytes": 9 << 20, **more}  # 72 blocks: requests are preempted
    with passing("plain", folder, without_pool(llava) | small, **MODULES) as plain:
        right = [answers(plain, command) for command in commands]
    both = options_of(llava, folder / "pool", kv=True, **small)
    with (
        passing("a", folder, both, **MODULES) as a,
        passing("b", folder, both | {"max_num_batched_tokens": 256}, **MODULES) as b,
    ):
        draw = random.Random(8)
        for command, tokens in zip(commands, right, strict=True):
            assert answers(draw.choice((a, b)), command) == tokens
        found = [sources(engine) for engine in (a, b)]
    return sum(pool for pool, _ in found), sum(computed for _, computed in found)


def test_a_random_life_of_two_engines(llava: Path, tmp_path: Path) -> None:
    pool, computed = live(llava, tmp_path, rounds=6)
    assert pool > 0
    assert computed > 0


@pytest.mark.rare
def test_a_long_random_life_of_two_engines(llava: Path, tmp_path: Path) -> None:
    pool, computed = live(llava, tmp_path, rounds=180)
    assert pool > 50
    assert computed >= 14


@pytest.mark.rare
def test_ranks_share_what_one_engine_stores(
    llava: Path, pool: Path, reference: dict[str, list[int]], tmp_path: Path
) -> None:
    """Both ranks of a larger engine get the bytes with their step."""
    options = options_of(llava, pool, tensor_parallel_size=2)
    with started("ranks", tmp_path, options, VLLM_CPU_OMP_THREADS_BIND="0|1", **MODULES) as engine:
        said = {name: ask(engine, asked)["tokens"] for name, asked in ALL.items()}
        assert sources(engine) == (5, 0)
        fresh = Asked((words(60, 20), 77, words(61, 9)))
        ask(engine, fresh)
        settle(engine, 1)
    assert said["one"][0] == reference["one"][0]


@pytest.mark.rare
def test_an_encoder_of_its_own_stores_what_another_engine_loads(
    llava: Path, reference: dict[str, list[int]], tmp_path: Path
) -> None:
    pool = tmp_path / "pool"
    produces, consumes = options_of(llava, pool), options_of(llava, pool)
    produces["ec_transfer_config"]["ec_role"] = "ec_producer"
    consumes["ec_transfer_config"]["ec_role"] = "ec_consumer"
    with passing("consumes", tmp_path, consumes, **MODULES) as consumer:
        with passing("produces", tmp_path, produces, **MODULES) as producer:
            ask(producer, ONE)
            assert eventually(lambda: len(records(pool)) == 1)
        assert ask(consumer, ONE)["tokens"] == reference["one"]
        assert sources(consumer) == (1, 0)
        assert ask(consumer, MANY)["tokens"] == reference["many"]
        assert sources(consumer) == (1, 3)
        assert len(records(pool)) == 1, "it only loads"
