"""Weights that change in a living engine, and adapters that change between two: outputs are those without a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import EngineProcess
from demo.tiny_model import Kind
from tests.support.engine_forks import write_model
from tests.support.engines import (
    ask,
    call,
    engine_options,
    namespaces,
    passing,
    prompt,
    started,
    write_adapter,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PROMPT = prompt(1, 700)
OTHER_PROMPT = prompt(2, 700)
BLOCKS = 5  # of 128 tokens
Adapter = tuple[str, int, str]  # name, number and path of a request's
ADAPTED = {"enable_lora": True, "max_lora_rank": 8}


def reset(engine: EngineProcess, *, connector: bool) -> None:
    """``reset_prefix_cache``, again while stores under way hold blocks."""
    for _ in range(20):
        if call(engine, "reset_prefix_cache", reset_connector=connector):
            return
        engine.generate(prompt(9, 20), 2)
    raise AssertionError("the caches are not reset")


def load_weights(engine: EngineProcess, model: Path) -> None:
    call(engine, "collective_rpc", "reload_weights", kwargs={"weights_path": str(model)})


def test_weights_that_were_loaded_into_a_living_engine_meet_no_blocks_of_others(tmp_path: Path) -> None:
    """Engine ``b`` gets other weights in place, in several ways, while ``a`` keeps its own."""
    old, new = (
        write_model(tmp_path / name, kind="llama", width=256, layers=2, seed=seed)
        for name, seed in (("old", 1), ("new", 2))
    )
    pool = f"file://{tmp_path}/pool"
    without = {"kv_transfer_config": None}
    with passing("plain", tmp_path, engine_options(old, pool, **without)) as plain:
        of_old = ask(plain, PROMPT)["tokens"], ask(plain, OTHER_PROMPT)["tokens"]
        load_weights(plain, new)
        reset(plain, connector=False)
        of_new = ask(plain, PROMPT)["tokens"], ask(plain, OTHER_PROMPT)["tokens"]
    assert of_old[0] != of_new[0]
    assert of_old[1] != of_new[1]
    with (
        passing("a", tmp_path, engine_options(old, pool)) as a,
        passing("b", tmp_path, engine_options(old, pool)) as b,
    ):
        ask(a, PROMPT)
        loaded = ask(b, PROMPT)
        assert (loaded["pool_tokens"], loaded["tokens"]) == (BLOCKS * 128, of_old[0])
        shared = namespaces(tmp_path / "pool")
        assert len(shared) == 1
        load_weights(b, new)
        # Nobody has reset its caches: nothing of either weights goes to the pool, or comes from it.
        in_between = ask(b, prompt(3, 700))
        assert in_between["pool_tokens"] == 0
        reset(b, connector=True)
        computed = ask(b, PROMPT)
        assert (computed["pool_tokens"], computed["tokens"]) == (0, of_new[0])
        ask(b, OTHER_PROMPT)
        engines = ask(a, OTHER_PROMPT)
        assert (engines["pool_tokens"], engines["tokens"]) == (0, of_old[1])
        reset(b, connector=False)
        again = ask(b, PROMPT)
        assert (again["pool_tokens"], again["tokens"]) == (BLOCKS * 128, of_new[0]), "it has them for itself"
        assert len(namespaces(tmp_path / "pool") - shared) == 1
        # A pause before, and no reset behind: what a level-2 sleep and RL loops do.
        call(b, "sleep", 2)
        load_weights(b, old)
        call(b, "wake_up")
        back = ask(b, PROMPT)
        assert (back["pool_tokens"], back["tokens"]) == (BLOCKS * 128, of_old[0]), "it has what it had"
        # Who gets the same weights in place shares, however it began.
        reset(a, connector=True)
        load_weights(a, new)
        updated = ask(a, OTHER_PROMPT)
        assert (updated["pool_tokens"], updated["tokens"]) == (BLOCKS * 128, of_new[1])
        assert len(namespaces(tmp_path / "pool")) == 2
        metrics = b.ask({"do": "metrics"})
        assert metrics["kvpool_weights_measured_total/off"] == 1
        assert metrics["kvpool_weights_measured_total/other"] == 2, "with the reset, and with the wake-up"


def test_weights_that_stay_are_shared_through_resets_sleeps_and_reloads(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", kind="llama", width=256, layers=2)
    options = engine_options(model, f"file://{tmp_path}/pool")
    with passing("a", tmp_path, options) as a:
        first = ask(a, PROMPT)
        for level in (1, 2):
            reset(a, connector=True)
            call(a, "sleep", level)
            if level == 2:
                load_weights(a, model)
            call(a, "wake_up")
            again = ask(a, PROMPT)
            assert (again["pool_tokens"], again["tokens"]) == (BLOCKS * 128, first["tokens"])
        assert len(namespaces(tmp_path / "pool")) == 1


def test_an_adapter_is_what_an_engine_holds_whatever_its_files_are_by_then(tmp_path: Path) -> None:
    """A trainer writes the next checkpoint to its path, before its first request or behind it."""
    model = write_model(tmp_path / "model", kind="llama", width=256, layers=2)
    path, pool = tmp_path / "adapter", f"file://{tmp_path}/pool"
    adapter = ("adapter", 1, str(path))
    options = engine_options(model, pool, **ADAPTED)
    write_adapter(path, model, 1)
    with started("a", tmp_path, options) as a:
        # Loaded by a request that wants no pool.
        wants_none = {"kvpool": {"load": False, "store": False}}
        loads = {"tokens": prompt(8, 20), "max_tokens": 2, "adapter": adapter}
        a.ask({"do": "generate", **loads, "transfer_params": wants_none})
        write_adapter(path, model, 2)
        plain, first, other = (
            ask(a, PROMPT),
            ask(a, PROMPT, adapter=adapter),
            ask(a, OTHER_PROMPT, adapter=adapter),
        )
        assert first["tokens"] != plain["tokens"]
        reset(a, connector=False)
        again = ask(a, PROMPT, adapter=adapter)
        assert (again["pool_tokens"], again["tokens"]) == (BLOCKS * 128, first["tokens"])
    with passing("b", tmp_path, options) as b:
        fresh = ask(b, PROMPT, adapter=adapter)
        assert fresh["pool_tokens"] == 0
        assert fresh["tokens"] != first["tokens"]
        assert ask(b, PROMPT)["pool_tokens"] == BLOCKS * 128, "the base model shares as before"
    write_adapter(path, model, 1)
    with passing("c", tmp_path, options) as c:
        for tokens, said in ((PROMPT, first), (OTHER_PROMPT, other)):
            same = ask(c, tokens, adapter=adapter)
            assert (same["pool_tokens"], same["tokens"]) == (BLOCKS * 128, said["tokens"])
        # Another checkpoint under the same name, path and number: vLLM's own cache cannot tell them apart.
        write_adapter(path, model, 2)
        call(c, "collective_rpc", "remove_lora", args=(1,))
        assert ask(c, prompt(4, 700), adapter=adapter)["pool_tokens"] == 0
        reset(c, connector=True)
        replaced = ask(c, PROMPT, adapter=adapter)
        assert (replaced["pool_tokens"], replaced["tokens"]) == (BLOCKS * 128, fresh["tokens"])


def removed(engine: EngineProcess, adapter: Adapter) -> Adapter:
    call(engine, "collective_rpc", "remove_lora", args=(adapter[1],))
    return adapter


def loaded_in_place(engine: EngineProcess, adapter: Adapter) -> Adapter:
    """``/v1/load_lora_adapter`` with ``load_inplace``."""
    engine.ask(
        {"do": "generate", "tokens": prompt(8, 20), "max_tokens": 2, "adapter": (*adapter, None, True)}
    )
    return adapter


def pushed_out(engine: EngineProcess, adapter: Adapter) -> Adapter:
    """vLLM keeps one, and another one is asked for."""
    other = ("other", 9, str(Path(adapter[2]).with_name("other")))
    engine.ask({"do": "generate", "tokens": prompt(8, 20), "max_tokens": 2, "adapter": other})
    return adapter


def renumbered(engine: EngineProcess, adapter: Adapter) -> Adapter:
    """``/v1/unload_lora_adapter``, then ``/v1/load_lora_adapter``."""
    return (adapter[0], adapter[1] + 1, adapter[2])


def reloaded(engine: EngineProcess, adapter: Adapter) -> Adapter:
    """vLLM forgets its adapters when it loads the model's weights."""
    call(engine, "collective_rpc", "reload_weights")
    return adapter


