"""Dynamo's ``RadixTree`` in the contest of ``python -m benchmarks index``; a caller of its HTTP indexer.

Runs in an environment with ``ai-dynamo-runtime`` and without kvpool, so it imports only the contest, by its
path. It uses the tree as its binding requires: an event is JSON, of as many blocks as our batches; a prompt
is a list of block hashes. A block's two hashes are equal here, which does not change the work.
"""

from __future__ import annotations

import dataclasses
import http.client
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

EVENT_BLOCKS = 1024
BLOCK_TOKENS = 16
TIMEOUT_S = 60.0


class Tree:
    is_slow = False

    def __init__(self) -> None:
        from dynamo.llm import RadixTree

        self._tree = RadixTree()
        self._events = 0

    def store(self, worker: int, hashes: Sequence[int]) -> float:
        events = []
        for at in range(0, len(hashes), EVENT_BLOCKS):
            blocks = [{"block_hash": one, "tokens_hash": one} for one in hashes[at : at + EVENT_BLOCKS]]
            parent = hashes[at - 1] if at else None
            events.append(self._event({"stored": {"parent_hash": parent, "blocks": blocks}}))
        started = time.perf_counter()
        for event in events:
            self._tree.apply_event(worker, event)
        return time.perf_counter() - started

    def take_away(self, worker: int, hashes: Sequence[int]) -> None:
        self._tree.apply_event(worker, self._event({"removed": {"block_hashes": list(hashes)}}))

    def question(self, packed: bytes) -> list[int]:
        return [int.from_bytes(packed[at : at + 8], "little") for at in range(0, len(packed), 8)]

    def ask(self, question: list[int]) -> Any:
        return self._tree.find_matches(question)

    def scores(self, answer: Any) -> dict[int, int]:
        return {worker: blocks for (worker, _), blocks in answer.scores.items()}

    def remove_worker(self, worker: int) -> float:
        started = time.perf_counter()
        self._tree.remove_worker(worker)
        return time.perf_counter() - started

    def nbytes(self) -> int:
        """Of the whole process, because the tree does not report its memory."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _event(self, data: dict[str, Any]) -> bytes:
        self._events += 1
        return json.dumps({"event_id": self._events, "data": data}).encode()


def run_contest(asked: dict[str, Any]) -> dict[str, Any]:
    sys.path.append(str(Path(__file__).parent))
    contest = importlib.import_module("contest")
    result = contest.contest(Tree(), asked["shape"], asked["workers"], asked["prompts"], asked["rounds"])
    return dataclasses.asdict(result)


def run_queries(asked: dict[str, Any]) -> list[float]:
    """Microseconds of every ``/query_by_hash``, over one connection."""
    from dynamo.llm import compute_block_hash_for_seq

    bodies = []
    for tokens in asked["tokens"]:
        # signed, as it requires
        hashes = [(one ^ 1 << 63) - (1 << 63) for one in compute_block_hash_for_seq(tokens, BLOCK_TOKENS)]
        bodies.append(json.dumps({"model_name": asked["model"], "block_hashes": hashes}))
    connection = http.client.HTTPConnection("127.0.0.1", asked["port"], timeout=TIMEOUT_S)
    times = []
    for turn in range(asked["rounds"] + 1):
        for body in bodies:
            started = time.perf_counter()
            connection.request("POST", "/query_by_hash", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            if turn:
                times.append((time.perf_counter() - started) * 1e6)
            if response.status != http.client.OK or not json.loads(answer)["scores"]:
                raise RuntimeError(f"it does not know a prompt that was published: {answer[:200]!r}")
    return times


def main() -> None:
    # Separates answers from a library's prints.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    asked = json.loads(sys.stdin.read())
    parts: dict[str, Callable[[dict[str, Any]], Any]] = {
        "open": lambda _: bool(Tree()), "contest": run_contest, "queries": run_queries,
    }  # fmt: skip
    try:
        answer: dict[str, Any] = {"result": parts[asked["do"]](asked)}
    except Exception as error:  # any exception is its answer
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers)
    answers.flush()
    os._exit(0)  # its threads may not end


if __name__ == "__main__":
    main()
