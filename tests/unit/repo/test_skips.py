"""The skip policy of tests/conftest.py, tried on a small test suite of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_skipped_test_fails_unless_it_is_on_the_list(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\ndef test_nothing():\n    pytest.skip('no reason')\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-q", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "was skipped and is not on the list" in done.stdout