def asked_for(engine: EngineProcess, adapter: Adapter) -> Adapter:
    return adapter


REPLACED = (asked_for, removed, loaded_in_place, pushed_out, renumbered, reloaded)


def test_an_adapter_that_is_replaced_in_any_way_meets_no_blocks_of_another(tmp_path: Path) -> None:
    """Six checkpoints under one name and path, and back to the first; vLLM asks for a reset behind each."""
    model = write_model(tmp_path / "model", kind="llama", width=256, layers=2)
    write_adapter(tmp_path / "other", model, 99)
    path = tmp_path / "adapter"
    adapter: Adapter = ("adapter", 1, str(path))
    options = engine_options(model, f"file://{tmp_path}/pool", **ADAPTED, max_loras=1, max_cpu_loras=1)
    of_each = []
    with passing("plain", tmp_path, {**options, "kv_transfer_config": None}) as plain:
        for number in range(1, len(REPLACED) + 1):
            own = write_adapter(tmp_path / f"of-{number}", model, number)
            of_each.append(ask(plain, PROMPT, adapter=(own.name, number, str(own)))["tokens"])
    assert len(set(map(tuple, of_each))) == len(REPLACED)
    with passing("a", tmp_path, options) as a:
        for number, replace in enumerate(REPLACED, 1):
            write_adapter(path, model, number)
            adapter = replace(a, adapter)
            reset(a, connector=True)
            said = ask(a, PROMPT, adapter=adapter)
            assert (said["pool_tokens"], said["tokens"]) == (0, of_each[number - 1]), replace.__name__
        for number in (1, len(REPLACED)):
            write_adapter(path, model, number)
            adapter = removed(a, adapter)
            reset(a, connector=True)
            said = ask(a, PROMPT, adapter=adapter)
            assert (said["pool_tokens"], said["tokens"]) == (BLOCKS * 128, of_each[number - 1])


