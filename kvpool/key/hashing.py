"""The engine's block-hash chain, bit for bit, so that any process can name the blocks of a prompt.

``h[i] = H(cbor((h[i-1], tokens of block i, extra keys or null)))``, with ``h[-1] = H(cbor(seed))``, H one of
SHA-256 and XXH3-128, and canonical CBOR: ``hash_block_tokens`` and ``generate_block_hash_extra_keys`` in vLLM
0.32 (vllm/v1/core/kv_cache_utils.py). The chain is native; only the extra keys are made here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import cbor2

from kvpool import _native
from kvpool.errors import NO_PROVIDER, ConfigError
from kvpool.text import unknown

if TYPE_CHECKING:
    from typing_extensions import Buffer

ALGORITHMS = ("sha256_cbor", "xxhash_cbor")
DEFAULT_SEED = "vllm-none-hash"  # DEFAULT_NONE_HASH_SEED in vLLM, from 0.29
MAX_BLOCK_TOKENS = 1 << 20

_PICKLING = {"sha256": "sha256_cbor", "xxhash": "xxhash_cbor"}

Multimodal = tuple[str, int, int]  # identifier, offset, length; the last two in tokens of the prompt


class BlockHasher:
    """The block hashes of prompts, as vLLM computes them with ``--prefix-caching-hash-algo`` set to
    ``algorithm``.

    ``block_tokens``: vLLM's hash block size. ``seed``: the engines' ``PYTHONHASHSEED``; None: unset, which
    only ``sha256_cbor`` allows. ``cache``: of ``hashes64``, of several hashers; ``owner``: those of equal owners use
    each other's hashes. Prompts of embeddings have no hash here. Immutable and thread-safe. Errors: ``ConfigError``.
    """

    __slots__ = ("_algorithm", "_block_tokens", "_cache", "_none_hash", "_owner")

    def __init__(
        self,
        block_tokens: int,
        algorithm: str = "sha256_cbor",
        seed: str | None = None,
        *,
        cache: _native.HashCache | None = None,
        owner: str = "",
    ) -> None:
        if type(block_tokens) is not int or not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
            raise ConfigError(
                f"block_tokens is a whole number from 1 to {MAX_BLOCK_TOKENS}, not {block_tokens!r}"
            )
        if algorithm in _PICKLING:
            raise ConfigError(
                f'hash algorithm "{algorithm}" hashes a Python pickle, which differs between processes, so '
                "nothing would ever be shared: start vLLM with "
                f"--prefix-caching-hash-algo {_PICKLING[algorithm]}"
            )
        if algorithm not in ALGORITHMS:
            raise ConfigError(unknown("hash algorithm", str(algorithm), ALGORITHMS))
        if seed is None:
            if algorithm == "xxhash_cbor":
                raise ConfigError(
                    "xxhash_cbor draws its seed at random in every process, so nothing would ever be shared: "
                    "set PYTHONHASHSEED to one value for all engines and give it as seed, or use sha256_cbor"
                )
            seed = DEFAULT_SEED
        self._block_tokens = block_tokens
        self._algorithm = algorithm
        self._cache, self._owner = cache, owner
        seeded = _cbor(_text("seed", seed))
        try:
            self._none_hash = _native.digest(algorithm, seeded)
        except RuntimeError as error:
            raise ConfigError(f"{error}, by which blocks are named; {NO_PROVIDER}") from error

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self._block_tokens

    @property
    def algorithm(self) -> str:
        """``sha256_cbor`` (digests of 32 bytes) or ``xxhash_cbor`` (16 bytes)."""
        return self._algorithm

    def hashes(
        self,
        token_ids: Sequence[int] | Buffer,
        *,
        lora: tuple[str, str] | None = None,
        cache_salt: str | None = None,
        multimodal: Sequence[Multimodal] = (),
    ) -> list[bytes]:
        """One digest per full block of the prompt, in order; trailing tokens are ignored.

        ``token_ids``: ints from 0 to 2**64 - 1, or a contiguous buffer of them (16, 32 or 64 bits). ``lora``:
        (name, path) of the adapter. ``multimodal``: (identifier, offset, length) of each item, in tokens, by
        rising offset; the identifier is vLLM's ``MultiModalFeatureSpec.identifier``. Errors: ``ConfigError``.
        """
        extras = self._extras(len_tokens(token_ids) // self._block_tokens, lora, cache_salt, multimodal)
        try:
            return _native.hash_chain(self._algorithm, self._none_hash, token_ids, self._block_tokens, extras)
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(str(error)) from error

    def hashes64(
        self,
        token_ids: Sequence[int] | Buffer,
        *,
        lora: tuple[str, str] | None = None,
        cache_salt: str | None = None,
        multimodal: Sequence[Multimodal] = (),
    ) -> bytes:
        """The same blocks as KV events name them: the last 8 digest bytes of each, as a little-endian u64.

        ``int.from_bytes(digest[-8:], "big")`` is the integer. Arguments and errors: as ``hashes``.
        """
        extras = self._extras(len_tokens(token_ids) // self._block_tokens, lora, cache_salt, multimodal)
        try:
            return _native.hash_chain64(
                self._algorithm,
                self._none_hash,
                token_ids,
                self._block_tokens,
                extras,
                self._cache,
                self._owner,
            )
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(str(error)) from error

    def __repr__(self) -> str:
        return f"BlockHasher({self._block_tokens}, {self._algorithm!r})"  # the seed may be a secret

    def _extras(
        self,
        blocks: int,
        lora: tuple[str, str] | None,
        cache_salt: str | None,
        multimodal: Sequence[Multimodal],
    ) -> dict[int, bytes]:
        """CBOR of the extra keys of each block that has some."""
        of_all: list[tuple[str, ...]] = []
        if lora is not None:
            of_all.append(_lora_key(lora))
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise ConfigError(f"cache_salt is text, not {type(cache_salt).__name__}")
        items = _checked_items(multimodal)
        shared = _cbor(tuple(of_all)) if of_all else None
        extras: dict[int, bytes] = {} if shared is None else dict.fromkeys(range(blocks), shared)
        if not blocks:
            return extras
        of_items = _item_keys(items, blocks, self._block_tokens)
        for block in sorted({0, *of_items} if cache_salt else of_items):
            salt = [("cache_salt", cache_salt)] if cache_salt and block == 0 else []
            extras[block] = _cbor((*of_all, *of_items.get(block, ()), *salt))
        return extras


def _item_keys(
    items: Sequence[Multimodal], blocks: int, block_tokens: int
) -> dict[int, list[tuple[str, str, int]]]:
    """``("mm", identifier, offset from the block's start)`` of each block's items.

    vLLM walks blocks and items together and stops at an item that reaches beyond the block. A later
    overlapping item stands only in blocks where the earlier item ends (``_gen_mm_extra_hash_keys``).
    """
    keys: dict[int, list[tuple[str, str, int]]] = {}
    if not items:
        return keys
    _, last_offset, last_length = items[-1]
    current = 0
    block = items[0][1] // block_tokens  # no item reaches an earlier block
    while block < blocks and current < len(items) and block * block_tokens < last_offset + last_length:
        start = block * block_tokens
        end = start + block_tokens
        while current < len(items):
            identifier, offset, length = items[current]
            if end <= offset:
                break
            if start < offset + length:
                keys.setdefault(block, []).append(("mm", identifier, offset - start))
                if end < offset + length:
                    break
            current += 1
        block += 1
    return keys


def len_tokens(token_ids: Sequence[int] | Buffer) -> int:
    try:
        return len(token_ids)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(f"token_ids is a sequence of ints, not {type(token_ids).__name__}") from error


def _checked_items(multimodal: Sequence[Multimodal]) -> list[Multimodal]:
    items: list[Multimodal] = []
    for position, item in enumerate(multimodal):
        try:
            identifier, offset, length = item
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"multimodal[{position}] is (identifier, offset, length), not {item!r:.80}"
            ) from error
        _text(f"multimodal[{position}] identifier", identifier)
        for name, value in (("offset", offset), ("length", length)):
            if type(value) is not int or value < 0:
                raise ConfigError(f"multimodal[{position}] {name} is a number of tokens, not {value!r:.80}")
        if items and offset < items[-1][1]:
            raise ConfigError(
                f"multimodal[{position}] begins before the item in front of it: sort them by offset"
            )
        items.append((identifier, offset, length))
    return items


def media_hash(identifier: str) -> bytes:
    """The hash in the key of an item's output of an encoder. ``identifier``: vLLM's: a hash, or a caller's own text."""
    return hashlib.sha256(identifier.encode("utf-8", "surrogatepass")).digest()


def seed_id(seed: str | None) -> str:
    """16 hex digits that identify a seed without revealing it. ``seed``: as for ``BlockHasher``."""
    return hashlib.sha256(_text("seed", DEFAULT_SEED if seed is None else seed).encode()).hexdigest()[:16]


def _lora_key(lora: tuple[str, str]) -> tuple[str, str, str]:
    try:
        name, path = lora
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lora is (name, path), not {lora!r:.80}") from error
    if isinstance(lora, str):
        raise ConfigError("lora is (name, path), not text")
    return ("lora", _text("lora name", name), _text("lora path", path))


def _text(what: str, value: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{what} is text, not {type(value).__name__}")
    return value


def _cbor(value: object) -> bytes:
    try:
        return cbor2.dumps(value, canonical=True)
    except UnicodeEncodeError as error:
        raise ConfigError(f"text that is not Unicode cannot be hashed: {error.reason}") from error
