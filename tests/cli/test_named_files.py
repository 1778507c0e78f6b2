"""Each option, variable and parameter that names a file: a pipe in its place is refused at once, in one line."""

from __future__ import annotations

import os

import pytest

from kvpool.errors import KVPoolError
from kvpool.store import StoreURL, open_store
from tests.support.command_line import refused
from tests.support.credentials import Authority

LOOKUP = ("lookup", "--index", "127.0.0.1:1", "--model", "m")
INDEX = ("index", "--listen", "127.0.0.1:0")
NAMED = {
    "a prompt's text": (*LOOKUP, "--text", "@{}"),
    "its tokens": (*LOOKUP, "--token-ids", "@{}"),
    "its hashes": (*LOOKUP, "--hashes", "@{}"),
    "a chat": (*LOOKUP, "--chat", "@{}"),
    "a caller's token": ("top", "--index", "127.0.0.1:1", "--token-file", "{}"),
    "an index's authority": ("top", "--index", "127.0.0.1:1", "--tls-ca", "{}"),
    "a caller's certificate": (
        "top", "--index", "127.0.0.1:1", "--tls-ca", "CA", "--tls-cert", "{}", "--tls-key", "{}"
    ),
    "an index's tokens": (*INDEX, "--tokens", "{}"),
    "an index's certificate": (*INDEX, "--tls-cert", "{}", "--tls-key", "{}"),
    "callers' authority": (*INDEX, "--tls-cert", "CERT", "--tls-key", "KEY", "--tls-client-ca", "{}"),
    "workers' authority": (*INDEX, "--worker-ca", "{}"),
    "a tokenizer": (*INDEX, "--tokenizer", "m=FOLDER"),
    "a snapshot": (*INDEX, "--snapshot", "{}"),
    "a trace": ("size", "--trace", "{}"),
    "vLLM's options": ("vllm", "--pool", "file:///tmp/p", "--", "serve", "m", "--config", "{}"),
}  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("named")
    authority = Authority(folder)
    pair = authority.issue("me", names=("localhost",))
    (folder / "model").mkdir()
    os.mkfifo(folder / "model" / "tokenizer.json")
    os.mkfifo(folder / "pipe")
    return {
        "{}": str(folder / "pipe"), "CA": str(authority.ca), "CERT": str(pair.cert), "KEY": str(pair.key),
        "FOLDER": str(folder / "model"),
    }  # fmt: skip


@pytest.mark.parametrize("what", sorted(NAMED))
def test_a_pipe_is_no_file(words: dict[str, str], what: str) -> None:
    spelled = []
    for argument in NAMED[what]:
        for name, value in words.items():
            argument = argument.replace(name, value)
        spelled.append(argument)
    assert "not a file" in refused(*spelled)


@pytest.mark.parametrize("url", [
    "valkey://u@127.0.0.1:1?password_file={}", "valkeys://127.0.0.1:1?ca={}", "valkeys://127.0.0.1:1?cert={}&key={}",
])  # fmt: skip
def test_a_pipe_is_no_file_of_a_pool(words: dict[str, str], url: str) -> None:
    url = url.format(*[words["{}"]] * 2)
    for of in (url, f"{url}&client=redis"):
        with pytest.raises(KVPoolError, match="not a file"):
            open_store(of)
    parsed = StoreURL.parse(url)
    with pytest.raises((KVPoolError, OSError), match="not a file"):
        parsed.password_now() if parsed.tls is None else parsed.tls.context()
