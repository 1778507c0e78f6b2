"""Outputs of encoders for clips and sounds, and for items that a caller leaves out, on real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import EngineProcess
from demo.tiny_model import AUDIO_MARKS, SIDE, VIDEO_MARKS, VOCABULARY
from tests.support.encoder_engines import (
    MODULES,
    WITH_VISION,
    forget,
    generate,
    options_of,
    settle,
    sources,
    without_pool,
    words,
)
from tests.support.engines import passing

pytestmark = [pytest.mark.e2e, pytest.mark.rare, pytest.mark.timeout(1800), WITH_VISION]

# transformers looks for torchvision while it is imported, so these engines are not forked.
OWN = {**MODULES, "TESTS_INTERPRETER": "its own"}
START, END, IMAGE, VIDEO = (VOCABULARY + place for place in range(len(VIDEO_MARKS)))
BEGINS, ENDS, AUDIO = (VOCABULARY + place for place in range(len(AUDIO_MARKS)))
MARKS = {"image": (START, IMAGE, END), "video": (START, VIDEO, END), "audio": (BEGINS, AUDIO, ENDS)}
Prompt = tuple[list[int], dict[str, Any]]


def seen(*parts: tuple[str, list[int]]) -> Prompt:
    """A prompt of words and items, each by its modality and what it is made of."""
    tokens, media = [*words(1, 9)], dict[str, Any]()
    for number, (modality, item) in enumerate(parts):
        tokens += [*MARKS[modality], *words(2 + number, 7)]
        media.setdefault(modality, []).append(item)
    return tokens, media


CLIP, OTHER_CLIP, LONG_CLIP, PICTURE = [1, 4, SIDE], [2, 4, SIDE], [3, 8, SIDE], [4, SIDE]
SOUND, OTHER_SOUND, LONG_SOUND = [1, 1], [2, 1], [3, 3]
PROMPTS = {
    "qwen2_vl": [
        seen(("video", CLIP)),
        seen(("video", OTHER_CLIP)),
        seen(("video", CLIP), ("video", LONG_CLIP)),
        seen(("image", PICTURE), ("video", LONG_CLIP)),
    ],
    "qwen2_audio": [
        seen(("audio", SOUND)),
        seen(("audio", OTHER_SOUND)),
        seen(("audio", SOUND), ("audio", LONG_SOUND)),
    ],
}


def answers(engine: EngineProcess, prompts: list[Prompt]) -> list[list[int]]:
    return [generate(engine, *prompt)["tokens"] for prompt in prompts]


@pytest.mark.parametrize(("kind", "items"), [("qwen2_vl", 4), ("qwen2_audio", 3)])
def test_clips_and_sounds_are_encoded_once(
    request: pytest.FixtureRequest, kind: str, items: int, tmp_path: Path
) -> None:
    model, prompts = request.getfixturevalue(kind), PROMPTS[kind]
    with passing("without", tmp_path, without_pool(model), **OWN) as without:
        right = answers(without, prompts)
    assert right[0] != right[1], "what is asked is the same, what is seen or heard is not"
    options = options_of(model, tmp_path / "pool")
    with passing("first", tmp_path, options, **OWN) as first:
        assert answers(first, prompts) == right
        settle(first, items)
        assert sources(first) == (0, items)
    with passing("second", tmp_path, options, **OWN) as second:
        assert answers(second, prompts) == right
        assert sources(second) == (items, 0)


def test_an_item_that_is_left_out_comes_from_the_pool_or_its_request_fails(
    qwen2_vl: Path, tmp_path: Path
) -> None:
    """vLLM takes the size of a picture for the picture on engines that may load its output; one that nobody has would
    end it."""
    tokens, media = seen(("image", PICTURE))
    left_out = {"image": {"image_grid_thw": [[1, 8, 8]]}}
    with passing("engine", tmp_path, options_of(qwen2_vl, tmp_path / "pool"), **OWN) as engine:

        def named(name: str, media: dict[str, Any]) -> dict[str, Any]:
            return generate(engine, tokens, media, uuids={"image": [name]})

        right = named("a", media)["tokens"]
        settle(engine, 1)
        forget(engine)
        assert named("a", left_out)["tokens"] == right
        assert sources(engine) == (1, 1)
        forget(engine)
        failed = named("b", left_out)
        assert (failed["finish_reason"], failed["tokens"]) == ("error", [])
        assert named("a", left_out)["tokens"] == right, "the engine goes on"
        assert named("b", media)["tokens"] == right
        assert sources(engine) == (2, 2)
