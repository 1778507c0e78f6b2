"""A fleet that Prometheus reads: Valkey, an index, a vLLM server, and Prometheus with the rules of ``deploy/``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.engine_process import connector_config, free_ports
from demo.index_process import IndexProcess
from kvpool import IndexClient
from tests.support.api_server import ApiServer
from tests.support.deadlines import OPENER, answers, eventually
from tests.support.servers import Server, find, running

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "kvpool.json"
ALERTS = ROOT / "deploy" / "alerts.yml"
ANSWER_S = 300.0
_COMPARED = re.compile(r"(.*?)\s+(?:==|>|<)\s+[0-9.]+", re.DOTALL)

Values = dict[str, float]  # by the labels that tell series apart


class Rule(dict[str, Any]):
    """An alert of ``deploy/alerts.yml``."""

    @property
    def compared(self) -> str:
        """What the rule compares with a number; the whole expression where it is not as simple as that."""
        expression = " ".join(self["query"].split())
        match = _COMPARED.fullmatch(expression)
        return match[1] if match and " and " not in expression and "absent" not in expression else expression


@dataclass
class Fleet:
    """What runs, and where."""

    server: Server
    index: str
    worker: str
    prometheus: str

    def complete(self, tokens: list[int]) -> None:
        _post(f"{self.worker}/v1/completions", _completion(tokens, max_tokens=2))

    def look_up(self, tokens: list[int]) -> None:
        with IndexClient(self.index, timeout_s=60) as client:
            client.lookup("tiny", token_ids=tokens)

    def load_weights(self, model: Path) -> None:
        """Load other weights into the engine that runs, and reset nothing."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
        _post(f"{self.worker}/collective_rpc", call)

    def ask(self, expression: str) -> Values:
        """What Prometheus makes of it now."""
        reply = self._api("query?" + urllib.parse.urlencode({"query": expression}))
        if reply["resultType"] == "scalar":
            return {"": float(reply["result"][1])}
        return {
            ",".join(value for name, value in sorted(row["metric"].items()) if name in SHOWN): float(
                row["value"][1]
            )
            for row in reply["result"]
        }

    def rules(self) -> dict[str, Rule]:
        """The alerts as Prometheus has them now, by name."""
        groups = self._api("rules")["groups"]
        return {rule["name"]: Rule(rule) for group in groups for rule in group["rules"]}

    def targets_up(self) -> bool:
        found = self._api("targets")["activeTargets"]
        return len(found) == 2 and all(target["health"] == "up" for target in found)

    def _api(self, path: str) -> Any:
        with OPENER.open(f"{self.prometheus}/api/v1/{path}", timeout=60) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return answer["data"]


SHOWN = ("result", "source", "window", "cause", "where", "outcome", "size", "le")


def _completion(tokens: list[int], max_tokens: int) -> dict[str, Any]:
    return {"model": "tiny", "prompt": tokens, "max_tokens": max_tokens, "ignore_eos": True}


def _post(url: str, body: Any) -> None:
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with OPENER.open(request, timeout=ANSWER_S) as reply:
        assert reply.status == 200


@contextmanager
def fleet(folder: Path, model: Path, *, maxmemory: str, kv_cache_nbytes: int) -> Iterator[Fleet]:
    """All of it runs and is scraped every second until the end of the block. The rules wait 2 s, whatever they say."""
    with contextlib.ExitStack() as parts:
        options = ("--maxmemory", maxmemory, "--maxmemory-policy", "allkeys-lru")
        server = parts.enter_context(running("valkey-server", _made(folder / "valkey"), *options))
        worker_port, metrics_port, prometheus_port, events, replay = free_ports(5)
        at = f"127.0.0.1:{metrics_port}"
        index = parts.enter_context(IndexProcess(folder, server.url, ("--metrics", at)))
        config = connector_config(server.url, {"lookup_timeout_s": 20.0})
        served = ApiServer(
            "worker",
            model,
            worker_port,
            events,
            replay,
            config,
            ("--kv-cache-memory-bytes", str(kv_cache_nbytes)),
        )
        worker = parts.enter_context(served.running(folder))
        parts.enter_context(_prometheus(folder, prometheus_port, at, f"127.0.0.1:{worker_port}"))
        made = Fleet(server, index.address, worker, f"http://127.0.0.1:{prometheus_port}")
        assert eventually(made.targets_up)
        yield made


@contextmanager
def _prometheus(folder: Path, port: int, index: str, worker: str) -> Iterator[None]:
    rules = folder / "alerts.yml"
    rules.write_text(re.sub(r"for: [0-9]+[smh]", "for: 2s", ALERTS.read_text()))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [target]}]}
            for job, target in (("index", index), ("worker", worker))
        ],
    }
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(config))  # JSON is YAML
    command = [
        program("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    log = folder / "prometheus.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        ready = f"http://127.0.0.1:{port}/-/ready"
        assert eventually(lambda: answers(ready, process, log)), log.read_text()[-3000:]
        yield
    finally:
        process.kill()
        process.wait()


def program(name: str) -> str:
    """``prometheus`` or ``promtool``."""
    return os.environ.get(name.upper()) or shutil.which(name) or find(name)


def expressions() -> dict[str, tuple[str, str]]:
    """(panel, expression) of the dashboard, by the question they belong to, the panel and the legend."""
    found: dict[str, tuple[str, str]] = {}
    row = ""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
            continue
        for target in panel["targets"]:
            found[f"{row}/{panel['title']}/{target['legendFormat']}"] = (panel["title"], target["expr"])
    return found


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
