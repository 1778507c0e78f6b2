"""``NearBlocks``: an index knows what the near pool's directory holds, whoever stores into it or evicts from it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kvpool import Namespace, PrefixIndex, open_store
from kvpool.store.file_system import FileSystem
from kvpool.vllm.geometry import Group
from kvpool.vllm.plan import PoolWorkerMetadata
from kvpool.vllm.tell import near as module
from kvpool.vllm.tell.near import LOOK_S, NEW_NAMESPACE_S, NearBlocks
from tests.support.deadlines import eventually
from tests.support.fleets import Clock
from tests.support.scheduler import NAMESPACE as IN_USE
from tests.support.scheduler import half
from tests.support.vllm_blocks import encoded
from tests.support.wire import packed64

pytestmark = [pytest.mark.vllm]

HASHES = [place.to_bytes(32, "big") for place in range(1, 9)]
PROMPT = list(range(1, 9))
NAMESPACE, OTHER = Namespace("t", {"a": 1}), Namespace("t", {"a": 2})


def put(path: Path, hashes: list[bytes], namespace: Namespace = NAMESPACE, group: int = 0) -> None:
    with open_store(f"file://{path}") as store:
        assert all(store.put_many(namespace.keys(hashes, group, 0), [b"x"] * len(hashes)))


def evict(path: Path, hashes: list[bytes]) -> None:
    with open_store(f"file://{path}") as store:
        assert store.delete_many(NAMESPACE.keys(hashes, 0, 0)) == len(hashes)


class Told:
    """An index that is told what one engine of the host takes."""

    def __init__(self, path: Path, *groups: Group) -> None:
        self.clock = Clock()
        self.blocks = NearBlocks(str(path), groups or [Group(16)], self.clock)
        self.index = PrefixIndex()

    def step(self, namespace: Namespace | None = NAMESPACE) -> int:
        events: list[Any] = self.blocks.take(namespace)
        if events:
            self.index.apply("w", encoded(events), near="near")
        return len(events)

    def look(self, namespace: Namespace | None = NAMESPACE) -> None:
        """The engine steps, the thread looks, and the engine steps until all is told."""
        self.step(namespace)
        self.blocks.turn()
        while self.step(namespace):
            pass

    def held(self) -> int:
        return len(self.index)

    def leading(self) -> int:
        return max((row.pool_blocks for row in self.index.match(packed64(PROMPT))), default=0)


def test_an_index_learns_what_came_and_what_was_evicted(tmp_path: Path) -> None:
    put(tmp_path / "pool", HASHES[:5])
    told = Told(tmp_path / "pool")
    told.look()
    assert (told.leading(), told.held()) == (5, 5)
    evict(tmp_path / "pool", HASHES[3:4])
    put(tmp_path / "pool", HASHES[5:])
    told.look()
    assert (told.leading(), told.held()) == (3, 7)
    told.look()
    assert told.step() == 0, "nothing changed"


def test_the_medium_is_where_the_directory_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "pool", HASHES[:1])
    media = []
    for kind in ("tmpfs", "ext4"):
        monkeypatch.setattr(module.FileSystem, "of", lambda _, kind=kind: FileSystem("/", kind, "", 1, 1, 0))
        blocks = NearBlocks(str(tmp_path / "pool"), [Group(16)])
        blocks.take(NAMESPACE)
        blocks.turn()
        (event,) = blocks.take(NAMESPACE)
        media.append((event.medium, event.locality, event.ownership))  # type: ignore[attr-defined]
    assert media == [("CPU", "LOCAL", "kvpool"), ("DISK", "LOCAL", "kvpool")]


def test_each_group_is_told_by_its_kind(tmp_path: Path) -> None:
    put(tmp_path / "pool", HASHES[:6])
    put(tmp_path / "pool", HASHES[4:6], group=1)
    put(tmp_path / "pool", HASHES, group=2)  # of another engine's layout
    told = Told(tmp_path / "pool", Group(16), Group(16, 33))
    told.look()
    assert (told.leading(), told.held()) == (6, 6)


def test_an_idle_engine_tells_only_what_holds_when_it_steps(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    put(path, HASHES[:2])
    told = Told(path)
    told.look()
    put(path, HASHES[2:4])
    told.blocks.turn()
    evict(path, HASHES[2:3])
    told.blocks.turn()
    while told.step():
        pass
    assert told.held() == 3
    told.look()
    evict(path, HASHES[:2])
    told.look()
    assert told.held() == 1


def test_what_is_told_in_parts_is_told_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two parts the directory changes: the rest of the old ones comes first, then the change."""
    monkeypatch.setattr(module, "EVENT_HASHES", 2)
    path = tmp_path / "pool"
    put(path, HASHES)
    told = Told(path)
    told.step()
    told.blocks.turn()
    assert told.step() == 1
    evict(path, HASHES[:6])
    told.blocks.turn()
    assert [told.step() for _ in range(5)] == [1, 1, 1, 0, 0]
    assert told.held() == 8
    told.look()
    assert told.held() == 2


