"""Fixtures that every room's tests may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import ScriptedUpstream
from hypothesis import HealthCheck, settings

# how fast the machine is says nothing of the code: no test has a limit of its own for that
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")

ROOT = Path(__file__).parent.parent


def pytest_report_header() -> list[str]:
    return [f"large recorded data: {'found' if shared_folder() else 'missing, tests that need it are skipped'}"]


def shared_folder() -> Path | None:
    """Recorded conversations and reference programs that are too large for the repository, where they are present."""
    folder = Path(os.environ.get("COMPACTION_SHARED") or ROOT.parent / "shared")
    return folder if (folder / "data" / "trajectories.jsonl").exists() else None


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = shared_folder()
    if folder is None:
        pytest.skip("needs the recorded conversations (set COMPACTION_SHARED)")
    return folder


@pytest.fixture(scope="session")
def _scripted() -> Iterator[ScriptedUpstream]:
    yield from ScriptedUpstream().start()


@pytest.fixture
def upstream(_scripted: ScriptedUpstream) -> ScriptedUpstream:
    """A scripted upstream that has received nothing yet."""
    _scripted.reset()
    return _scripted


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
