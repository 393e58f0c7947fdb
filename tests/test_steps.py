"""How many steps a request takes: calls of functions of ours, which no other work on the machine changes, as it changes times."""

from __future__ import annotations

import asyncio
import http.client
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from builders import agent_session, chat, user
from fakes import ScriptedUpstream

import proxy
from proxy.app import build_app
from proxy.config import Config, Upstream
from proxy.server import running

ROOMS = str(Path(proxy.__file__).parent)


async def calls_a_request(upstream: ScriptedUpstream, body: bytes, times: int = 64) -> float:
    """Of functions of ours, on the event loop, for each of as many requests on one connection once it is warm."""
    application = build_app(Config(upstream=Upstream(url=upstream.url)))
    calls: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOMS):
            calls[frame.f_code] += 1

    async with running(application.proxy, application.admin) as addresses:
        connection = http.client.HTTPConnection(*addresses.proxy, timeout=30)

        def ask(many: int) -> None:
            for _ in range(many):
                connection.request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer key"})
                assert connection.getresponse().read()

        await asyncio.to_thread(ask, times)
        sys.setprofile(note)
        try:
            await asyncio.to_thread(ask, times)
        finally:
            sys.setprofile(None)
        connection.close()
    return sum(calls.values()) / times


@pytest.mark.anyio
@pytest.mark.parametrize("messages", [[user("What is a cache?")], agent_session(20, 200), agent_session(40, 200)], ids=len)
async def test_a_request_that_fits_takes_no_more_than_two_hundred_calls(
    upstream: ScriptedUpstream, messages: list[dict[str, Any]]
) -> None:
    """However long its history is, and although each answer here teaches something of how the upstream counts."""
    body = chat(messages, model="gpt-4o")

    assert 20 < await calls_a_request(upstream, body) <= 200
