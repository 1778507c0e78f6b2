"""LoRA adapters are told apart by their files, whatever they are called and wherever they lie."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvpool.errors import NoThread
from kvpool.key.checkpoint import CheckpointDigest
from kvpool.store import Store
from kvpool.vllm.engine import adapters
from kvpool.vllm.engine.adapters import AdapterCheck, Adapters, pool_hash
from tests.support.deadlines import eventually
from tests.support.scheduler import (
    NAMESPACE,
    TABLE,
    answer,
    computed,
    half,
    output,
    request_with,
)

pytestmark = [pytest.mark.vllm]

HASHES = [bytes([number]) * 32 for number in range(4)]


def write(folder: Path, weights: float) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    save_file({"lora_A": np.full((8, 64), weights, np.float32)}, folder / "adapter_model.safetensors")
    return folder


class Lora:
    """What is looked at of vLLM's ``LoRARequest``."""

    def __init__(self, path: Path | str, name: str = "adapter", form: bool = False, number: int = 1) -> None:
        self.lora_name, self.lora_path, self.is_3d_lora_weight = name, str(path), form
        self.lora_int_id = number


@pytest.fixture
def engine() -> Iterator[Callable[..., Adapters]]:
    started: list[Adapters] = []

    def start(*arguments: object) -> Adapters:
        started.append(Adapters(*arguments))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for one in started:
        one.close()


def checked(engine: Adapters, lora: Lora) -> AdapterCheck:
    check = engine.check(lora)
    assert eventually(lambda: check.done)
    return check


def test_equal_files_are_one_adapter_and_others_are_not(
    engine: Callable[..., Adapters], tmp_path: Path
) -> None:
    here, there, other = (write(tmp_path / name, weights) for name, weights in (("a", 1), ("b", 1), ("c", 2)))
    tag = checked(engine(), Lora(here)).tag
    assert tag is not None
    assert len(tag) == 16
    assert checked(engine(), Lora(there)).tag == tag
    assert checked(engine(), Lora(other)).tag not in (tag, None)
    assert checked(engine(), Lora(here, form=True)).tag not in (tag, None), (
        "its tensors are read in another way"
    )
    assert checked(engine("other target_modules"), Lora(here)).tag not in (tag, None)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_the_file_that_vllm_loads_counts_whatever_lies_beside_it(
    engine: Callable[..., Adapters], tmp_path: Path, name: str
) -> None:
    """A trainer leaves other weights in an adapter's folder, which vLLM does not read."""
    path = write(tmp_path / "a", 1)
    (path / "adapter_model.safetensors").rename(path / name)
    alone = checked(engine(), Lora(path)).tag
    assert alone is not None
    for beside in ("value_head.safetensors", "optimizer.safetensors", ".adapter_model.safetensors"):
        save_file({"v": np.zeros(4, np.float32)}, path / beside)
    assert checked(engine(), Lora(path)).tag == alone
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert checked(engine(), Lora(path)).tag not in (alone, None)
    write(path, 2)
    of_safetensors = checked(engine(), Lora(path)).tag
    (path / name).unlink()
    assert checked(engine(), Lora(path)).tag == of_safetensors, "vLLM prefers it"


def test_an_adapter_whose_weights_vllm_takes_from_elsewhere_goes_without_the_pool(
    engine: Callable[..., Adapters], tmp_path: Path
) -> None:
    lora = Lora(write(tmp_path / "a", 1))
    lora.tensorizer_config_dict = {"tensorizer_dir": "s3://bucket"}  # type: ignore[attr-defined]
    check = engine().check(lora)
    assert (check.done, check.tag, check.cause) == (True, None, "unreadable")


