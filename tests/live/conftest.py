"""What the live tests share: an upstream that misbehaves, and a small client on a raw socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from live.toxic import Toxic


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def toxic() -> AsyncIterator[Toxic]:
    """An upstream that echoes until its `behavior` or `script` says otherwise."""
    async with Toxic() as upstream:
        yield upstream
