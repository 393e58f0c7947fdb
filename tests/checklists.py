"""Rows of requirements, each with the tests that show it: whether those tests are there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path


def unshown(rows: Mapping[str, Collection[str]]) -> list[str]:
    """The ids of tests, below this folder, that rows name and pytest does not find."""
    named = {name for names in rows.values() for name in names}
    files = sorted({name.split("::")[0] for name in named})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", *files]
    told = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout
    return sorted(named - {line.split("[")[0].removeprefix("tests/") for line in told.splitlines() if "::" in line})
