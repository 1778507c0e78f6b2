"""``kvpool vllm`` with models that have an encoder: whose outputs are shared, and who says otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpool.cli.encoder import has_encoder
from kvpool.cli.vllm import ENCODER, EVENTS, HASH, TRANSFER, Build, Start, command_of
from kvpool.config import EncoderConfig, PoolConfig
from kvpool.errors import ConfigError

GPU = Build(on_cpu=False, has_program=True)
POOL = {"KVPOOL_POOL": "valkey://pool:6379"}
ENCODER_CONNECTOR = {
    "ec_connector": "KVPoolECConnector",
    "ec_connector_module_path": "kvpool.vllm",
    "ec_role": "ec_both",
    "ec_connector_extra_config": {},
}
VISION = {"model_type": "llava", "vision_config": {"hidden_size": 128}, "text_config": {"hidden_size": 256}}


def of(started: Start, option: str) -> Any:
    """The only value of ``option``."""
    (at,) = [at for at, word in enumerate(started.command) if word == option]
    return json.loads(started.command[at + 1])


def sees(folder: Path, *options: str, config: object = VISION, **environ: str) -> Start:
    """With a model of this config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    return command_of(["serve", str(folder), *options], environ or POOL, GPU, lambda port: True)


@pytest.mark.parametrize(
    "config",
    [
        VISION,
        {"audio_config": {"hidden_size": 1}},
        {"thinker_config": {"vision_config": {"hidden_size": 1}}},
        {"vit_config": {"hidden_size": 1}, "is_encoder_decoder": False},
    ],
)
def test_a_model_with_an_encoder_gets_its_connector_beside_the_other(tmp_path: Path, config: object) -> None:
    started = sees(tmp_path, config=config)
    assert of(started, ENCODER) == ENCODER_CONNECTOR
    assert of(started, TRANSFER)["kv_connector"] == "KVPoolConnector"
    assert started.variables == POOL, "both have one pool"
    assert started.left_out == ""
    assert f"{ENCODER} '{json.dumps(ENCODER_CONNECTOR)}'" in started.shown()


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "hidden_size": 256},
        {"model_type": "whisper", "is_encoder_decoder": True, "audio_config": {"hidden_size": 1}},
        {"vision_config": None},
        {"text_config": {"image_size": 3}},
    ],
)
def test_a_model_without_one_gets_none(tmp_path: Path, config: object) -> None:
    started = sees(tmp_path, config=config)
    assert ENCODER not in started.command
    assert started.left_out == ""


@pytest.mark.parametrize(
    "options",
    [
        ["--language-model-only"],
        ["--limit-mm-per-prompt", '{"image": 0, "video": 0}'],
        ["--limit_mm_per_prompt.image=0"],
        ["--limit-mm-per-prompt", '{"image": {"count": 0, "width": 64}}'],
        [ENCODER, "{}"],
        ["--ec_transfer_config={}"],
    ],
)
def test_who_wants_no_pictures_or_says_so_gets_none(tmp_path: Path, options: list[str]) -> None:
    started = sees(tmp_path, *options)
    assert not any(word.startswith(("--ec-", "--ec_")) for word in started.command)
    assert started.left_out == ""


@pytest.mark.parametrize(
    "options",
    [
        ["--limit-mm-per-prompt", '{"image": 2}'],
        ["--limit-mm-per-prompt", '{"image": 0, "video": 1}'],
        ["--limit-mm-per-prompt", "image=0"],
        ["--limit-mm-per-prompt", "{}"],
    ],
)
def test_fewer_pictures_are_pictures(tmp_path: Path, options: list[str]) -> None:
    assert of(sees(tmp_path, *options), ENCODER) == ENCODER_CONNECTOR


