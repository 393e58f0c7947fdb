"""The server behind us: what leaves for it, what comes back, and what we ask it ourselves."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Literal, Protocol, cast

import httpx

from proxy.connection import HOP_BY_HOP, NEVER_NAMED_AWAY, Headers, Origin, Sink, end_to_end, named_by_connection
from proxy.errors import ConfigError, UpstreamError
from proxy.transport import Body, Patience, Prepared, Sockets, prepare, tls_context

NOT_FORWARDED = HOP_BY_HOP | {b"host", b"expect", b"content-length", b"forwarded", b"x-real-ip", b"true-client-ip"}
"""Never sent upstream as they came: framing and host are ours to write; providers' edges refuse forwarding headers."""
NOT_FORWARDED_PREFIXES = (b"x-compaction", b"x-forwarded-", b"cf-")
WITHOUT_BODY = frozenset({b"GET", b"HEAD", b"OPTIONS", b"DELETE", b"TRACE"})
"""Methods whose requests get no `content-length: 0` when they come without a body."""
MAX_COMPLETION_BYTES = 16 * 1024 * 1024
"""Of an answer to a request of our own: a hundred times the longest summary, and still no danger to memory."""
SHARDS = 16
"""Stock pools scan all their connections at each step: 16 pools carry 3,000 streams where one does not (measured)."""


class Answer(Protocol):
    """What the upstream answered: a `connection.Reply`, or a stock httpx answer.

    headers: as they came, names in lower case, in order, without those of the connection.
    """

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> list[tuple[bytes, bytes]]: ...

    def next(self) -> Awaitable[bytes]:
        """Each piece as it comes, b"" at the clean end. Raises UpstreamError when the answer broke off or fell short."""
        ...

    def pour(self, sink: Sink) -> Awaitable[bool] | None:
        """Has each piece handed to the sink as it comes, without waking anybody: True at the clean end, False as soon as the
        sink is full. None where the transport cannot. Raises UpstreamError."""
        ...

    def rest(self) -> bytes | None:
        """All that has not been fetched, where it is here to its clean end; it is fetched then. None where that is not known."""
        ...

    @property
    def ready(self) -> bool:
        """Whether `next` has something to give without waiting."""
        ...

    @property
    def ended(self) -> bool:
        """Whether all of it has been fetched: `next` would say so without waiting."""
        ...

    def close(self) -> None:
        """End it; the socket is closed unless the answer was read to its clean end. Twice does no harm."""
        ...


