"""H039 and its kin: whatever of ours raises, and wherever, the request goes on as it came."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from bug_reports.upstreams import window_of
from builders import agent_session, chat
from live.toxic import Toxic

from proxy.app import build_app
from proxy.config import load
from proxy.errors import StoreUnavailable
from proxy.server import running

pytestmark = pytest.mark.anyio


class Panic(BaseException):
    """As pyo3 raises it: no Exception."""


FAILURES = (Panic, RecursionError, TimeoutError, StoreUnavailable, UnicodeEncodeError, StopAsyncIteration)
BODY = chat([*agent_session(12), {"role": "user", "content": "CANARY"}])


def raised(kind: type[BaseException]) -> BaseException:
    if kind is UnicodeEncodeError:
        return UnicodeEncodeError("utf-8", "CANARY", 0, 1, "CANARY")
    return kind("CANARY")


PARTS: dict[str, Callable[[Any, Any], None]] = {
    "reading": lambda compactor, fails: setattr(compactor, "_read", fails),
    "knowing the model": lambda compactor, fails: setattr(compactor, "_basis", fails),
    "measuring": lambda compactor, fails: setattr(compactor, "_weigh", fails),
    "judging": lambda compactor, fails: setattr(compactor, "_judge", fails),
    "fitting": lambda compactor, fails: setattr(compactor._events, "fit", fails),
    "counting": lambda compactor, fails: setattr(compactor._threads, "total", fails),
    "off the loop": lambda compactor, fails: setattr(compactor._threads, "run", fails),
    "a refusal": lambda compactor, fails: setattr(compactor.learned, "refused", fails),
    "a second try": lambda compactor, fails: setattr(compactor, "harder", fails),
    "an answer": lambda compactor, fails: setattr(compactor, "answered", fails),
}
"""Where to make it fail. Only injected faults can show this: none that occur are known."""


@asynccontextmanager
async def failing(upstream: Toxic, kind: type[BaseException], part: str) -> AsyncIterator[httpx.AsyncClient]:
    """The product, one of whose parts raises."""
    settings = {"upstream": {"url": upstream.url}, "compaction": {"discovery": False}, "models": {"gpt-4o": {"window": 3_000}}}
    built = build_app(load(settings, environment={}))
    reached = []

    def fails(*_: Any, **__: Any) -> Any:
        reached.append(part)
        raise raised(kind)

    PARTS[part](built.compactor, fails)
    async with running(built.proxy, built.admin) as addresses:
        host, port = addresses.proxy[:2]
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", trust_env=False, timeout=60) as client:
            yield client
    assert reached  # else it would show nothing


@pytest.mark.parametrize(
    "part", ["reading", "knowing the model", "measuring", "judging", "fitting", "counting", "off the loop", "an answer"]
)
@pytest.mark.parametrize("kind", FAILURES)
async def test_whatever_raises_the_request_gets_its_answer(
    kind: type[BaseException], part: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with Toxic("ok") as upstream, failing(upstream, kind, part) as client:
        answer = await client.post("/v1/chat/completions", content=BODY, headers={"authorization": "Bearer sk-test-0000"})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "Hello."
    assert len(upstream.requests) == 1
    assert (upstream.requests[0].body == BODY) == (answer.headers["x-compaction"] in ("failed", "none"))
    assert "x-compaction-error" not in answer.headers
    told = "".join(capfd.readouterr())
    assert "CANARY" not in told
    assert "Traceback" not in told


@pytest.mark.parametrize("part", ["a refusal", "a second try"])
@pytest.mark.parametrize("kind", [Panic, KeyError])
async def test_a_refusal_that_we_fail_at_is_the_clients_to_see(
    kind: type[BaseException], part: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with Toxic(window_of(10, 3)) as upstream, failing(upstream, kind, part) as client:
        answer = await client.post("/v1/chat/completions", content=BODY, headers={"x-compaction-window": "100000"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert len(upstream.requests) == 1
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("part", ["reading", "judging", "counting"])
async def test_the_sidecar_says_that_it_failed_or_gives_the_messages_back(part: str, capfd: pytest.CaptureFixture[str]) -> None:
    async with Toxic("ok") as upstream, failing(upstream, Panic, part) as client:
        answer = await client.post("/v1/compact", content=BODY)
    assert answer.status_code == 200
    assert answer.json()["messages"] == json.loads(BODY)["messages"]
    assert answer.json()["compaction"]["outcome"] == "failed"
    assert "Traceback" not in "".join(capfd.readouterr())


async def test_H212_threads_that_are_stuck_cost_no_request_and_savings_come_back_with_them() -> None:
    settings = {"compaction": {"discovery": False, "timeout_ms": 100}, "models": {"gpt-4o": {"window": 3_000}}}
    async with Toxic("ok") as upstream:
        built = build_app(load({"upstream": {"url": upstream.url}, **settings}, environment={}))
        threads, freed = built.compactor._threads, threading.Event()
        async with running(built.proxy, built.admin) as addresses:
            url = "http://{}:{}".format(*addresses.proxy[:2])
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
                stuck = [asyncio.ensure_future(threads.run(freed.wait)) for _ in range(threads._pool._max_workers)]
                during = [await client.post("/v1/chat/completions", content=BODY) for _ in range(2)]
                freed.set()
                await asyncio.gather(*stuck)
                after = await client.post("/v1/chat/completions", content=BODY, headers={"authorization": "Bearer sk-test-0000"})

    assert [(answer.status_code, answer.headers["x-compaction-reason"]) for answer in during] == [
        (200, "deadline"),
        (200, "deadline"),
    ]
    assert (after.status_code, after.headers["x-compaction"]) == (200, "applied")
    assert [len(one.body) == len(BODY) for one in upstream.requests] == [True, True, False]
