"""What the end-to-end tests share: tiny models, engine options, prompts, and ways to damage a file pool."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq
from safetensors.numpy import save_file

from demo.engine_process import EngineProcess, connector_config, kill_all_but_trackers, small_engine
from demo.tiny_model import FIRST_WORD, VOCABULARY
from kvpool import BlockHasher
from kvpool._native import RECORD_HEADER_NBYTES, pack_header
from kvpool.discovery.worker_watch import WorkerWatch
from kvpool.index.answer import Row
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.follow.subscriber import END, Subscriber
from kvpool.store.store import Store
from tests.support.deadlines import eventually
from tests.support.engine_forks import ONE_THREAD, ForkedEngine
from tests.support.file_record import read_record, write_record

BLOCK_TOKENS = 128
GENERATED_TOKENS = 12
# Of the connector. What a lookup, a load and a step take on a busy machine is no fault of the tests: those of timeouts
# and of the gate ask for them by name.
PATIENT = {"cost_gate": False, "lookup_timeout_s": 20.0}


def engine_options(model: Path, pool: str, **more: Any) -> dict[str, Any]:
    """Options of ``vllm.LLM`` for one small float32 engine on the pool; ``settings`` go to the connector."""
    settings = {**PATIENT, **more.pop("settings", {})}
    return {
        **small_engine(model, block_tokens=BLOCK_TOKENS, longest_tokens=4608, kv_cache_nbytes=96 << 20),
        "kv_transfer_config": connector_config(pool, settings),
        **more,
    }


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """A LoRA adapter of rank 8 for the attention of a small Llama; its weights are ``seed``'s."""
    config = json.loads((model / "config.json").read_text())
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or width // heads
    outputs = {"q_proj": heads * head, "v_proj": config["num_key_value_heads"] * head}
    draw = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, rows in outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = draw.standard_normal((8, width), np.float32)
            tensors[f"{name}.lora_B.weight"] = draw.standard_normal((rows, 8), np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(outputs), "bias": "none",
        "base_model_name_or_path": str(model),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(FIRST_WORD, VOCABULARY) for _ in range(tokens)]


def started(name: str, folder: Path, options: dict[str, Any], **environment: str) -> EngineProcess:
    """An engine (on ``cpu_platform``) that takes commands and has generated once, from an unrelated prompt."""
    engine = ForkedEngine(name, folder, options, {**ONE_THREAD, **environment})
    try:
        engine.wait_ready()
        engine.generate(prompt(zlib.crc32(name.encode()), 300), 2)
    except BaseException:
        engine.kill()
        raise
    return engine


@contextlib.contextmanager
def passing(name: str, folder: Path, options: dict[str, Any], **environment: str) -> Iterator[EngineProcess]:
    """As ``started``, of whose end nothing is expected: it comes at once, and not in the seconds that vLLM takes.

    Not for several ranks: vLLM leaves the memory that these share in /dev/shm when they are killed.
    """
    with started(name, folder, options, **environment) as engine:
        yield engine
        kill_all_but_trackers(engine.process_id)


def ask(
    engine: EngineProcess,
    tokens: list[int],
    salt: str | None = None,
    adapter: tuple[str, int, str] | None = None,
) -> dict[str, Any]:
    """What the engine says to a prompt with this ``cache_salt``, and where it had the prompt from.

    ``adapter``: name, number and path.
    """
    asked = {"tokens": tokens, "max_tokens": GENERATED_TOKENS, "cache_salt": salt, "adapter": adapter}
    return engine.ask({"do": "generate", **asked})


@dataclass
class Drafted:
    """An answer of an engine that drafts, and how many tokens of the drafts were right."""

    tokens: list[int]
    cached: int
    pool: int
    accepted: float