class Upstream:
    """One upstream by its URL. connect_timeout, read_timeout: seconds; a read_timeout of None waits for ever.

    api_key replaces the client's Authorization. ca_file: PEM bundle to trust instead of the public one. transport: our own
    sockets, or stock httpx. Raises ConfigError for a URL that we cannot speak to.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float = 5.0,
        read_timeout: float | None = None,
        api_key: str | None = None,
        ca_file: str | None = None,
        transport: Literal["sockets", "httpx"] = "sockets",
    ) -> None:
        base = _parse(url)
        tls = base.scheme == "https"
        self.url = url
        self._origin = Origin(tls, base.raw_host.decode("ascii"), base.port or (443 if tls else 80))
        self._host = (b"host", base.netloc)
        path, _, query = base.raw_path.partition(b"?")
        self._path, self._query = path.rstrip(b"/"), query
        self._targets: dict[bytes, bytes] = {}
        self._authorization = _bearer(api_key)
        self._patience = Patience(connect_timeout, read_timeout)
        context = _tls_context(ca_file) if tls else None
        self._sender: _Sender = Sockets(tls=context) if transport == "sockets" else _Stock(context)

    def prepare(self, method: bytes, target: bytes, headers: Headers) -> Prepared:
        """What goes upstream before the body, for any number of bodies; a client's content-length has no part in it.

        target: path and query as the client sent them. Raises UpstreamError when it cannot be written.
        """
        joined = self._targets.get(target)
        if joined is None:
            joined = join_target(self._path, self._query, target)
            if len(self._targets) < 256 and len(target) <= 256:  # targets come from outside, as names do
                self._targets[target] = joined
        return prepare(method, joined, self._fields(headers))

    def send(self, prepared: Prepared, body: Sequence[bytes]) -> Awaitable[Answer]:
        """Send a prepared request on, with this body and its length. Raises UpstreamError."""
        length: int | None = len(body[0]) if len(body) == 1 else sum(map(len, body))
        if not length and prepared.method in WITHOUT_BODY:
            length = None
        return self._sender.send(self._origin, prepared, body, length, self._patience)

    async def forward(self, method: bytes, target: bytes, headers: Headers, body: Body = ()) -> Answer:
        """Send a client's request on. target: path and query as the client sent them.

        A sequence is sent with its length; what is iterated with the client's own content-length, or chunked. Raises
        UpstreamError, and what iterating the body raises.
        """
        prepared = self.prepare(method, target, headers)
        if isinstance(body, Sequence):
            return await self.send(prepared, body)
        length = _content_length(headers)
        framing = (b"transfer-encoding", b"chunked") if length is None else (b"content-length", b"%d" % length)
        pieces = body if length is None else _exactly(body, length)
        fields = [*prepared.headers, framing]
        return await self._sender.exchange(self._origin, method, prepared.target, fields, pieces, self._patience)

    async def fetch(self, path: str, headers: Headers, *, timeout: float, max_bytes: int) -> tuple[int, bytes]:  # noqa: ASYNC109
        """A small GET of our own: status and body. Raises UpstreamError, also when it takes longer or is larger."""
        async with _deadline(timeout):
            answer = await self.forward(b"GET", path.encode("ascii"), headers)
            return answer.status, await _read_all(answer, max_bytes)

    async def complete(self, body: bytes, headers: Headers, *, timeout: float) -> tuple[int, bytes]:  # noqa: ASYNC109
        """A chat completion of our own, not streamed: status and body. Raises UpstreamError."""
        headers = [*headers, (b"content-type", b"application/json")]
        async with _deadline(timeout):
            answer = await self.forward(b"POST", b"/v1/chat/completions", headers, (body,))
            return answer.status, await _read_all(answer, MAX_COMPLETION_BYTES)

    async def aclose(self) -> None:
        """Close every connection."""
        await self._sender.aclose()

    def _fields(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """The header fields that go upstream, but for the one that frames the body."""
        sent = [self._host, *request_headers(headers)]
        if self._authorization is not None:
            sent = [field for field in sent if field[0] not in (b"authorization", b"Authorization")]
            sent.append(self._authorization)
        return sent


def join_target(base_path: bytes, base_query: bytes, target: bytes) -> bytes:
    """Put a client's target under the upstream's base path; what both have in common (`/v1`) is not doubled.

    base_path: without a slash at its end. Bytes of the target are kept as they came. The base's query goes first; a name
    that the request gives as well is the request's.
    """
    path, mark, query = target.partition(b"?")
    joined = base_path[: len(base_path) - _overlap(base_path, path)] + path
    if not base_query:
        return joined + mark + query
    names = {pair.partition(b"=")[0] for pair in query.split(b"&")}
    kept = [pair for pair in base_query.split(b"&") if pair.partition(b"=")[0] not in names]
    merged = b"&".join([*kept, query] if query else kept)
    return joined + b"?" + merged if merged else joined


def _overlap(base_path: bytes, path: bytes) -> int:
    """How many bytes at the end of the base are whole segments that the path begins with; the longest."""
    start = base_path.find(b"/")
    while start >= 0:
        tail = base_path[start:]
        if path.startswith(tail) and path[len(tail) : len(tail) + 1] in (b"", b"/"):
            return len(tail)
        start = base_path.find(b"/", start + 1)
    return 0


def request_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """What goes upstream of a client's headers (names in lower case), in order, duplicates kept."""
    sent = [field for field in headers if _SENT[field[0]]]
    named = named_by_connection(headers)
    return [field for field in sent if field[0] not in named] if named else sent


