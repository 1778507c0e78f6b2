"""The fronts before the workers in ``python -m benchmarks route``: a ``Front`` per contestant."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import route_dynamo
from benchmarks.route_fleet import WORKER, RouteFleet, Started
from benchmarks.route_traffic import BLOCK_TOKENS, MODEL
from demo.engine_process import free_ports
from demo.index_process import IndexProcess
from kvpool.errors import ConfigError, KVPoolError
from tests.support import envoy

HEALTHY_TIMEOUT_S = 30.0
# The index tokenizes uncached text, which exceeds its default for a long prompt.
PLACE_TIMEOUT_S = "1"

_ROUND_ROBIN = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {listen}}}}}
    per_connection_buffer_limit_bytes: 16777216
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: openai
          route_config:
            virtual_hosts:
            - name: workers
              domains: ["*"]
              routes: [{{match: {{prefix: "/"}}, route: {{cluster: workers, timeout: 0s}}}}]
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: workers
    type: STATIC
    connect_timeout: 1s
    lb_policy: ROUND_ROBIN
    load_assignment:
      cluster_name: workers
      endpoints:
      - lb_endpoints:
{endpoints}
"""


@dataclass(frozen=True)
class Running:
    """``urls``: of each replica. ``pids``: of all its processes."""

    urls: list[str]
    pids: list[int]


@dataclass(frozen=True)
class Front:
    """``start``: starts replicas before a fleet, with their files in the folder. ``worker``: of the fleet.
    ``environment``: of its workers, by the fleet's folder.
    """

    name: str
    start: Callable[[Path, RouteFleet, int], AbstractContextManager[Running]]
    worker: Sequence[str] = WORKER
    environment: Callable[[Path], Mapping[str, str]] = lambda _: {}


@contextmanager
def _direct(_: Path, fleet: RouteFleet, count: int) -> Iterator[Running]:
    yield Running([f"http://{target}" for target in fleet.targets], [])


@contextmanager
def _picker(folder: Path, fleet: RouteFleet, count: int, *, duplex: bool) -> Iterator[Running]:
    with ExitStack() as parts:
        urls, pids = [], []
        for number in range(count):
            own = folder / f"{number}"
            own.mkdir()
            port = free_ports(1)[0]
            index = parts.enter_context(
                IndexProcess(
                    own, f"file://{own}/pool",
                    [
                        *fleet.kvpool_flags(), f"--tokenizer={MODEL}={fleet.tokenizer}", f"--ext-proc=127.0.0.1:{port}",
                        f"--place-timeout={PLACE_TIMEOUT_S}",
                    ],
                )
            )  # fmt: skip
            front = parts.enter_context(
                envoy.running(own, fleet.targets, [f"127.0.0.1:{port}"], duplex=duplex)
            )
            ends_s = time.monotonic() + HEALTHY_TIMEOUT_S
            while front.healthy("picker") < 1 or front.healthy("workers") < len(fleet.targets):
                if time.monotonic() > ends_s:
                    raise KVPoolError("Envoy does not find the index or a worker healthy")
                time.sleep(0.05)
            urls.append(front.url)
            pids += [front.process.pid, index.pid]
        yield Running(urls, pids)