def drafted(engine: EngineProcess, tokens: list[int]) -> Drafted:
    """A long answer to a prompt: a tiny model accepts few drafts."""
    counter = "vllm:spec_decode_num_accepted_tokens_total"
    before = engine.ask({"do": "metrics"}).get(counter, 0.0)
    said = engine.generate(tokens, 64)
    accepted = engine.ask({"do": "metrics"})[counter] - before
    return Drafted(said["tokens"], said["cached_tokens"], said["pool_tokens"], accepted)


def call(engine: EngineProcess, method: str, *arguments: Any, **more: Any) -> Any:
    """Call a method of the engine's ``vllm.LLM``."""
    return engine.ask({"do": "call", "method": method, "arguments": arguments, "more": more})["answer"]


def records(pool: Path, tokens: list[int], block_tokens: int = BLOCK_TOKENS) -> list[Path]:
    """The files that hold the full blocks of a prompt, every group and rank, in block order."""
    found: list[Path] = []
    for block_hash in BlockHasher(block_tokens).hashes(tokens):
        found += sorted((pool / "blocks").glob(f"*/*.{block_hash.hex()}.*"))
    return found


def corrupt(record: Path, *, keep_checksum: bool, first_share: float = 0.0) -> None:
    """Turn payload bits of a record, and make its checksum right again unless ``keep_checksum``.

    ``first_share``: of the payload, in front of those bits; layers lie one after the other.
    """
    content = bytearray(read_record(record))
    payload_nbytes = len(content) - RECORD_HEADER_NBYTES
    for at in range(int(first_share * payload_nbytes), payload_nbytes):
        content[at] ^= 0x11
    if not keep_checksum:
        content[payload_nbytes:] = pack_header(_key(record), content[:payload_nbytes])
    write_record(record, bytes(content))


def _key(record: Path) -> str:
    return "kvpool:" + record.name.replace(".", ":")


def namespaces(pool: Path) -> set[str]:
    """The namespaces that have records in a file pool."""
    return {path.name.split(".")[1] for path in (pool / "blocks").glob("*/*")}


def process_named(engine: EngineProcess, name: str) -> int:
    """The process below an engine's driver that vLLM has given this name."""
    (process,) = [
        pid
        for pid in processes_below(engine.process_id)
        if Path(f"/proc/{pid}/comm").read_text().strip() == name
    ]
    return process


def processes_below(process: int) -> list[int]:
    children = [int(child) for text in _of_threads(process, "children") for child in text.split()]
    return children + [pid for child in children for pid in processes_below(child)]


@contextlib.contextmanager
def held_worker(engine: EngineProcess) -> Iterator[int]:
    """The engine's worker does not run until the end of the block; gives the process of its core.

    The core asks the pool by itself, and then waits for its worker: ``rests``. In the middle of a step, such as those
    after an answer, it would ask nothing: both are at rest before the worker is held. A core whose worker computes for
    more than a second is at rest in mid-step, too (``SpinCondition`` in vLLM's ``shm_broadcast``).
    """
    core, worker = process_named(engine, "VLLM::EngineCor"), process_named(engine, "VLLM::Worker")
    assert eventually(lambda: rests(core) and rests(worker)), "the engine is busy"
    os.kill(worker, signal.SIGSTOP)
    try:
        yield core
    finally:
        os.kill(worker, signal.SIGCONT)


def rests(process: int) -> bool:
    """Whether no thread of a process runs for 0.4 s, or waits for a core, as on a busy machine."""
    before = ran_ns(process)
    for _ in range(20):
        threading.Event().wait(0.02)
        if "R" in states(process):
            return False
    return ran_ns(process) == before


def states(process: int) -> set[str]:
    """The states of a process's threads, as ``/proc`` has them: R runs or waits for a core."""
    return {text.rpartition(")")[2].split()[0] for text in _of_threads(process, "stat")}


def ran_ns(process: int) -> int:
    """How long the threads of a process have run."""
    return sum(int(text.split()[0]) for text in _of_threads(process, "schedstat"))


