from __future__ import annotations

import array
import json
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import BlockHasher, _native
from kvpool.errors import ConfigError
from tests.support import vllm_blocks
from tests.support.deadlines import ends_within

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "hashes.json").read_text())
TOKENS = list(range(1000, 1100))


def arguments(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "lora": tuple(row["lora"]) if row["lora"] else None,
        "cache_salt": row["cache_salt"],
        "multimodal": [tuple(item) for item in row["multimodal"]],
    }


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['name']}-{row['algorithm']}-{row['seed']}")
def test_golden_hashes(row: dict[str, Any]) -> None:
    hasher = BlockHasher(row["block_tokens"], row["algorithm"], row["seed"])
    digests = hasher.hashes(row["token_ids"], **arguments(row))
    assert [digest.hex() for digest in digests] == row["digests"]
    assert len(digests) == len(row["token_ids"]) // row["block_tokens"]
    assert hasher.hashes64(row["token_ids"], **arguments(row)).hex() == row["hashes64"]


@pytest.mark.parametrize(
    "tokens",
    [tuple(TOKENS), range(1000, 1100), array.array("I", TOKENS), array.array("q", TOKENS),
     numpy.array(TOKENS, dtype=numpy.uint32), numpy.array(TOKENS),
     memoryview(struct.pack("<100I", *TOKENS)).cast("I"),
     [numpy.int64(token) for token in TOKENS]],
)  # fmt: skip
def test_any_sequence_of_tokens(tokens: Any) -> None:
    hasher = BlockHasher(16)
    assert hasher.hashes(tokens) == hasher.hashes(TOKENS)
    assert hasher.hashes64(tokens) == hasher.hashes64(TOKENS)


def test_what_is_in_a_block_changes_it_and_all_that_follow() -> None:
    hasher = BlockHasher(10)
    plain = hasher.hashes(TOKENS)

    def first_difference(**extra: Any) -> int:
        other = hasher.hashes(extra.pop("tokens", TOKENS), **extra)
        same = [ours == theirs for ours, theirs in zip(plain, other, strict=True)]
        assert same == sorted(same, reverse=True)
        return same.index(False) if False in same else len(same)

    assert first_difference() == 10
    assert first_difference(tokens=[*TOKENS[:37], 1, *TOKENS[38:]]) == 3
    assert first_difference(lora=("a", "/a")) == 0
    assert first_difference(cache_salt="a") == 0
    assert first_difference(cache_salt="") == 10
    assert first_difference(multimodal=[("i", 29, 1)]) == 2
    assert first_difference(multimodal=[("i", 30, 1)]) == 3
    assert first_difference(multimodal=[("i", 100, 1)]) == 10
    assert hasher.hashes(TOKENS, lora=("a", "/b")) != hasher.hashes(TOKENS, lora=("a", "/a"))
    assert hasher.hashes(TOKENS, multimodal=[("i", 31, 1)]) != hasher.hashes(
        TOKENS, multimodal=[("i", 32, 1)]
    )


