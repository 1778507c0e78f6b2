"""``HashProofs``: whether the engine's block hashes of a request are those of the request's tokens.

The engine hashes a block once and may replace a token of it later, as versions before 0.32 do in streaming sessions
(vllm-project/vllm#49377). In the pool, other tokens' KV under a hash would be every engine's. So the hashes of
scheduled requests are computed again from their tokens, natively: each block once, on the proven hash before it.

A hash that leaves out some of what the KV depends on (``internals.covered_tokens``) is as false: two requests have it.

The engine's own cache has such a block under its false hash, too. A request that begins with one computes on the KV of
other tokens. So nothing behind it is proven, and what it computes there is as false to those that begin with that.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.v1.request import Request

from kvpool import _native
from kvpool.vllm.engine import internals

logger = init_logger("vllm.kvpool")

_OF_OTHERS = (
    "is not of its tokens (in versions of vLLM before 0.32 streaming sessions do that, vllm-project/vllm#49377: update "
    "vLLM)"
)
_OF_LESS = "leaves out what KV depends on (sound inside of a video, an adapter's encoder, a token 0 among embeddings)"
BESIDE_ADAPTERS = (
    "says of no adapter, though on a CPU vLLM computes with one what is in a step beside adapters"
)
OF_EARLIER_WEIGHTS = (
    "is of an item that the encoder's earlier weights have encoded, which the engine keeps until its cache of encoders "
    "is reset (reset_encoder_cache)"
)
ON_A_WRONG_HIT = "is computed on blocks of the pool that an audit found wrong"
MIN_PRUNED = 1 << 16  # false hashes; beyond it those are forgotten that the engine's cache no longer has


@dataclass(slots=True)
class _Proof:
    prompt_tokens: int  # a session's next turn has more, and is proven anew
    covered: int  # leading blocks whose hashes cover all that their KV depends on
    blocks: int = 0  # leading ones whose hashes are true
    end: bytes = b""  # the last of these
    end_tokens: Sequence[int] = ()
    is_false: bool = False  # the hash behind them is of other tokens, or of too little
    placed: bool = False  # it is known what the request began with
    spoilt: int | None = None  # the first block that holds other tokens' KV, or was computed on it
    computed: int = 0  # with the last step, or found
    told: int = 0  # of them, those behind ``proven`` are in ``HashProofs._false``

    @property
    def proven(self) -> int:
        return self.blocks if self.spoilt is None else min(self.blocks, self.spoilt)


class HashProofs:
    """Of an engine that hashes blocks of ``block_tokens`` tokens with ``algorithm``.

    ``is_cached``: whether the engine's own cache has a block under a hash.
    """

    def __init__(self, algorithm: str, block_tokens: int, is_cached: Callable[[bytes], bool]) -> None:
        self._algorithm, self._block_tokens, self._is_cached = algorithm, block_tokens, is_cached
        self._proofs: dict[str, _Proof] = {}
        self._false: set[bytes] = set()  # under which the engine's cache may have other tokens' KV
        self._most_false = MIN_PRUNED
        self._said: set[str] = set()

    def placed(self, request_id: str) -> None:
        """The engine gave a request blocks: from now on it begins with these."""
        if (proof := self._proofs.get(request_id)) is not None:
            proof.placed = False

    def finished(self, request_id: str) -> None:
        self._proofs.pop(request_id, None)

    def prove(self, request: Request, computed_tokens: int) -> None:
        """Prove a scheduled request's hashes, up to the tokens that are computed after the step."""
        computed = min(computed_tokens // self._block_tokens, len(request.block_hashes))
        proof = self._proofs.get(request.request_id)
        if proof is None or proof.prompt_tokens != request.num_prompt_tokens:
            proof = self._begin(request)
        if computed > proof.blocks and not proof.is_false:
            if proof.blocks and not self._is_as_proven(proof, request):
                proof = self._begin(request)
            self._extend(proof, request, computed)
        proof.computed = computed
        self._tell(proof, request)

    def look_behind(self, request: Request, held_tokens: int) -> None:
        """Look at the blocks that a proven request did not compute, if they are new.

        After all requests of a step are proven: it may have begun with a block that another computes in this step.
        """
        proof = self._proofs[request.request_id]
        if not proof.placed:
            proof.placed, proof.spoilt = True, self._first_false(request.block_hashes, held_tokens)
            proof.told = 0
            self._tell(proof, request)

    def spoil(self, request: Request, before: int, why: str) -> None:
        """What a request computes behind ``before`` tokens is not what its hashes say, though they are true.

        One that was never scheduled may begin with what others computed, which is known then.
        """
        if (proof := self._proofs.get(request.request_id)) is None:
            return
        first = before // self._block_tokens
        proof.spoilt, proof.told = min(first, proof.spoilt if proof.spoilt is not None else first), 0
        self._tell(proof, request)
        self._say(request, first, why)

    def evicted(self, hashes: Iterable[bytes]) -> None:
        """The engine's own cache has nothing under these any more."""
        self._false.difference_update(hashes)

    def proven_tokens(self, request: Request) -> int:
        """Up to where the request's blocks hold the KV of the tokens in their hashes."""
        proof = self._proofs.get(request.request_id)
        return 0 if proof is None else proof.proven * self._block_tokens

    def is_true(self, request: Request) -> bool:
        """Whether all hashes that a request has now are those of its tokens."""
        hashes = request.block_hashes
        return self._hashed(request, 0, len(hashes), b"") == list(hashes)

    def is_false(self, block_hash: bytes) -> bool:
        """Whether the engine's own cache may have other tokens' KV under a hash."""
        return block_hash in self._false

    def _tell(self, proof: _Proof, request: Request) -> None:
        first = max(proof.proven, proof.told)
        if proof.computed > first and (proof.is_false or proof.spoilt is not None):
            self._false.update(request.block_hashes[first : proof.computed])
            proof.told = proof.computed
            if len(self._false) > self._most_false:
                self._false = set(filter(self._is_cached, self._false))
                self._most_false = max(MIN_PRUNED, 2 * len(self._false))

    def _begin(self, request: Request) -> _Proof:
        """Prove from the first token. What it began with stays."""
        earlier = self._proofs.get(request.request_id)
        covered = internals.covered_tokens(request) // self._block_tokens
        proof = self._proofs[request.request_id] = _Proof(request.num_prompt_tokens, covered)
        if earlier is not None:
            proof.placed, proof.spoilt = earlier.placed, earlier.spoilt
        return proof

    def _is_as_proven(self, proof: _Proof, request: Request) -> bool:
        end = proof.blocks * self._block_tokens
        return (
            request.block_hashes[proof.blocks - 1] == proof.end
            and request.all_token_ids[end - self._block_tokens : end] == proof.end_tokens
        )

    def _extend(self, proof: _Proof, request: Request, blocks: int) -> None:
        stop = min(blocks, proof.covered)
        given = request.block_hashes[proof.blocks : stop]
        true = self._hashed(request, proof.blocks, stop, proof.end)
        same = len(given)
        if given != true:
            proof.is_false = True
            same = next(at for at, (one, other) in enumerate(zip(given, true, strict=True)) if one != other)
            self._say(request, proof.blocks + same, _OF_OTHERS)
        elif stop < blocks:
            proof.is_false = True
            self._say(request, stop, _OF_LESS)
        if same:
            proof.blocks, proof.end = proof.blocks + same, given[same - 1]
            end = proof.blocks * self._block_tokens
            proof.end_tokens = request.all_token_ids[end - self._block_tokens : end]

    def _hashed(self, request: Request, begin: int, end: int, parent: bytes) -> list[bytes]:
        """The hashes of a request's blocks ``begin`` to ``end``; ``parent``: that before them, of the first none."""
        size = self._block_tokens
        return _native.hash_chain(
            self._algorithm,
            parent or internals.first_parent_hash(),
            request.all_token_ids[begin * size : end * size],
            size,
            internals.extra_keys(request, range(begin, end), size),
        )

    def _first_false(self, hashes: Sequence[bytes], tokens: int) -> int | None:
        if not self._false:
            return None
        held = hashes[: tokens // self._block_tokens]
        return next((at for at, one in enumerate(held) if one in self._false), None)

    def _say(self, request: Request, block: int, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            logger.warning(
                "kvpool: the engine's hash of block %d of request %s %s, so nothing of it is stored from there on; "
                "later ones are counted, as wrong_hash in kvpool_store_skipped_blocks_total",
                block,
                request.request_id,
                why,
            )
