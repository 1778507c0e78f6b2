"""``KVPoolTier``: the kit of secondary tiers, which vLLM's own file tier passes too, and what is ours alone.

Over 400 lines because all calls of vLLM's interface share one scripted primary tier.
"""

from __future__ import annotations

import dataclasses
import functools
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import LoadConfig, VllmConfig
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    get_offload_block_hash,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvpool import open_store
from kvpool.discovery.facts import announced_namespaces
from kvpool.discovery.quota import write_held, write_quota
from kvpool.errors import EngineRefused, KVPoolError
from kvpool.store.store import MAX_BATCH_KEYS
from kvpool.vllm import KVPoolTier
from kvpool.vllm.load import chunks
from tests.support.deadlines import eventually
from tests.support.secondary_tier import (
    CHUNK_NBYTES,
    CHUNKS,
    HIT,
    MISS,
    PLAIN,
    Driven,
    OpenTier,
    SecondaryTierConformance,
    Spec,
    create_tier,
    key,
    spec,
)
from tests.support.servers import SERVERS, Server, running, started
from tests.support.touches import touched_by


def memory() -> np.ndarray:
    """Rows on pages of their own, as in the region that engines share: vLLM's file tier writes past the page cache."""
    return np.frombuffer(mmap.mmap(-1, CHUNKS * CHUNK_NBYTES), np.uint8).reshape(CHUNKS, CHUNK_NBYTES)


def made(
    config: dict[str, Any], described: Spec | None = None, items: Any = np.uint8, **engine: Any
) -> Driven:
    """A tier as ``TieringOffloadingSpec`` makes it, from its entry in ``secondary_tiers``; ``items``: of the view."""
    rows = memory()
    tier = create_tier(config, memoryview(rows.view(items)), described or spec(), **engine)
    return Driven(tier, rows)


def entry(pool: str, **more: Any) -> dict[str, Any]:
    patient = {"lookup_timeout_s": 60.0, "max_load_s": 60.0}
    kind = {"type": "KVPoolTier", "module_path": "kvpool.vllm"}
    return {**kind, "pool": pool, "model_id": "tiny", **patient, **more}


Opened = Callable[..., Driven]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """``made``, of tiers that are shut down in the end."""
    with ExitStack() as stack:

        def start(*arguments: Any, **engine: Any) -> Driven:
            driven = made(*arguments, **engine)

            def end() -> None:
                with suppress(KVPoolError, RuntimeError):
                    driven.tier.shutdown()

            stack.callback(end)
            return driven

        yield start


