"""How many tokens a request counts as, where nobody has made them: by its text, and a constant a picture."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from kvpool.index.fleet.fleet import Fleet
from kvpool.index.front.inference_request import CHAT, read_request
from kvpool.index.prompt import NO_BLOCKS
from kvpool.index.tokens.token_estimate import ITEM_TOKENS, MAX_ITEMS, estimate
from tests.support.fleets import a_worker
from tests.support.placing import placer_of

PICTURE = base64.b64encode(bytes(range(256)) * 2400).decode()  # of 600 KB
TEXT = "what is there to see? " * 20


def chat(*parts: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": list(parts)}]}).encode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}},
        {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}},
        {"type": "input_audio", "input_audio": {"data": PICTURE, "format": "wav"}},
        {"type": "input_file", "file_data": PICTURE},
        {"type": "image_embeds", "image_embeds": PICTURE},
        {"type": "audio_embeds", "audio_embeds": PICTURE},
        {"images": [f"data:image/png;base64,{PICTURE}"]},
        {"prompt_embeds": [PICTURE]},
    ],
)
def test_a_picture_counts_as_a_picture_however_many_bytes_it_has(part: Any) -> None:
    body = chat({"type": "text", "text": TEXT}, part)
    few = chat({"type": "text", "text": TEXT})
    assert len(few) // 4 + ITEM_TOKENS <= estimate(body) < len(few) // 4 + ITEM_TOKENS + 100
    two = chat({"type": "text", "text": TEXT}, part, part)
    assert 2 * ITEM_TOKENS < estimate(two) < 2 * ITEM_TOKENS + 300


def test_a_picture_elsewhere_counts_too() -> None:
    body = chat({"type": "image_url", "image_url": {"url": "https://pictures.test/1.png"}})
    assert ITEM_TOKENS <= estimate(body) < ITEM_TOKENS + 40


def test_text_counts_by_its_bytes() -> None:
    assert estimate(b"") == 1
    assert estimate(b"x" * 4000) == 1000
    body = chat({"type": "text", "text": '"url": "'}, {"data": 5, "url": ["a"]}, {"data": "short"})
    assert estimate(body) == len(body) // 4
    said = json.dumps({"model": "m", "prompt": "word " * 20_000}).encode()
    assert read_request("/v1/completions", said).tokens_estimate == len(said) // 4


@pytest.mark.parametrize("before", [b"", b"\r\n", b"\n\n"])
def test_a_form_is_a_file_of_sound(before: bytes) -> None:
    said = before + b"--x\r\ncontent-disposition: form-data; name=file\r\n\r\n" + bytes(5 << 20)
    assert estimate(said) == ITEM_TOKENS


@pytest.mark.parametrize("end", ["", '"', '": "', '":"data:', '" :\n "https:', "\\"])
def test_any_bytes_have_an_estimate(end: str) -> None:
    many = ('"url"' + end).encode() * 300
    assert 1 <= estimate(many) <= len(many) // 4 + MAX_ITEMS * ITEM_TOKENS
    assert estimate(b"\xff" * 64 + many) > 0


@pytest.mark.anyio
@pytest.mark.parametrize("nbytes", [600_000, 5 << 20])
async def test_after_a_picture_the_next_texts_go_to_both_workers(nbytes: int) -> None:
    """One that is read, and one whose body is too large for that."""
    fleet = Fleet()
    for place, name in enumerate("ab"):
        fleet.add(a_worker(name, port=5600 + 2 * place, address=f"http://127.0.0.1:{7000 + place}"), "flag")
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBO" * (nbytes // 4)}}
    async with placer_of(fleet, timeout_s=5) as (placer, router):
        placement = await placer.place(CHAT, {}, chat({"type": "text", "text": TEXT}, picture), "default")
        assert placement.reservation
        reserved = {pick.worker: pick.reserved_cost for pick in router.route("m", hashes64=NO_BLOCKS).picks}
        assert sorted(reserved.values())[0] == 0
        assert ITEM_TOKENS <= max(reserved.values()) < 2 * ITEM_TOKENS
