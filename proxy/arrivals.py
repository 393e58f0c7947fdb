"""The client's side of a request: its body as it arrives, and its leaving, in whatever phase that happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import Any

from proxy.errors import ClientGone

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
Body = Sequence[bytes] | AsyncIterator[bytes]


def header(headers: Headers, name: bytes) -> str:
    """A header's value, empty when it is not there."""
    return next((value for key, value in headers if key.lower() == name), b"").decode("latin-1")


class Upload:
    """A request's body: the pieces at hand, then what the client still sends."""

    def __init__(self, receive: Receive, pieces: Sequence[bytes] = (), *, more: bool) -> None:
        self._receive, self._first = receive, pieces
        self._read = asyncio.Event()
        if not more:
            self._read.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it in order. Raises ClientGone."""
        for piece in self._first:
            yield piece
        while not self._read.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            if not message.get("more_body", False):
                self._read.set()
            if piece := message.get("body", b""):
                yield piece

    async def left(self) -> None:
        """Returns when the client has left. Waits for the whole body first: it tells by itself when it breaks off."""
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def while_client_stays(work: Awaitable[None], left: Coroutine[Any, Any, None]) -> None:
    """Does the work; stops it at once when the client leaves. Raises ClientGone then."""
    task = asyncio.current_task()
    assert task is not None
    watcher = asyncio.ensure_future(left)
    stop = lambda _: task.cancel()  # noqa: E731
    watcher.add_done_callback(stop)
    try:
        await work
    except asyncio.CancelledError:
        if not watcher.done() or watcher.cancelled():
            raise
        task.uncancel()
        raise ClientGone from None
    finally:
        watcher.remove_done_callback(stop)
        watcher.cancel()