@pytest.fixture(scope="module")
def server_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(SERVERS[1], tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def server(server_of_module: Server) -> Server:
    server_of_module.client.flushall()
    return server_of_module


@pytest.fixture
def on_server(server: Server, opened: Opened) -> Opened:
    """``more``: of the entry in ``secondary_tiers``."""

    def start(described: Spec | None = None, items: Any = np.uint8, **more: Any) -> Driven:
        return opened(entry(server.url, **more), described, items)

    return start


@pytest.fixture
def driven(on_server: Opened) -> Driven:
    return on_server()


def test_hits_come_from_where_the_pool_is_and_not_from_a_disk(on_server: Opened) -> None:
    assert on_server().tier.cache_hit_source == "external_unspecified"


class TestTierOnServer(SecondaryTierConformance):
    @pytest.fixture
    def open_tier(self, server: Server, on_server: Opened) -> OpenTier:
        self._server = server
        return on_server

    def lose(self, one: OffloadKey) -> None:
        (name,) = self._server.client.keys(f"kvpool:default:*:{get_offload_block_hash(one).hex()}:0:0")
        assert self._server.client.delete(name) == 1


class TestTierOnFiles(SecondaryTierConformance):
    @pytest.fixture
    def open_tier(self, tmp_path: Path, opened: Opened) -> OpenTier:
        self._folder = tmp_path / "pool"
        return lambda: opened(entry(f"file://{self._folder}"))

    def lose(self, one: OffloadKey) -> None:
        (record,) = (self._folder / "blocks").glob(f"*/*.{get_offload_block_hash(one).hex()}.0.0")
        record.unlink()


class TestFileTierOfVllm(SecondaryTierConformance):
    @pytest.fixture
    def open_tier(self, tmp_path: Path, opened: Opened) -> OpenTier:
        self._folder = tmp_path / "fs"
        return lambda: opened({"type": "fs", "root_dir": str(self._folder)})

    def lose(self, one: OffloadKey) -> None:
        (record,) = self._folder.rglob(f"{get_offload_block_hash(one).hex()}.bin")
        record.unlink()


def test_a_byte_that_was_changed_is_a_miss(server: Server, driven: Driven) -> None:
    driven.fill([0])
    assert driven.ended(driven.submit([key(1)], [0], load=False)).success
    (name,) = list(server.client.keys("kvpool:default:*:0:0"))
    body = bytearray(server.client.hget(name, "b"))
    body[1000] ^= 1
    server.client.hset(name, "b", bytes(body))
    result = driven.ended(driven.submit([key(1)], [1], load=True))
    assert not result.success
    assert not result.successful_keys
    assert not server.client.exists(name)


def test_over_its_quota_a_tier_stores_nothing_and_loads(server: Server, driven: Driven) -> None:
    driven.fill(range(4))
    assert driven.ended(driven.submit([key(1)], [0], load=False)).success
    with open_store(server.url) as store:
        write_quota(store, "default", 1)
        write_held(store, "default", 2, 60)
        driven.tier._quota.turn()
        assert not driven.ended(driven.submit([key(2), key(3)], [1, 2], load=False)).success
        assert driven.ended(driven.submit([key(1)], [3], load=True)).success
        write_quota(store, "default", None)
        driven.tier._quota.turn()
        assert driven.ended(driven.submit([key(2)], [1], load=False)).success
    stats = driven.tier.get_stats()
    assert stats is not None
    assert stats.reduce()["kvpool_store_skipped_blocks_total:('quota',)"] == 2


def test_what_is_there_is_not_sent_again(driven: Driven) -> None:
    driven.fill(range(4))
    assert driven.ended(driven.submit([key(1), key(2)], [0, 1], load=False)).success
    assert driven.ended(driven.submit([key(1), key(2), key(3)], [0, 1, 2], load=False)).success
    stats = driven.tier.get_stats()
    assert stats is not None
    counted = stats.reduce()
    assert counted["kvpool_stored_blocks_total"] == 3
    assert counted["kvpool_store_skipped_blocks_total:('already_there',)"] == 2
    assert set(stats.data["data"]) <= set(KVPoolTier.build_metric_definitions({}))


def test_events_say_what_is_in_the_pool(server: Server, driven: Driven, on_server: Opened) -> None:
    driven.fill(range(2))
    driven.ended(driven.submit([key(1), key(2)], [0, 1], load=False))
    (stored,) = driven.tier.take_events()
    assert (stored.keys, stored.removed, stored.medium.value) == ([key(1), key(2)], False, "STORAGE")
    server.client.flushall()
    driven.ended(driven.submit([key(2)], [0], load=True))
    (removed,) = driven.tier.take_events()
    assert (removed.keys, removed.removed) == ([key(2)], True)
    silent = on_server(spec(events=False))
    silent.ended(silent.submit([key(3)], [0], load=False))
    assert list(silent.tier.take_events()) == []


@pytest.mark.parametrize("items", [np.int8, np.float16, np.float32], ids=lambda items: items.__name__)
def test_a_row_is_moved_whole_whatever_its_items_are(items: Any, on_server: Opened) -> None:
    driven = on_server(items=items)
    assert driven.tier.block_size_bytes == CHUNK_NBYTES
    bytes_of = driven.fill(range(4))
    keys = [key(number) for number in range(4)]
    assert driven.ended(driven.submit(keys, range(4), load=False)).success
    assert driven.ended(driven.submit(keys, range(20, 24), load=True)).success
    assert {row - 20: driven.rows[row].tobytes() for row in range(20, 24)} == bytes_of
    assert not driven.rows[4:20].any()


@pytest.mark.parametrize(
    ("view", "chunk_nbytes", "words"),
    [
        (memory(), CHUNK_NBYTES + 1, f"a row of the primary tier has {CHUNK_NBYTES} bytes, and a chunk"),
        (memory()[:, : CHUNK_NBYTES // 2], CHUNK_NBYTES // 2, "not rows of chunks"),
        (memory().reshape(-1), CHUNK_NBYTES, "not rows of chunks"),
        (memory()[:0], CHUNK_NBYTES, "not rows of chunks"),
        (np.frombuffer(bytes(2 * CHUNK_NBYTES), np.uint8).reshape(2, -1), CHUNK_NBYTES, "can be written"),
    ],
    ids=["too short", "with gaps", "flat", "none", "read only"],
)
def test_memory_that_is_not_what_was_promised_is_refused(
    view: np.ndarray, chunk_nbytes: int, words: str, server: Server
) -> None:
    with pytest.raises(EngineRefused, match=words) as caught:
        create_tier(entry(server.url), memoryview(view), spec(chunk_nbytes=chunk_nbytes))
    assert "\n" not in str(caught.value)


CANONICAL = {"canonical_layout": True, "layout": "LBNHC", "agnostic": True}
LATENT = {"replicated_layout": True, "layout": "LBNHC"}
HEADS_FIRST = {"layout": "BHLNC", "agnostic": True}


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (spec(tp_size=1), spec(tp_size=2), False),
        (spec(tp_size=2, **LATENT), spec(tp_size=4, **LATENT), True),
        (spec(tp_size=2, **CANONICAL), spec(tp_size=4, **CANONICAL), True),
        (spec(**CANONICAL), spec(canonical_layout=True, layout="LBHNC", agnostic=True), False),
        (spec(**CANONICAL), spec(layout="LBNHC", agnostic=True), False),
        (spec(tp_size=1, **HEADS_FIRST), spec(tp_size=2, **HEADS_FIRST), True),
        (
            spec(tp_size=1, blocks_per_chunk=2, **HEADS_FIRST),
            spec(tp_size=2, blocks_per_chunk=2, **HEADS_FIRST),
            False,
        ),
        # Said to be agnostic, and true of heads outside of layers only.
        (spec(tp_size=1, layout="LBHNC", agnostic=True), spec(tp_size=2, layout="LBHNC", agnostic=True), False),
        # The two model runners lay out the same number of bytes differently.
        (spec(agnostic=True), spec(agnostic=False), False),
        (spec(blocks_per_chunk=1), spec(blocks_per_chunk=2), False),
        (spec(), spec(kv_dtype="fp8"), False),
    ],
    ids=[
        "sizes", "sizes of latent vectors", "sizes of canonical rows", "canonical rows of another layout",
        "canonical rows and others", "sizes with heads first", "sizes with heads first and two blocks",
        "sizes with layers first", "model runners", "blocks per chunk", "kv type",
    ],
)  # fmt: skip
def test_engines_share_where_vllm_says_that_rows_are_the_same(
    one: Spec, other: Spec, shared: bool, server: Server, on_server: Opened
) -> None:
    driven = on_server(one)
    driven.fill([0])
    assert driven.ended(driven.submit([key(1)], [0], load=False)).success
    assert on_server(other).look_up([key(1)]) == [HIT if shared else MISS]
    assert on_server(one, model_id="other").look_up([key(1)]) == [MISS]
    with open_store(server.url) as store:
        assert len(announced_namespaces(store, "default")["tiny"]) == (1 if shared else 2)


STATES = MambaSpec(block_size=16, shapes=((4, 8),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    "other",
    [
        {"layer": dataclasses.replace(PLAIN, dtype=torch.bfloat16)},
        {
            "layer": SlidingWindowSpec(
                16, num_kv_heads=2, head_size=32, dtype=torch.float16, sliding_window=32
            )
        },
        {"speculation": SimpleNamespace(method="eagle", model="drafts")},
    ],
    ids=["a type of equal size", "a window", "layers of drafts"],
)
def test_engines_of_other_layers_share_nothing_though_rows_have_as_many_bytes(
    other: dict[str, Any], server: Server
) -> None:
    plain, differs = made(entry(server.url)), made(entry(server.url), **other)
    plain.fill([0])
    assert plain.ended(plain.submit([key(1)], [0], load=False)).success
    assert differs.look_up([key(1)]) == [MISS]
    same = made(entry(server.url), speculation=SimpleNamespace(method="ngram", model=None))
    assert same.look_up([key(1)]) == [HIT], "drafts of tokens have no layers"
    for driven in (plain, differs, same):
        driven.tier.shutdown()


def longrope(config: Any, max_model_len: int) -> Any:
    """Its factors are chosen by the length of the engine."""
    config.model_config.hf_text_config.rope_parameters = {"rope_type": "longrope"}
    config.model_config.max_model_len = max_model_len
    return config


def with_setting(config: Any, setting: str, value: object) -> Any:
    *section, name = setting.split(".")
    setattr(functools.reduce(getattr, section, config), name, value)
    return config


@pytest.mark.parametrize(
    ("this", "other"),
    [
        (lambda make: make(), lambda make: make(hf_overrides={"rms_norm_eps": 0.5})),
        (lambda make: make(), lambda make: make(dtype="bfloat16")),
        (lambda make: make(), lambda make: with_setting(make(), "model_config.quantization", "fp8")),
        (lambda make: make(), lambda make: with_setting(make(), "attention_config.backend", "FLASHINFER")),
        (
            lambda make: make(),
            lambda make: with_setting(make(), "cache_config.kv_cache_dtype_skip_layers", ["1"]),
        ),
        (lambda make: longrope(make(), 2048), lambda make: longrope(make(), 4096)),
    ],
    ids=["overrides", "a type of weights", "quantization", "a backend", "layers left out", "a length"],
)
def test_engines_that_compute_otherwise_share_nothing_under_one_name(
    this: Callable[[Any], Any],
    other: Callable[[Any], Any],
    engine_config: Any,
    server: Server,
    opened: Opened,
) -> None:
    """Whatever their operators called them in ``model_id``: vLLM tells a tier of none of it."""
    plain, same, differs = (
        opened(entry(server.url), engine=configured(engine_config)) for configured in (this, this, other)
    )
    stored(plain, [1])
    assert same.look_up([key(1)]) == [HIT]
    assert differs.look_up([key(1)]) == [MISS]


@pytest.mark.parametrize(
    ("setting", "this", "other"),
    [
        ("attention_config.backend_per_kind", {"full": "A", "mla": "B"}, {"mla": "B", "full": "A"}),
        ("cache_config.kv_cache_dtype_skip_layers", ["0", "1"], ["1", "0"]),
    ],
)
def test_engines_that_name_the_same_in_another_order_share(
    setting: str, this: object, other: object, engine_config: Any, server: Server, opened: Opened
) -> None:
    here, there = (
        opened(entry(server.url), engine=with_setting(engine_config(), setting, value))
        for value in (this, other)
    )
    stored(here, [1])
    assert there.look_up([key(1)]) == [HIT]


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("lora_config", object(), "sees no adapter's files.*--enable-lora"),
        ("aux_output_config", SimpleNamespace(enabled=True), "--enable-return-routed-experts"),
        ("attention_config.use_non_causal", True, "use_non_causal"),
        ("diffusion_config", object(), "diffusion models compute"),
        ("weight_transfer_config", object(), "--weight-transfer-config"),
        ("cache_config.calculate_kv_scales", True, "--calculate-kv-scales"),
    ],
)
def test_engines_whose_blocks_no_key_tells_apart_are_refused_by_name(
    setting: str, value: object, words: str, engine_config: Any, server: Server
) -> None:
    with pytest.raises(EngineRefused, match=words) as caught:
        made(entry(server.url), engine=with_setting(engine_config(), setting, value))
    assert "\n" not in str(caught.value)


