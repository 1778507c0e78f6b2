"""The facts of an engine out of those of its ranks, which differ: a pipeline stage has layers of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from kvpool.key.key import EPOCH_FACT, Fact, differing_facts


def facts_of_epoch(facts: Mapping[str, Fact], epoch: str) -> dict[str, Fact]:
    """The facts of an engine whose weights are those of ``epoch``; empty: those that it started with."""
    return {**facts, EPOCH_FACT: epoch} if epoch else dict(facts)


def facts_of_engine(ranks: Sequence[Mapping[str, Fact]], stages: int) -> dict[str, Fact] | None:
    """What a namespace for all of an engine's ``ranks`` is made of; these come in order, stage by stage.

    A fact in which all stages agree stands under its own name, any other one as ``stage0.NAME``, ``stage1.NAME``, and
    so on: engines have the same facts when each of their stages has. None: ranks of one stage differ.
    """
    firsts = ranks[:: len(ranks) // stages]
    for rank, facts in enumerate(ranks):
        if differing_facts(facts, firsts[rank * stages // len(ranks)]):
            return None
    own = {name for facts in firsts for name, _, _ in differing_facts(firsts[0], facts)}
    return {
        f"stage{stage}.{name}" if name in own else name: value
        for stage, facts in enumerate(firsts)
        for name, value in facts.items()
    }


def why_ranks_differ(ranks: Sequence[Mapping[str, Fact]], stages: int) -> str:
    """In which fact two ranks of one stage differ, in words, where ``facts_of_engine`` finds none for all."""
    of_stage = len(ranks) // stages
    for rank, facts in enumerate(ranks):
        first = rank // of_stage * of_stage
        for name, here, there in differing_facts(ranks[first], facts):
            values = [json.dumps(value) if value is not None else "absent" for value in (here, there)]
            return (
                f"its ranks differ: {name} is {values[0]} on rank {first} and {values[1]} on rank {rank}; "
                "give all ranks the same model and settings"
            )
    return "its ranks agree"
