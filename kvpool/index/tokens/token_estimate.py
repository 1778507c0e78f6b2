"""``estimate``: tokens of a request whose prompt nobody has tokenized, by its bytes. Pure.

Text has four bytes a token. A picture, sound or video counts as one item however many bytes bring it: base64 of a
photograph has as many bytes as a book. What models take for one: LLaVA-1.5 576, Gemma 3 256, Qwen2.5-VL 1,300 for a
megapixel, Llama 3.2 1,601 a tile, Pixtral up to 4,096, Whisper 1,500 for half a minute.
"""

from __future__ import annotations

import re

ITEM_TOKENS = 1500
TEXT_NBYTES = 4  # a token
MAX_ITEMS = 256  # of a key; what follows counts as text
MAX_GAP_NBYTES = 16  # blanks between a key and its value
# What a string is an item behind, if it is long or names a place. OpenAI's chats and responses, Anthropic's messages,
# Cohere's images, embeddings of vLLM's.
_KEYS = (
    b'"url"', b'"image_url"', b'"data"', b'"file_data"', b'"prompt_embeds"', b'"image_embeds"', b'"audio_embeds"',
    b'"images"',
)  # fmt: skip
_PLACES = (b"data:", b"http:", b"https:", b"file:")
_LONG_NBYTES = 1024
FORM = re.compile(rb"[\r\n]*--")  # begins a form, of a file of sound and a few fields, and no JSON


def estimate(body: bytes) -> int:
    """At least 1. Takes as long as eight searches of the body, 1 ms a MiB."""
    if FORM.match(body):
        return ITEM_TOKENS
    items = nbytes = 0
    for key in _KEYS:
        at = body.find(key)
        for _ in range(MAX_ITEMS):
            if at < 0:
                break
            begin = _begin_of_text(body, at + len(key))
            end = body.find(b'"', begin) if begin else -1
            if end > 0 and (end - begin >= _LONG_NBYTES or body[begin : begin + 6].startswith(_PLACES)):
                items, nbytes = items + 1, nbytes + end - begin
            at = body.find(key, max(at + len(key), end))
    return max(1, (len(body) - nbytes) // TEXT_NBYTES + items * ITEM_TOKENS)


def _begin_of_text(body: bytes, at: int) -> int:
    """Of the string that is the value of a key, or the first of its list; 0: another value."""
    between = body[at : at + MAX_GAP_NBYTES].split(b'"', 1)[0]
    return at + len(between) + 1 if b"".join(between.split()) in (b":", b":[") else 0