def test_images_that_are_counted_and_not_hashed_are_refused(engine_config: Any, server: Server) -> None:
    """vLLM names them renderer0-mm-1-image-0 where neither of its caches is on: the next engine's first one, too."""
    engine = with_setting(
        engine_config(), "model_config.multimodal_config", SimpleNamespace(mm_processor_cache_gb=0)
    )
    with pytest.raises(EngineRefused, match=r"does not hash them.*--mm-processor-cache-gb 0"):
        made(entry(server.url), engine=with_setting(engine, "cache_config.enable_prefix_caching", False))


def test_states_are_refused_by_name(server: Server) -> None:
    """A page has as many bytes, whatever the type, the order and the number of its states' rows."""
    with pytest.raises(EngineRefused, match="KV-cache group 0 is of kind MambaSpec"):
        made(entry(server.url), layer=STATES)


def test_a_tier_that_cannot_see_its_engine_is_refused(server: Server) -> None:
    with pytest.raises(EngineRefused, match="does not show a tier the engine"):
        SecondaryTierFactory.create_secondary_tier(entry(server.url), memoryview(memory()), spec())


def checkpoint(folder: Path, weights: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / "pytorch_model.bin").write_bytes(weights)
    return str(folder)


def test_weights_are_told_by_their_files_wherever_they_lie(tmp_path: Path, on_server: Opened) -> None:
    def found(model: str, **more: str) -> list[LookupResult]:
        return on_server(spec(model=model), **more).look_up([key(1)])

    here = checkpoint(tmp_path / "here", b"weights")
    driven = on_server(spec(model=here))
    driven.fill([0])
    assert driven.ended(driven.submit([key(1)], [0], load=False)).success
    assert found(checkpoint(tmp_path / "there", b"weights")) == [HIT], "they were moved"
    assert found("org/model", model_path=here) == [HIT], "an operator says where they are"
    assert found("org/model") == [MISS], "nobody knows what these are"
    checkpoint(tmp_path / "here", b"WEIGHTS")
    assert found(here) == [MISS], "they were overwritten"


