"""The cluster of ``docker-compose.yml``, started and stopped through Compose, and asked over its published ports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support.deadlines import eventually

ROOT = Path(__file__).parents[2]
UP_TIMEOUT_S = 420.0
DOWN_TIMEOUT_S = 120.0
COMMAND_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 120.0
LOG_LINES = 300
MODEL = "tiny"


def cached(completion: dict[str, Any]) -> int:
    """Tokens of the prompt that the worker did not compute."""
    return (completion["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


class Cluster:
    """One project of Compose. Blocking; every call has a deadline; a failed command fails the test with its words.

    ``environment``: what Compose is told otherwise than ``scripts/test-compose`` has set it.
    """

    def __init__(self, **environment: str) -> None:
        compose = os.environ.get("COMPOSE")
        assert compose, "the tests of the cluster need a Docker engine and base images: run make test-compose"
        self._compose = compose.split()
        self._environment = {**os.environ, **environment}
        self.project = self._environment["COMPOSE_PROJECT_NAME"]

    def up(self) -> None:
        """Start all services and wait until each is healthy and ``ready`` has ended well."""
        try:
            self.compose("up", "--detach", "--no-build", timeout_s=UP_TIMEOUT_S)
            self._wait_ready()
        except BaseException:
            self._show_what_failed()
            raise

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "10", timeout_s=DOWN_TIMEOUT_S)

    def kill(self, service: str) -> None:
        """End its processes at once, without a word to anybody; it stays down."""
        container = self._container(service)
        self.docker("kill", container)
        assert self.docker("inspect", "--format", "{{.State.Running}}", container).strip() == "false"

    def crash(self, service: str) -> None:
        """End its processes at once, from within: Docker starts it again, as after a crash."""
        container = self._container(service)
        started = self._started(container)
        # All but the container's init, which ends with its child; the shell may be gone with it.
        subprocess.run(
            ["docker", "exec", container, "sh", "-c", "kill -9 -1"],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False,
        )  # fmt: skip
        assert eventually(lambda: self._started(container) != started, within_s=COMMAND_TIMEOUT_S), (
            f"{service} was not started again"
        )

    def restart(self, service: str) -> None:
        self.compose("restart", "--timeout", "20", service, timeout_s=COMMAND_TIMEOUT_S)

    def signal(self, service: str, name: str) -> None:
        """From within: after a signal by Docker itself a container is not started again when it ends."""
        self.inside(service, "bash", "-c", f"kill -{name} 1")

    def is_healthy(self, service: str) -> bool:
        """Asked once a second at most: Compose takes half of that of a processor."""
        time.sleep(1.0)
        form = "{{.State.Running}} {{.State.Health.Status}}"
        return self.docker("inspect", "--format", form, self._container(service)).strip() == "true healthy"

    def serves_all_slots(self, shards: tuple[str, ...]) -> bool:
        """Whether each of these shards sees all slots of the pool served. Asked once a second at most."""
        time.sleep(1.0)
        try:
            seen = [self.inside(shard, "valkey-cli", "cluster", "info") for shard in shards]
        except AssertionError:  # its container is about to start
            return False
        return all("cluster_state:ok" in info and "cluster_slots_ok:16384" in info for info in seen)

    def service_of(self, worker: str) -> str:
        """By the name under which the index knows a worker: HOST:PORT of its events."""
        return worker.rpartition(":")[0]

    @property
    def front_url(self) -> str:
        return f"http://{self.address('front', 8080)}"

    def address(self, service: str, port: int) -> str:
        """HOST:PORT under which this machine reaches a service's port."""
        return self.compose("port", service, str(port)).strip()

    def ask(self, service: str, path: str, body: dict[str, Any] | None = None) -> str:
        """What a worker answers over HTTP: to a GET, or to a POST of ``body`` as JSON."""
        request = urllib.request.Request(
            f"http://{self.address(service, 8000)}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as reply:
                text: str = reply.read().decode()
        except urllib.error.HTTPError as failure:
            with failure:
                raise AssertionError(
                    f"{service} answered {failure.code}: {failure.read()[:2000]!r}"
                ) from None
        return text

    def complete(self, worker: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """The worker's completion of token ids, greedy, with the tokens that it chose and their log probabilities."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": 1,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        answer: dict[str, Any] = json.loads(self.ask(worker, "/v1/completions", body))
        return answer

    def hand_over(
        self, workers: tuple[str, str], prompts: Iterable[list[int]], max_tokens: int, cached_tokens: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Each worker's completion of the first prompt of which the second worker computes only the end; else the last.

        On a busy machine the first worker may be late with its store, or the second worker's lookup may reach its
        deadline of half a second: that is a miss on purpose, and the next prompt is asked.
        """
        for prompt in prompts:
            computed, loaded = (self.complete(worker, prompt, max_tokens) for worker in workers)
            if cached(loaded) == cached_tokens:
                break
            page = self.ask(workers[1], "/metrics").splitlines()
            print("missed:", *(line for line in page if line.startswith("kvpool_missed_tokens_total")))
        return computed, loaded

    def metric(self, worker: str, name: str) -> float:
        """The sum of a counter over its labels, as the worker's metrics page has it now."""
        lines = self.ask(worker, "/metrics").splitlines()
        values = [
            float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))
        ]
        assert values, f"{worker} has no metric {name}"
        return sum(values)

    def compose(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        return self._output([*self._compose, *arguments], timeout_s)

    def docker(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        return self._output(["docker", *arguments], timeout_s)

    def inside(self, service: str, *command: str) -> str:
        """What a command in a service's container prints."""
        return self.docker("exec", self._container(service), *command)

    def left(self) -> list[str]:
        """Containers, networks and volumes of the project that exist."""
        label = f"label=com.docker.compose.project={self.project}"
        kinds = (["ps", "--all"], ["network", "ls"], ["volume", "ls"])
        return [line for kind in kinds for line in self.docker(*kind, "--quiet", "--filter", label).split()]

    def _container(self, service: str) -> str:
        (container,) = self.compose("ps", "--quiet", service).split()
        return container

    def _started(self, container: str) -> str:
        return self.docker("inspect", "--format", "{{.State.StartedAt}}", container).strip()

    def _wait_ready(self) -> None:
        container = self.compose("ps", "--all", "--quiet", "ready").strip()
        status = self.docker("wait", container, timeout_s=UP_TIMEOUT_S).strip()
        assert status == "0", f"ready ended with status {status}"

    def _show_what_failed(self) -> None:
        """Print the state of every service, and the end of the log of those that are not as they should be."""
        form = '{{index .Config.Labels "com.docker.compose.service"}} {{.State.Status}} {{.State.ExitCode}}'
        form += "{{with .State.Health}} {{.Status}}{{end}}"
        try:
            for container in self.compose("ps", "--all", "--quiet").split():
                state = self.docker("inspect", "--format", form, container).strip()
                print(state, file=sys.stderr)
                if not state.endswith((" running 0 healthy", " exited 0")):
                    service = state.split()[0]
                    print(self.compose("logs", "--no-color", f"--tail={LOG_LINES}", service), file=sys.stderr)
        except (AssertionError, subprocess.TimeoutExpired) as failure:
            print(failure, file=sys.stderr)

    def _output(self, command: list[str], timeout_s: float) -> str:
        run = subprocess.run(
            command,
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert run.returncode == 0, f"{' '.join(command)} ended with {run.returncode}: {run.stderr[-2000:]}"
        return run.stdout
