"""What ``deploy/`` holds for Prometheus and Grafana: rules that promtool takes and that fire when they should."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpool import metrics
from kvpool.metrics import Metric
from tests.support.servers import find

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "alerts.yml"
CASES = Path(__file__).parent / "alerts_test.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "kvpool.json"
_NAME = re.compile(r"\bkvpool_[a-z0-9_]+")


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = os.environ.get("PROMTOOL") or shutil.which("promtool") or find("promtool")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_promtool_takes_the_rules() -> None:
    checked = promtool("check", "rules", ALERTS)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_alerts_fire_when_they_should_and_not_else() -> None:
    tested = promtool("test", "rules", CASES)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_each_alert_has_a_case_in_which_it_fires() -> None:
    alerts = set(re.findall(r"- alert: (\w+)", ALERTS.read_text()))
    fired = set(re.findall(r"alertname: (\w+)\n\s+exp_alerts:\n\s+- exp_labels", CASES.read_text()))
    assert len(alerts) > 15
    assert alerts == fired


def test_the_dashboard_is_what_its_script_writes(tmp_path: Path) -> None:
    written = tmp_path / "kvpool.json"
    subprocess.run([sys.executable, ROOT / "scripts" / "dashboard", written], check=True, timeout=60)
    assert json.loads(written.read_text()) == json.loads(DASHBOARD.read_text()), "run scripts/dashboard"


def test_all_metrics_that_are_asked_for_exist() -> None:
    known = {name for metric in _all_metrics() for name in _series(metric)}
    asked = set(_NAME.findall(ALERTS.read_text().partition("groups:")[2])) | {
        name for target in _targets() for name in _NAME.findall(target["expr"])
    }
    assert len(asked) > 30
    assert asked - known == set()


@pytest.mark.parametrize("row", ["Does the near pool help?", "Are items encoded once?"])
def test_the_panels_of_some_engines_show_each_series_of_their_metrics(tmp_path: Path, row: str) -> None:
    """With ten minutes of counters that rise by one a second. All others: ``tests/e2e/test_monitoring.py``."""
    by_name = {metric.name: metric for metric in _all_metrics()}
    series, expected = [], []
    for target in _targets(row):
        for metric in [by_name[name] for name in _NAME.findall(target["expr"])]:
            for value in metric.values or ("",):
                label = f', {metric.label}="{value}"' if value else ""
                series.append({"series": f'{metric.name}{{instance="w"{label}}}', "values": "0+15x40"})
        (label,) = re.findall(r"{{(\w+)}}", target["legendFormat"])
        shown = ["w"] if label == "instance" else metric.values
        value = 1 if "rate(" in target["expr"] else 600
        samples = [{"labels": f'{{{label}="{each}"}}', "value": value} for each in shown]
        expected.append({"expr": target["expr"], "eval_time": "10m", "exp_samples": samples})
    assert len(expected) > 5
    cases = {"tests": [{"interval": "15s", "input_series": series, "promql_expr_test": expected}]}
    file = tmp_path / "near.yml"
    file.write_text(json.dumps(cases))
    tested = promtool("test", "rules", file)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_the_panels_of_audits_show_verdicts_and_distances(tmp_path: Path) -> None:
    """Of 240 audits in an hour, 238 within 0.01, of which the half within 0.003, and two between 0.3 and 1."""
    series = [
        {"series": f'kvpool_audits_total{{instance="w", verdict="{verdict}"}}', "values": f"0+{step}x300"}
        for verdict, step in (("same", 2), ("differs", 1))
    ]
    buckets = {"0.003": 119, "0.01": 238, "0.3": 238, "1.0": 240, "+Inf": 240}
    series += [
        {
            "series": f'kvpool_audit_distance_bucket{{instance="w", le="{le}"}}',
            "values": f"0+{count / 240}x300",
        }
        for le, count in buckets.items()
    ]
    by_legend = {
        target["legendFormat"]: target["expr"]
        for target in _targets("Is it broken?")
        if "kvpool_audit" in target["expr"]
    }
    expected = {
        "{{verdict}}": [('{verdict="same"}', 480), ('{verdict="differs"}', 240)],
        "p99 {{instance}}": [('{instance="w"}', 0.009976)],
        "p50 {{instance}}": [('{instance="w"}', 0.003059)],
    }
    assert by_legend.keys() == expected.keys()
    tests = [
        {
            "expr": f"round({by_legend[legend]}, 0.000001)",
            "eval_time": "70m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
        }
        for legend, samples in expected.items()
    ]
    file = tmp_path / "audits.yml"
    cases = {"tests": [{"interval": "15s", "input_series": series, "promql_expr_test": tests}]}
    file.write_text(json.dumps(cases))
    tested = promtool("test", "rules", file)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def _targets(row: str = "") -> list[dict[str, Any]]:
    """Of all rows, or of one."""
    title, found = "", []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        title = panel["title"] if panel["type"] == "row" else title
        found += panel.get("targets", []) if row in ("", title) else []
    return found


def _all_metrics() -> list[Metric]:
    found = [value for value in vars(metrics).values() if isinstance(value, Metric)]
    for table in (metrics.INDEX, metrics.POOL_RECONCILER, metrics.POOL_SERVERS):
        found += table.values()
    return found


def _series(metric: Metric) -> list[str]:
    return [metric.name, *(f"{metric.name}_{part}" for part in ("bucket", "sum", "count"))]