def test_the_files_that_the_engines_loader_reads_are_those_that_count(tmp_path: Path, server: Server) -> None:
    """One folder, two sets of weights; of a loader that is not known, both count."""
    model = checkpoint(tmp_path / "model", b"weights")
    (tmp_path / "model" / "model.pt").write_bytes(b"other weights")

    def weights(load_format: str) -> object:
        engine = VllmConfig(load_config=LoadConfig(load_format=load_format))
        driven = made(entry(server.url), spec(model=model), engine=engine)
        try:
            return driven.tier._facts["weights"]  # type: ignore[attr-defined]
        finally:
            driven.tier.shutdown()

    before = {load_format: weights(load_format) for load_format in ("auto", "pt", "tensorizer")}
    assert len(set(before.values())) == 3
    (tmp_path / "model" / "model.pt").write_bytes(b"OTHER WEIGHTS")
    after = {load_format: weights(load_format) for load_format in before}
    assert [name for name in before if after[name] != before[name]] == ["pt", "tensorizer"]


def test_weights_that_cannot_be_read_are_refused(server: Server, tmp_path: Path) -> None:
    for path, words in ((tmp_path, "no weights in"), (tmp_path / "gone", "not there")):
        with pytest.raises(EngineRefused, match=words) as caught:
            made(entry(server.url, model_path=str(path)))
        assert "\n" not in str(caught.value)


