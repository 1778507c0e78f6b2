"""A vLLM server as a user starts it, by ``kvpool vllm``, on a port of loopback."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.engine_process import (
    ASK_TIMEOUT_S,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    EngineFailed,
    child_environment,
    first_error,
    kill_all_but_trackers,
)

LOOK_S = 0.2


@dataclass(frozen=True)
class Answer:
    """Seconds since the request was sent; tokens of the prompt, and those of them that were not computed."""

    text: str
    first_token_s: float
    prompt_tokens: int
    cached_tokens: int


@contextlib.contextmanager
def serving(
    name: str,
    folder: Path,
    pool: str,
    model: Path,
    port: int,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    waiting: Callable[[str], contextlib.AbstractContextManager[None]] = lambda what: contextlib.nullcontext(),
) -> Iterator[str]:
    """Its URL, until the end of the block. Output: ``folder``/NAME.log. Errors: ``EngineFailed``."""
    log = folder / f"{name}.log"
    command = [
        str(Path(sys.executable).with_name("kvpool")), "vllm", "--pool", pool, "--", "serve", str(model),
        "--host", "127.0.0.1", "--port", str(port), *options,
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=child_environment(environment),
        )
    url = f"http://127.0.0.1:{port}"
    try:
        with waiting(f"{name} engine starts"):
            _wait_ready(name, url, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)  # stores in flight end
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        kill_all_but_trackers(process.pid)
        process.wait()


def _wait_ready(name: str, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            cause = first_error(log.read_text(errors="replace").splitlines()) or "no error in its log"
            raise EngineFailed(f"engine {name} did not start: {cause}; see {log}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):  # noqa: S310 - loopback
            return
        time.sleep(LOOK_S)
    raise EngineFailed(f"engine {name} did not start within {START_TIMEOUT_S:g} s; see {log}")


def ask(url: str, path: str, body: Mapping[str, Any]) -> Answer:
    """Stream the answer at temperature 0 from the only model. Errors: ``EngineFailed``."""
    whole = {**body, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    started, first_token_s = time.monotonic(), 0.0
    parts: list[str] = []
    usage: dict[str, Any] = {}
    try:
        request = urllib.request.Request(  # noqa: S310 - loopback
            f"{url}{path}", json.dumps(whole).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as response:  # noqa: S310
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if part := choice.get("text") or choice.get("delta", {}).get("content"):
                        first_token_s = first_token_s or time.monotonic() - started
                        parts.append(part)
    except (OSError, ValueError) as error:
        raise EngineFailed(f"{url}{path}: {error}") from error
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer("".join(parts), first_token_s, int(usage["prompt_tokens"]), int(cached))
