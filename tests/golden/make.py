"""Make the golden vectors beside this file: what an implementation in any language must compute.

Over 400 lines because the vectors of all formats are written by one command.

    python -m tests.golden.make [hashes|records|cuts|namespaces|events|protocol|snapshots]...

Nothing here uses kvpool but what ``protoc`` has generated. ``hashes.json`` is computed by vLLM's own functions,
``records.json`` by struct and the xxhash package, ``namespaces.json`` by json and hashlib. The payloads in
``events.json`` are packed by vLLM's own event classes; what an index must answer after them is written down here.
``protocol.json`` is encoded by protobuf's own code, with hashes by vLLM; ``snapshots.json`` by hand, with struct,
msgpack and the xxhash package. The tests compare kvpool with all.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [
        chance.choice([chance.randrange(24), chance.randrange(200_000), (1 << 32) - 1]) for _ in range(count)
    ]


def hash_cases() -> list[dict[str, Any]]:
    """Inputs only; ``digests`` are added by vLLM."""
    chance = random.Random(7)
    cases: list[dict[str, Any]] = []

    def add(name: str, block_tokens: int, tokens: list[int], **extra: Any) -> None:
        for algorithm, seed in (("sha256_cbor", None), ("sha256_cbor", "0"), ("xxhash_cbor", "42")):
            cases.append(
                {
                    "name": name, "algorithm": algorithm, "seed": seed, "block_tokens": block_tokens,
                    "token_ids": tokens, "lora": None, "cache_salt": None, "multimodal": [], **extra,
                }
            )  # fmt: skip

    add("no tokens", 16, [])
    add("less than a block", 16, _tokens(chance, 15))
    add("one block", 16, list(range(16)))
    add("a block and a rest", 16, _tokens(chance, 31))
    add("blocks of one token, at every width of a CBOR integer", 1,
        [0, 23, 24, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])  # fmt: skip
    add("blocks of 24 tokens, whose CBOR length takes a second byte", 24, _tokens(chance, 72))
    add("blocks of 128", 128, _tokens(chance, 300))
    add("lora", 16, _tokens(chance, 48), lora=["adapter", "/models/adapter"])
    add("salt, on the first block only", 16, _tokens(chance, 48), cache_salt="s\u00e4lt \U0001f9c2")
    add("an empty salt is none", 16, _tokens(chance, 32), cache_salt="")
    add("an item inside a block", 16, _tokens(chance, 48), multimodal=[["image-1", 18, 4]])
    add("an item over several blocks", 16, _tokens(chance, 80), multimodal=[["image-1", 10, 50]])
    add("an item that ends where a block ends", 16, _tokens(chance, 64), multimodal=[["image-1", 16, 16]])
    add("several items in a block", 16, _tokens(chance, 48),
        multimodal=[["a", 1, 2], ["b", 4, 5], ["c", 12, 10], ["d", 22, 3]])  # fmt: skip
    add("the same item in another place", 16, _tokens(chance, 48), multimodal=[["a", 3, 2], ["a", 20, 2]])
    add("an item behind the last full block", 16, _tokens(chance, 40), multimodal=[["a", 33, 7]])
    add("all at once", 32, _tokens(chance, 200), lora=["l", "/l"], cache_salt="tenant-a",
        multimodal=[["a", 0, 33], ["b", 40, 100]])  # fmt: skip
    return cases


def make_hashes() -> list[dict[str, Any]]:
    from tests.support.vllm_blocks import vllm_hashes

    cases = hash_cases()
    for case in cases:
        digests = vllm_hashes(
            case["token_ids"],
            block_tokens=case["block_tokens"],
            algorithm=case["algorithm"],
            seed=case["seed"],
            lora=tuple(case["lora"]) if case["lora"] else None,
            cache_salt=case["cache_salt"],
            multimodal=[tuple(item) for item in case["multimodal"]],
        )
        case["digests"] = [digest.hex() for digest in digests]
        case["hashes64"] = b"".join(
            (int.from_bytes(digest, "big") & ((1 << 64) - 1)).to_bytes(8, "little") for digest in digests
        ).hex()
    return cases


def make_records() -> list[dict[str, Any]]:
    import xxhash

    chance = random.Random(11)
    records = []
    for digest_nbytes, payload_nbytes, group, rank in [
        (32, 1, 0, 0), (16, 64, 1, 0), (8, 240, 0, 7), (32, 241, 65535, 65535), (64, 1024, 3, 12),
        (32, 4096, 0, 0),
    ]:  # fmt: skip
        fingerprint, digest = chance.randbytes(16), chance.randbytes(digest_nbytes)
        payload = chance.randbytes(payload_nbytes)
        writer = chance.randbytes(16) if rank == 12 else bytes(16)
        fields = (
            b"KVPR",
            2,
            0,
            payload_nbytes,
            fingerprint,
            digest[:20].ljust(20, b"\0"),
            group,
            rank,
            writer,
        )
        form = struct.Struct("<4sHHQ16s20sHH16sQ")
        checksum = xxhash.xxh3_64_intdigest(payload + form.pack(*fields, 0))
        records.append(
            {
                "key": f"kvpool:tenant_{len(records)}:{fingerprint.hex()}:{digest.hex()}:{group}:{rank}",
                "payload": payload.hex(),
                "writer": writer.hex(),
                "checksum": f"{checksum:016x}",
                "header": form.pack(*fields, checksum).hex(),
            }
        )
    return records


def make_cuts() -> list[dict[str, Any]]:
    """By trying all size classes of jemalloc: the fewest fields that waste a hundredth at most, else three; of those
    that waste the least, the ones that are largest in front."""
    classes = [(4 + part) << power for power in range(5, 27) for part in range(4)]

    def wasted(fields: tuple[int, ...]) -> int:
        return sum(min(one for one in classes if one >= field + 12) - field - 12 for field in fields)

    def order(fields: tuple[int, ...]) -> tuple[int, ...]:
        return (wasted(fields), *(-field for field in fields))

    cuts = []
    for nbytes in [
        1, 127, 4096, 16 * 1024 - 81, 64 * 1024, 96 * 1024, 296_000, 300_000, 512 * 1024, 1_124_352, 1_376_256,
        2 << 20, 2_560_000, 4 << 20, 9 << 20, 26_004_685, 77_280_051, 160 << 20,
    ]:  # fmt: skip
        whole = nbytes + 80
        fitting = [one - 12 for one in classes if one - 12 <= nbytes]
        best: tuple[int, ...] = (whole,)
        if whole >= 16 * 1024 and wasted(best) * 100 > whole:
            best = min(((first, whole - first) for first in fitting), key=order)
            if wasted(best) * 100 > whole:
                pairs = (
                    (first, second) for first in fitting for second in fitting if first + second <= nbytes
                )
                best = min(((*pair, whole - sum(pair)) for pair in pairs), key=order)
        payloads = [*best[:-1], best[-1] - 80]
        names = (*("b", "c")[: len(best) - 1], "h")
        cuts.append({"payload_nbytes": nbytes, "fields": list(map(list, zip(names, payloads, strict=True)))})
    return cuts


def make_namespaces() -> list[dict[str, Any]]:
    block = hashlib.sha256(b"block").hexdigest()
    cases: list[tuple[str, dict[str, str | int | bool]]] = [
        ("default", {"model": "tiny"}),
        ("default", {"model": "tiny", "kv_dtype": "bfloat16", "group0.block_tokens": 32}),
        (
            "a_B-9",
            {"prefix_caching": True, "tp": 1, "model": 'm\u00f6del \U0001f98a "quoted" \\ /\n\t\u0001<&>'},
        ),
        ("default", {"b": -1, "a": (1 << 63) - 1, "\u00e9": "", "Z": False}),
    ]
    namespaces = []
    for tenant, facts in cases:
        versioned = {**facts, "record_version": 2}
        canonical = json.dumps(versioned, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
        fingerprint = hashlib.sha256(canonical).hexdigest()[:32]
        namespaces.append(
            {
                "tenant": tenant, "facts": facts, "canonical": canonical.decode(), "namespace": fingerprint,
                "facts_key": f"kvpool:{tenant}:{fingerprint}:facts",
                "hash": block, "group": 2, "rank": 13, "key": f"kvpool:{tenant}:{fingerprint}:{block}:2:13",
            }
        )  # fmt: skip
    return namespaces


# What is told to an index, batch by batch, by one worker; then questions: a prompt, and its rows
# [rank, device, host, disk, pool, local, any] (see docs/explanation/prefix-index.md).
def event_cases() -> list[dict[str, Any]]:
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 33}
    whole = bytes(range(32))
    low = int.from_bytes(whole[-8:], "big")

    def stored(
        hashes: list[Any], parent: Any = None, medium: str | None = "GPU", **more: Any
    ) -> dict[str, Any]:
        event = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": [7] * (16 * len(hashes))}
        event |= {"block_size": 16, "lora_id": None, "lora_name": None, "medium": medium}
        return {"type": "BlockStored", **event, **more}

    def removed(hashes: list[Any], medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, **more}

    cleared = {"type": "AllBlocksCleared"}
    tokenless = {"token_ids": [], "block_size": 0}
    pool = {"medium": "STORAGE", "locality": "REMOTE", "ownership": "kvpool"}
    computed = [stored([1, 2, 3, 4], **full), stored([1, 2, 3, 4], **window)]
    return [
        {"name": "one prompt", "batches": [([stored([1, 2, 3], **full)], 0)], "blocks": 3,
         "questions": [([1, 2, 3, 4], [[0, 3, 0, 0, 0, 3, 3]]), ([2, 3], [[0, 2, 0, 0, 0, 2, 2]]), ([4], [])]},
        {"name": "hashes as bytes", "batches": [([stored([whole, b"\xff" * 8])], 0)], "blocks": 2,
         "questions": [([low, (1 << 64) - 1], [[0, 2, 0, 0, 0, 2, 2]])]},
        {"name": "two ranks", "batches": [([stored([1, 2])], 0), ([stored([1])], 5)], "blocks": 2,
         "questions": [([1, 2], [[0, 2, 0, 0, 0, 2, 2], [5, 1, 0, 0, 0, 1, 1]])]},
        {"name": "a copy, and one removal", "blocks": 2, "questions": [([1, 2], [[0, 2, 0, 0, 0, 2, 2]])],
         "batches": [([stored([1, 2]), stored([2], 1)], 0), ([removed([2])], 0)]},
        {"name": "reused blocks reported, and one removal", "blocks": 1,
         "questions": [([1, 2], [[0, 1, 0, 0, 0, 1, 1]])],
         "batches": [([stored([1, 2]), stored([1, 2])], 0), ([removed([2])], 0)]},
        {"name": "a middle block removed and stored again", "blocks": 3,
         "questions": [([1, 2, 3], [[0, 3, 0, 0, 0, 3, 3]])],
         "batches": [([stored([1, 2, 3]), removed([2])], 0), ([stored([2], 1)], 0)]},
        {"name": "no tokens, on the host", "blocks": 3, "questions": [([1, 2, 3], [[0, 1, 0, 0, 0, 3, 3]])],
         "batches": [([stored([1]), stored([2, 3], medium="CPU", **tokenless)], 0)]},
        {"name": "the pool outlives a clear", "blocks": 2, "questions": [([1, 2], [[0, 0, 0, 0, 2, 0, 2]])],
         "batches": [([stored([1, 2]), stored([1, 2], **pool), cleared], 0)]},
        {"name": "the pool counts no copies", "blocks": 0, "questions": [([1], [])],
         "batches": [([stored([1], **pool), stored([1], **pool), removed([1], **pool)], 0)]},
        {"name": "two groups that need everything", "blocks": 3,
         "questions": [([1, 2, 3], [[0, 2, 0, 0, 0, 2, 2]])],
         "batches": [([stored([1, 2, 3], **full), stored([1, 2], **full | {"group_idx": 1})], 0)]},
        {"name": "a window needs its last blocks, and reports are believed from their end", "blocks": 4,
         "questions": [([1, 2, 3, 4], [[0, 4, 0, 0, 0, 4, 4]]), ([1, 2, 3], []),
                       ([1, 2, 3, 4, 5], [[0, 4, 0, 0, 0, 4, 4]])],
         "batches": [(computed, 0), ([removed([1, 2], group_idx=1)], 0), (computed, 0)]},
    ]  # fmt: skip


def make_events() -> list[dict[str, Any]]:
    import msgspec
    from vllm.distributed import kv_events

    def pack(events: list[dict[str, Any]], dp_rank: int) -> str:
        made = [
            getattr(kv_events, event["type"])(**{k: v for k, v in event.items() if k != "type"})
            for event in events
        ]
        sent = kv_events.KVEventBatch(ts=1.5, events=made, data_parallel_rank=dp_rank)
        return msgspec.msgpack.encode(sent).hex()

    rows = []
    for case in event_cases():
        questions = [
            {"hashes64": struct.pack(f"<{len(prompt)}Q", *prompt).hex(), "rows": answers}
            for prompt, answers in case["questions"]
        ]
        rows.append(case | {"questions": questions, "payloads": [pack(*batch) for batch in case["batches"]]})
        del rows[-1]["batches"]
    return rows


def _varint(number: int) -> bytes:
    packed = b""
    while number > 0x7F:
        packed += bytes([number & 0x7F | 0x80])
        number >>= 7
    return packed + bytes([number])


def filled(message: Any, fields: dict[str, Any]) -> Any:
    """A message of protobuf's own code with these fields; bytes are given as hex."""
    message.SetInParent()
    for name, value in fields.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        repeated = isinstance(value, list)
        if field.message_type is not None and repeated:
            for one in value:
                filled(getattr(message, name).add(), one)
        elif field.message_type is not None:
            filled(getattr(message, name), value)
        elif repeated:
            getattr(message, name).extend(value)
        elif value:  # what has its default is left out
            setattr(message, name, bytes.fromhex(value) if field.type == field.TYPE_BYTES else value)
    return message


