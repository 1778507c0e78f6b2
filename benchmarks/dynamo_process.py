"""Dynamo in its own processes: ``dynamo_peer.py``, and its HTTP indexer."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import dynamo_peer
from demo.engine_process import free_ports
from kvpool.errors import ConfigError, KVPoolError

ASK_TIMEOUT_S = 1800.0
TIMEOUT_S = 60.0


def dynamo_python(folder: Path) -> Path:
    """Dynamo's interpreter, below the folder of peers' environments. Errors: ``KVPoolError``."""
    python = folder / "dynamo" / "bin" / "python"
    if not python.exists():
        raise ConfigError(f"there is no {python}: make bench-peers makes it, in a clone of kvpool")
    ask_dynamo(python, {"do": "open"})
    return python


def ask_dynamo(python: Path, asked: dict[str, Any]) -> Any:
    """The answer of ``dynamo_peer.py``. Blocks while it works. Errors: ``KVPoolError``."""
    try:
        ended = subprocess.run(
            [python, "-I", dynamo_peer.__file__], input=json.dumps(asked), stdout=subprocess.PIPE, text=True,
            timeout=ASK_TIMEOUT_S, check=True,
        )  # fmt: skip
    except (subprocess.SubprocessError, OSError) as error:
        raise KVPoolError("Dynamo did not end its part of the benchmark; what it said is above") from error
    answer = json.loads(ended.stdout)
    if "error" in answer:
        raise KVPoolError(f"Dynamo could not do its part of the benchmark: {answer['error']}")
    return answer["result"]


class DynamoIndexer:
    """Its HTTP indexer, subscribed to the publishers at ``events``. Use it with ``with``."""

    def __init__(self, python: Path, model: str, block_tokens: int, events: Sequence[str]) -> None:
        self._python, self._model = python, model
        [self._port] = free_ports(1)
        workers = ",".join(f"{number}={endpoint}" for number, endpoint in enumerate(events))
        self._process = subprocess.Popen(
            [
                python, "-I", "-m", "dynamo.indexer", "--port", str(self._port), "--block-size", str(block_tokens),
                "--model-name", model, "--workers", workers,
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def __enter__(self) -> DynamoIndexer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def holders(self, token_ids: Sequence[int]) -> int:
        """How many workers hold a part of a prompt now. Errors: ``KVPoolError`` after its end."""
        if self._process.poll() is not None:
            raise KVPoolError("Dynamo's HTTP indexer ended")
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            body = json.dumps({"model_name": self._model, "token_ids": token_ids})
            connection.request("POST", "/query", body, {"Content-Type": "application/json"})
            return len(json.loads(connection.getresponse().read())["scores"])
        except (OSError, http.client.HTTPException):
            return 0  # it does not listen yet
        finally:
            connection.close()

    def query(self, prompts: Sequence[Sequence[int]], rounds: int) -> list[float]:
        """Microseconds of each query of these prompts' hashes, over one connection, in rotation."""
        asked = {
            "do": "queries",
            "port": self._port,
            "model": self._model,
            "tokens": prompts,
            "rounds": rounds,
        }
        times: list[float] = ask_dynamo(self._python, asked)
        return times
