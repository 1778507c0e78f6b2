"""One vLLM engine behind a pipe: ``python demo/piped_engine.py OPTIONS.json`` for the demo, tests and benchmarks.

Reads one JSON object a line from standard input and answers each with one line on the descriptor given in the
options, so that nothing the engine prints can be mistaken for an answer. Commands:

- ``{"do": "generate", "tokens": [...], "max_tokens": 16}``: ``{"tokens", "finish_reason", "cached_tokens",
  "pool_tokens", "first_token_s", "finished_s"}``, times since the request was added; with ``"transfer_params"``, the
  request's ``kv_transfer_params``, with ``"cache_salt"`` its salt, with ``"adapter": [name, number, path]`` a LoRA
  adapter, and with ``"media"`` items of noise, each of its number: ``{"image": [[number, side], ...], "video":
  [[number, frames, side], ...], "audio": [[number, seconds], ...]}``, sides in pixels, or in the place of a list the
  tensors by name of a caller who leaves the items out; ``"uuids": {"image": ["a", ...]}`` are callers' names of items;
- ``{"do": "burst", "prompts": [[...]], "max_tokens": 16, "n": 1}``: all at once, ``n`` answers to each; ``{"steps",
  "answers"}``: steps of the engine that gave tokens, and the tokens of each prompt's first answer;
  ``"transfer_params"`` as above, ``"media"`` a list, one for each prompt, and the prompts at the places ``"aborted"``
  are aborted after the first step;
- ``{"do": "embed", "tokens": [...]}``: ``{"embedding", "cached_tokens", "pool_tokens"}`` of a model that embeds;
- ``{"do": "abort", "tokens": [...], "once": PATH}``: the request is aborted as soon as there is that file;
- ``{"do": "call", "method": "sleep", "arguments": [1], "more": {}}``: calls a method of ``vllm.LLM``, or of
  its engine; ``{"answer"}``, null for what JSON cannot say;
- ``{"do": "metrics"}``: kvpool's and vLLM's own counters, summed over labels; ``name/value`` where one of ours
  has a label;
- ``{"do": "stop"}``: shuts the engine down and exits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

POOL_HITS = "vllm:external_prefix_cache_hits_total"
ABORT_WAIT_S = 60.0
LABELS = ("result", "cause", "pool", "verdict", "source", "reason")


def main() -> None:
    """Start the engine of the options and serve commands until ``stop`` or the end of input."""
    options = json.loads(Path(sys.argv[1]).read_text())
    with os.fdopen(options.pop("answers_fd"), "w", buffering=1) as answers:
        from vllm import LLM

        engine = LLM(**options)
        print(json.dumps({"ready": True}), file=answers)
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "stop":
                break
            print(json.dumps(_answer(engine, command)), file=answers)
        engine.llm_engine.engine_core.shutdown()
    # Python's own shutdown takes two seconds for vLLM's imports.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _answer(engine: Any, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "metrics":
        return _metrics()
    if command["do"] == "burst":
        return _burst(engine, **{key: command[key] for key in command if key != "do"})
    if command["do"] == "embed":
        return _embed(engine, command["tokens"])
    if command["do"] == "abort":
        return _abort(engine, command["tokens"], Path(command["once"]))
    if command["do"] == "call":
        owner = engine if hasattr(engine, command["method"]) else engine.llm_engine
        answer = getattr(owner, command["method"])(*command["arguments"], **command["more"])
        return {"answer": answer if isinstance(answer, (bool, int, str)) else None}
    return _generate(engine, command)


def _generate(engine: Any, command: dict[str, Any]) -> dict[str, Any]:
    before = _metrics().get(POOL_HITS, 0)
    core, name = engine.llm_engine, _add(engine, **{key: command[key] for key in command if key != "do"})
    started = time.perf_counter()
    first_token_s = 0.0
    while core.has_unfinished_requests():
        for output in core.step():
            assert output.request_id.startswith(name)
            if not first_token_s and output.outputs[0].token_ids:
                first_token_s = time.perf_counter() - started
            last = output
    return {
        "tokens": list(last.outputs[0].token_ids),
        "finish_reason": last.outputs[0].finish_reason,
        "cached_tokens": last.num_cached_tokens,
        "pool_tokens": _metrics().get(POOL_HITS, 0) - before,
        "first_token_s": first_token_s,
        "finished_s": time.perf_counter() - started,
    }


def _burst(
    engine: Any,
    prompts: Sequence[list[int]],
    max_tokens: int,
    media: Sequence[Mapping[str, Any]] = (),
    aborted: Sequence[int] = (),
    **more: Any,
) -> dict[str, Any]:
    names = [
        _add(engine, tokens, max_tokens, media=of_prompt, **more)
        for tokens, of_prompt in zip(prompts, media or [{}] * len(prompts), strict=True)
    ]
    core, steps = engine.llm_engine, 0
    said: dict[str, list[int]] = {}
    while core.has_unfinished_requests():
        outputs = core.step()
        steps += bool(outputs)
        said |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
        if aborted:
            core.abort_request([names[place] for place in aborted])
            aborted = ()
    answers = [next((said[one] for one in said if one.startswith(name)), []) for name in names]
    return {"steps": steps, "answers": answers}


def _embed(engine: Any, tokens: list[int]) -> dict[str, Any]:
    before = _metrics().get(POOL_HITS, 0)
    (output,) = engine.embed([{"prompt_token_ids": tokens}], use_tqdm=False)
    return {
        "embedding": list(output.outputs.embedding),
        "cached_tokens": output.num_cached_tokens,
        "pool_tokens": _metrics().get(POOL_HITS, 0) - before,
    }


def _abort(engine: Any, tokens: list[int], once: Path) -> dict[str, Any]:
    core, name = engine.llm_engine, _add(engine, tokens, 16)
    deadline = time.monotonic() + ABORT_WAIT_S
    while not once.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    core.abort_request([name])
    while core.has_unfinished_requests():
        core.step()
    return {"aborted": True}


def _add(
    engine: Any,
    tokens: list[int],
    max_tokens: int,
    transfer_params: Any = None,
    cache_salt: str | None = None,
    adapter: Sequence[Any] | None = None,
    n: int = 1,
    media: Mapping[str, Any] | None = None,
    uuids: Mapping[str, Sequence[str]] | None = None,
) -> str:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    name = f"request-{time.monotonic_ns()}"
    extra = None if transfer_params is None else {"kv_transfer_params": transfer_params}
    sampling = SamplingParams(
        n=n,
        temperature=float(n > 1),
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args=extra,
    )
    prompt: dict[str, Any] = {"prompt_token_ids": tokens}
    if cache_salt is not None:
        prompt["cache_salt"] = cache_salt
    if items := {modality: _items(modality, given) for modality, given in (media or {}).items() if given}:
        prompt["multi_modal_data"] = items
    if uuids:
        prompt["multi_modal_uuids"] = uuids
    lora = LoRARequest(*adapter) if adapter else None
    engine.llm_engine.add_request(name, prompt, sampling, lora_request=lora)
    return name


def _items(modality: str, given: Any) -> Any:
    if isinstance(given, dict):
        import torch

        return {name: torch.tensor(numbers) for name, numbers in given.items()}
    makers: dict[str, Callable[..., Any]] = {"image": picture, "video": clip, "audio": sound}
    return [makers[modality](*one) for one in given]


def picture(number: int, side: int) -> Any:
    """A picture of noise, the same for the same number."""
    from PIL import Image

    return Image.fromarray(_noise(number, (side, side, 3)))


def clip(number: int, frames: int, side: int) -> Any:
    """As ``picture``, of two frames a second."""
    about = {"total_num_frames": frames, "fps": 2.0, "duration": frames / 2, "video_backend": "opencv"}
    about |= {"frames_indices": list(range(frames)), "do_sample_frames": False}
    return _noise(number, (frames, side, side, 3)), about


def sound(number: int, seconds: int) -> Any:
    """As ``picture``, of 16,000 samples a second."""
    import numpy as np

    return _noise(number, (16_000 * seconds,)).astype(np.float32) / 1280 - 0.1, 16_000


def _noise(number: int, shape: tuple[int, ...]) -> Any:
    import numpy as np

    return np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)


def _metrics() -> dict[str, float]:
    """vLLM's and kvpool's counters in this process, summed over labels; kvpool's by ``name/label value``."""
    from prometheus_client import REGISTRY

    sums: dict[str, float] = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total") and sample.name.startswith(("kvpool_", "vllm:")):
                label = next(filter(None, map(sample.labels.get, LABELS)), None)
                name = (
                    f"{sample.name}/{label}" if label and sample.name.startswith("kvpool_") else sample.name
                )
                sums[name] = sums.get(name, 0) + sample.value
    return sums


if __name__ == "__main__":
    main()
