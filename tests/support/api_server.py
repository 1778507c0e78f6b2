"""vLLM's OpenAI-compatible server in a process of its own, on ports of loopback."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.engine_process import child_environment, kill_all_but_trackers
from tests.support.deadlines import answers, eventually
from tests.support.engine_forks import forking_environment

BLOCK_TOKENS = 128
KV_CACHE_NBYTES = 128 << 20  # 64 blocks of 2 MiB
NAME = "tiny"  # of the model
START_S = 600.0  # on a busy machine


@dataclass(frozen=True)
class ApiServer:
    """One engine. ``config``: of its KV transfer. ``events``, ``replay``: ports on which it tells what it holds.
    ``options``: more of its command.
    """

    name: str
    model: Path
    port: int
    events: int
    replay: int
    config: Mapping[str, Any]
    options: tuple[str, ...] = ()

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[str]:
        """Its URL, until the end of the block. Its output goes to ``folder``/NAME.log."""
        url, log = f"http://127.0.0.1:{self.port}", folder / f"{self.name}.log"
        environment = child_environment({**forking_environment(), "VLLM_SERVER_DEV_MODE": "1"})
        with log.open("wb") as out:
            process = subprocess.Popen(
                self._command(), stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        try:
            ready = eventually(lambda: answers(f"{url}/health", process, log), within_s=START_S)
            assert ready, log.read_text()[-3000:]
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            kill_all_but_trackers(process.pid)
            process.wait()

    def _command(self) -> list[str]:
        publisher = {"endpoint": f"tcp://*:{self.events}", "replay_endpoint": f"tcp://*:{self.replay}"}
        return [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model),
            "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32",
            "--enforce-eager", "--max-model-len", "4096", "--max-num-batched-tokens", "4096",
            "--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", str(KV_CACHE_NBYTES),
            "--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details",
            "--kv-transfer-config", json.dumps(self.config),
            "--kv-events-config", json.dumps({"enable_kv_cache_events": True, **publisher}), *self.options,
        ]  # fmt: skip
