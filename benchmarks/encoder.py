"""``python -m benchmarks encoder``: an image asked of two workers, without and with connectors for encoders' outputs.

Two real engines of a small vision model for each row take the same new prompts in turns, rows in another order for each
image: the first worker computes and stores what the second one may load. Beside kvpool stand vLLM's own connectors. And
what kvpool's takes of the scheduler's time in a step: ``encoder_steps``.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.encoder_report import (
    FIRST,
    FOLDER,
    OFF,
    OWN,
    OWN_SERVER,
    SECOND,
    Asked,
    Moved,
    Report,
    show,
)
from benchmarks.encoder_steps import measure_steps
from benchmarks.encoder_watch import runs
from benchmarks.valkey_shards import ValkeyShards, find_server
from demo.engine_process import EngineFailed, EngineProcess, encoder_config, small_engine, write_model
from demo.tiny_model import FIRST_WORD, PATCH, VOCABULARY
from demo.workspace import doing, workspace
from kvpool.errors import ConfigError
from tests.support.engine_forks import ROOT, watching
from tests.support.engines import passing

VISION = ROOT / ".cache" / "vision"
MEMORY = Path("/dev/shm")  # noqa: S108
WORDS_BEFORE, WORDS_AFTER = 16, 16
ANSWER_TOKENS = 8
LONGEST = 1024
KV_CACHE_NBYTES = 128 << 20
WARM_UPS = 2
STEPS_ROUNDS = 200
# Another one of vLLM's, which cannot be measured on a CPU; what it says when it is tried.
NOT_HERE = "ECCPUConnector"


@dataclass(frozen=True)
class Sizes:
    """Of the model. ``side``: of an image, pixels; a multiple of 14."""

    side: int
    vision_width: int
    vision_layers: int
    width: int
    layers: int

    @property
    def image_tokens(self) -> int:
        return (self.side // PATCH) ** 2


def run_encoder(*, server: Path | None, images: int, sizes: Sizes, as_json: bool) -> bool:
    """Measure and print; whether all tokens agreed, and each of kvpool's pools was used.

    Blocks for minutes. Errors: ``ConfigError``, ``KVPoolError``.
    """
    for option, size, unit in (
        ("--side", sizes.side, PATCH), ("--vision-width", sizes.vision_width, 128), ("--width", sizes.width, 256),
    ):  # fmt: skip
        if size % unit:
            raise ConfigError(f"{option} {size} is not a multiple of {unit}")
    if not VISION.is_dir():
        raise ConfigError(
            "vLLM's models with images import torchvision: make .cache/vision/.stamp fetches it"
        )
    program, console, load = find_server(server), Console(stderr=True), os.getloadavg()[0]
    memory = MEMORY if os.access(MEMORY, os.W_OK) else None
    with (
        workspace("kvpool-bench-", console, keep=False) as folder,
        tempfile.TemporaryDirectory(prefix="kvpool-bench-", dir=memory) as pools,
        watching(folder, "encoder"),
        ValkeyShards(program, folder / "server", shards=1, io_threads=1) as shards,
    ):
        with doing(console, "a small vision model with random weights is written"):
            model = write_model(
                folder / "model", kind="llava", width=sizes.width, layers=sizes.layers,
                vision={name: getattr(sizes, name) for name in ("side", "vision_width", "vision_layers")},
            )  # fmt: skip
        transfers = _transfers(Path(pools), shards.url)
        with doing(console, f"{NOT_HERE} is tried"):
            refused = {NOT_HERE: _why_not(folder, _options(model, _vllms(NOT_HERE)))}
        asked, moved = _measure(console, folder, model, transfers, Path(pools), images, sizes.side)
        with doing(console, "what the connector takes of a scheduler's step"):
            steps = measure_steps(STEPS_ROUNDS)
    report = Report(
        images, sizes.image_tokens, sizes.image_tokens * sizes.width * 4, asked, moved, refused, steps, load,
    )  # fmt: skip
    show(report, as_json=as_json)
    return not report.faults


def _vllms(name: str, **settings: Any) -> dict[str, Any]:
    return {"ec_connector": name, "ec_role": "ec_both", "ec_connector_extra_config": settings}


def _transfers(pools: Path, url: str) -> dict[str, dict[str, Any] | None]:
    return {
        OFF: None,
        FOLDER: _vllms("ECExampleConnector", shared_storage_path=str(pools / "vllm")),
        OWN: encoder_config(f"file://{pools}/kvpool"),
        OWN_SERVER: encoder_config(url),
    }


def _options(model: Path, transfer: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        **small_engine(model, block_tokens=32, longest_tokens=LONGEST, kv_cache_nbytes=KV_CACHE_NBYTES),
        "skip_tokenizer_init": False,
        **({} if transfer is None else {"ec_transfer_config": transfer}),
    }


def _why_not(folder: Path, options: dict[str, Any]) -> str:
    """Start an engine that is not expected to; its reason, or nothing. It has the runner that the connector wants."""
    modules = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(VISION)])
    environment = {"PYTHONPATH": modules, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    engine = EngineProcess(NOT_HERE, folder, options, environment)
    try:
        engine.wait_ready()
    except EngineFailed as error:
        said = re.search(r"Value error, (.*?)\.? \[type", engine.log.read_text(errors="replace"))
        return said[1] if said else str(error)
    finally:
        engine.kill()
    return ""


def _measure(
    console: Console, folder: Path, model: Path, transfers: Mapping[str, dict[str, Any] | None], pools: Path,
    images: int, side: int,
) -> tuple[list[Asked], list[Moved]]:  # fmt: skip
    draw = random.Random(19)
    asked: list[Asked] = []
    with contextlib.ExitStack() as parts:
        engines: dict[tuple[str, str], EngineProcess] = {}
        with doing(console, f"{2 * len(transfers)} engines start"):
            for number, (row, transfer) in enumerate(transfers.items()):
                for worker in (FIRST, SECOND):
                    started = passing(
                        f"{worker}{number}", folder, _options(model, transfer), TESTS_MODULES=str(VISION)
                    )
                    engines[row, worker] = parts.enter_context(started)
        before: list[int] = []
        with doing(console, f"{images} images"):
            for image in range(WARM_UPS + images):
                if image == WARM_UPS:
                    before = _nbytes(engines, pools)
                prompt = [
                    *_words(draw, WORDS_BEFORE), VOCABULARY, *_words(draw, WORDS_AFTER),
                ]  # fmt: skip
                order = list(transfers)
                draw.shuffle(order)
                of_image = [
                    _ask(engines[row, worker], row, worker, image - WARM_UPS, prompt, side)
                    for row in order
                    for worker in (FIRST, SECOND)
                ]
                if image >= WARM_UPS:
                    asked += of_image
        stored, own_stored, own_loaded, far_stored, far_loaded = (
            now - then for now, then in zip(_nbytes(engines, pools), before, strict=True)
        )
    kept = sum(not one.encoder_runs for one in asked if (one.row, one.worker) == (FOLDER, SECOND)) / images
    return asked, [
        Moved(OFF, 0, 0), Moved(FOLDER, stored, int(kept * stored)), Moved(OWN, own_stored, own_loaded),
        Moved(OWN_SERVER, far_stored, far_loaded),
    ]  # fmt: skip


def _words(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(FIRST_WORD, VOCABULARY) for _ in range(count)]


def _ask(engine: EngineProcess, row: str, worker: str, image: int, prompt: list[int], side: int) -> Asked:
    before = runs(engine.log)
    said = engine.ask(
        {
            "do": "generate",
            "tokens": prompt,
            "media": {"image": [[image + 1000, side]]},
            "max_tokens": ANSWER_TOKENS,
        }
    )
    after = runs(engine.log)
    engine.wait_quiet()
    return Asked(
        row, worker, image, said["first_token_s"], said["finished_s"], after.items - before.items,
        after.took_s - before.took_s, said["tokens"],
    )  # fmt: skip


def _nbytes(engines: Mapping[tuple[str, str], EngineProcess], pools: Path) -> list[int]:
    """In the folder of vLLM's connector; and stored and loaded by kvpool's, since their start."""
    found = [sum(one.stat().st_size for one in (pools / "vllm").glob("*/*"))]
    for row in (OWN, OWN_SERVER):
        for worker, name in ((FIRST, "stored_bytes"), (SECOND, "loaded_bytes")):
            engine = engines[row, worker]
            engine.generate([FIRST_WORD] * 3, 2)  # brings what is counted
            found.append(int(engine.ask({"do": "metrics"}).get(f"kvpool_encoder_{name}_total", 0)))
    return found
