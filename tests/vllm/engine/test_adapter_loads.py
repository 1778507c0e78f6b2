"""No block is moved of an adapter whose tensors are others in this worker than those it is called by."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from kvpool.vllm.engine import adapter_loads, internals
from kvpool.vllm.engine.adapter_loads import AdapterLoads
from kvpool.vllm.engine.adapters import GONE, UNDIGESTED, UNREADABLE
from kvpool.vllm.plan import AdapterWeights
from tests.support.adapters import LORA, Memory, Vllm, model

pytestmark = [pytest.mark.vllm]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    return Vllm(monkeypatch)


def test_equal_tensors_have_one_digest_whatever_they_are_called(vllm: Vllm) -> None:
    vllm.put("/adapters/copy")
    vllm.add()
    vllm.add(2, "other", "/adapters/copy")
    assert vllm.weights(1).digests == vllm.weights(2).digests
    told = vllm.loads.take_news()
    assert (set(told), vllm.loads.take_news()) == ({1, 2}, {})
    vllm.loads.tell_all()
    assert (vllm.loads.take_news(), vllm.loads.take_news()) == (told, {})


@pytest.mark.parametrize("other", [{"seed": 2}, {"scaling": 1.0}, {"module": "v_proj"}], ids=str)
def test_all_that_is_computed_with_is_in_the_digest(vllm: Vllm, other: dict[str, Any]) -> None:
    vllm.add()
    one = vllm.weights()
    vllm.put(**other)
    vllm.add(in_place=True)
    assert vllm.weights() != one
    assert not vllm.loads.has(one)
    assert not vllm.loads.may_have(one)


def test_layers_that_an_adapter_replaces_are_in_its_digest(vllm: Vllm) -> None:
    for number in (1, 2):
        made = model(number)
        made.modules_to_save = {"score": SimpleNamespace(weight=torch.full((2, 64), float(number)))}
        vllm.files[f"/adapters/{number}"] = lambda _, made=made: made
        vllm.add(number, f"adapter {number}", f"/adapters/{number}")
    assert vllm.weights(1).digests != vllm.weights(2).digests


def test_a_single_element_of_a_large_adapter_is_in_the_digest(vllm: Vllm) -> None:
    large = torch.zeros(2_000_003)
    before = adapter_loads.digest_adapter([("a", large)])
    large[1_234_567] = 1
    assert adapter_loads.digest_adapter([("a", large)]) != before


def test_tensors_that_a_trainer_brings_are_measured_as_those_of_files(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frameworks put a method of their own in the place of vLLM's."""
    monkeypatch.setattr(LRUCacheWorkerLoRAManager, "_load_adapter", lambda manager, request: model(1, seed=3))
    vllm.add()
    from_memory = vllm.weights()
    monkeypatch.undo()
    assert vllm.loads.has(from_memory)
    assert from_memory.digests != ("",)


@pytest.mark.parametrize("gone", ["for want of room", "by a call", "with all others"])
def test_what_vllm_holds_no_more_is_known_no_more(vllm: Vllm, gone: str) -> None:
    """Whatever took it: vLLM drops adapters in several ways, after each reload of the model, too."""
    vllm.add()
    one, held = vllm.weights(), vllm.manager._adapter_manager._registered_adapters
    vllm.loads.take_news()
    if gone == "for want of room":
        for number in (2, 3):
            vllm.put(f"/adapters/{number}", seed=number)
            vllm.add(number, f"adapter {number}", f"/adapters/{number}")
    elif gone == "by a call":
        vllm.manager.remove_adapter(1)
    else:
        held.clear()
    assert [vllm.loads.has(one), vllm.loads.may_have(one)] == [False] * 2
    assert vllm.loads.take_news()[1] == GONE
    vllm.put(seed=5)
    vllm.add()
    assert [vllm.loads.has(one), vllm.loads.may_have(one)] == [False] * 2