def encode(message: str, fields: dict[str, Any]) -> bytes:
    from kvpool.v1 import index_pb2

    packed: bytes = filled(getattr(index_pb2, message)(), fields).SerializeToString(deterministic=True)
    return packed


def make_protocol() -> list[dict[str, Any]]:
    """Four kinds of rows: ``prompt`` (tokens and what a client may send for them), ``message`` (fields and bytes),
    ``exchange`` (a worker, its batches by number, a request and its reply) and ``stream`` (the same, with requests and
    replies by id)."""
    from tests.support.vllm_blocks import vllm_hashes

    rows: list[dict[str, Any]] = []
    prompts: list[tuple[str, dict[str, Any]]] = [
        ("plain", {"token_ids": list(range(40)), "block_tokens": 16}),
        ("wide tokens, a seed", {"token_ids": [0, 23, 24, 255, 256, 65535, 65536, (1 << 32) - 1], "block_tokens": 2,
                                 "seed": "42"}),
        ("xxhash", {"token_ids": list(range(33)), "block_tokens": 16, "seed": "0", "algorithm": "xxhash_cbor"}),
        ("everything", {"token_ids": list(range(100, 180)), "block_tokens": 16, "lora": ["adapter", "/models/adapter"],
                        "cache_salt": "s\u00e4lt", "multimodal": [["image-1", 20, 30], ["image-2", 60, 5]]}),
    ]  # fmt: skip
    for name, given in prompts:
        case = {
            "algorithm": "sha256_cbor", "seed": None, "lora": None, "cache_salt": None, "multimodal": [], **given,
        }  # fmt: skip
        digests = vllm_hashes(
            case["token_ids"], block_tokens=case["block_tokens"], algorithm=case["algorithm"], seed=case["seed"],
            lora=tuple(case["lora"]) if case["lora"] else None, cache_salt=case["cache_salt"],
            multimodal=[tuple(item) for item in case["multimodal"]],
        )  # fmt: skip
        seed = "vllm-none-hash" if case["seed"] is None else case["seed"]
        rows.append(
            {
                "kind": "prompt", "name": name, **case,
                "hash_seed_id": hashlib.sha256(seed.encode()).hexdigest()[:16],
                "digests": [digest.hex() for digest in digests],
                "block_hashes": b"".join(digest[:-9:-1] for digest in digests).hex(),
                "token_ids_packed": struct.pack(f"<{len(case['token_ids'])}I", *case["token_ids"]).hex(),
            }
        )  # fmt: skip

    def message(kind: str, fields: dict[str, Any]) -> None:
        rows.append({"kind": "message", "message": kind, "fields": fields, "hex": encode(kind, fields).hex()})

    whole, plain = rows[3], rows[0]
    items = [dict(zip(("identifier", "offset", "length"), item, strict=True)) for item in whole["multimodal"]]
    scope = {"model": "m", "tenant": "t", "lora_name": "adapter", "lora_path": "/models/adapter",
             "cache_salt": "s\u00e4lt", "multimodal": items}  # fmt: skip
    worker = {"name": "w-1", "tenant": "t", "model": "m", "hash_algorithm": "sha256_cbor",
              "hash_seed_id": plain["hash_seed_id"], "block_tokens": 16, "address": "http://10.0.0.7:8000",
              "incarnation": "f00d", "namespace": "0123456789abcdef" * 2, "names": ["gpt-4", "modèle"],
              "near": "fedcba9876543210" * 2, "media_namespaces": ["00112233445566778899aabbccddeeff"],
              "publishers": [{"dp_rank": 0, "events": "tcp://10.0.0.7:5557", "replay": "tcp://10.0.0.7:5657"},
                             {"dp_rank": 1, "events": "tcp://10.0.0.7:5558", "replay": ""}]}  # fmt: skip
    message("LookupRequest", {"scope": {"model": "m"}, "block_hashes": plain["block_hashes"]})
    message(
        "LookupRequest", {"scope": scope, "token_ids": whole["token_ids_packed"], "workers": ["w-1", "w-2"]}
    )
    message("LookupResponse", {})
    message("LookupResponse", {
        "worker": ["w-1", "w-1"], "dp_rank": [0, 1], "address": ["http://10.0.0.7:8000", ""],
        "block_tokens": [16, 16], "prompt_blocks": [300, 300], "device_blocks": [200, 0], "local_blocks": [250, 0],
        "pool_blocks": [300, 300], "sequence": [(1 << 64) - 1, 0], "staleness_ms": [128, (1 << 32) - 1],
        "stale": [False, True], "loadable_blocks": [300, 300], "pool_media": [2, 0],
    })  # fmt: skip
    message("LookupRequest", {"scope": {"model": "m"}, "block_hashes": plain["block_hashes"], "id": 300})
    message("LookupRequest", {"requests": [
        {"scope": {"model": "m"}, "block_hashes": plain["block_hashes"]},
        {"scope": scope, "token_ids": whole["token_ids_packed"], "workers": ["w-1"], "id": 1},
    ], "id": (1 << 64) - 1})  # fmt: skip
    message("LookupResponse", {"status": {"code": 5, "message": "unknown model"}, "id": 300})
    message("LookupResponse", {"responses": [
        {"worker": ["w-1"], "dp_rank": [0], "address": [""], "block_tokens": [16], "prompt_blocks": [2],
         "device_blocks": [2], "local_blocks": [2], "pool_blocks": [0], "sequence": [7], "staleness_ms": [0],
         "stale": [False]},
        {"status": {"code": 3, "message": "a prompt has 1 to 4194304 blocks, not 0"}, "id": 1},
    ], "id": (1 << 64) - 1})  # fmt: skip
    message("LookupRequest", {"scope": {"model": "m"}, "text": "Gr\u00fc\u00df dich"})
    call = {"id": "c1", "type": "function", "function": {"name": "ask", "arguments": '{"a": 1}'}}
    chat = {
        "messages": [
            {"role": "system", "content": ["be brief", "be kind"]},
            {"role": "user", "content": ["how many?"], "name": "ann"},
            {"role": "assistant", "reasoning": "let me ask", "tool_calls_json": json.dumps([call])},
            {"role": "tool", "content": ["42"], "tool_call_id": "c1"},
        ],
        "tools_json": json.dumps([{"type": "function", "function": {"name": "ask"}}]),
        "add_generation_prompt": True,
        "template_options_json": json.dumps({"enable_thinking": False}),
    }
    message("LookupRequest", {"scope": scope, "workers": ["w-1"], "chat": chat})
    message("RouteRequest", {
        "scope": scope, "block_hashes": whole["block_hashes"], "workers": ["w-1", "w-2"],
        "loads": [{"worker": "w-1", "dp_rank": 1, "running": 3, "waiting": 2, "queued_tokens": 4_000_000_000_000,
                   "kv_usage_permille": 250}, {"worker": "w-2"}],
        "most": 2, "reserve_ms": 2_000, "prompt_tokens": 90, "session_id": "s-1", "prompt_cache_key": "app",
        "preview": True,
    })  # fmt: skip
    message(
        "RouteRequest", {"scope": {"model": "m"}, "chat": {"messages": [{"role": "user", "content": ["x"]}]}}
    )
    message("RouteRequest", {"scope": scope, "token_ids": whole["token_ids_packed"], "most": 1})
    message("RouteRequest", {"scope": {"model": "m"}, "text": "Gr\u00fc\u00df dich"})
    message("RouteResponse", {
        "rows": {
            "worker": ["w-1", "w-1"], "dp_rank": [1, 0], "address": ["http://10.0.0.7:8000", ""],
            "block_tokens": [16, 16], "prompt_blocks": [5, 5], "device_blocks": [2, 0], "local_blocks": [3, 0],
            "pool_blocks": [4, 4], "sequence": [7, 0], "staleness_ms": [12, 0], "stale": [False, True],
            "loadable_blocks": [5, 4],
        },
        "trust": [1, 3], "cost": [300, 4_000_000_000_000], "prefill_cost": [16, 16], "fetch_cost": [4, 13],
        "queue_cost": [280, 3_999_999_999_971], "running": [1, 0], "waiting": [0, 7], "queued_tokens": [200, 0],
        "kv_usage_permille": [15, 1000], "reserved_cost": [1, 0], "load_source": [1, 2], "load_age_ms": [0, 900],
        "asleep": [False, True], "reservation": "00112233aabbccdd", "unreachable": [False, True], "move_cost": [0, 8],
        "encode_cost": [0, 300],
    })  # fmt: skip
    message("RouteResponse", {"rows": {}})
    message("ReleaseRequest", {"tenant": "t", "reservation": "00112233aabbccdd"})
    message("ReleaseResponse", {"released": True})
    message("RegisterWorkerRequest", {"worker": worker, "lease_ms": 10_000})
    message("RegisterWorkerResponse", {"replaced": True})
    message("RemoveWorkerRequest", {"tenant": "t", "name": "w-1"})
    message("RemoveWorkerResponse", {"removed": False})
    message("ListWorkersRequest", {"tenant": "t", "model": "m"})
    message("ListWorkersRequest", {"page_size": 300, "page_token": "t/w-0"})
    message("ListWorkersResponse", {"workers": [{
        "worker": worker, "source": "call", "lease_left_ms": 9_000,
        "publishers": [
            {"dp_rank": 0, "sequence": 41, "batches": 42, "gaps": 2, "replays": 1, "resets": 1, "staleness_ms": 7,
             "digest": (1 << 64) - 2, "blocks": 321, "device_blocks": 300, "host_blocks": 20, "disk_blocks": 1,
             "evicted_blocks": 300},
            {"dp_rank": 1, "staleness_ms": 9_000, "stale": True, "problem": "not heard from yet"},
        ],
    }], "index": {
        "uptime_ms": 60_000, "lookups": 5, "prompt_blocks": 1_500, "device_blocks": 900, "local_blocks": 1_000,
        "pool_blocks": 1_100, "held_blocks": 310, "held_pool_blocks": 200, "memory_nbytes": 1 << 20,
        "placements": 7, "placed_prompt_blocks": 800, "placed_matched_blocks": 600,
        "pool_servers": 3, "pool_servers_away": 1,
    }, "quotas": [
        {"tenant": "t", "quota_nbytes": 50 << 30, "held_nbytes": 0}, {"tenant": "u", "quota_nbytes": 1},
    ], "audits": [
        {"tenant": "t", "host": "h", "writer": "ab" * 16, "same": 500, "differing": 2, "unjudged": 8,
         "doubts": "why", "put_away_writers": ["cd" * 16], "found_writers": ["cd" * 16, "ef" * 16], "found_s": 1.5e9},
        {"tenant": "u", "host": "i", "writer": "12" * 16, "same": 1},
    ]})  # fmt: skip
    message("HitCurveRequest", {"tenant": "t"})
    message("HitCurveResponse", {
        "sizes": [1, 2, 300], "hit_rates": [0.0, 0.25, 0.5], "requests": 9, "requested_blocks": 1_000, "share": 0.125,
        "since_s": 1.5e9, "block_tokens": 16.0, "pool_blocks": 200, "block_nbytes": 2_097_152.5,
    })  # fmt: skip
    message("ListWorkersResponse", {
        "workers": [{"worker": {"name": "w-1", "tenant": "t"}, "source": "flag"}], "next_page_token": "t/w-1",
        "index": {"uptime_ms": 60_000, "instance_id": "0123456789abcdef" * 2},
    })  # fmt: skip
    message("SnapshotRequest", {})
    message("SnapshotChunk", {"data": bytes(range(200)).hex()})

    def exchange(name: str, request: dict[str, Any], reply: dict[str, Any]) -> None:
        rows.append(
            {
                "kind": "exchange", "name": name, "worker": encode("Worker", worker).hex(),
                "batches": [[0, 3, batch], [0, 4, pool]],
                "request": encode("LookupRequest", request).hex(), "reply": encode("LookupResponse", reply).hex(),
            }
        )  # fmt: skip

    import msgpack

    ends = [int(digest[-16:], 16) for digest in plain["digests"]]
    stored = {
        "type": "BlockStored",
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 16,
        "lora_id": None,
    }
    batch = msgpack.packb([1.5, [{**stored, "block_hashes": ends[:1], "medium": "GPU"}], 0]).hex()
    pool = msgpack.packb([2.5, [{**stored, "block_hashes": ends, "medium": "STORAGE"}], 0]).hex()
    found = {"worker": ["w-1", "w-1"], "dp_rank": [0, 1], "address": [worker["address"]] * 2,
             "block_tokens": [16, 16], "prompt_blocks": [2, 2], "device_blocks": [1, 0], "local_blocks": [1, 0],
             "pool_blocks": [2, 2], "sequence": [4, 0], "staleness_ms": [0, 0], "stale": [False, True],
             "loadable_blocks": [2, 2]}  # fmt: skip
    scope = {"model": "m", "tenant": "t"}
    exchange("by tokens", {"scope": scope, "token_ids": plain["token_ids_packed"]}, found)
    exchange("by hashes", {"scope": scope, "block_hashes": plain["block_hashes"]}, found)
    exchange("of nobody", {"scope": scope, "block_hashes": plain["block_hashes"], "workers": ["w-2"]}, {})

    asked = {"scope": scope, "block_hashes": plain["block_hashes"]}
    unknown = {"scope": {"model": "x", "tenant": "t"}, "block_hashes": plain["block_hashes"]}
    turns: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({**asked, "id": 1}, {**found, "id": 1}),
        ({**unknown, "id": 2}, {"status": {"code": 5}, "id": 2}),
        ({"scope": scope, "id": 1}, {"status": {"code": 3}, "id": 1}),
        (asked, found),
        ({"requests": [{**asked, "id": 7}, unknown, asked], "id": (1 << 64) - 1},
         {"responses": [{**found, "id": 7}, {"status": {"code": 5}}, found], "id": (1 << 64) - 1}),
        ({"requests": [{"requests": [asked]}]}, {"responses": [{"status": {"code": 3}}]}),
        ({**asked, "requests": [asked], "id": 3}, {"status": {"code": 3}, "id": 3}),
    ]  # fmt: skip
    last = rows[-1]
    rows.append(
        {
            "kind": "stream", "name": "by id", "worker": last["worker"], "batches": last["batches"],
            "messages": [
                [encode("LookupRequest", request).hex(), encode("LookupResponse", reply).hex()]
                for request, reply in turns
            ],
        }
    )  # fmt: skip
    return rows