def answer_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """What goes to the client of the upstream's headers, names in lower case, in order, duplicates kept."""
    return end_to_end([(name.lower(), value) for name, value in headers])


class _Sent(dict[bytes, bool]):
    """Whether a header goes upstream, by its name. Decided once a name."""

    def __missing__(self, name: bytes) -> bool:
        sent = name not in NOT_FORWARDED and not name.startswith(NOT_FORWARDED_PREFIXES) and not (b"_" in name and _shadows(name))
        if len(self) < 1024 and len(name) <= 64:  # names come from outside: they must not fill the memory
            self[name] = sent
        return sent


_SENT = _Sent()


def _shadows(name: bytes) -> bool:
    """Whether a name with underscores reads, to servers that map both to one, as a header that has a meaning to us."""
    dashed = name.replace(b"_", b"-")
    return dashed in NOT_FORWARDED or dashed in NEVER_NAMED_AWAY or dashed.startswith(NOT_FORWARDED_PREFIXES)


def _content_length(headers: Headers) -> int | None:
    for name, value in headers:
        if name == b"content-length" and re.fullmatch(rb"[0-9]{1,18}", value.strip()):
            return int(value)
    return None


async def _exactly(pieces: AsyncIterator[bytes], length: int) -> AsyncIterator[bytes]:
    """The pieces of a body that was announced with its length."""
    left = length
    async for piece in pieces:
        left -= len(piece)
        if left < 0:
            break
        if piece:
            yield piece
    if left != 0:
        raise UpstreamError("the request's body does not have the length that it announced", reason="protocol")


async def _read_all(answer: Answer, max_bytes: int) -> bytes:
    body = bytearray()
    try:
        while piece := await answer.next():
            body += piece
            if len(body) > max_bytes:
                raise UpstreamError("the upstream's answer is too large", reason="protocol")
    finally:
        answer.close()
    return bytes(body)


@contextlib.asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    """`asyncio.timeout` in our words."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise UpstreamError(
            "the upstream did not answer in time", reason="timeout", status=504, code="upstream_timeout"
        ) from None


def _parse(url: str) -> httpx.URL:
    try:
        base = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"upstream: {url!r} is not a URL ({error})") from None
    if base.scheme not in ("http", "https") or not re.fullmatch(rb"[0-9A-Za-z._:-]+", base.raw_host):
        raise ConfigError(f"upstream: got {url!r}, takes http://HOST[:PORT][/PATH] or https://…")
    if base.userinfo or base.fragment:
        raise ConfigError("upstream: takes no user name, password or #fragment; a key goes into upstream.api_key")
    return base


def _bearer(api_key: str | None) -> tuple[bytes, bytes] | None:
    if api_key is None:
        return None
    if not re.fullmatch(r"[\x21-\x7e]+", api_key):
        raise ConfigError("upstream.api_key: takes printable ASCII without spaces")
    return (b"authorization", b"Bearer " + api_key.encode("ascii"))


def _tls_context(ca_file: str | None) -> ssl.SSLContext:
    try:
        return tls_context(ca_file)
    except OSError as error:
        raise ConfigError(f"upstream.ca_file: cannot use {ca_file!r} ({error.strerror or error})") from None


class _Sender(Protocol):
    async def send(
        self, origin: Origin, prepared: Prepared, body: Sequence[bytes], length: int | None, patience: Patience
    ) -> Answer: ...

    async def exchange(
        self, origin: Origin, method: bytes, target: bytes, headers: Headers, body: Body, patience: Patience
    ) -> Answer: ...

    async def aclose(self) -> None: ...


class _Stock:
    """The same exchange through stock httpx transports: no client above them, so no cookie jar, no redirects, no defaults."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=1000, keepalive_expiry=4.0)
        http2 = importlib.util.find_spec("h2") is not None
        self._shards = [
            httpx.AsyncHTTPTransport(verify=context or False, limits=limits, trust_env=False, http2=http2) for _ in range(SHARDS)
        ]
        self._turn = itertools.cycle(self._shards)
        self._closing: set[asyncio.Task[None]] = set()

    async def send(
        self, origin: Origin, prepared: Prepared, body: Sequence[bytes], length: int | None, patience: Patience
    ) -> _StockReply:
        framing = [] if length is None else [(b"content-length", b"%d" % length)]
        return await self.exchange(origin, prepared.method, prepared.target, [*prepared.headers, *framing], body, patience)

    async def exchange(
        self, origin: Origin, method: bytes, target: bytes, headers: Headers, body: Body, patience: Patience
    ) -> _StockReply:
        request = httpx.Request(
            method.decode("ascii"),
            httpx.URL(scheme="https" if origin.tls else "http", host=origin.host, port=origin.port, path="/"),
            extensions={
                "target": target,
                "timeout": {"connect": patience.connect, "read": patience.read, "write": None, "pool": None},
            },
        )
        request.headers = httpx.Headers(list(headers))
        request.stream = _StockBody(body)
        try:
            response = await next(self._turn).handle_async_request(request)
        except httpx.HTTPError as error:
            raise _from_httpx(error) from None
        reply = _StockReply(response, self._closing)
        if not 200 <= reply.status <= 599:
            reply.close()
            raise UpstreamError("the upstream's answer is not valid HTTP", reason="protocol")
        return reply

    async def aclose(self) -> None:
        await asyncio.gather(*self._closing, return_exceptions=True)
        for shard in self._shards:
            await shard.aclose()


