"""The picture of ``make demo-real``: two engines are asked about it, and the encoder of the first one alone runs.

Salts keep the blocks of both prompts apart, so that the second engine computes its own and shares the picture alone.
"""

from __future__ import annotations

import base64
import re
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from demo.worker_process import Answer, ask
from kvpool.cli.encoder import has_encoder

PICTURES = Path(__file__).parents[1] / "docs/assets/pictures"
PICTURE, FOR_WARMTH = PICTURES / "status-narrow.png", PICTURES / "status-narrow-dark.png"
QUESTION = "What does this picture show?"
ANSWER_TOKENS = 24
COUNTED_S = 10.0  # until an engine shows what it has counted
LOOK_S = 0.1
_COUNT = re.compile(r'kvpool_encoder_(outputs|loaded_bytes)_total\{[^}]*?(?:source="(\w+)")?\} ([\d.e+]+)')


@dataclass(frozen=True)
class Seen:
    """``runs``: of the encoder; ``loaded_nbytes``: of outputs that came from the pool in their place."""

    answer: Answer
    runs: int
    loaded_nbytes: int


def why_not(model: Path) -> str | None:
    """Why no picture can be shown, in a sentence; empty: the model sees none; None: one can be."""
    text = (model / "config.json").read_text()
    names = ("vision_config", "visual_tokenizer_config", "vit_config")
    if not has_encoder(str(model)) or not any(f'"{name}"' in text for name in names):
        return ""
    if util.find_spec("torchvision") is None:
        return (
            "no picture is shown: vLLM's models that see import torchvision, and most do not start without it; in a "
            "checkout make .cache/vision/.stamp fetches it, for PYTHONPATH=.cache/vision"
        )
    return None


def show_picture(url: str, name: str) -> Seen:
    """Ask engine ``name`` about the picture. Errors: ``EngineFailed``."""
    _ask(url, FOR_WARMTH, f"{name} warmth")
    before, answer, until_s = _counts(url), _ask(url, PICTURE, name), time.monotonic() + COUNTED_S
    after = _counts(url)
    while after[:2] == before[:2] and time.monotonic() < until_s:
        time.sleep(LOOK_S)
        after = _counts(url)
    return Seen(answer, after[0] - before[0], after[2] - before[2])


def _ask(url: str, picture: Path, salt: str) -> Answer:
    data = base64.b64encode(picture.read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": QUESTION},
    ]
    messages = [{"role": "user", "content": content}]
    body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "cache_salt": salt}
    return ask(url, "/v1/chat/completions", body)


def _counts(url: str) -> tuple[int, int, int]:
    """Outputs that the engine computed, and had from the pool; bytes of these."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:  # noqa: S310 - loopback
        found = _COUNT.findall(page.read().decode())
    counts = {(name, source): int(float(count)) for name, source, count in found}
    return (
        counts.get(("outputs", "computed"), 0),
        counts.get(("outputs", "pool"), 0),
        counts.get(("loaded_bytes", ""), 0),
    )


def wrong_with(seen: Sequence[Seen]) -> list[str]:
    """The failed claims, in sentences; empty: none failed."""
    if len(seen) < 2:
        return ["an engine did not answer about the picture"]
    first, second = seen
    wrong = []
    if first.runs != 1:
        wrong.append(f"the first engine encoded the picture {first.runs} times")
    if second.runs or not second.loaded_nbytes:
        wrong.append("the second engine did not have the picture's output from the pool")
    if second.answer.cached_tokens:
        wrong.append(f"{second.answer.cached_tokens:,} tokens of the picture's prompt came from a cache")
    if second.answer.text != first.answer.text:
        wrong.append("the second engine answered otherwise about the picture")
    return wrong


def report(seen: Sequence[Seen]) -> list[str]:
    first, second = seen
    return [
        f"{PICTURE.name}, {first.answer.prompt_tokens:,} tokens with the question: {QUESTION}",
        "",
        f"first engine: encoder runs {first.runs}, first token after {first.answer.first_token_s:.2f} s",
        f"  {first.answer.text.strip()}",
        f"second engine: encoder runs {second.runs}, {second.loaded_nbytes:,} bytes from the pool, first token after "
        f"{second.answer.first_token_s:.2f} s",
        f"  {second.answer.text.strip()}",
        "",
    ]
