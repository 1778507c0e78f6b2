"""``read_names``: the names in a worker's ``GET /v1/models``. Pure.

vLLM lists its served names, and each LoRA adapter with its path as ``root`` and its model as ``parent``
(``vllm/entrypoints/openai/models/serving.py``).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvpool.errors import ConfigError
from kvpool.index.fleet.names import MAX_READ, Name
from kvpool.index.follow.metrics_page import BadPage
from kvpool.index.protocol import bounded_json

MAX_CONTAINERS = 16 * MAX_READ  # vLLM's cards have three; a page of 2 MiB, 5,000 cards


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


_CARDS = msgspec.json.Decoder(_Cards)


def read_names(page: bytes) -> list[Name]:
    """Errors: ``BadPage``."""
    try:
        bounded_json.check(page, most_containers=MAX_CONTAINERS)
        cards = _CARDS.decode(page).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ConfigError) as error:
        raise BadPage(f"its list of models cannot be read: {error!s:.200}") from error
    return [
        Name(card.id, (card.root or "") if card.parent else "", card.max_model_len or 0) for card in cards
    ]