def test_an_adapter_that_is_asked_for_is_read_once(vllm: Vllm) -> None:
    asked = LoRARequest(LORA[0], 1, LORA[1])
    vllm.loads.look(asked)
    digest = vllm.loads.take_news()[1]
    ahead = AdapterWeights(1, *LORA, (digest,))
    assert vllm.loads.may_have(ahead)
    assert not vllm.loads.has(ahead)
    vllm.put(seed=2)  # replaced between both
    vllm.add()
    assert (vllm.loads.take_news(), vllm.loaded) == ({1: digest}, 1), "what was read is what is used"
    assert vllm.loads.has(ahead)
    vllm.loads.look(asked)
    assert (vllm.loads.take_news(), vllm.loaded) == ({1: digest}, 1)
    vllm.manager.remove_adapter(1)
    vllm.add()
    assert not vllm.loads.has(ahead), "once"


def test_what_comes_in_the_step_in_which_it_was_looked_at_is_told(vllm: Vllm) -> None:
    vllm.loads.look(LoRARequest(LORA[0], 1, LORA[1]))
    vllm.put(seed=2)
    vllm.add(in_place=True)
    assert vllm.loads.take_news() == {1: vllm.weights().digests[0]}


def test_each_rank_compares_its_own_digest(vllm: Vllm) -> None:
    """Ranks hold their own experts."""
    second = AdapterLoads(1)
    second.held = vllm.loads.held
    second.look(LoRARequest(LORA[0], 1, LORA[1]))
    digest = second.take_news()[1]
    own, of_first = (AdapterWeights(1, *LORA, digests) for digests in (("other", digest), (digest, "other")))
    assert [second.may_have(own), second.may_have(of_first)] == [True, False]
    vllm.add()
    assert [one(weights) for one in (second.has, second.may_have) for weights in (own, of_first)] == [
        True, False, True, False,
    ]  # fmt: skip


def test_what_is_read_in_the_step_that_tells_of_its_loss_is_told(vllm: Vllm) -> None:
    """vLLM drops all adapters with a reload of the model, and the scheduler asks anew after the reset behind it."""
    vllm.add()
    digest = vllm.loads.take_news()[1]
    vllm.manager._adapter_manager._registered_adapters.clear()
    vllm.loads.look(LoRARequest(LORA[0], 1, LORA[1]))
    assert vllm.loads.take_news() == {1: digest}
    assert vllm.loads.take_news() == {}
    vllm.put(seed=2)
    vllm.add(in_place=True)
    assert vllm.loads.take_news() not in ({1: digest}, {})


