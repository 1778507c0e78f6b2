"""``TokenMakers``: who makes the tokens of requests' prompts. Immutable."""

from __future__ import annotations

from typing import NamedTuple

from kvpool.index.front.renderer import Renderer
from kvpool.index.front.token_checks import TokenChecks
from kvpool.index.tokens.tokenizers import Tokenizers


class TokenMakers(NamedTuple):
    """``tokenizers``: by model; workers ``renderer`` those of other models. ``checks`` compares both now and then."""

    tokenizers: Tokenizers
    renderer: Renderer
    checks: TokenChecks
