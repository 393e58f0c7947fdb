"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_server import MISSING, PROGRAM, Redis, running_redis


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    """A Redis of the test's own."""
    if PROGRAM is None:
        pytest.skip(MISSING)
    with running_redis(tmp_path) as server:
        yield server
