"""A host whose OpenSSL wants FIPS and has no provider for it: each way to TLS says so, and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import kvpool_process, refusal

# ``base`` has no algorithms, so that Python's hashes are its own. Alone, the last line also takes SHA-256 away.
NO_CIPHERS = """
openssl_conf = init
[init]
providers = active
alg_section = algorithms
[active]
base = on
[on]
activate = 1
[algorithms]
default_properties = fips=yes
"""
NO_HASHES = (
    "openssl_conf = init\n[init]\nalg_section = algorithms\n[algorithms]\ndefault_properties = fips=yes\n"
)
SAYS = "OpenSSL offers no TLS: library has no ciphers; OpenSSL's configuration wants a provider that is not active"
WAYS = {
    "native": "kvpool.open_store('valkeys://127.0.0.1:1')",
    "many servers": "kvpool.open_store('valkey+cluster://127.0.0.1:1?tls=true')",
    "redis-py": "kvpool.open_store('valkeys://127.0.0.1:1?client=redis')",
    "documents": "kvpool.store.tls.Tls().context()",
    "workers": "kvpool.index.net.tls.trusting('--worker-tls-ca', '/dev/null')",
    "an index": "kvpool.index.net.tls.channel_credentials('/dev/null')",
}
PROGRAM = """
import kvpool, kvpool.store.tls, kvpool.index.net.tls
try:
    {}
except kvpool.ConfigError as error:
    print(error)
"""


def environment(tmp_path: Path, configuration: str) -> dict[str, str]:
    (tmp_path / "openssl.cnf").write_text(configuration)
    return {**os.environ, "OPENSSL_CONF": str(tmp_path / "openssl.cnf")}


@pytest.mark.parametrize("way", WAYS)
def test_tls_without_a_provider_is_one_sentence_with_what_to_do(tmp_path: Path, way: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(WAYS[way])],
        env=environment(tmp_path, NO_CIPHERS),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert SAYS in ended.stdout
    assert "OPENSSL_CONF" in ended.stdout


def test_a_command_without_hashes_is_one_sentence_with_what_to_do(tmp_path: Path) -> None:
    line = refusal(
        kvpool_process("token", "r", "--token-file", f"{tmp_path}/r", env=environment(tmp_path, NO_HASHES))
    )
    assert line.startswith("kvpool: Python's OpenSSL offers no SHA-256: ")
    assert "OPENSSL_CONF" in line


def test_a_hasher_without_hashes_is_one_sentence_with_what_to_do(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format("kvpool.BlockHasher(16)")],
        env=environment(tmp_path, NO_HASHES),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(
        "OpenSSL has no SHA256, by which blocks are named; OpenSSL's configuration wants"
    )


def test_a_front_that_cannot_be_asked_over_tls_says_why(tmp_path: Path) -> None:
    ended = kvpool_process("doctor", "--front", "https://127.0.0.1:1", env=environment(tmp_path, NO_CIPHERS))
    assert SAYS in " ".join(ended.stdout.split())
