"""The files of the Secrets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``make kubernetes-secrets`` writes."""
    folder = tmp_path_factory.mktemp("kubernetes") / "secrets"
    command = [sys.executable, ROOT / "scripts/compose-env", "--kubernetes", folder]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    return folder
