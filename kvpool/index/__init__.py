"""The prefix index: which worker holds which blocks, and how far a prompt reaches with each of them.

In this version it lives in one process: feed it the payloads of the engines' KV events, ask it about prompts.
"""

from __future__ import annotations

from kvpool.index.table import Applied, Match, Matches, PrefixIndex, Tier

__all__ = ["Applied", "Match", "Matches", "PrefixIndex", "Tier"]
