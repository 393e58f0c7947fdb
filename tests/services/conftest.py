"""What the tests of this folder share."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis_server import MISSING, PROGRAM, Redis, running_redis
from running import RunningProxy


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    """A Redis of the test's own."""
    if PROGRAM is None:
        pytest.skip(MISSING)
    with running_redis(tmp_path) as server:
        yield server


@pytest.fixture
def store_was_quick() -> Callable[..., None]:
    """Skips a test in which a store did not answer within its 50 ms, on a machine that had other things to do: what is only in the
    store is not found then, and what that costs is the matter of other tests."""

    def check(*proxies: RunningProxy) -> None:
        for proxy in proxies:
            with urllib.request.urlopen(f"{proxy.admin}/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            if any(line.startswith("compaction_checkpoint_operations_total{") and 'result="error"' in line for line in lines):
                pytest.skip("the store was too slow for its budget")

    return check
