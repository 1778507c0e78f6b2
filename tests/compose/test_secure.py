"""The cluster of ``docker-compose.secure.yml``: it serves over TLS, and refuses those who show no token or password.

The workers' own ports are published beside it (``docker-compose.debug.yml``), to ask one of them in particular.
"""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

import kvpool
from tests.compose.cluster import ASK_TIMEOUT_S, MODEL, ROOT, Cluster, cached
from tests.support.deadlines import eventually

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

FILES = ("docker-compose.yml", "docker-compose.secure.yml", "docker-compose.debug.yml")
BLOCK_TOKENS = 128
FULL_BLOCKS = 3
PROMPT = [10 + number % 97 for number in range(FULL_BLOCKS * BLOCK_TOKENS + 24)]


class Secured(NamedTuple):
    cluster: Cluster
    folder: Path  # with what make compose-env makes

    @property
    def authority(self) -> str:
        return str(self.folder / "ca.pem")

    def index(self, token: str | None) -> kvpool.IndexClient:
        address = self.cluster.address("index-1", 50051)
        return kvpool.IndexClient(address, timeout_s=60, tls_ca=self.authority, token=token)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secure") / "secrets"
    subprocess.run([sys.executable, "scripts/compose-env", folder], cwd=ROOT, check=True, timeout=60)
    settings = dict(line.split("=", 1) for line in (folder / "env").read_text().splitlines())
    cluster = Cluster(COMPOSE_PROJECT_NAME="kvpool-test-secure", COMPOSE_FILE=":".join(FILES), **settings)
    try:
        cluster.up()
        yield Secured(cluster, folder)
    finally:
        cluster.down()


def test_a_request_over_tls_is_placed_and_served_from_the_pool(secured: Secured) -> None:
    cluster = secured.cluster
    url = f"https://{cluster.address('front', 8080)}/v1/completions"
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    trusting = ssl.create_default_context(cafile=secured.authority)
    with httpx.Client(verify=trusting, timeout=ASK_TIMEOUT_S) as caller:
        first = caller.post(url, json=body).raise_for_status()
        holder = first.headers["x-kvpool-worker"]

        def again() -> bool:
            reply = caller.post(url, json=body).raise_for_status()
            placed = (reply.headers["x-kvpool-worker"], reply.headers["x-kvpool-reason"])
            return placed == (holder, "prefix") and reply.json()["choices"] == first.json()["choices"]

        assert eventually(again)
    with pytest.raises(httpx.HTTPError):
        httpx.post(url.replace("https", "http"), json=body, timeout=10)
    prompts = ([200 + number, *PROMPT[1:]] for number in range(10))
    whole = FULL_BLOCKS * BLOCK_TOKENS
    computed, loaded = cluster.hand_over(("worker-1", "worker-2"), prompts, 8, whole)
    assert (cached(computed), cached(loaded)) == (0, whole)
    assert loaded["choices"][0]["text"] == computed["choices"][0]["text"]


def test_an_index_answers_those_with_its_token_only(secured: Secured) -> None:
    token = (secured.folder / "admin.token").read_text().strip()
    with secured.index(token) as index:
        assert len(index.workers()) == 2
    for wrong in (None, token[:-1] + ("a" if token[-1] != "a" else "b")):
        with secured.index(wrong) as index, pytest.raises(kvpool.AccessDenied):
            index.workers()
    address = secured.cluster.address("index-1", 50051)
    with (
        kvpool.IndexClient(address, timeout_s=60, token=token) as plain,
        pytest.raises(kvpool.IndexUnavailable),
    ):
        plain.workers()


def test_the_pool_takes_no_plain_connection_and_no_user_without_a_password(secured: Secured) -> None:
    def ask(*command: str) -> str:
        line = f"valkey-cli {' '.join(command)} 2>&1 || true"
        return secured.cluster.inside("valkey-1", "env", "-u", "REDISCLI_AUTH", "sh", "-c", line)

    tls = ("--tls", "--cacert", "/run/secrets/ca.pem")
    assert "PONG" not in ask("ping")
    assert "PONG" in ask(*tls, "ping")
    assert "NOPERM" in ask(*tls, "get", "kvpool:x")


def test_nothing_secret_is_an_argument_or_in_a_log(secured: Secured) -> None:
    settings = (secured.folder / "env").read_text()
    words = [
        (secured.folder / "admin.token").read_text().strip(),
        *re.findall(r"(?m)kvpool:([^@:]+)@|^VALKEY_CLUSTER_PASSWORD=(.+)$", settings),
    ]
    words = ["".join(word) for word in words]
    assert len(words) == 3
    assert all(len(word) > 30 for word in words)
    logs = secured.cluster.compose("logs", "--no-color")
    assert "listens on" in logs
    arguments = secured.cluster.inside("index-1", "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "--tokens" in arguments
    assert not [word for word in words if word in logs + arguments]