MEASURED: dict[Kind, dict[str, Any]] = {
    "deepseek": {"layers": 2},  # of its layers some are replicated
    "gpt_oss": {"layers": 2, "window": 512},
    "qwen3_next": {"layers": 4},
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "deepseek" else pytest.mark.rare) for kind in MEASURED]
)
def test_the_weights_of_experts_states_and_latent_vectors_are_measured_and_stay_the_same_in_use(
    kind: Kind, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", kind=kind, width=256, **MEASURED[kind])
    options = engine_options(model, f"file://{tmp_path}/pool")
    if kind == "qwen3_next":
        options["dtype"] = "bfloat16"  # as its kernels compute
    elif kind == "deepseek":
        options["attention_backend"] = (
            "CPU_MLA"  # AMX_MLA, which a processor with AMX would get, takes bfloat16 alone
        )
    asked = prompt(
        1, 641
    )  # whole blocks and a token: vLLM's CPU kernels take other hits of latent vectors for none
    with passing("a", tmp_path, options) as a:
        ask(a, asked)
        first = ask(
            a, asked
        )  # of its own cache, which those kernels read with another result than they compute
        reset(a, connector=True)
        again = ask(a, asked)
        assert again["pool_tokens"] > 0
        assert again["tokens"] == first["tokens"]
        metrics = a.ask({"do": "metrics"})
        assert metrics["kvpool_weights_measured_total/same"] == 1
        assert metrics["kvpool_weights_measured_total/silent"] == 0