@contextmanager
def _started(
    folder: Path,
    count: int,
    command: Callable[[Path, int, int], list[str]],
    environment: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """``command``: of a folder, the port to listen on, and another port."""
    with ExitStack() as parts:
        urls, pids = [], []
        for number in range(count):
            own = folder / f"{number}"
            own.mkdir()
            listen, other = free_ports(2)
            process = Started(command(own, listen, other), own / "front.log", environment=environment)
            parts.callback(process.stop)
            process.wait_ready(f"http://127.0.0.1:{listen}/health")
            urls.append(f"http://127.0.0.1:{listen}")
            pids.append(process.pid)
        yield Running(urls, pids)


def _round_robin(folder: Path, fleet: RouteFleet, count: int) -> AbstractContextManager[Running]:
    def command(own: Path, listen: int, _: int) -> list[str]:
        endpoints = "\n".join(
            f"        - endpoint: {{address: {{socket_address: {{address: {host}, port_value: {port}}}}}}}"
            for host, port in (target.split(":") for target in fleet.targets)
        )
        config = own / "envoy.yaml"
        config.write_text(_ROUND_ROBIN.format(listen=listen, endpoints=endpoints))
        return [
            str(envoy.BINARY), "--config-path", str(config), "--concurrency", "1", "--disable-hot-restart",
            "--log-level", "warning", "--drain-time-s", "1",
        ]  # fmt: skip

    return _started(folder, count, command)


def _kvpool_router(folder: Path, fleet: RouteFleet, count: int) -> AbstractContextManager[Running]:
    def command(_: Path, listen: int, __: int) -> list[str]:
        return [
            *_KVPOOL, "router", f"--listen=127.0.0.1:{listen}", *fleet.kvpool_flags(),
            f"--tokenizer={MODEL}={fleet.tokenizer}", f"--place-timeout={PLACE_TIMEOUT_S}",
        ]  # fmt: skip

    return _started(folder, count, command)


def _vllm_router(program: Path) -> Callable[[Path, RouteFleet, int], AbstractContextManager[Running]]:
    def start(folder: Path, fleet: RouteFleet, count: int) -> AbstractContextManager[Running]:
        ends = fleet.endpoints()

        def command(_: Path, listen: int, metrics: int) -> list[str]:
            return [
                str(program), "--host=127.0.0.1", f"--port={listen}", f"--prometheus-port={metrics}",
                "--policy=kv_aware", "--worker-urls", *(url for url, _, _ in ends),
                *(f"--kv-event-source={url}={events}" for url, events, _ in ends),
                *(f"--kv-event-replay-source={url}={replay}" for url, _, replay in ends),
                f"--kv-event-block-size={BLOCK_TOKENS}", f"--kv-event-model={MODEL}", "--log-level=warning",
                "--worker-startup-check-interval=1",
            ]  # fmt: skip

        return _started(folder, count, command)

    return start


def _smg(program: Path) -> Callable[[Path, RouteFleet, int], AbstractContextManager[Running]]:
    def start(folder: Path, fleet: RouteFleet, count: int) -> AbstractContextManager[Running]:
        def command(_: Path, listen: int, metrics: int) -> list[str]:
            return [
                str(program), "launch", "--host=127.0.0.1", f"--port={listen}", f"--prometheus-port={metrics}",
                "--policy=cache_aware", "--worker-urls", *(f"http://{target}" for target in fleet.targets),
                "--log-level=warn", "--worker-startup-check-interval=1",
            ]  # fmt: skip

        return _started(folder, count, command)

    return start


def _dynamo(python: Path) -> Callable[[Path, RouteFleet, int], AbstractContextManager[Running]]:
    @contextmanager
    def start(folder: Path, fleet: RouteFleet, count: int) -> Iterator[Running]:
        def command(_: Path, listen: int, __: int) -> list[str]:
            return route_dynamo.command(python, listen)

        with _started(folder, count, command, route_dynamo.environment(fleet.folder)) as running:
            for url in running.urls:
                route_dynamo.wait_found(url, len(fleet.targets))
            yield running

    return start


_KVPOOL = [sys.executable, "-c", "from kvpool.cli import main; main()"]
DIRECT = Front("direct", _direct)
KVPOOL_ROUTER = Front("kvpool router", _kvpool_router)


def routers(peers: Path) -> dict[str, Front]:
    """Those of others, by program. Errors: ``ConfigError``."""
    found = {}
    for name, program, made in (
        ("vllm-router kv_aware", "vllm-router", _vllm_router), ("smg cache_aware", "smg", _smg),
    ):  # fmt: skip
        path = peers / program / "bin" / program
        if not path.exists():
            raise ConfigError(f"there is no {path}: make bench-peers makes it, in a clone of kvpool")
        found[program] = Front(name, made(path))
    return found


def fronts(peers: Path | None) -> list[Front]:
    """All fronts available here. ``peers``: their environments; None: without. Errors: ``ConfigError``."""
    if not envoy.BINARY.exists():
        raise ConfigError(f"there is no {envoy.BINARY}: make bench-route fetches it")
    found = [
        Front("Envoy + kvpool", lambda *of: _picker(*of, duplex=False)),
        Front("Envoy + kvpool, duplex", lambda *of: _picker(*of, duplex=True)),
    ]
    if _has_router():
        found.append(KVPOOL_ROUTER)
    if peers is not None:
        found += routers(peers).values()
        python, packages = route_dynamo.installed(peers)
        worker = ("benchmarks.route_dynamo", str(packages))
        found.append(Front("Dynamo's frontend", _dynamo(python), worker, route_dynamo.environment))
    return [*found, Front("round robin", _round_robin)]


def _has_router() -> bool:
    with contextlib.suppress(subprocess.SubprocessError, OSError):
        return not subprocess.run(
            [*_KVPOOL, "router", "--help"], capture_output=True, timeout=60, check=False
        ).returncode
    return False