class _StockBody(httpx.AsyncByteStream):
    def __init__(self, body: Body) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if isinstance(self._body, Sequence):
            for piece in self._body:
                yield piece
        else:
            async for piece in self._body:
                yield piece


class _StockReply:
    """A stock httpx answer as an `Answer`."""

    def __init__(self, response: httpx.Response, closing: set[asyncio.Task[None]]) -> None:
        self.status = response.status_code
        self.headers = answer_headers(response.headers.raw)
        self._response: httpx.Response | None = response
        self._pieces = aiter(cast(httpx.AsyncByteStream, response.stream))
        self._closing = closing

    async def next(self) -> bytes:
        try:
            while (piece := await anext(self._pieces, None)) is not None:
                if piece:
                    return piece
        except httpx.HTTPError as error:
            raise _from_httpx(error) from None
        return b""

    def pour(self, sink: Sink) -> None:
        return None

    def rest(self) -> None:
        return None

    ready = ended = False  # it says so only when it is asked for more

    def close(self) -> None:
        response, self._response = self._response, None
        if response is not None:
            _retire_if_dirty(response)
            task = asyncio.ensure_future(response.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def _retire_if_dirty(response: httpx.Response) -> None:
    """Keep the stock pool from handing a connection with bytes left in it to the next caller, which it does (httpcore 1.0)."""
    stream = getattr(response.stream, "_httpcore_stream", None)
    connection = getattr(getattr(stream, "_stream", None), "_connection", None)
    parser = getattr(connection, "_h11_state", None)
    if connection is not None and parser is not None and parser.trailing_data[0]:
        connection._keepalive_expiry = -1.0


def _from_httpx(error: httpx.HTTPError) -> UpstreamError:
    match error:
        case httpx.ConnectTimeout() | httpx.PoolTimeout():
            message, reason = "the upstream did not accept a connection in time", "timeout"
        case httpx.TimeoutException():
            message, reason = "the upstream was silent for too long", "timeout"
        case httpx.ConnectError() | httpx.ProxyError() | httpx.UnsupportedProtocol():
            message, reason = "no connection to the upstream", "connect"
        case httpx.ProtocolError():
            message, reason = "the upstream's answer is not valid or not complete HTTP", "protocol"
        case _:
            message, reason = "the upstream closed the connection before the answer was complete", "read"
    if reason == "timeout":
        return UpstreamError(message, reason=reason, status=504, code="upstream_timeout")
    return UpstreamError(message, reason=reason)
