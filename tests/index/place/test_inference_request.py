"""What of a request says its model, and which prompts only an engine makes tokens of."""

from __future__ import annotations

import pytest

from kvpool.index.place.inference_request import MAX_PARTS, named_model, read_request

SPEECH = "/v1/audio/transcriptions"


def part(head: bytes, value: bytes = b"n") -> bytes:
    return b"--x\r\n" + head + b"\r\n\r\n" + value + b"\r\n"


FIELD = b'Content-Disposition: form-data; name="model"'
OTHER = part(b'content-disposition: form-data; name="file"; filename="model.wav"', b'name="model"\r\n\r\nm')
END = b"--x--\r\n"


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/completions", b'{"prompt": {"model": "m"}, "model": "n"}', "n"),
        ("/v1/completions", b'{"model": "m", "model": "n"}', "n"),
        ("/v1/completions", b'{"model": 7}', ""),
        ("/v1/completions", b'{"model": null}', ""),
        ("/v1/completions", b'{"model": "n"', ""),
        ("/v1/completions", b'{"model": "n", "prompt": ' + b"[" * 100_000, ""),
        ("/v1/completions", b'{"model": "\xff"}', ""),
        ("/v1/completions", b"", ""),
        ("/v1/models/n", b'{"model": "m"}', "n"),
        ("/v1/models/org/n?model=m", b"", "org/n"),
        ("/v1/models/org%2Fn", b"", "org/n"),
        ("/v1/models/%FF", b"", "\ufffd"),
        ("/v1/models", b"", ""),
        (SPEECH, OTHER + part(FIELD) + END, "n"),
        (SPEECH, part(FIELD + b"\r\ncontent-type: text/plain") + OTHER + END, "n"),
        (SPEECH, part(b"content-type: text/plain\r\ncontent-disposition: form-data; name=model; x=y") + END, "n"),
        (SPEECH, OTHER + END, ""),
        (SPEECH, part(b'content-disposition: form-data; name="models"') + END, ""),
        (SPEECH, part(FIELD), ""),
        (SPEECH, part(FIELD, b"") + END, ""),
        (SPEECH, part(FIELD, b"n" * 5000) + END, "n" * 4096),
        (SPEECH, OTHER * MAX_PARTS + part(FIELD) + END, ""),
        (SPEECH, b"--" + b"x" * 100 + b"\r\n", ""),
        (SPEECH, b"--\r\n\r\n\r\n--", ""),
        (SPEECH, b"--", ""),
    ],
)  # fmt: skip
def test_what_names_a_model(path: str, body: bytes, model: str) -> None:
    assert named_model(path, body) == model


@pytest.mark.parametrize(
    ("field", "is_known"),
    [
        ('"suffix": "x"', False),
        ('"kv_transfer_params": {"prompt_token_ids": [1]}', False),
        ('"kv_transfer_params": {"do_remote_decode": true}', True),
        ('"kv_transfer_params": null', True),
        ('"stream": true', True),
    ],
)
def test_a_prompt_that_an_engine_changes_has_no_tokens_here(field: str, is_known: bool) -> None:
    request = read_request("/v1/completions", f'{{"model": "m", "prompt": "x", {field}}}'.encode())
    assert (request.prompt is not None) == is_known
