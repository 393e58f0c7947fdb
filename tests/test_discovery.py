"""Asking the upstream about its models: never in the way, and again when it told nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from fakes import ScriptedUpstream

from proxy import discovery
from proxy.discovery import Discoverer
from proxy.upstream import Upstream
from proxy.windows import Windows

pytestmark = pytest.mark.anyio
KEYS = [(b"authorization", b"Bearer sk-test-0000"), (b"cookie", b"no")]


@contextlib.asynccontextmanager
async def asking(url: str) -> AsyncIterator[tuple[Discoverer, Windows]]:
    windows, api, root = Windows(), Upstream(url + "/v1"), Upstream(url)
    discoverer = Discoverer(api, root, windows)
    try:
        yield discoverer, windows
    finally:
        await discoverer.aclose()
        await api.aclose()
        await root.aclose()


async def noticed(discoverer: Discoverer) -> None:
    discoverer.notice(KEYS)
    if discoverer._task is not None:
        await asyncio.wait({discoverer._task})
        await asyncio.sleep(0)


def size(windows: Windows, model: str) -> tuple[int, str] | None:
    found = windows.lookup(model, 0.0)
    return None if found is None else (found.tokens, found.source)


async def test_one_asking_tells_every_model_and_is_not_repeated(upstream: ScriptedUpstream) -> None:
    upstream.models = [{"id": "house-model", "max_model_len": 7_000}]

    async with asking(upstream.url) as (discoverer, windows):
        for _ in range(3):
            await noticed(discoverer)

        assert size(windows, "house-model") == (7_000, "discovered")
    assert [one.target for one in upstream.received] == ["/v1/models"]
    assert upstream.received[0].header("authorization") == "Bearer sk-test-0000"
    assert upstream.received[0].header("cookie") is None


async def test_a_server_that_tells_nothing_yet_is_asked_again(
    upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "AGAIN", 0.0)

    async with asking(upstream.url) as (discoverer, windows):
        await noticed(discoverer)
        assert size(windows, "late-model") is None
        upstream.models = [{"id": "late-model", "meta": {"n_ctx": 5_000}}]
        await noticed(discoverer)

        assert size(windows, "late-model") == (5_000, "discovered")


async def test_an_upstream_that_is_down_does_not_hurt() -> None:
    async with asking("http://127.0.0.1:9") as (discoverer, windows):
        await noticed(discoverer)

        assert size(windows, "any") is None