@pytest.mark.parametrize("text", [None, "no JSON", "[]", "[" * 100_000])
def test_a_model_that_is_not_known_is_one_sentence(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    started = command_of(["serve", str(tmp_path)], POOL, GPU, lambda port: True)
    assert ENCODER not in started.command
    assert started.left_out.endswith("add --ec-transfer-config.ec_role=ec_both")
    assert "\n" not in started.left_out
    by_hand = command_of(["serve", str(tmp_path), f"{ENCODER}.ec_role=ec_both"], POOL, GPU, lambda port: True)
    assert of(by_hand, ENCODER) == ENCODER_CONNECTOR


@pytest.mark.parametrize(
    "model", ["", "/nowhere/model.gguf", "s3://bucket/model", "O/M:Q4_K", "a\0b", "x" * 5000]
)
def test_a_model_that_is_no_folder_and_no_name_is_not_known(model: str) -> None:
    assert has_encoder(model) is None


def test_a_name_of_the_hub_is_looked_up_in_its_cache_alone(tmp_path: Path) -> None:
    commit, folder = "0" * 40, tmp_path / "models--ORG--MODEL"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(commit)
    (snapshot / "config.json").write_text(json.dumps(VISION))
    named = ["serve", "ORG/MODEL", "--download-dir", str(tmp_path)]
    for more, left_out in (([], False), (["--revision", commit], False), (["--revision", "v2"], True)):
        started = command_of([*named, *more], POOL, GPU, lambda port: True)
        assert (ENCODER in started.command, bool(started.left_out)) == (not left_out, left_out)


def test_the_model_may_be_an_option_or_in_vllms_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VISION))
    by_option = command_of(["serve", "--model", str(tmp_path)], POOL, GPU, lambda port: True)
    assert of(by_option, ENCODER) == ENCODER_CONNECTOR
    file = tmp_path / "vllm.yaml"
    file.write_text(f"model: {tmp_path}\n")
    by_file = command_of(["serve", "--config", str(file)], POOL, GPU, lambda port: True)
    assert of(by_file, ENCODER) == ENCODER_CONNECTOR
    file.write_text(f"model: {tmp_path}\nec-transfer-config:\n  ec_role: ec_consumer\n")
    by_file = command_of(["serve", "--config", str(file)], POOL, GPU, lambda port: True)
    assert of(by_file, ENCODER) == {**ENCODER_CONNECTOR, "ec_role": "ec_consumer"}


def test_settings_of_the_users_are_completed_and_those_of_others_left_alone(tmp_path: Path) -> None:
    ours = of(sees(tmp_path, f"{ENCODER}.ec_connector_extra_config.tenant", "a"), ENCODER)
    assert ours == {**ENCODER_CONNECTOR, "ec_connector_extra_config": {"tenant": "a"}}
    given = {
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"pool": 1},
    }
    assert of(sees(tmp_path, ENCODER, json.dumps(given)), ENCODER) == given


def test_both_have_one_pool_which_leaves_the_arguments(tmp_path: Path) -> None:
    url = "valkey://u:secret@h:1"
    one = f"{ENCODER}.ec_connector_extra_config.pool"
    started = sees(tmp_path, one, url, PATH="/bin")
    assert started.variables == {"KVPOOL_POOL": url}
    assert not any("secret" in word for word in started.command)
    assert sees(tmp_path, one, url, KVPOOL_POOL=url).variables == {"KVPOOL_POOL": url}
    with pytest.raises(ConfigError, match="names another pool") as caught:
        sees(tmp_path, one, url)
    assert "secret" not in str(caught.value)


def test_an_engine_that_only_encodes_has_nothing_of_blocks(tmp_path: Path) -> None:
    """vLLM turns its prefix caching off."""
    started = sees(tmp_path, f"{ENCODER}.ec_role=ec_producer", "--no-enable-prefix-caching")
    assert of(started, ENCODER) == {**ENCODER_CONNECTOR, "ec_role": "ec_producer"}
    assert not {TRANSFER, EVENTS, HASH} & set(started.command)
    assert started.variables == POOL


def test_a_file_of_settings_is_for_both_connectors(tmp_path: Path) -> None:
    file = tmp_path / "kvpool.toml"
    file.write_text('pool = "file:///pool"\nstore_decode = false\naudit_share = 0.0\n')
    started = sees(tmp_path, KVPOOL_CONFIG=str(file))
    assert started.variables == {}
    assert of(started, ENCODER) == ENCODER_CONNECTOR
    assert EncoderConfig.load({}, {"KVPOOL_CONFIG": str(file)}).audit_share == 0
    file.write_text('pool = "file:///pool"\nstore_decod = false\n')
    with pytest.raises(ConfigError, match="store_decod"):
        sees(tmp_path, KVPOOL_CONFIG=str(file))


@pytest.mark.parametrize("name", sorted({*PoolConfig.model_fields} - {*EncoderConfig.model_fields}))
def test_no_variable_of_the_one_connector_is_a_typo_of_the_others(name: str) -> None:
    environ = {"KVPOOL_POOL": "file:///p", f"KVPOOL_{name.upper()}": "1"}
    assert EncoderConfig.load({}, environ).pool == "file:///p"