def test_all_is_told_again_to_an_index_that_lost_some(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    put(path, HASHES[:4])
    told = Told(path)
    told.look()
    put(path, HASHES[4:5])
    told.blocks.turn()
    told.index = PrefixIndex()
    told.blocks.forget()
    assert told.step() == 0, "what was found before is not told any more"
    told.look()
    assert (told.leading(), told.held()) == (5, 5)
    evict(path, HASHES[4:5])
    told.look()
    assert told.held() == 4


def test_a_new_namespace_waits_until_indexes_know_of_it(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    put(path, HASHES[:4])
    put(path, HASHES[4:6], OTHER)
    told = Told(path)
    told.look()
    told.index = PrefixIndex()
    told.look(None)
    told.look(OTHER)
    assert told.held() == 0
    told.clock.now_s += NEW_NAMESPACE_S
    told.look(OTHER)
    assert told.held() == 2


def test_an_unreadable_directory_is_said_once_and_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *values: said.append(text % values))
    path = tmp_path / "pool"
    path.mkdir()
    (path / "blocks").touch()
    told = Told(path)
    for _ in range(3):
        told.step()
        assert told.blocks.turn() == LOOK_S
    (line,) = said
    assert "what the near pool holds" in line
    (path / "blocks").unlink()
    path.rmdir()
    put(path, HASHES[:1])
    told.look()
    assert told.held() == 1


def test_looking_takes_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(tmp_path / "pool")

    def slow(_: NearBlocks) -> float:
        told.clock.now_s += 3.0
        return LOOK_S

    monkeypatch.setattr(NearBlocks, "_look", slow)
    assert told.blocks.turn() == pytest.approx(60.0)


def test_its_thread_ends(tmp_path: Path) -> None:
    put(tmp_path / "pool", HASHES[:1])
    blocks = NearBlocks(str(tmp_path / "pool"), [Group(16)])
    blocks.start()
    blocks.take(NAMESPACE)
    blocks.close()
    assert "kvpool-near" not in {thread.name for thread in threading.enumerate()}


def test_an_engine_tells_it_with_its_other_events(tmp_path: Path) -> None:
    """And tells all of it again to an index that asks for all that the engine holds."""
    urls = [f"file://{tmp_path / 'near'}?capacity=64MiB", f"file://{tmp_path / 'far'}?capacity=64MiB"]
    with open_store(urls) as store:
        engine = half(store, pool=" ".join(urls))
        engine.start()
        put(tmp_path / "near", HASHES[:3], IN_USE)
        told: list[Any] = []

        def tells(count: int) -> bool:
            told.extend(
                event for event in engine.take_events() if getattr(event, "ownership", "") == "kvpool"
            )
            return len(told) == count

        assert eventually(lambda: tells(1), within_s=LOOK_S + 55)
        engine.update(PoolWorkerMetadata(asked=True), (), ())
        assert eventually(lambda: tells(2), within_s=LOOK_S + 55)
        engine.close()
    assert sorted(told[0].block_hashes) == sorted(told[1].block_hashes) == PROMPT[:3]


@pytest.mark.parametrize(("near", "events"), [(True, False), (False, True)])
def test_without_events_or_a_near_pool_nothing_is_listed(tmp_path: Path, near: bool, events: bool) -> None:
    urls = [f"file://{tmp_path / 'near'}", f"file://{tmp_path / 'far'}"][not near :]
    with open_store(urls) as store:
        engine = half(store, pool=" ".join(urls), events=events)
        engine.start()
        assert "kvpool-near" not in {thread.name for thread in threading.enumerate()}
        engine.close()