def test_a_seed_separates() -> None:
    seeds: list[str | None] = [None, "", "0", "1"]
    assert len({BlockHasher(16, "sha256_cbor", seed).hashes(TOKENS)[0] for seed in seeds}) == 4
    assert BlockHasher(16, "sha256_cbor", "vllm-none-hash").hashes(TOKENS) == BlockHasher(16).hashes(TOKENS)
    assert "secret" not in repr(BlockHasher(16, "xxhash_cbor", "secret"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((0,), "block_tokens is a whole number from 1"),
        ((-16,), "block_tokens"),
        ((16.0,), "block_tokens"),
        ((True,), "block_tokens"),
        (("16",), "block_tokens"),
        (((1 << 20) + 1,), "block_tokens"),
        (
            (16, "sha256"),
            'hash algorithm "sha256" hashes a Python pickle.*--prefix-caching-hash-algo sha256_cbor',
        ),
        ((16, "xxhash"), "--prefix-caching-hash-algo xxhash_cbor"),
        ((16, "sha256_cobr"), 'unknown hash algorithm "sha256_cobr"; did you mean "sha256_cbor"?'),
        ((16, "md5"), 'unknown hash algorithm "md5"; known are sha256_cbor, xxhash_cbor'),
        ((16, "xxhash_cbor"), "PYTHONHASHSEED"),
        ((16, "sha256_cbor", 5), "seed is text, not int"),
        ((16, "sha256_cbor", "\ud800"), "not Unicode"),
    ],
)
def test_refuse_a_hasher(given: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        BlockHasher(*given)


@pytest.mark.parametrize(
    ("tokens", "extra"),
    [
        ([1, -1], {}),
        ([1, 1 << 64], {}),
        ([1, 2.0], {}),
        ([1, "2"], {}),
        ([1, None], {}),
        ([1, True], {}),
        (None, {}),
        (5, {}),
        ("12", {}),
        (b"1234", {}),
        (numpy.array([-1, 5]), {}),
        (numpy.zeros((2, 2), dtype=numpy.int64), {}),
        (numpy.zeros(4), {}),
        (iter([1, 2]), {}),
        ([1, 2], {"lora": "name"}),
        ([1, 2], {"lora": ("name",)}),
        ([1, 2], {"lora": ("name", None)}),
        ([1, 2], {"lora": "ab"}),
        ([1, 2], {"lora": ("name", "\udfff")}),
        ([1, 2], {"cache_salt": 5}),
        ([1, 2], {"cache_salt": b"salt"}),
        ([1, 2], {"multimodal": [("a", 0)]}),
        ([1, 2], {"multimodal": [5]}),
        ([1, 2], {"multimodal": [(None, 0, 1)]}),
        ([1, 2], {"multimodal": [("a", -1, 1)]}),
        ([1, 2], {"multimodal": [("a", 0, -1)]}),
        ([1, 2], {"multimodal": [("a", 0.0, 1)]}),
        ([1, 2], {"multimodal": [("a", 5, 1), ("b", 4, 1)]}),
    ],
)
def test_refuse_a_prompt(tokens: Any, extra: dict[str, Any]) -> None:
    hasher = BlockHasher(1)
    with pytest.raises(ConfigError):
        hasher.hashes(tokens, **extra)
    with pytest.raises(ConfigError):
        hasher.hashes64(tokens, **extra)


def test_extra_keys_cost_little() -> None:
    tokens = list(range(131_072))
    hasher = BlockHasher(16)
    with ends_within(0.5):
        hashes = hasher.hashes(tokens, lora=("a", "/a"), multimodal=[("i", 16 * n, 16) for n in range(1000)])
    assert len(hashes) == 8192


# ---------------------------------------------------------------------- hashes that are looked up

SEGMENT = 64  # blocks, kSegmentBlocks in kvpool/_native/key/hash_cache.h
BASE = [token * 7919 % 150_000 for token in range(3 * SEGMENT * 2)]
PROMPTS = st.fixed_dictionaries(
    {
        "block_tokens": st.sampled_from([1, 2]), "algorithm": st.sampled_from(["sha256_cbor", "xxhash_cbor"]),
        "seed": st.sampled_from(["0", "1"]), "owner": st.sampled_from(["", "a"]),
        # One of few bases up to a place, then another token.
        "end": st.sampled_from([0, 1, SEGMENT - 1, SEGMENT, 2 * SEGMENT, 2 * SEGMENT + 3, 4 * SEGMENT, len(BASE)]),
        "changed": st.sampled_from([None, 0, SEGMENT - 1, SEGMENT, 2 * SEGMENT + 1, 5 * SEGMENT]),
        "lora": st.sampled_from([None, ("a", "/a")]), "cache_salt": st.sampled_from([None, "s"]),
        "multimodal": st.sampled_from([(), [("i", SEGMENT, 3)], [("i", SEGMENT + 1, 3)], [("j", 3 * SEGMENT, 200)]]),
    }
)  # fmt: skip


@given(
    prompts=st.lists(PROMPTS, min_size=2, max_size=12), nbytes=st.sampled_from([0, 1 << 10, 2 << 10, 1 << 20])
)
def test_looked_up_hashes_are_those_that_are_computed(prompts: list[dict[str, Any]], nbytes: int) -> None:
    cache = _native.HashCache(nbytes)
    for one in prompts:
        made = (one["block_tokens"], one["algorithm"], one["seed"])
        tokens = BASE[: one["end"]]
        if one["changed"] is not None and one["changed"] < len(tokens):
            tokens = [*tokens[: one["changed"]], 1, *tokens[one["changed"] + 1 :]]
        extras = {name: one[name] for name in ("lora", "cache_salt", "multimodal")}
        cached = BlockHasher(*made, cache=cache, owner=one["owner"])
        assert cached.hashes64(tokens, **extras) == BlockHasher(*made).hashes64(tokens, **extras)
        assert cache.nbytes <= nbytes


def test_a_prompt_that_goes_on_adds_what_is_new() -> None:
    cache = _native.HashCache(1 << 20)
    hasher = BlockHasher(1, cache=cache, owner="a")
    hasher.hashes64(BASE[:SEGMENT])
    of_one = cache.nbytes
    for end, segments in ((2 * SEGMENT - 1, 1), (2 * SEGMENT, 2), (SEGMENT, 2), (6 * SEGMENT, 6)):
        hasher.hashes64(BASE[:end])
        assert cache.nbytes == segments * of_one
    BlockHasher(1, cache=cache, owner="b").hashes64(BASE[:SEGMENT])
    assert cache.nbytes == 7 * of_one, "another owner's hashes are not used"


def test_what_is_kept_is_bounded_and_the_last_used_stays() -> None:
    of_one = 1 << 10  # more than one takes, less than two
    cache = _native.HashCache(of_one)
    hasher = BlockHasher(1, cache=cache)
    for first in range(20):
        hasher.hashes64(list(range(first, first + SEGMENT)))
        assert 0 < cache.nbytes <= of_one


def test_threads_may_share_looked_up_hashes() -> None:
    cache = _native.HashCache(4 << 10)
    prompts = [BASE[place:] + BASE[:place] for place in range(0, len(BASE), 40)]
    expected = [BlockHasher(1).hashes64(prompt) for prompt in prompts]
    wrong: list[int] = []

    def ask() -> None:
        hasher = BlockHasher(1, cache=cache)
        for _ in range(20):
            wrong.extend(
                place for place, prompt in enumerate(prompts) if hasher.hashes64(prompt) != expected[place]
            )

    with ThreadPoolExecutor(4) as threads:
        for asked in [threads.submit(ask) for _ in range(4)]:
            asked.result()
    assert wrong == []


# ---------------------------------------------------------------------- against the installed vLLM


def random_tokens(chance: random.Random, count: int) -> list[int]:
    tops = (24, 256, 1 << 16, 200_000, 1 << 32)
    return [chance.randrange(chance.choice(tops)) for _ in range(count)]


def random_text(chance: random.Random) -> str:
    return "".join(chance.choice("abc/-_ .0\u00e9\u4e2d\U0001f98a\0") for _ in range(chance.randrange(1, 40)))


def random_items(
    chance: random.Random, tokens: int, block_tokens: int, *, overlapping: bool
) -> list[tuple[str, int, int]]:
    """Items anywhere: inside a block, over edges, ending on one, over many blocks, beyond the prompt."""
    items: list[tuple[str, int, int]] = []
    end = 0
    for _ in range(chance.randrange(7)):
        length = chance.choice(
            [1, 2, block_tokens - 1, block_tokens, block_tokens + 1, chance.randrange(1, 5 * block_tokens)]
        )
        if overlapping:
            offset = chance.randrange(tokens + 1)
        else:
            offset = end + chance.choice([0, 0, 1, chance.randrange(block_tokens + 1)])
            if chance.random() < 0.3:
                offset += -offset % block_tokens
        items.append((chance.choice(["image-a", "image-b", random_text(chance)]), offset, max(length, 1)))
        end = offset + max(length, 1)
    return sorted(items, key=lambda item: item[1])


@pytest.mark.vllm
@pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxhash_cbor"])
def test_the_same_as_vllm(algorithm: str) -> None:
    chance = random.Random(algorithm)
    requests = blocks = with_items = 0
    for turn in range(100):
        seed = None if turn % 4 == 0 and algorithm == "sha256_cbor" else random_text(chance).replace("\0", "")
        vllm_blocks.init_none_hash(algorithm, seed)
        for _ in range(30):
            block_tokens = chance.choice([1, 2, 16, 16, 32, 64, 128, chance.randrange(1, 129)])
            count = chance.choice(
                [0, 1, block_tokens - 1, block_tokens, block_tokens + 1, chance.randrange(24 * block_tokens)]
            )
            tokens = random_tokens(chance, count)
            overlapping = chance.random() < 0.2
            extra: dict[str, Any] = {"lora": None, "cache_salt": None, "multimodal": []}
            if chance.random() < 0.4:
                extra["lora"] = (random_text(chance), random_text(chance))
            if chance.random() < 0.4:
                extra["cache_salt"] = chance.choice(["", random_text(chance)])
            if chance.random() < 0.6:
                extra["multimodal"] = random_items(chance, count, block_tokens, overlapping=overlapping)
            generated = None if overlapping or chance.random() < 0.7 else chance.randrange(count + 1)
            expected = vllm_blocks.request_hashes(
                tokens, block_tokens=block_tokens, algorithm=algorithm, first_tokens=generated, **extra
            )
            hasher = BlockHasher(block_tokens, algorithm, seed)
            assert hasher.hashes(tokens, **extra) == expected, (seed, block_tokens, tokens, extra, generated)
            assert hasher.hashes64(tokens, **extra) == b"".join(digest[-8:][::-1] for digest in expected)
            requests, blocks = requests + 1, blocks + len(expected)
            with_items += bool(extra["multimodal"] and expected)
    assert requests == 3000
    assert blocks > 5000
    assert with_items > 500


@pytest.mark.vllm
def test_the_default_seed_is_vllms_own() -> None:
    from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED

    from kvpool.key.hashing import DEFAULT_SEED

    assert DEFAULT_SEED == DEFAULT_NONE_HASH_SEED


@pytest.mark.vllm
def test_the_golden_vectors_are_what_vllm_computes_today() -> None:
    from tests.golden.make import make_hashes

    assert make_hashes() == GOLDEN