def test_an_adapter_that_changes_under_an_engine_has_no_tag_again_in_its_life(
    engine: Callable[..., Adapters], tmp_path: Path
) -> None:
    """The engine may hold blocks of both under one hash."""
    path, one = write(tmp_path / "a", 1), engine()
    tag = checked(one, Lora(path)).tag
    write(path, 2)
    check = one.check(Lora(path))
    assert eventually(lambda: check.done)
    assert (check.tag, check.cause) == (None, "changed")
    assert checked(one, Lora(path)).tag is None
    write(path, 1)
    assert checked(one, Lora(path)).tag is None
    assert checked(engine(), Lora(path)).tag == tag


def test_files_that_were_written_again_with_the_same_bytes_are_the_same_adapter(
    engine: Callable[..., Adapters], tmp_path: Path
) -> None:
    path, one = write(tmp_path / "a", 1), engine()
    tag = checked(one, Lora(path)).tag
    shutil.rmtree(path)
    write(path, 1)
    (path / "README.md").write_text("new")
    assert checked(one, Lora(path)).tag == tag


def test_files_are_read_once(
    engine: Callable[..., Adapters], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    digest = adapters.checkpoint_digest

    def reads(path: Path, **more: float) -> CheckpointDigest:
        read.append(path)
        return digest(path, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(adapters, "checkpoint_digest", reads)
    one, path = engine(), write(tmp_path / "a", 1)
    tags = {checked(one, Lora(path)).tag for _ in range(5)}
    assert len(tags) == len(read) == 1


@pytest.mark.parametrize("damage", ["missing", "empty", "secret", "a name on a hub"])
def test_files_that_cannot_be_read_keep_requests_from_the_pool_and_are_tried_again(
    engine: Callable[..., Adapters], tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [0.0]
    path: Path = tmp_path / "a"
    if damage == "empty":
        path.mkdir()
    elif damage == "secret":
        if os.geteuid() == 0:
            pytest.skip("root reads everything")
        write(path, 1)
        (path / "adapter_model.safetensors").chmod(0)
    one = engine("", lambda: now_s[0])
    lora = Lora("organisation/adapter" if damage == "a name on a hub" else path)
    check = checked(one, lora)
    assert (check.tag, check.cause) == (None, "unreadable")
    shutil.rmtree(path, ignore_errors=True)
    write(path, 1)
    assert checked(one, lora).tag is None
    now_s[0] += adapters.RETRY_S
    assert (checked(one, lora).tag is not None) == (damage != "a name on a hub")


def test_a_disk_that_hangs_costs_its_requests_the_pool_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(adapters, "files_state", lambda path: hangs.wait(60))
    monkeypatch.setattr(adapters, "MAX_WAITING", 4)
    one = Adapters()
    try:
        checks = [one.check(Lora(write(tmp_path / "a", 1))) for _ in range(12)]
        refused = [check for check in checks if check.done]
        assert len(refused) >= 4, "what waits has a limit"
        assert {(check.tag, check.cause) for check in checks} == {(None, "late")}
        one.close()
    finally:
        hangs.set()
    assert eventually(lambda: not one._reading)


def test_a_disk_that_hangs_stops_no_adapter_on_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do the many requests that wait for it."""
    hangs, look = threading.Event(), adapters.files_state

    def looks(path: Path) -> tuple[bytes, int]:
        if path.name == "hangs":
            hangs.wait(60)
        return look(path)

    monkeypatch.setattr(adapters, "files_state", looks)
    monkeypatch.setattr(adapters, "MAX_WAITING", 4)
    one = Adapters()
    try:
        stuck = [one.check(Lora(write(tmp_path / "hangs", 1), "hangs")) for _ in range(20)]
        for _ in range(3):
            assert checked(one, Lora(write(tmp_path / "a", 1))).tag is not None
        assert not stuck[0].done
        one.close()
    finally:
        hangs.set()
    assert eventually(lambda: not one._reading)
    assert stuck[0].tag is not None, "its own look ends, too"


def test_requests_that_wait_together_are_answered_by_one_look(
    engine: Callable[..., Adapters], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, look, looks = threading.Event(), adapters.files_state, [0]

    def counted(path: Path) -> tuple[bytes, int]:
        looks[0] += 1
        held.wait(60)
        return look(path)

    monkeypatch.setattr(adapters, "files_state", counted)
    one, path = engine(), write(tmp_path / "a", 1)
    checks = [one.check(Lora(path, form=bool(number % 2), number=number + 1)) for number in range(6)]
    held.set()
    assert eventually(lambda: all(check.done for check in checks))
    assert looks[0] < len(checks)
    assert len({check.tag for check in checks}) == 2, "each by the form of its own"
    assert [check.files and check.files.number for check in checks] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("width", [16, 32, 64])
def test_hashes_of_different_adapters_meet_in_their_last_eight_bytes_alone(width: int) -> None:
    plain = [block_hash[:16] * (width // 16) for block_hash in HASHES]
    of_one, of_other = ([pool_hash(one, tag * 16) for one in plain] for tag in (b"a", b"b"))
    assert len({*plain, *of_one, *of_other}) == 3 * len(plain)
    for one, other, block_hash in zip(of_one, of_other, plain, strict=True):
        assert len(one) == len(other) == width
        assert one[-8:] == other[-8:] == block_hash[-8:]
        assert one[:-8] != other[:-8]


def test_a_request_of_an_adapter_that_is_not_known_is_computed_and_counted(
    store: Store, tmp_path: Path
) -> None:
    path = write(tmp_path / "a", 1)
    lora = {"lora": ("adapter", str(path))}
    computed(request_with("stored", **lora), store)  # type: ignore[arg-type]
    scheduler = half(store)
    shutil.rmtree(path)
    asked = request_with("asked", **lora)  # type: ignore[arg-type]
    scheduler.seen(asked)
    assert answer(scheduler, asked) == 0
    assert scheduler.plan(output(asked, 96, TABLE)).stores == []
    scheduler.finished(asked)
    assert scheduler.stats()["kvpool_adapter_requests_without_pool_total/unreadable"] == 1
    scheduler.close()


def test_blocks_that_are_computed_before_the_adapter_is_known_are_stored_when_it_is(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = threading.Event()
    state = adapters.files_state
    monkeypatch.setattr(adapters, "files_state", lambda path: (known.wait(60), state(path))[1])
    scheduler = half(store)
    asked = request_with("asked", lora=("adapter", str(write(tmp_path / "a", 1))))
    scheduler.seen(asked)
    scheduler.allocated(asked, TABLE, 0)
    assert scheduler.plan(output(asked, 48, TABLE)).stores == []
    known.set()
    assert eventually(lambda: scheduler._requests["asked"].asked.checked)
    asked.num_computed_tokens = 48
    stored = scheduler.plan(output(asked, 48, TABLE)).stores
    assert [block.block_ids for block in stored] == [(block,) for block in TABLE[0][:6]]
    assert not {block.block_hash for block in stored} & set(asked.block_hashes)
    assert NAMESPACE.keys([block.block_hash for block in stored], 0, 0)
    scheduler.close()


def test_an_adapter_that_no_thread_can_read_goes_without_the_pool_until_one_can(
    engine: Callable[..., Adapters], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, lora = engine(), Lora(write(tmp_path / "a", 1))

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", refuse)
        check = reading.check(lora)
    assert (check.done, check.tag, check.cause) == (True, None, "unreadable")
    assert checked(reading, lora).tag is not None


def test_files_that_no_thread_can_read_are_looked_at_again_after_a_while(
    engine: Callable[..., Adapters], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look is a warning: a busy engine would write thousands."""
    asked: list[Path] = []

    def refuse(path: Path, **_: object) -> None:
        asked.append(path)
        raise NoThread("no thread could be started")

    monkeypatch.setattr("kvpool.vllm.engine.adapters.checkpoint_digest", refuse)
    reading, lora = engine(), Lora(write(tmp_path / "a", 1))
    for _ in range(3):
        check = checked(reading, lora)
        assert (check.tag, check.cause) == (None, "unreadable")
    assert len(asked) == 1
