"""Texts that are made into tokens piece by piece have the tokens of the whole; where they had not, they are not cut."""

from __future__ import annotations

import random
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.index.tokens import token_cache
from kvpool.index.tokens.token_cache import TokenCache

tokenizers = pytest.importorskip("tokenizers")

SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "<s>>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the dog sleeps 1234 times, doesn't it",
    "def f(x):\n    return x ** 2\n", "Grüße aus Köln 你好，世界。これはテストです Привет мир",  # noqa: RUF001
] * 8  # fmt: skip
GPT_2, LLAMA_3, QWEN, GPT_OSS = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def trained(made: Any, *, alphabet: bool = True, tokens: list[Any] | None = None) -> Any:
    from tokenizers import AddedToken, pre_tokenizers, trainers

    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [],
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens(tokens or [AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    return made


def by_pattern(pattern: str) -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return trained(made)


def metaspace(scheme: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.BPE(unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return trained(made, alphabet=False)


def prepending() -> Any:
    """As Llama 2's: no pieces at all."""
    from tokenizers import Tokenizer, models, normalizers

    made = Tokenizer(models.BPE(unk_token="<s>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return trained(made, alphabet=False)


MADE = {
    "gpt-2": lambda: by_pattern(GPT_2), "llama-3": lambda: by_pattern(LLAMA_3), "qwen": lambda: by_pattern(QWEN),
    "gpt-oss": lambda: by_pattern(GPT_OSS), "metaspace-always": lambda: metaspace("always"),
    "metaspace-first": lambda: metaspace("first"), "metaspace-never": lambda: metaspace("never"),
    "llama-2": prepending,
}  # fmt: skip
CUT = ("gpt-2", "llama-3", "qwen", "gpt-oss")


class Cached:
    """A tokenizer, and its cache with pieces of a few characters."""

    def __init__(self, made: Any) -> None:
        self.encoded: list[str] = []
        self._made = made
        self.cache = TokenCache(self.whole, made.get_added_tokens_decoder().values())
        self.cache._piece_chars = self.cache._special_chars = 8  # and texts of any length are cut
        self.encoded.clear()

    def whole(self, text: str) -> list[int]:
        self.encoded.append(text)
        return list(self._made.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def cached() -> dict[str, Cached]:
    return {name: Cached(make()) for name, make in MADE.items()}


def test_the_patterns_of_todays_models_are_cut(cached: dict[str, Cached]) -> None:
    assert {name for name, one in cached.items() if one.cache.cuts} >= set(CUT)


WORDS = st.sampled_from(
    [
        "the", "quick", "Dog", "don't", "it's", "1234", "5", "_", "x_y", "  ", "\n", "\r\n", "\t", "。", "你好",
        "Привет", "é", "e\u0301", "🙂", "'", "'ll", "-", "...", "\ufb01", "\u00a0", "\u200b", "ß", "A", "<", "s>",
        "\uff0c", " ", *SPECIAL,
    ]
)  # fmt: skip
TEXTS = st.lists(st.one_of(WORDS, WORDS, st.text(max_size=3)), max_size=60).flatmap(
    lambda words: st.sampled_from([" ".join(words), "".join(words)])
)


@pytest.mark.parametrize("name", MADE)
@given(text=TEXTS)
def test_pieces_have_the_tokens_of_the_whole(cached: dict[str, Cached], name: str, text: str) -> None:
    one = cached[name]
    assert list(one.cache.tokens(text)) == one.whole(text)
    assert list(one.cache.tokens(text)) == one.whole(text), "and when they are remembered"


BASE = "".join(f"<|im_start|>user\nquestion {number} word's  end<|im_end|>\n1234 " for number in range(12))


@pytest.mark.parametrize("name", CUT)
@given(turns=st.lists(st.tuples(st.integers(0, len(BASE)), TEXTS), min_size=2, max_size=8))
def test_texts_that_begin_alike_have_their_own_tokens(
    cached: dict[str, Cached], name: str, turns: list[tuple[int, str]]
) -> None:
    one = cached[name]
    for end, more in turns:
        text = BASE[:end] + more
        assert list(one.cache.tokens(text)) == one.whole(text)


def test_a_special_token_that_begins_before_the_end_of_a_known_piece_is_one_token() -> None:
    from tokenizers import AddedToken

    made = by_pattern(QWEN)
    made.add_special_tokens(
        [AddedToken(one, special=True, normalized=False) for one in ("[a]", "[a][", "[b]")]
    )
    one = Cached(made)
    for text in ("the quick brown[a]<s>tail", "the quick brown[a][b]tail", "the quick brown[a]<s>the dog"):
        assert list(one.cache.tokens(text)) == one.whole(text)


def test_the_next_turn_of_a_conversation_is_made_into_tokens_alone(cached: dict[str, Cached]) -> None:
    one = cached["qwen"]
    turns = "".join(
        f"<|im_start|>user\nquestion {'word ' * number} end<|im_end|>\n" for number in range(5, 30)
    )
    one.cache.tokens(turns)
    one.encoded.clear()
    more = "<|im_start|>user\nanother one<|im_end|>\n"
    assert list(one.cache.tokens(turns + more))[-3:] == one.whole(more)[-3:]
    assert "".join(one.encoded[:-1]) == more, "only what is new"


def test_a_long_chat_of_short_messages_is_cut_into_few_pieces() -> None:
    one = Cached(MADE["qwen"]())
    one.cache._piece_chars, one.cache._special_chars = token_cache.PIECE_CHARS, token_cache.SPECIAL_CHARS
    chat = "".join(f"<|im_start|>user\nquestion {number}{' word' * 60}<|im_end|>\n" for number in range(1000))
    assert list(one.cache.tokens(chat)) == one.whole(chat)
    assert len(one.cache._known) < 200
    one.encoded.clear()
    other = chat[:2000] + "<|im_start|>user\nanother chat<|im_end|>\n"
    assert list(one.cache.tokens(other)) == one.whole(other)
    assert len("".join(one.encoded[:-1])) < 500, "what begins alike is shared in small pieces"


def test_what_is_remembered_is_bounded(cached: dict[str, Cached], monkeypatch: pytest.MonkeyPatch) -> None:
    one = Cached(MADE["qwen"]())
    monkeypatch.setattr(token_cache, "MAX_NBYTES", 20_000)
    draw = random.Random(1)
    for _ in range(300):
        one.cache.tokens(
            " ".join(draw.choice(["alpha", "beta", "gamma"]) + str(draw.random()) for _ in range(9))
        )
    assert one.cache._nbytes <= 20_000
    assert one.cache._nbytes == sum(map(token_cache._nbytes, one.cache._known.values()))
    assert len(one.cache._known) < 200


def test_what_is_forgotten_is_freed(cached: dict[str, Cached], monkeypatch: pytest.MonkeyPatch) -> None:
    one = Cached(MADE["qwen"]())
    one.cache.tokens(BASE)
    pieces = [weakref.ref(piece) for piece in one.cache._known.values()]
    assert len(pieces) > 10
    monkeypatch.setattr(token_cache, "MAX_NBYTES", 0)
    one.cache.tokens("another text, for which there is no room")
    assert [piece for piece in pieces if piece() is not None] == []


def test_threads_may_share_it(cached: dict[str, Cached], monkeypatch: pytest.MonkeyPatch) -> None:
    one = Cached(MADE["gpt-2"]())
    monkeypatch.setattr(token_cache, "MAX_NBYTES", 10_000)
    texts = [" ".join(f"word{chr(97 + (number * at) % 26)}" for at in range(40)) for number in range(50)]
    expected = [one.whole(text) for text in texts]
    wrong: list[str] = []

    def ask() -> None:
        for _ in range(5):
            wrong.extend(
                text
                for text, tokens in zip(texts, expected, strict=True)
                if list(one.cache.tokens(text)) != tokens
            )

    with ThreadPoolExecutor(4) as threads:
        for asked in [threads.submit(ask) for _ in range(4)]:
            asked.result()
    assert wrong == []


def test_tokens_that_depend_on_what_stands_around_are_not_cut_at() -> None:
    from tokenizers import AddedToken

    made = by_pattern(QWEN)
    made.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False, special=True)])
    assert not Cached(made).cache.cuts
    made = by_pattern(QWEN)
    made.add_tokens([AddedToken("two words", normalized=False)])
    assert not Cached(made).cache.cuts


def test_behind_a_part_that_cannot_be_cut_the_text_is_cut_again() -> None:
    one = Cached(MADE["qwen"]())
    one.cache._piece_chars, one.cache._special_chars = token_cache.PIECE_CHARS, token_cache.SPECIAL_CHARS
    blob, words = "0123456789" * 5000, "the quick brown fox " * 2000
    text = f"<|im_start|>see {blob} {words}<|im_end|>{words}"
    assert list(one.cache.tokens(text)) == one.whole(text)
    one.encoded.clear()
    one.cache.tokens(text + "and more")
    assert len("".join(one.encoded)) < 3 * token_cache.PIECE_CHARS, "the blob is remembered, too"
    assert max(len(piece) for piece in one.cache._known if blob not in piece) < 3 * token_cache.PIECE_CHARS


@given(
    st.lists(st.text("<a|>_1", min_size=1, max_size=5), min_size=1, max_size=9),
    st.text("<a|>_1", max_size=40),
)
def test_special_tokens_are_found_as_the_longest_at_a_place(contents: list[str], text: str) -> None:
    longest_first = "|".join(re.escape(one) for one in sorted(contents, key=len, reverse=True))
    pattern = token_cache._pattern(contents)
    assert pattern is not None
    assert [one.span() for one in pattern.finditer(text)] == [
        one.span() for one in re.finditer(longest_first, text)
    ]


def test_special_tokens_that_begin_alike_are_compared_once() -> None:
    contents = [f"<|place_holder_no_{number}|>" for number in range(800)]
    pattern = token_cache._pattern(contents)
    assert pattern is not None
    assert pattern.pattern.count("place") == 1
    assert all(pattern.fullmatch(one) for one in contents)