def _of_threads(process: int, file: str) -> list[str]:
    """What ``/proc`` has in this file of each of a process's threads, but of Gloo's, which never rest."""
    texts = []
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (task / "comm").read_text() != "gloo_tcp_loop\n":
                texts.append((task / file).read_text())
    return texts


# 40 blocks of 1 MiB: the prompts below need more, so blocks are evicted.
KV_CACHE_NBYTES = 40 << 20
PROMPTS = [prompt(700 + i, 1100 + 130 * i) for i in range(8)]
WITHIN_S = 60.0


class EngineSays:
    """A subscriber of its own: every batch that the publisher keeps, in a dictionary of copies by tier."""

    def __init__(self, replay_port: int) -> None:
        self.sequence = -1
        self.evicted = 0
        self.copies: dict[str, Counter[int]] = {"GPU": Counter(), "STORAGE": Counter()}
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(f"tcp://127.0.0.1:{replay_port}")
            dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            while True:
                assert dealer.poll(60_000), "the publisher answers"
                *_, number, payload = dealer.recv_multipart()
                if int.from_bytes(number, "big") == END:
                    return
                self.sequence += 1
                assert int.from_bytes(number, "big") == self.sequence, "all batches since the start are kept"
                for event in msgpack.unpackb(payload)[1]:
                    self._add(event)

    def _add(self, event: dict[str, Any]) -> None:
        copies = self.copies[event["medium"]]
        for one in event["block_hashes"]:
            if event["type"] == "BlockRemoved":
                self.evicted += event["medium"] == "GPU"
                copies[one] -= 1
            elif event["medium"] == "STORAGE":
                copies[one] = 1
            else:
                copies[one] += 1

    def leading(self, tokens: list[int], medium: str = "GPU") -> int:
        count = 0
        for block_hash in BlockHasher(BLOCK_TOKENS).hashes(tokens):
            if self.copies[medium][int.from_bytes(block_hash[-8:], "big")] < 1:
                break
            count += 1
        return count


@dataclass
class Index:
    """What ``kvpool index`` consists of, without the gRPC around it."""

    store: Store
    fleet: Fleet = field(default_factory=Fleet)

    def __post_init__(self) -> None:
        self.fleet.feed = Subscriber()
        self.watch = WorkerWatch(
            self.store,
            on_worker=lambda worker, keep_s: self.fleet.add(worker, "pool", keep_s),
            on_gone=self.fleet.remove,
            on_pool_lost=self.fleet.forget_pool,
            incomplete=self.fleet.incomplete,
            on_requested=self._ask,
        )

    def _ask(self, worker_id: str, dp_rank: int) -> None:
        rank = self.fleet.rank(worker_id, dp_rank)
        assert rank is not None
        rank.ask()

    def close(self) -> None:
        self.watch.close()
        self.fleet.close()

    def row(self, model: str, tokens: list[int], worker: str) -> Row:
        (row,) = self.fleet.lookup(model, token_ids=tokens, workers=[worker])
        return row

    def knows(self, worker: str) -> bool:
        """Whether it follows the worker, and all that it was told is true now."""
        for status in self.fleet.workers():
            if status.worker.name == worker:
                return not any(publisher.stale for publisher in status.publishers)
        return False

    def incarnation(self, worker: str) -> str:
        return next(one.worker.incarnation for one in self.fleet.workers() if one.worker.name == worker)


def publishing(ports: list[int]) -> dict[str, Any]:
    """The events of an engine on the first port, and again on the second."""
    endpoints = {"endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}"}
    return {"enable_kv_cache_events": True, **endpoints}


def options_of(model: Path, pool: str, ports: list[int], **settings: Any) -> dict[str, Any]:
    return engine_options(
        model,
        pool,
        settings={"advertise_host": "127.0.0.1", **settings},
        kv_events_config=publishing(ports),
        kv_cache_memory_bytes=KV_CACHE_NBYTES,
    )