def make_snapshots() -> list[dict[str, Any]]:
    """A snapshot of version 1 that every later index of that version must be able to read, and what it then knows."""
    import msgpack
    import xxhash

    def number(value: int) -> bytes:
        return _varint(value)

    def sealed(magic: bytes, size: int, covered: bytes, rest: bytes = b"") -> bytes:
        header = struct.pack("<8sIIQ", magic, 1, 0, size)
        checksum = xxhash.xxh3_64_intdigest(header + bytes(8) + covered)
        return header + struct.pack("<Q", checksum) + covered + rest

    def blocks(*hashes: int) -> bytes:
        return number(len(hashes)) + b"".join(struct.pack("<Q", one) for one in hashes)

    namespace = "0123456789abcdef" * 2
    names = [b"rank/300", b"rank/301", b"pool/" + namespace.encode()]
    holders = [
        number(len(name)) + name + number(rank) + number(0) + number(0) + number(0) + number(1)
        for name, rank in zip(names, [0, 1, 0], strict=True)
    ]
    device, host, pool = 1, 2, 8
    sets = [
        number(2) + number(0 << 4 | device) + number(2 << 4 | pool) + blocks((1 << 64) - 1, 2),
        number(2) + number(0 << 4 | device | host) + number(1 << 4 | host) + blocks(3),
    ]
    copies = [number(0) + number(200) + struct.pack("<Q", 2)]
    body = b"".join([number(3), *holders, number(2), *sets, number(1), *copies])
    image = sealed(b"KVPTABLE", len(body), body)
    digests = [0x0123456789ABCDEF, (1 << 64) - 1]
    worker = [
        "default", "w", "m", "sha256_cbor", "a" * 16, "http://w:8000", "i", namespace, 16, "call", 60.0,
        [[0, "tcp://w:5557", "tcp://w:5657", "rank/300", [41, digests[0]], ""],
         [1, "tcp://w:5558", "tcp://w:5658", "rank/301", [(1 << 63) + 5, digests[1]],
          "batches were lost"]],
    ]  # fmt: skip
    partition = {"image_nbytes": len(image), "namespaces": [namespace], "workers": [worker]}
    head = msgpack.packb({"written_at_s": 1.5, "life": "run", "partitions": [partition]})
    return [
        {
            "name": "two ranks, a pool, copies", "hex": sealed(b"KVPINDEX", len(head), head, image).hex(),
            "positions": [[41, digests[0]], [(1 << 63) + 5, digests[1]]],
            "prompt": [(1 << 64) - 1, 2, 3], "device": [3, 0], "local": [3, 0], "pool": [2, 2],
            "lacking": ["", "batches were lost"], "alone": [3], "alone_local": [1, 1], "copied": 2, "copies": 201,
        }
    ]  # fmt: skip


def main(names: list[str]) -> None:
    makers = {
        "hashes": make_hashes,
        "records": make_records,
        "cuts": make_cuts,
        "namespaces": make_namespaces,
        "events": make_events,
        "protocol": make_protocol,
        "snapshots": make_snapshots,
    }
    for name in names or makers:
        rows = ",\n".join(json.dumps(row, ensure_ascii=True) for row in makers[name]())
        (HERE / f"{name}.json").write_text(f"[\n{rows}\n]\n")
        print(f"{HERE / name}.json")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main(sys.argv[1:])
