"""Which facts stand for an engine's weights, on real configurations; and which loaders are refused."""

from __future__ import annotations

import functools
import json
import multiprocessing
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ResolvedRevision
from vllm import envs
from vllm.config import LoadConfig
from vllm.model_executor import model_loader
from vllm.model_executor.models.llama import LlamaForCausalLM

from kvpool.config import PoolConfig
from kvpool.errors import ConfigError, EngineRefused
from kvpool.key.key import Fact
from kvpool.vllm.engine import internals
from kvpool.vllm.engine.weights import model_name, weights_of
from tests.support.deadlines import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.allow_leaks("vLLM keeps helpers of its own for a process")]

COMMIT, LATER = "a" * 40, "b" * 40


@pytest.fixture
def config(engine_config: Any, tmp_path: Path) -> Any:
    """A configuration whose model is a copy of its own, to be changed."""
    made = engine_config()
    made.model_config.model = str(shutil.copytree(made.model_config.model, tmp_path / "model"))
    return made


@pytest.fixture
def cached(config: Any, tmp_path: Path) -> Callable[[str], Path]:
    """Puts the model into a cache of the hub, as a commit of ORG/NAME; the configuration then names it so."""
    source = Path(config.model_config.model)
    config.model_config.model = "ORG/NAME"
    config.load_config.download_dir = str(tmp_path / "cache")

    def put(commit: str) -> Path:
        repository = tmp_path / "cache" / "models--ORG--NAME"
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        return Path(shutil.copytree(source, repository / "snapshots" / commit))

    return put


def _facts(config: Any, **settings: Any) -> dict[str, Fact]:
    return weights_of(config, PoolConfig.load({"pool": "file:///unused", **settings}, {})).facts


