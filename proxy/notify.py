"""Notices of events to a webhook, in the background: a request never waits for one, and a receiver that is down costs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from urllib.parse import urlsplit, urlunsplit

import structlog

from proxy.errors import UpstreamError
from proxy.upstream import Upstream

SENT, DROPPED = "sent", "dropped"
HEADERS = [(b"content-type", b"application/json"), (b"user-agent", b"compaction-proxy")]
WORTH_ANOTHER_TRY = frozenset({408, 425, 429})
"""Of the statuses below 500 that are no success: all others will be the same the next time."""
LONGEST_WAIT = 60.0
LAST_WORDS_SECONDS = 1.0
"""What notices that still wait get when the proxy ends."""

log = structlog.get_logger("proxy")


class Notifier:
    """One webhook. timeout, backoff: seconds; the wait before a further try doubles each time. waiting: notices that are kept.

    count: told what became of each notice, `sent` or `dropped`.
    """

    def __init__(
        self,
        url: str,
        count: Callable[[str], None],
        *,
        timeout: float = 5.0,
        attempts: int = 5,
        backoff: float = 1.0,
        waiting: int = 256,
    ) -> None:
        parts = urlsplit(url)
        self._target = urlunsplit(("", "", parts.path or "/", parts.query, "")).encode("ascii", "ignore")
        self._receiver = Upstream(urlunsplit((parts.scheme, parts.netloc, "", "", "")), connect_timeout=timeout)
        self._count, self._timeout, self._attempts, self._backoff = count, timeout, attempts, backoff
        self._notices: asyncio.Queue[bytes] = asyncio.Queue(waiting)
        self._task: asyncio.Task[None] | None = None
        self._failing = False

    def notice(self, body: bytes) -> None:
        """Takes a JSON body to deliver; drops it when too many wait already."""
        try:
            self._notices.put_nowait(body)
        except asyncio.QueueFull:
            self._dropped("too many wait")
            return
        if self._task is None:
            self._task = asyncio.ensure_future(self._work())

    async def aclose(self) -> None:
        """Delivers what can be delivered at once, and gives up the rest."""
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._notices.join(), LAST_WORDS_SECONDS)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._receiver.aclose()

    async def _work(self) -> None:
        while True:
            body = await self._notices.get()
            try:
                await self._deliver(body)
            finally:
                self._notices.task_done()

    async def _deliver(self, body: bytes) -> None:
        reason = "no try"
        for attempt in range(self._attempts):
            if attempt:
                wait = min(self._backoff * 2 ** (attempt - 1), LONGEST_WAIT)
                await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # so that replicas do not come back all at once
            try:
                status = await self._post(body)
            except (UpstreamError, TimeoutError) as error:
                reason = error.reason if isinstance(error, UpstreamError) else "timeout"
                continue
            if 200 <= status < 300:
                self._failing = False
                self._count(SENT)
                return
            reason = f"status {status}"
            if status < 500 and status not in WORTH_ANOTHER_TRY:
                break
        self._dropped(reason)

    async def _post(self, body: bytes) -> int:
        async with asyncio.timeout(self._timeout):
            answer = await self._receiver.forward(b"POST", self._target, HEADERS, (body,))
            answer.close()
            return answer.status

    def _dropped(self, reason: str) -> None:
        self._count(DROPPED)
        if not self._failing:  # once until one gets through again
            log.warning("a notice could not be delivered", reason=reason)
        self._failing = True
