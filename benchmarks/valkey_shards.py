"""Valkey servers on loopback, for one benchmark: a single one, or a cluster's primaries. Killed at the end."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from demo.engine_process import free_ports, ran_s
from kvpool.errors import ConfigError, StoreUnavailable

FETCHED = Path(__file__).parents[1] / ".cache" / "servers" / "bin" / "valkey-server"
SLOTS = 16384  # of every cluster
START_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 10.0
PAUSE_S = 0.02


def find_server(named: Path | None) -> str:
    """The program: ``named``, else from ``scripts/servers``, else from the PATH. Errors: ``ConfigError``."""
    if named is not None:
        if shutil.which(named) is None:
            raise ConfigError(f"--server {named} cannot be run: name a valkey-server")
        return str(named)
    found = shutil.which(FETCHED) or shutil.which("valkey-server")
    if found is None:
        raise ConfigError(
            "there is no valkey-server: name one with --server, or fetch one with scripts/servers .cache/servers"
        )
    return found


class ValkeyShards:
    """``shards`` servers with ``io_threads`` each, and files below ``folder``; several form a cluster.

    Use it with ``with``. Blocks for ``START_TIMEOUT_S`` at most. Errors: ``StoreUnavailable``.
    """

    def __init__(self, server: str, folder: Path, *, shards: int, io_threads: int) -> None:
        self._folder = folder
        self._ports = free_ports(2 * shards)
        self._buses = [self._ports.pop() for _ in range(shards)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._clients = [
            redis.Redis(port=port, protocol=2, socket_timeout=ANSWER_TIMEOUT_S, retry=Retry(NoBackoff(), 0))
            for port in self._ports
        ]
        try:
            self._start(server, io_threads)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        return f"valkey{'+cluster' if len(self._ports) > 1 else ''}://{hosts}"

    def ran_s(self) -> float:
        return sum(ran_s(process.pid) for process in self._processes)

    def sent_nbytes(self) -> int:
        """Bytes that the servers have sent to all their clients. Blocks."""
        return sum(int(client.info("stats")["total_net_output_bytes"]) for client in self._clients)

    def received_nbytes(self) -> int:
        """Bytes that all their clients have sent to the servers. Blocks."""
        return sum(int(client.info("stats")["total_net_input_bytes"]) for client in self._clients)

    def signal(self, number: int) -> None:
        """Send a signal to all servers: SIGSTOP, SIGCONT, SIGKILL."""
        for process in self._processes:
            process.send_signal(number)

    def kill(self, number: int) -> None:
        """End one server; the others of a cluster serve on."""
        for client in self._clients if len(self._clients) > 1 else ():
            client.config_set("cluster-require-full-coverage", "no")
        self._processes[number].kill()
        self._processes[number].wait()

    def shard_of(self, key: str) -> int:
        """Of a cluster: the number of the server that has the key. Blocks."""
        slot = int(self._clients[0].execute_command("CLUSTER", "KEYSLOT", key))  # type: ignore[no-untyped-call]
        count = len(self._clients)
        return next(number for number in range(count) if slot < SLOTS * (number + 1) // count)

    def keys(self, number: int) -> int:
        """How many one server has. Blocks."""
        return int(self._clients[number].dbsize())

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for client in self._clients:
            client.close()

    def __enter__(self) -> ValkeyShards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, server: str, io_threads: int) -> None:
        many = len(self._ports) > 1
        for port, bus in zip(self._ports, self._buses, strict=True):
            own = self._folder / str(port)
            own.mkdir(parents=True)
            command = [
                server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                "--io-threads", str(io_threads), "--dir", str(own), "--logfile", str(own / "log"),
                *(("--cluster-enabled", "yes", "--cluster-port", str(bus)) if many else ()),
            ]  # fmt: skip
            # Its own session, by which its processor time is read.
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
            self._processes.append(process)
        deadline = time.monotonic() + START_TIMEOUT_S
        for client in self._clients:
            self._wait(deadline, lambda client=client: bool(client.ping()))  # type: ignore[misc]
        if many:
            self._join(deadline)

    def _join(self, deadline: float) -> None:
        """Form a cluster with equal parts of the slots, and wait until all servers agree."""
        count = len(self._clients)
        for number, client in enumerate(self._clients):
            ask = client.execute_command
            ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)  # type: ignore[no-untyped-call]
            first, last = SLOTS * number // count, SLOTS * (number + 1) // count - 1
            ask("CLUSTER", "ADDSLOTSRANGE", first, last)  # type: ignore[no-untyped-call]
            if number:
                ask("CLUSTER", "MEET", "127.0.0.1", self._ports[0], self._buses[0])  # type: ignore[no-untyped-call]
        for client in self._clients:
            self._wait(deadline, lambda client=client: self._serves(client))  # type: ignore[misc]

    @staticmethod
    def _serves(client: redis.Redis) -> bool:
        info = client.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]
        return bool(info["cluster_state"] == "ok" and int(info["cluster_slots_ok"]) == SLOTS)

    def _wait(self, deadline: float, holds: Callable[[], bool]) -> None:
        while True:
            with contextlib.suppress(redis.RedisError):
                if holds():
                    return
            ended = [process for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise StoreUnavailable(f"a server of the benchmark does not serve: {self._last_words()}")
            time.sleep(PAUSE_S)

    def _last_words(self) -> str:
        lines = [line for log in self._folder.glob("*/log") for line in log.read_text().splitlines()[-1:]]
        return lines[0] if lines else "it wrote nothing; see whether the program runs by itself"