def test_what_was_read_long_ago_is_read_again(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.loads.look(LoRARequest(LORA[0], 1, LORA[1]))
    ahead = AdapterWeights(1, *LORA, (vllm.loads.take_news()[1],))
    monkeypatch.setattr(internals, "AHEAD_S", -1.0)
    vllm.put(seed=2)
    assert not vllm.loads.may_have(ahead)
    vllm.add()
    assert vllm.weights() != ahead


def test_what_is_read_ahead_is_bounded(vllm: Vllm) -> None:
    for number in range(1, 8):
        vllm.put(f"/adapters/{number}", seed=number)
        vllm.loads.look(LoRARequest(f"adapter {number}", number, f"/adapters/{number}"))
    assert len(getattr(vllm.manager, internals._AHEAD)) == internals.MAX_READ_AHEAD


def test_an_adapter_that_cannot_be_read_is_said_to_be_so(
    vllm: Vllm, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm.kvpool"):
        vllm.loads.look(LoRARequest("missing", 1, "/adapters/missing"))
    assert vllm.loads.take_news() == {1: UNREADABLE}
    assert "missing cannot be read" in caplog.text
    with pytest.raises(KeyError):
        vllm.add(1, "missing", "/adapters/missing")
    assert vllm.loads.take_news() == {}


def test_a_tensor_that_cannot_be_measured_keeps_its_adapter_from_the_pool_and_vllm_goes_on(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(tensors: Any) -> str:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(adapter_loads, "digest_of_all", planted)
    vllm.add()
    assert vllm.manager.list_adapters() == {1}
    assert vllm.loads.take_news() == {1: UNDIGESTED}
    vllm.loads.look(LoRARequest(LORA[0], 1, LORA[1]))
    assert (vllm.loads.take_news(), vllm.loaded) == ({1: UNDIGESTED}, 1)


def test_adapters_that_vllm_makes_for_steps_without_requests_are_not_digested(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of several ranks of data makes them anew in each step in which it has nothing to compute."""
    monkeypatch.setattr(Memory, "create_dummy_lora", lambda _, number, *rest: model(number), raising=False)
    vllm.manager._cached_dummy_lora, vllm.manager.embedding_modules = None, {}
    for number in (1, 2):
        vllm.manager.add_dummy_lora(LoRARequest("warmup", number, "/none"), rank=8)
    assert vllm.loads.take_news() == {1: UNDIGESTED, 2: UNDIGESTED}
    vllm.manager._adapter_manager._registered_adapters.clear()
    vllm.add()
    assert vllm.loads.take_news() == {1: vllm.weights().digests[0], 2: GONE}
    assert vllm.weights().digests != (UNDIGESTED,)


def test_an_adapter_of_another_make_is_taken_in_by_vllm(vllm: Vllm) -> None:
    """Nothing that is looked at for the digest may end a load that vLLM could end."""

    class Slotted:
        __slots__ = ()

    made = model(1)
    made.loras["q_proj"] = Slotted()  # type: ignore[assignment]
    vllm.files[LORA[1]] = lambda _: made
    vllm.add()
    assert vllm.manager.list_adapters() == {1}
    assert vllm.loads.take_news() == {1: UNDIGESTED}


def test_what_was_loaded_stays_when_its_file_is_written_over(vllm: Vllm, tmp_path: Path) -> None:
    """Tensors of safetensors are views of their file, which vLLM reads again and again."""
    file = tmp_path / "adapter_model.safetensors"
    save_file({"a": torch.ones(8, 64)}, file)
    loaded = model(1)
    with safe_open(file, framework="pt") as opened:
        loaded.loras["q_proj"].lora_a = opened.get_tensor("a")
    vllm.files[LORA[1]] = lambda number: loaded
    vllm.add()
    content = bytearray(file.read_bytes())
    content[-8 * 64 * 4 :] = bytes(8 * 64 * 4)
    with file.open("r+b") as written:
        written.write(content)
    held = vllm.manager._adapter_manager.get_adapter(1).loras["q_proj"].lora_a
    assert torch.equal(held, torch.ones(8, 64))


def test_a_version_that_does_not_show_its_adapters_shares_none(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = Vllm(monkeypatch)
    monkeypatch.delattr("vllm.lora.model_manager.LoRAModelManager._add_adapter")
    hidden = AdapterLoads(0)
    hidden.held = vllm.loads.held
    hidden.look(LoRARequest(LORA[0], 1, LORA[1]))
    assert (hidden.take_news(), vllm.loaded) == ({1: UNREADABLE}, 0)
    loads = AdapterLoads(0)
    assert not loads.may_have(AdapterWeights(1, *LORA, ("any",)))
    loads.look(LoRARequest(LORA[0], 1, LORA[1]))
    assert loads.take_news() == {1: UNREADABLE}


def test_engines_in_one_process_know_their_own_adapters(vllm: Vllm) -> None:
    other = AdapterLoads(0)
    manager: Any = LRUCacheWorkerLoRAManager.__new__(LRUCacheWorkerLoRAManager)
    manager._adapter_manager = Memory()
    other.held = internals.HeldAdapters(manager, adapter_loads.digest_adapter)
    vllm.add()
    assert (set(vllm.loads.take_news()), other.take_news()) == ({1}, {})
    vllm.put(seed=2)
    other.look(LoRARequest(LORA[0], 1, LORA[1]))
    assert other.may_have(AdapterWeights(1, *LORA, (other.take_news()[1],)))
    assert not other.may_have(vllm.weights())