def _changed(file: Path) -> None:
    """Turn the last byte of a file, as other weights of the same shapes would."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_weights_are_the_same_wherever_they_lie_and_others_when_overwritten(
    config: Any, tmp_path: Path
) -> None:
    facts = _facts(config)
    assert list(facts) == ["weights"]
    here = Path(config.model_config.model)
    config.model_config.model = str(shutil.copytree(here, tmp_path / "elsewhere"))
    assert _facts(config) == facts
    _changed(tmp_path / "elsewhere" / "model.safetensors")
    assert _facts(config) != facts


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "hf_quant_config.json", "model.safetensors.index.json", "code.py"],
)
def test_weights_that_changed_since_the_engine_began_to_load_them_are_not_identified(
    config: Any, name: str
) -> None:
    settings = PoolConfig.load({"pool": "file:///unused"}, {})
    here = Path(config.model_config.model)
    (here / "hf_quant_config.json").write_text("{}")
    (here / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model.safetensors"}}')
    (here / "code.py").touch()
    began_ns = max(file.stat().st_ctime_ns for file in here.iterdir())
    facts = weights_of(config, settings, began_ns).facts

    def is_later() -> bool:
        (here / name).write_bytes((here / name).read_bytes())
        return (here / name).stat().st_ctime_ns > began_ns

    assert eventually(is_later), "a clock ticks"
    assert weights_of(config, settings).facts == facts
    with pytest.raises(ConfigError, match=f"{name} was changed while this engine loaded"):
        weights_of(config, settings, began_ns)


def test_what_an_engine_fetched_from_a_hub_as_it_began_is_identified(
    config: Any, cached: Callable[[str], Path]
) -> None:
    cached("a" * 40)
    assert (
        weights_of(config, PoolConfig.load({"pool": "file:///unused"}, {}), 0).facts["revision"] == "a" * 40
    )


def _tell_when_it_began(told: Any) -> None:
    told.put((internals.began_ns(), time.time_ns()))


def test_an_engines_process_knows_when_it_began() -> None:
    assert internals.began_ns() > time.time_ns() + 10**18, (
        "the caller's own process may have loaded anything before"
    )
    context = multiprocessing.get_context("spawn")
    told, before_ns = context.Queue(), time.time_ns()
    process = context.Process(target=_tell_when_it_began, args=(told,))
    process.start()
    began_ns, now_ns = told.get(timeout=120)
    process.join()
    tick_ns = 20_000_000
    assert before_ns - tick_ns <= began_ns <= now_ns + tick_ns


def test_of_a_branch_of_the_hub_the_commit_counts(config: Any, cached: Callable[[str], Path]) -> None:
    """Files that are equal in two commits do not make these one: nobody has looked at every byte."""
    for commit in (COMMIT, LATER):
        cached(commit)
    found = {}
    for commit in (COMMIT, LATER):
        config.model_config.revision = ResolvedRevision(commit, "main")
        found[commit] = _facts(config)
        assert found[commit]["revision"] == commit
        assert all(type(value) is str for value in found[commit].values())
    assert found[COMMIT]["weights"] == found[LATER]["weights"]
    assert found[COMMIT] != found[LATER]


def test_a_commit_is_the_same_by_its_name_and_by_its_folder(
    config: Any, cached: Callable[[str], Path]
) -> None:
    """Offline, vLLM replaces the one by the other. Versions before 0.32 resolve no revision."""
    folder = cached(COMMIT)
    by_name = []
    for revision in (ResolvedRevision(COMMIT, "main"), COMMIT, "main", None):
        config.model_config.revision = revision
        by_name.append(_facts(config))
    config.model_config.model = str(folder)
    assert by_name == [_facts(config)] * 4


def test_a_model_that_is_in_no_cache_is_refused(config: Any, cached: Callable[[str], Path]) -> None:
    cached(COMMIT)
    config.model_config.revision = ResolvedRevision(LATER, "main")
    with pytest.raises(
        ConfigError, match=r'"ORG/NAME" are in no cache .*HF_HUB_CACHE.*or set model_id'
    ) as refusal:
        _facts(config)
    assert "\n" not in str(refusal.value)


def test_the_name_of_a_model_is_the_same_wherever_it_lies(config: Any, cached: Callable[[str], Path]) -> None:
    model = config.model_config
    folder = cached(COMMIT)
    model.served_model_name = model.model
    assert model_name(model, None) == "ORG/NAME"
    model.model = model.served_model_name = str(folder)
    assert model_name(model, None) == "ORG/NAME"
    model.model = model.served_model_name = str(
        shutil.copytree(folder, folder.parents[3] / "models" / "m-8b")
    )
    assert model_name(model, None) == "m-8b"
    model.served_model_name = ["assistant", "chat"]
    assert model_name(model, None) == "assistant"
    assert model_name(model, "mine") == "mine"


def test_model_id_stands_in_place_of_the_digest(config: Any) -> None:
    facts = _facts(config, model_id="mine")
    assert facts == {"weights": "model_id mine"}
    _changed(Path(config.model_config.model) / "model.safetensors")
    assert _facts(config, model_id="mine") == facts


def test_dummy_weights_are_like_no_others_of_their_name(config: Any) -> None:
    config.load_config.load_format = "dummy"
    with pytest.raises(
        EngineRefused, match=r"--load-format dummy fills .*; set model_id to a name that stands for"
    ):
        _facts(config)
    assert _facts(config, model_id="mine") == {"weights": "dummy model_id mine"}


@pytest.mark.parametrize(
    "load_format",
    ["tensorizer", "npcache", "ipc_cache", "modelexpress", "runai_streamer_sharded", "of a later version"],
)
def test_loaders_that_do_not_read_the_files_are_refused_by_name(config: Any, load_format: str) -> None:
    config.load_config.load_format = load_format
    with pytest.raises(EngineRefused, match=f"--load-format {load_format} loads .*; set model_id to a name"):
        _facts(config)
    assert _facts(config, model_id="mine") == {"weights": "model_id mine"}


@pytest.mark.parametrize(
    "load_format",
    [
        "auto",
        "hf",
        "safetensors",
        "fastsafetensors",
        "instanttensor",
        "runai_streamer",
        "sharded_state",
    ],
)
def test_loaders_that_read_the_same_files_share(config: Any, load_format: str) -> None:
    facts = _facts(config)
    config.load_config.load_format = load_format
    assert _facts(config) == facts


def test_the_files_that_a_loader_reads_are_those_that_count(config: Any) -> None:
    """A folder may hold the weights twice, and the two may differ."""
    folder = Path(config.model_config.model)
    shutil.copy(folder / "model.safetensors", folder / "model.pt")
    facts = _facts(config)
    _changed(folder / "model.pt")
    assert _facts(config) == facts
    config.load_config.load_format = "pt"
    of_pt = _facts(config)
    assert of_pt != facts
    _changed(folder / "model.pt")
    assert _facts(config) != of_pt


def test_loaders_that_choose_different_files_of_one_folder_do_not_share(config: Any) -> None:
    """``auto`` takes a consolidated checkpoint first, and ``safetensors`` all files; an index leaves some out."""
    folder = Path(config.model_config.model)
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    _changed(folder / "consolidated.safetensors")
    by_format = {}
    for load_format in ("auto", "mistral", "safetensors"):
        config.load_config.load_format = load_format
        by_format[load_format] = _facts(config)
    assert by_format["auto"] == by_format["mistral"] != by_format["safetensors"]
    index = {"weight_map": {"x": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    chosen = _facts(config)
    assert chosen not in by_format.values()
    _changed(folder / "model.safetensors")
    assert _facts(config) != chosen
    config.load_config.load_format = "auto"
    assert _facts(config) == by_format["auto"], "it is not loaded"


def test_drafts_that_another_loader_reads_from_the_models_folder_are_looked_at(
    config: Any,
) -> None:
    """A folder may hold the weights twice, and the drafts may be of the second."""
    folder = Path(config.model_config.model)
    shutil.copy(folder / "model.safetensors", folder / "model.pt")
    loads = LoadConfig(load_format="pt")
    config.speculative_config = SimpleNamespace(
        method="mtp", draft_model_config=config.model_config, draft_load_config=None
    )
    assert list(_facts(config)) == ["weights"]
    config.speculative_config.draft_load_config = loads
    facts = _facts(config)
    assert set(facts) == {"weights", "drafts_weights"}
    _changed(folder / "model.pt")
    assert _facts(config) != facts


def test_every_loader_of_vllm_is_either_digested_or_refused_with_a_reason(config: Any) -> None:
    """A new format of a new version is refused until somebody has looked at what it reads."""
    known = {
        "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "runai_streamer", "sharded_state",
        "pt", "dummy", "tensorizer", "npcache", "ipc_cache", "modelexpress", "runai_streamer_sharded",
    }  # fmt: skip
    assert set(model_loader._LOAD_FORMAT_TO_MODEL_LOADER) <= known


def test_a_loader_of_a_plugin_is_refused_under_a_known_name_too(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(model_loader.DefaultModelLoader):
        pass

    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "auto", Other)
    with pytest.raises(EngineRefused, match="--load-format auto is a plugin's loader"):
        _facts(config)


CODE = "model_config.hf_config.auto_map"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_config.model_weights": "s3://bucket/model"}, "the weights come from object storage"),
        (
            {"load_config.model_loader_extra_config": {"num_threads": 2, "pattern": "x-{rank}.safetensors"}},
            "--model-loader-extra-config has pattern",
        ),
        ({"model_config.model": "ORG/NAME", "modelscope": True}, "the weights come from ModelScope"),
        (
            {"model_config.trust_remote_code": True, CODE: {"AutoModel": "other/repo--modeling.Model"}},
            "--trust-remote-code runs code that lies not beside the weights",
        ),
        (
            {"model_config.trust_remote_code": True, "model_config.code_revision": "later",
             CODE: {"AutoTokenizer": ["a.B", None]}},
            "--trust-remote-code runs code",
        ),
        ({"overrides": ["*er/*.safetensors"]}, "the model LlamaForCausalLM loads weights from more places"),
    ],
)  # fmt: skip
def test_what_the_files_do_not_say_is_refused_by_name(
    config: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    for name, value in changes.items():
        if name == "modelscope":
            monkeypatch.setattr(envs, "VLLM_USE_MODELSCOPE", value, raising=False)
        elif name == "overrides":
            monkeypatch.setattr(LlamaForCausalLM, "allow_patterns_overrides", value, raising=False)
        else:
            *sections, field = name.split(".")
            setattr(functools.reduce(getattr, sections, config), field, value)
    with pytest.raises(EngineRefused, match=says) as refusal:
        _facts(config)
    assert str(refusal.value).endswith(
        "so the weights cannot be identified; set model_id to a name that stands for exactly these weights"
    )
    assert _facts(config, model_id="mine") == {"weights": "model_id mine"}


def test_code_beside_the_weights_is_part_of_the_digest(config: Any) -> None:
    folder = Path(config.model_config.model)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"auto_map": {"AutoModel": "modeling.Model"}}))
    (folder / "modeling.py").write_text("one = 1\n")
    config.model_config.trust_remote_code = True
    config.model_config.hf_config.auto_map = {"AutoModel": "modeling.Model"}
    facts = _facts(config)
    (folder / "modeling.py").write_text("one = 2\n")
    assert _facts(config) != facts


def test_weights_that_cannot_be_read_in_time_or_at_all_are_one_line(config: Any) -> None:
    (Path(config.model_config.model) / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="there are no weights in") as refusal:
        _facts(config)
    assert "\n" not in str(refusal.value)


def test_the_log_says_what_was_read(config: Any) -> None:
    made = weights_of(config, PoolConfig.load({"pool": "file:///unused"}, {}))
    assert str(made.facts["weights"]) in made.source
    assert "of 1 file with" in made.source
    assert config.model_config.model in made.source
    assert " ms" in made.source