def stored(driven: Driven, numbers: Sequence[int]) -> list[OffloadKey]:
    """The keys of chunks that are in the pool now."""
    keys = [key(number) for number in numbers]
    driven.fill(range(len(keys)))
    assert driven.ended(driven.submit(keys, range(len(keys)), load=False)).success
    return keys


@pytest.mark.parametrize("never_change", [False, True])
def test_after_a_reset_an_engine_shares_only_with_itself(never_change: bool, on_server: Opened) -> None:
    """Weights may have been changed in place, and vLLM tells a tier nothing else of it."""
    driven = on_server(weights_never_change=never_change)
    other = on_server()
    before = stored(driven, range(2))
    context = ReqContext("asked before, loads after")
    driven.tier.on_new_request(context)
    assert eventually(lambda: (driven.poll(), driven.tier.lookup(before[0], context) is HIT)[1])
    driven.tier.drain_jobs()
    assert (driven.tier.lookup(before[0], context) is HIT) == never_change
    assert driven.look_up(before) == [HIT if never_change else MISS] * 2
    after = stored(driven, range(2, 4))
    assert driven.look_up(after) == [HIT] * 2
    assert other.look_up(before) == [HIT] * 2
    assert other.look_up(after) == [HIT if never_change else MISS] * 2
    driven.tier.drain_jobs()
    assert driven.look_up(after) == [HIT if never_change else MISS] * 2, "weights may change again"


def test_what_engines_ask_for_and_use_counts_as_used(server: Server, driven: Driven) -> None:
    """Else the pool drops first what every engine has in its own memory."""
    keys = stored(driven, range(3))

    def touched(act: Callable[[], object]) -> int:
        def whole() -> None:
            act()
            assert isinstance(driven.tier, KVPoolTier)
            assert eventually(lambda: (driven.poll(), not driven.tier._lookups._touching)[1])  # type: ignore[attr-defined]

        return touched_by(server, whole)

    assert touched(lambda: driven.look_up(keys)) == 3
    assert touched(lambda: driven.tier.touch([*keys, key(9)], ReqContext("r"))) == 4
    assert touched(lambda: stored(driven, range(3))) == 3


