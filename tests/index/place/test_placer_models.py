"""``Placer`` before workers of several models: a request goes to those of its own, whatever else is known of it."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvpool.index.place import placer as placer_module
from kvpool.index.place.inference_request import MAX_READ_NBYTES
from tests.support.placing import LONG, Placing, placing

MODELS = "mn"  # of worker a, and of worker b
CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/transcriptions"


def said(**fields: object) -> bytes:
    return json.dumps({**fields, "model": "n"}).encode()


def form(**fields: bytes) -> bytes:
    parts = (
        b'--x\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), value)
        for name, value in fields.items()
    )
    return b"".join(parts) + b"--x--\r\n"


async def targets(there: Placing, path: str, body: bytes) -> list[str]:
    """Where a request goes; its reservation is ended."""
    placement = await there.placer.place(path, {}, body, "default")
    assert there.reservations == 1
    there.placer.release(placement)
    assert there.reservations == 0
    return [target.worker for target in placement.targets]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/v1/completions", said(prompt="x"), id="small"),
        pytest.param("/v1/embeddings", said(input="x"), id="embeddings"),
        pytest.param("/v1/completions", said(prompt=7), id="a prompt that is none"),
        pytest.param(CHAT, said(messages="x" * MAX_READ_NBYTES), id="more than is read"),
        pytest.param(CHAT, said(messages=[[0]] * (1 << 19)), id="more values than are read"),
        pytest.param("/v1/models/n", b"", id="path"),
        pytest.param("/v1/models/%6E?x=m", b"", id="escaped path"),
        pytest.param(SPEECH, form(model=b"n", file=b"\0\1"), id="form"),
        pytest.param(SPEECH, form(file=b"\r\n--y\0" * MAX_READ_NBYTES, model=b"n"), id="large form"),
    ],
)
def test_a_request_goes_to_workers_of_its_model_whatever_is_read_of_it(path: str, body: bytes) -> None:
    async def ask() -> None:
        async with placing(models=MODELS) as there:
            assert [await targets(there, path, body) for _ in range(3)] == [["b"]] * 3

    asyncio.run(ask())


def test_a_request_whose_tokens_come_too_late_goes_to_workers_of_its_model() -> None:
    async def ask() -> None:
        async with placing(timeout_s=0.1, models=MODELS) as there:
            there.tokenizer.goes_on.clear()
            assert await targets(there, "/v1/completions", said(prompt=LONG)) == ["b"]

    asyncio.run(ask())


def test_a_request_beside_too_many_others_goes_to_workers_of_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placer_module, "MAX_UNDER_WAY", 0)

    async def ask() -> None:
        async with placing(models=MODELS) as there:
            assert await targets(there, "/v1/completions", said(prompt=LONG)) == ["b"]

    asyncio.run(ask())


@pytest.mark.parametrize("body", [b'{"model": "an adapter", "prompt": "x"}', b"{", b"--x", b"--x\r\n\r\n"])
def test_a_request_of_no_known_model_goes_to_the_worker_with_the_least_to_do(body: bytes) -> None:
    async def ask() -> None:
        async with placing(models=MODELS) as there:
            first, second = [
                await there.placer.place("/v1/completions", {}, body, "default") for _ in range(2)
            ]
            assert {first.targets[0].worker, second.targets[0].worker} == {"a", "b"}
            assert {len(first.targets), len(second.targets), there.reservations} == {2}
            for placement in (first, second):
                there.placer.release(placement)
            taken = [(await targets(there, "/v1/completions", body))[0] for _ in range(4)]
            assert sorted(taken) == ["a", "a", "b", "b"], "of equals not always the same"

    asyncio.run(ask())
