"""Between the index's values and the messages of its protocol (``protos/kvpool/v1/index.proto``). Pure.

What is read here was written by other processes: it is checked for its form. What it says is judged by ``Fleet``.
Errors: ``ConfigError``, where no other is named.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from kvpool.errors import ConfigError
from kvpool.hashing import Multimodal, len_tokens
from kvpool.index.answer import FleetStatus, IndexStatus, Lookup, PublisherStatus, WorkerStatus
from kvpool.index.worker import DEFAULT_ALGORITHM, DEFAULT_TENANT, Publisher, Worker
from kvpool.v1 import index_pb2 as pb

if TYPE_CHECKING:
    from typing_extensions import Buffer

SERVICE = "kvpool.v1.IndexService"
MAX_PROMPT_NBYTES = 32 << 20  # 4 Mi block hashes
MAX_REQUEST_NBYTES = MAX_PROMPT_NBYTES + (1 << 20)
MAX_REPLY_NBYTES = 64 << 20
CHUNK_NBYTES = 1 << 20  # of a snapshot
MAX_U32 = (1 << 32) - 1
TOKEN_NBYTES = 4

Answer = TypeVar("Answer")


class Call(NamedTuple, Generic[Answer]):
    """One request, and what makes a value of its reply."""

    method: str
    request: Any
    value: Callable[[Any], Answer]

    def decode(self, reply: bytes) -> Answer:
        """Errors: ``DecodeError`` of protobuf, ``ValueError``."""
        return self.value(REPLIES[self.method].FromString(reply))


REPLIES: dict[str, Any] = {
    "Lookup": pb.LookupResponse,
    "RegisterWorker": pb.RegisterWorkerResponse,
    "RemoveWorker": pb.RemoveWorkerResponse,
    "ListWorkers": pb.ListWorkersResponse,
}


# ---- what a client sends


def lookup_call(
    model: str,
    *,
    token_ids: Sequence[int] | Buffer | None,
    hashes64: Buffer | None,
    tenant: str,
    lora: tuple[str, str] | None,
    cache_salt: str | None,
    multimodal: Sequence[Multimodal],
    workers: Sequence[str] | None,
) -> Call[Lookup]:
    """``Lookup``; the arguments are those of ``IndexClient.lookup``."""
    if (token_ids is None) == (hashes64 is None):
        raise ConfigError("give a prompt as token_ids or as hashes64, and not as both")
    if workers is not None and not workers:
        raise ConfigError("workers names nobody; leave it out to ask about all")
    if isinstance(workers, str):
        raise ConfigError("workers is a list of names, not text")
    name, path = _pair("lora is (name, path)", lora) if lora is not None else ("", "")
    try:
        scope = pb.Scope(
            model=model,
            tenant=tenant,
            lora_name=name,
            lora_path=path,
            cache_salt=cache_salt or "",
            multimodal=[
                pb.MultimodalItem(identifier=identifier, offset=offset, length=length)
                for identifier, offset, length in multimodal
            ],
        )
        request = pb.LookupRequest(scope=scope, workers=workers or ())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"this cannot be sent to an index: {_first_line(error)}") from error
    if token_ids is not None:
        request.token_ids = pack_tokens(token_ids)
    else:
        assert hashes64 is not None
        request.block_hashes = _pack_hashes(hashes64)
    return Call("Lookup", request, decode_lookup)


def register_call(worker: Worker, lease_s: float | None) -> Call[bool]:
    """``RegisterWorker``; its answer: whether another start of that name was followed."""
    lease_ms = 0
    if lease_s is not None:
        if not 0.001 <= lease_s <= MAX_U32 / 1000:
            raise ConfigError(f"a lease is a number of seconds from 0.001 on, not {lease_s:g}")
        lease_ms = round(lease_s * 1000)
    try:
        request = pb.RegisterWorkerRequest(worker=encode_worker(worker), lease_ms=lease_ms)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"this worker cannot be sent to an index: {_first_line(error)}") from error
    return Call("RegisterWorker", request, lambda reply: bool(reply.replaced))


def remove_call(name: str, tenant: str) -> Call[bool]:
    """``RemoveWorker``; its answer: whether it was known."""
    try:
        request = pb.RemoveWorkerRequest(tenant=tenant, name=name)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"this cannot be sent to an index: {_first_line(error)}") from error
    return Call("RemoveWorker", request, lambda reply: bool(reply.removed))


def workers_call(tenant: str | None, model: str | None) -> Call[list[WorkerStatus]]:
    """``ListWorkers``."""
    try:
        request = pb.ListWorkersRequest(tenant=tenant or "", model=model or "")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"this cannot be sent to an index: {_first_line(error)}") from error
    return Call("ListWorkers", request, decode_workers)


def status_call(tenant: str | None, model: str | None) -> Call[FleetStatus]:
    """``ListWorkers``, with what the index says of itself."""
    return workers_call(tenant, model)._replace(value=decode_status)  # type: ignore[arg-type, return-value]


def pack_tokens(token_ids: Sequence[int] | Buffer) -> bytes:
    """Packed little-endian u32. ``token_ids``: ints, or a contiguous buffer of them (16, 32 or 64 bits)."""
    if len_tokens(token_ids) * TOKEN_NBYTES > MAX_PROMPT_NBYTES:
        raise ConfigError(f"a prompt of {len_tokens(token_ids)} tokens is too long to be sent to an index")
    if isinstance(token_ids, list):
        values: Any = token_ids
    else:
        try:
            view = memoryview(token_ids)  # type: ignore[arg-type]
        except TypeError:
            values = token_ids
        else:
            if view.format == "I":
                return view.tobytes()
            if view.format not in tuple("hHilLqQ") or view.ndim != 1:
                raise ConfigError("token_ids is a sequence or a buffer of ints of 16, 32 or 64 bits")
            values = view.tolist()
    try:
        return array("I", values).tobytes()
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"token ids are whole numbers from 0 to {MAX_U32}: {error}") from error


def _pack_hashes(hashes64: Buffer) -> bytes:
    try:
        view = memoryview(hashes64)
    except TypeError as error:
        raise ConfigError("hashes64 is what BlockHasher.hashes64 returns: bytes, 8 a block") from error
    if view.nbytes % 8 or view.nbytes > MAX_PROMPT_NBYTES:
        raise ConfigError(
            f"hashes64 has 8 bytes a block, at most {MAX_PROMPT_NBYTES} in all, not {view.nbytes}"
        )
    return view.tobytes()


# ---- what a client gets


def decode_lookup(reply: Any) -> Lookup:
    """Of ``LookupResponse``. Errors: ``ValueError`` when columns differ in length."""
    columns = (
        reply.worker, reply.dp_rank, reply.address, reply.block_tokens, reply.prompt_blocks, reply.device_blocks,
        reply.local_blocks, reply.pool_blocks, reply.sequence, reply.staleness_ms, reply.stale,
    )  # fmt: skip
    if len(set(map(len, columns))) != 1:
        raise ValueError("its columns differ in length")
    return Lookup(*map(tuple, columns))


def decode_workers(reply: Any) -> list[WorkerStatus]:
    """Of ``ListWorkersResponse``."""
    return [
        WorkerStatus(
            worker=decode_worker(status.worker, status.worker.hash_seed_id),
            source=status.source,
            lease_left_ms=status.lease_left_ms,
            publishers=tuple(
                PublisherStatus(**{name: getattr(one, name) for name in PublisherStatus.__dataclass_fields__})
                for one in status.publishers
            ),
        )
        for status in reply.workers
    ]


def decode_status(reply: Any) -> FleetStatus:
    """Of ``ListWorkersResponse``. An index of an earlier version says nothing of itself: zeros."""
    index = IndexStatus(**{name: getattr(reply.index, name) for name in IndexStatus.__dataclass_fields__})
    return FleetStatus(index, tuple(decode_workers(reply)))


# ---- what a server gets and sends


class Question(NamedTuple):
    """The arguments of ``Fleet.lookup``."""

    model: str
    options: dict[str, Any]
    nbytes: int  # of the prompt


def decode_question(request: Any) -> Question:
    """Of ``LookupRequest``."""
    prompt = request.WhichOneof("prompt")
    if prompt is None:
        raise ConfigError("a LookupRequest holds a prompt: block_hashes or token_ids")
    scope = request.scope
    options: dict[str, Any] = {
        "tenant": scope.tenant or DEFAULT_TENANT,
        "workers": list(request.workers) or None,
    }
    packed = getattr(request, prompt)
    if prompt == "block_hashes":
        return Question(scope.model, {**options, "hashes64": packed}, len(packed))
    if len(packed) % TOKEN_NBYTES:
        raise ConfigError(f"token_ids are packed u32s, 4 bytes each; {len(packed)} bytes are not")
    options |= {
        "token_ids": memoryview(packed).cast("I"),
        "lora": (scope.lora_name, scope.lora_path) if scope.lora_name or scope.lora_path else None,
        "cache_salt": scope.cache_salt or None,
        "multimodal": [(item.identifier, item.offset, item.length) for item in scope.multimodal],
    }
    return Question(scope.model, options, len(packed))


def encode_lookup(lookup: Lookup) -> Any:
    """``LookupResponse``."""
    return pb.LookupResponse(
        worker=lookup.workers,
        dp_rank=lookup.dp_ranks,
        address=lookup.addresses,
        block_tokens=lookup.block_tokens,
        prompt_blocks=lookup.prompt_blocks,
        device_blocks=lookup.device_blocks,
        local_blocks=lookup.local_blocks,
        pool_blocks=lookup.pool_blocks,
        sequence=lookup.sequences,
        staleness_ms=lookup.staleness_ms,
        stale=lookup.stale,
    )


def encode_worker(worker: Worker) -> Any:
    """``Worker``."""
    return pb.Worker(
        name=worker.name,
        tenant=worker.tenant,
        model=worker.model,
        hash_algorithm=worker.hash_algorithm,
        hash_seed_id=worker.hash_seed_id,
        block_tokens=worker.block_tokens,
        address=worker.address,
        incarnation=worker.incarnation,
        namespace=worker.namespace,
        publishers=[
            pb.Publisher(dp_rank=one.dp_rank, events=one.events, replay=one.replay)
            for one in worker.publishers
        ],
    )


def decode_worker(message: Any, default_seed_id: str) -> Worker:
    """Of ``Worker``, with the defaults that its fields have when they are empty."""
    return Worker(
        name=message.name,
        model=message.model,
        block_tokens=message.block_tokens,
        hash_seed_id=message.hash_seed_id or default_seed_id,
        publishers=tuple(Publisher(one.dp_rank, one.events, one.replay) for one in message.publishers),
        tenant=message.tenant or DEFAULT_TENANT,
        hash_algorithm=message.hash_algorithm or DEFAULT_ALGORITHM,
        address=message.address,
        incarnation=message.incarnation,
        namespace=message.namespace,
    )


def encode_status(status: FleetStatus) -> Any:
    """``ListWorkersResponse``."""
    return pb.ListWorkersResponse(
        index=pb.IndexStatus(
            **{name: getattr(status.index, name) for name in IndexStatus.__dataclass_fields__}
        ),
        workers=[
            pb.WorkerStatus(
                worker=encode_worker(one.worker),
                source=one.source,
                lease_left_ms=one.lease_left_ms,
                publishers=[
                    pb.PublisherStatus(
                        **{name: getattr(rank, name) for name in PublisherStatus.__dataclass_fields__}
                    )
                    for rank in one.publishers
                ],
            )
            for one in status.workers
        ],
    )


def _pair(what: str, pair: Any) -> tuple[str, str]:
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise ConfigError(f"{what}, not {pair!r:.80}")
    return pair[0], pair[1]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


assert struct.calcsize("I") == TOKEN_NBYTES
