"""What the installed vLLM's own server makes of prompts, and shows of itself: a script, run in a process of its own.

    python -m tests.support.vllm_server FOLDER < CASES

CASES: a JSON list of ``[chat template, kind, body]``, with the kind ``completions`` or ``chat/completions``. Prints a
JSON object: ``tokens`` of each case (null: it is refused), ``in_parts``: whether content has parts in each of
``chat_shapes.templates()``, ``payloads``: what each kind of request takes for pixels that it wants, and the metrics
``pages`` of a server with two engines by what it is doing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from functools import cache
from typing import Any

from pydantic import ValidationError

from kvpool.index.front.renderer import without_pixels
from tests.support.chat_shapes import templates


def configured(folder: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=folder, dtype="float32", max_model_len=4096, enforce_eager=True
    ).create_engine_config()


async def render(config: Any, cases: list[tuple[str, str, dict[str, Any]]]) -> list[list[int] | None]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.renderers.registry import renderer_from_config

    renderer = renderer_from_config(config)

    @cache
    def rendering(template: str) -> Any:
        return OnlineRenderer(
            config.model_config,
            renderer,
            request_logger=None,
            chat_template=template,
            chat_template_content_format="auto",
        )

    found: list[list[int] | None] = []
    for template, kind, body in cases:
        online = rendering(template)
        try:
            if kind == "completions":
                answer = await online.render_completion(CompletionRequest(**body))
            else:
                _, answer = await online.render_chat(ChatCompletionRequest(**body))
        except (VLLMValidationError, ValidationError):
            found.append(None)
            continue
        assert isinstance(answer, list), answer
        found.append(list(answer[0]["prompt_token_ids"]))
    return found


def payloads() -> list[str]:
    """What requests say of pixels, by our field, for each path that is rendered."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    messages = [{"role": "user", "content": "x"}]
    asked: list[tuple[Any, dict[str, Any]]] = [
        (ChatCompletionRequest, {"messages": messages}),
        (CompletionRequest, {"prompt": "x"}),
        (ResponsesRequest, {"input": "x"}),
        (AnthropicMessagesRequest, {"messages": messages, "max_tokens": 1}),
    ]
    bodies = (without_pixels(json.dumps({"model": "m", **body}).encode()) for _, body in asked)
    return [kind(**json.loads(body)).mm_payload for (kind, _), body in zip(asked, bodies, strict=True)]


def in_parts() -> list[bool]:
    from vllm.renderers import hf

    logging.disable()  # it tells each template that it cannot read
    return [hf._detect_content_format(source, default="string") == "openai" for source in templates()]


def pages(config: Any) -> dict[str, str]:
    from prometheus_client import generate_latest
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.stats import SchedulerStats

    logger = PrometheusStatLogger(config, [0, 1])
    made = {"new": generate_latest().decode()}
    config.cache_config.num_gpu_blocks, config.cache_config.kv_cache_size_tokens = 999, 15984
    logger.log_engine_initialized()
    for engine in (0, 1):
        stats = SchedulerStats(
            num_running_reqs=3 + engine, num_waiting_reqs=5 + engine, kv_cache_usage=0.25 + engine / 2
        )
        logger.record(stats, None, None, engine)
    made["busy"] = generate_latest().decode()
    for level in (0, 1, 2):
        logger.record_sleep_state(1, level)
        made[f"asleep {level}"] = generate_latest().decode()
    logger.record_sleep_state(0, 0)
    made["awake"] = generate_latest().decode()
    return made


if __name__ == "__main__":
    out = sys.stdout
    sys.stdout = sys.stderr  # vLLM logs there
    vllm_config = configured(sys.argv[1])
    answer = {
        "tokens": asyncio.run(render(vllm_config, json.load(sys.stdin))),
        "pages": pages(vllm_config),
        "payloads": payloads(),
        "in_parts": in_parts(),
    }
    json.dump(answer, out)
    out.flush()
    os._exit(0)  # whatever threads it has
