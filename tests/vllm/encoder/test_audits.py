"""Outputs that are computed although the pool has them, and what follows from the comparison."""

from __future__ import annotations

from kvpool.vllm.encoder.plan import ComparedOutput, EncoderWorkerMetadata
from tests.support.encoder import WRITER, Encoders, Picture, has, key, payload, ready, request
from tests.support.scripted_store import ScriptedStore

A, B = Picture("a" * 64, 10), Picture("b" * 64, 40)


def audited(store: ScriptedStore, share: float = 1.0) -> Encoders:
    return Encoders(store, {"audit_share": share}, random_number=lambda: 0.0)


def test_an_audited_output_is_computed_and_compared(store: ScriptedStore) -> None:
    encoders = audited(store)
    has(store, A)
    store.written_by[key(A.identifier)] = WRITER
    asked = request("r", A)
    encoders.half.seen(asked)
    ready(encoders, store, asked)
    assert encoders.schedule(asked) == [False]
    wanted = encoders.plan().stores[A.identifier]
    assert wanted.key == "", "it is not stored"
    assert wanted.record is not None
    assert wanted.record.tobytes() == payload(A.identifier, A.rows)
    assert wanted.writer == WRITER
    assert encoders.count("misses", "audited") == 1
    assert encoders.half._outputs.taken_nbytes == 0


def test_what_an_audit_finds_wrong_is_deleted_and_its_writer_put_away(store: ScriptedStore) -> None:
    encoders = audited(store)
    other = b"o" * 16

    def audit(name: str, difference: float, writer: bytes) -> None:
        encoders.half._audits.begin(name, key(name))
        found = ComparedOutput(name, "", writer, "bfloat16", difference, 1.0)
        encoders.half.update(EncoderWorkerMetadata(compared=[found]))

    for number in range(8):
        audit(f"own {number}", 1e-6, WRITER)
    audit("right", 1e-6, other)
    assert encoders.plan().wrong == []
    for name in ("wrong 1", "wrong 2"):
        audit(name, 0.5, other)
    assert encoders.plan().wrong == [key("wrong 1"), key("wrong 2")]
    assert encoders.count("audits", "differs") == 2
    has(store, A)
    store.written_by[key(A.identifier)] = other
    asked = request("r", A)
    encoders.half.seen(asked)
    ready(encoders, store, asked)
    assert encoders.schedule(asked) == [False]
    assert encoders.count("misses", "put_away") == 1
    assert encoders.plan().wrong == [key(A.identifier)]


def test_an_encoder_that_differs_from_itself_goes_without_the_pool_until_a_reset(
    store: ScriptedStore,
) -> None:
    encoders = audited(store)
    for number in range(10):
        name = f"own {number}"
        encoders.half._audits.begin(name, key(name))
        found = ComparedOutput(name, "", WRITER, "bfloat16", 1e-6 if number < 8 else 0.5, 1.0)
        encoders.half.update(EncoderWorkerMetadata(compared=[found]))
    asked = request("r", A)
    encoders.half.seen(asked)
    assert not store.under_way
    encoders.schedule(asked)
    assert encoders.count("misses", "switched_off") == 1
    encoders.half.reset()
    encoders.half.seen(request("2", B))
    assert store.under_way


def test_at_most_one_output_a_second_is_audited(store: ScriptedStore) -> None:
    encoders = audited(store, share=0.5)
    pictures = [Picture(f"{number:064}", number * 8) for number in range(4)]
    has(store, *pictures)
    asked = request("r", *pictures)
    encoders.half.seen(asked)
    ready(encoders, store, asked)
    assert encoders.schedule(asked) == [False, True, True, True]
