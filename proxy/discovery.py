"""What the upstream says of its models: asked at the first use and then hourly, and never while a request waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from proxy.errors import UpstreamError
from proxy.summarizers.redaction import credentials
from proxy.upstream import Upstream
from proxy.windows import DISCOVERY, Probe, Windows

EVERY = 3_600.0
"""Seconds between two askings that were answered: models change with a restart of the server, or with a release."""
AGAIN = 15.0
"""Seconds after one that told nothing, doubled each time up to EVERY: the next client may have a key that works, or the
server may have loaded its model by then."""
TIMEOUT = 10.0
MAX_BYTES = 8 * 1024 * 1024
"""Of a list of models; the longest known is about 1 MB."""


class Discoverer:
    """Asks one upstream. api, root: the upstream at its base URL, and at that URL without its `/v1`."""

    def __init__(self, api: Upstream, root: Upstream, windows: Windows) -> None:
        self._places = {"api": api, "root": root}
        self._windows = windows
        self._next = 0.0
        self._pause = AGAIN
        self._task: asyncio.Task[None] | None = None

    def notice(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Starts an asking when one is due, with the credentials of the request that came. Does not wait."""
        if self._task is not None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY
        self._task = asyncio.ensure_future(self._ask(credentials(headers)))
        self._task.add_done_callback(self._done)

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and task.exception() is not None:
            asyncio.get_running_loop().call_exception_handler({"message": "discovery failed", "exception": task.exception()})

    async def _ask(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        first = await self._answer(DISCOVERY[0], headers)
        found = first is not None and await self._take(DISCOVERY[0], first)
        further = self._windows.further_probes(first)
        for probe in further:
            answer = await self._answer(probe, headers)
            if answer is not None:
                found = await self._take(probe, answer) or found
        if found or (first is not None and not further):
            self._pause = AGAIN
        else:
            self._next = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, EVERY)

    async def _answer(self, probe: Probe, headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
        path = ("/v1" if probe.below == "api" else "") + probe.path
        try:
            status, body = await self._places[probe.below].fetch(path, headers, timeout=TIMEOUT, max_bytes=MAX_BYTES)
        except UpstreamError:
            return None
        return body if status == 200 else None

    async def _take(self, probe: Probe, answer: bytes) -> bool:
        models = await asyncio.to_thread(probe.read, answer)
        self._windows.discovered(models)
        return bool(models)
