"""``python -m benchmarks audits``: what its engines say of audits is read from their logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.audits_engines import Audit, audits
from benchmarks.audits_watch import _judged
from kvpool.key.key import writer_name
from kvpool.vllm.audit.floor import FACTOR, LEAST, LEAST_PAIRS, Floor
from kvpool.vllm.plan import AuditedPart, LayerDistance

pytestmark = [pytest.mark.vllm]


def test_distances_of_audits_are_in_the_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own, other = writer_name("own"), writer_name("other")
    floor, far = Floor(own), 2 * FACTOR * LEAST["float32"]
    for writer, distance in [(own, 0.0)] * LEAST_PAIRS + [(other, 0.0), (other, far)]:
        layer = LayerDistance("model.layers.0.attn", "float32", distance**2, 1.0)
        _judged(floor, [AuditedPart("", writer, [layer])])
    (tmp_path / "log").write_text(capsys.readouterr().out)
    *learnt, same, differs = audits(tmp_path / "log")
    assert learnt == [Audit("no_floor", True, 0.0, "", 0, 0.0, 0.0)] * LEAST_PAIRS
    assert same == Audit("same", False, 0.0, "", 0, 0.0, 0.0)
    assert (differs.verdict, differs.what, differs.far) == ("differs", "record", 1)
    assert differs.ratio == pytest.approx(2 * FACTOR)
    assert differs.farthest == pytest.approx(far)