def test_questions_and_jobs_of_any_length_are_cut(on_server: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.store.store.MAX_BATCH_KEYS", 10)
    monkeypatch.setattr("kvpool.vllm.load.chunks.ASK_KEYS", 10)
    monkeypatch.setattr("kvpool.vllm.load.chunks.MAX_TOUCHES", 10)
    monkeypatch.setattr("kvpool.vllm.tier.PART_NBYTES", 10 * CHUNK_NBYTES)
    driven = on_server()
    keys = stored(driven, range(CHUNKS))
    driven.tier.touch(keys, ReqContext("r"))
    assert driven.look_up([*keys, *map(key, range(100, 200))]) == [HIT] * CHUNKS + [MISS] * 100
    assert driven.ended(driven.submit(keys, range(CHUNKS), load=True)).success


def test_a_batch_of_the_tier_fits_the_store() -> None:
    assert max(chunks.ASK_KEYS, chunks.MAX_TOUCHES) <= MAX_BATCH_KEYS


SHORT, OF_A_GROUP = make_offload_key(b"short", 0), make_offload_key(bytes(32), 1 << 16)


@pytest.mark.parametrize("bad", [SHORT, OF_A_GROUP], ids=["a short hash", "a group"])
def test_a_key_that_cannot_be_spelled_is_a_miss_of_its_own(bad: OffloadKey, driven: Driven) -> None:
    keys = stored(driven, range(2))
    driven.tier.touch([bad], ReqContext("r"))
    assert driven.look_up([keys[0], bad, keys[1]]) == [HIT, MISS, HIT]
    for load in (False, True):
        assert not driven.ended(driven.submit([bad], [5], load=load)).success
    check_it_serves(driven, keys)


@pytest.mark.parametrize("rows", [[CHUNKS], [-1], [1, 2], []], ids=str)
def test_a_job_of_rows_that_are_not_there_costs_itself_only(rows: list[int], driven: Driven) -> None:
    keys = stored(driven, range(2))
    before = driven.rows.copy()
    for load in (True, False):
        assert not driven.ended(driven.submit([key(1)], rows, load=load)).success
    assert (driven.rows == before).all()
    check_it_serves(driven, keys)


class _Odd:
    """A transfer whose reply is none."""

    def done(self) -> bool:
        return True

    def cancel(self) -> None: ...

    def settle(self, timeout_s: float) -> None: ...

    def wait(self) -> list[bool]:
        raise ValueError("what is this?")

    def results(self) -> bytes:
        raise ValueError("what is this?")


@pytest.mark.parametrize("when", ["submitted", "answered"])
@pytest.mark.parametrize("what", ["submit_touch", "submit_get", "submit_put_absent"])
def test_an_exception_of_the_store_costs_one_batch(
    what: str, when: str, driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = stored(driven, range(2))
    assert isinstance(driven.tier, KVPoolTier)
    with monkeypatch.context() as patch:
        patch.setattr(driven.tier._store, what, lambda *_, **__: _Odd() if when == "answered" else 1 / 0)
        if what == "submit_touch":
            assert driven.look_up(keys, "odd") == [MISS] * 2
            driven.tier.touch(keys, ReqContext("r"))
            driven.poll()
        else:
            assert driven.ended(driven.submit([key(9)], [9], load=what == "submit_get")).success is False
    check_it_serves(driven, keys)


def check_it_serves(driven: Driven, keys: list[OffloadKey]) -> None:
    """The tier is not off, and has counted what it could not do."""
    stats = driven.tier.get_stats()
    assert stats is not None
    assert any("fault" in sample for sample in stats.reduce()), stats.reduce()
    assert driven.look_up(keys, "afterwards") == [HIT] * len(keys)
    assert driven.ended(driven.submit(keys, range(20, 20 + len(keys)), load=True)).success


def test_it_starts_before_its_pool_and_shares_when_it_comes(tmp_path: Path, opened: Opened) -> None:
    late = Server(SERVERS[1], tmp_path)
    early = opened(entry(late.url, start_without_pool=True))
    with started(late):
        assert eventually(lambda: early.ended(early.submit([key(1)], [0], load=False)).success)
        assert early.ended(early.submit([key(1)], [1], load=True)).success


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"pool": "memory://"}, "write file:///dev/shm/kvpool"),
        ({"pool": "valkey://127.0.0.1:1"}, "kvpool refuses to start: .*127.0.0.1:1"),
        ({"poll": "x"}, 'unknown setting "poll"; did you mean "pool"'),
        ({"model_id": None}, "model_id"),
        ({"model_id": ...}, '"model_id" is missing: .*secondary_tiers.*attention backend'),
        ({"lookup_timeout_s": 0}, "lookup_timeout_s"),
    ],
)
def test_it_refuses_to_start_in_one_line(more: dict[str, Any], words: str, server: Server) -> None:
    with pytest.raises(EngineRefused, match=words) as caught:
        made({name: value for name, value in (entry(server.url) | more).items() if value is not ...})
    assert "\n" not in str(caught.value)
