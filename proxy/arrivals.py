"""The client's side of a request: its body as it arrives, and its leaving, in whatever phase that happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from proxy.errors import ClientError, ClientGone

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
Body = Sequence[bytes] | AsyncIterator[bytes]

Notes = dict[object, Any]
"""What was made of a head, by who made it."""

CLIENT = "compaction-proxy.client"
"""The key of the ASGI scope under which our own server tells more of the client than ASGI has words for."""
NOTES = "compaction-proxy.notes"
"""The same for notes, kept for as long as the heads on a connection say the same, but for the length of the body."""
DRIPS = 10
"""Times the patience for one piece that a body read whole may take: a byte now and then would keep a connection for ever."""


class Leaves(Protocol):
    """task: what works on the client's request."""

    task: asyncio.Task[None] | None

    def when_left(self, tell: Callable[[], None] | None) -> None:
        """Has `tell` called as soon as the client leaves before it has its answer; None: no longer."""
        ...


class Client(Leaves, Protocol):
    """body_timeout: seconds that `receive` waits for the next piece of a body; it raises TimeoutError then."""

    body_timeout: float | None

    def whole(self, most: int) -> Sequence[bytes] | None:
        """All of the body, where it is here already, in one piece or in no more than `most` bytes, and none of it was taken."""
        ...

    def answer(self, status: int, headers: Headers, body: bytes) -> Awaitable[None]:
        """Sends a whole answer, at once where the client's socket is not full."""
        ...

    def put(self, piece: bytes) -> bool:
        """Sends a piece of an answer that has begun and has no length, at once; whether the client's socket takes more."""
        ...

    async def drain(self) -> None:
        """Waits while the client's socket is full."""
        ...


def client_of(scope: Scope) -> Client | None:
    """None under a server that is not ours."""
    client: Client | None = scope.get(CLIENT)
    return client


def notes_of(scope: Scope) -> Notes:
    """Those of the client's connection; under a server that is not ours, of this request alone."""
    notes: Notes | None = scope.get(NOTES)
    return {} if notes is None else notes


def header(headers: Headers, name: bytes) -> str:
    """A header's value, empty when it is not there. name, and those of the headers: in lower case."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return ""


class Held:
    """Bytes of all the bodies that are held whole at the moment, and how many may be."""

    def __init__(self, most: int) -> None:
        self.bytes, self.most = 0, most


class Upload:
    """The body of a request, and the client behind it.

    client: None under a server that is not ours. size: bytes of the body that are held, no longer than the block around it.
    """

    # what most uploads leave as it is stands here, for all of them
    first: Sequence[bytes] = ()
    whole = _gone = False
    size = 0
    _watched: Leaves | None = None

    def __init__(self, scope: Scope, receive: Receive, body_timeout: float | None, held: Held) -> None:
        """body_timeout: seconds that each piece may take, where our own server is in front."""
        self._receive, self._timeout, self._held = receive, body_timeout, held
        client = self.client = client_of(scope)
        if client is not None:
            client.body_timeout = body_timeout

    def takes_at_hand(self, most: int) -> bool:
        """What `read` does, at once, where all of the body is here; else False."""
        client, held = self.client, self._held
        if client is None or held.bytes > held.most or (pieces := client.whole(most)) is None:
            return False
        self.first, self.whole = pieces, True
        size = self.size = sum(map(len, pieces))
        held.bytes += size
        return True

    async def read(self, most: int) -> None:
        """Fills `first`, and tells in `whole` whether that is all; stops beyond `most` bytes, or what may be held of all bodies.

        Raises ClientGone, ClientError.
        """
        pieces: list[bytes] = []
        held, started = self._held, time.monotonic()
        while not self.whole and self.size <= most and held.bytes <= held.most:
            try:
                piece = self._piece(await self._receive())
            except TimeoutError:
                raise _late() from None
            if piece:
                pieces.append(piece)
                self.size += len(piece)
                held.bytes += len(piece)
            if not self.whole and self._timeout is not None and time.monotonic() - started > DRIPS * self._timeout:
                raise _late()
        self.first = pieces

    def end_with_client(self) -> None:
        """From here on the client's leaving ends the block around the upload at once, which raises ClientGone then."""
        watched = self._watched = self.client or _Watcher(self)
        watched.when_left(self._leave)

    def _leave(self) -> None:
        self._gone = True
        if self._watched is not None and self._watched.task is not None:
            self._watched.task.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        watched = self._watched
        if watched is not None:
            watched.when_left(None)
        self._held.bytes -= self.size
        self.size = 0
        if self._gone and watched is not None and watched.task is not None and isinstance(error, asyncio.CancelledError):
            watched.task.uncancel()
            raise ClientGone from None

    @property
    def body(self) -> Body:
        """All of it: at hand, or as it comes."""
        return self.first if self.whole else self._pieces()

    async def left(self) -> None:
        """Returns when the client has left. To be asked after the whole body is read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _pieces(self) -> AsyncIterator[bytes]:
        """Raises ClientGone, ClientError (408)."""
        for piece in self.first:
            yield piece
        self.first = ()
        self._held.bytes -= self.size
        self.size = 0  # from here on it only passes through
        while not self.whole:
            try:
                piece = self._piece(await self._receive())
            except TimeoutError:
                raise _late() from None
            if piece:
                yield piece

    def _piece(self, message: MutableMapping[str, Any]) -> bytes:
        if message["type"] == "http.disconnect":
            raise ClientGone
        self.whole = not message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece


def _late() -> ClientError:
    return ClientError("the request's body did not arrive in time", status=408, code="request_timeout")


class _Watcher:
    """Waits for the client's leaving by the words that ASGI has for it. An upload still under way tells by itself."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self.task = asyncio.current_task()
        self._watch: asyncio.Task[None] | None = None
        self._tell: Callable[[], None] | None = None

    def when_left(self, tell: Callable[[], None] | None) -> None:
        self._tell = tell
        if tell is None:
            if self._watch is not None:
                self._watch.cancel()
        elif self._upload.whole:
            self._watch = asyncio.ensure_future(self._upload.left())
            self._watch.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if self._tell is not None:
            self._tell()
