"""An upstream that misbehaves on purpose, on a raw socket, so that every framing fault can be had.

`async with Toxic("rst_after:headers") as upstream:` listens on `upstream.url`; what it received is in `upstream.requests`.
A behavior is a word of VOCABULARY, with an argument after a colon or in parentheses (`slow_headers:0.5s`, `chunks:100@0`),
or a coroutine function that takes the Exchange. `upstream.script` gives the next requests one behavior each, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import re
import socket
import struct
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import brotli

Behavior = Callable[["Exchange"], Awaitable[None]]
WAIT = 30.0
"""Seconds of a silence whose length the behavior does not give."""


@dataclass
class Received:
    """One request as it arrived. head: its raw bytes; complete: its body came whole; aborted: set when the peer left before the
    behavior had ended."""

    head: bytes
    body: bytes
    connection: int
    complete: bool = False
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def method(self) -> str:
        return self.head.split(b" ", 1)[0].decode("latin-1")

    @property
    def target(self) -> bytes:
        return self.head.split(b" ", 2)[1]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        lines = self.head.split(b"\r\n")[1:-2]
        return [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)


class _Socket(asyncio.Protocol):
    """What came, readable without taking it, so that a peer who leaves is noticed while we answer."""

    def __init__(self, server: Toxic) -> None:
        self.server, self.data, self.eof = server, bytearray(), False
        self.changed, self.drained = asyncio.Event(), asyncio.Event()
        self.drained.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.server.connections += 1
        self.number = self.server.connections
        self.server.sockets.add(self)
        self.task = asyncio.ensure_future(self.server.serve(self))

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.changed.set()

    def eof_received(self) -> bool:
        self.eof = True
        self.changed.set()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.eof = True
        self.changed.set()
        self.drained.set()
        self.server.sockets.discard(self)

    def pause_writing(self) -> None:
        self.drained.clear()

    def resume_writing(self) -> None:
        self.drained.set()

    async def take(self, count: int) -> bytes:
        while len(self.data) < count and not self.eof:
            await self._change()
        if len(self.data) < count:
            raise EOFError
        taken = bytes(self.data[:count])
        del self.data[:count]
        return taken

    async def take_until(self, mark: bytes) -> bytes:
        while mark not in self.data and not self.eof:
            await self._change()
        if mark not in self.data:
            raise EOFError
        return await self.take(self.data.index(mark) + len(mark))

    async def left(self) -> None:
        while not self.eof:
            await self._change()

    async def _change(self) -> None:
        self.changed.clear()
        await self.changed.wait()


@dataclass
class Exchange:
    """One request and the raw ways to answer it."""

    request: Received
    socket: _Socket
    argument: str = ""

    async def send(self, *pieces: bytes) -> None:
        """Each piece in a segment of its own, as far as the kernel lets us."""
        for piece in pieces:
            if self.socket.transport.is_closing():
                raise ConnectionError
            self.socket.transport.write(piece)
            await self.socket.drained.wait()
            await asyncio.sleep(0)

    async def head(self, status: int = 200, *fields: bytes) -> None:
        await self.send(b"HTTP/1.1 %d Status\r\n%b\r\n" % (status, b"".join(line + b"\r\n" for line in fields)))

    async def answer(self, body: bytes, status: int = 200, *fields: bytes) -> None:
        await self.send(
            b"HTTP/1.1 %d Status\r\n%bcontent-length: %d\r\n\r\n" % (status, b"".join(f + b"\r\n" for f in fields), len(body))
            + body
        )

    async def start_stream(self, *fields: bytes) -> None:
        await self.head(200, b"content-type: text/event-stream", b"transfer-encoding: chunked", *fields)

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def stream(self, pieces: Sequence[bytes], every: float = 0.0) -> None:
        await self.start_stream()
        for piece in pieces:
            await self.chunk(piece)
            await asyncio.sleep(every)
        await self.end_stream()

    def close(self) -> None:
        self.socket.transport.close()

    def reset(self) -> None:
        raw = self.socket.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.transport.abort()


class Toxic:
    """See the module. Also: `connections` so far, `sockets` that are open now; without `reads_bodies` the behavior reads."""

    def __init__(self, behavior: str | Behavior = "echo") -> None:
        self.behavior = behavior
        self.script: list[str | Behavior] = []
        self.requests: list[Received] = []
        self.reads_bodies = True
        self.connections = 0
        self.sockets: set[_Socket] = set()

    async def __aenter__(self) -> Toxic:
        self._server = await asyncio.get_running_loop().create_server(lambda: _Socket(self), "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        tasks = [connection.task for connection in self.sockets]
        for connection in list(self.sockets):
            connection.transport.abort()
            connection.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)

    async def serve(self, connection: _Socket) -> None:
        try:
            while True:
                await self._serve_one(connection)
        except (EOFError, ConnectionError):
            connection.transport.close()

    async def _serve_one(self, connection: _Socket) -> None:
        head = await connection.take_until(b"\r\n\r\n")
        request = Received(head, b"", connection.number)
        self.requests.append(request)
        behave, argument = _find(self.script.pop(0) if self.script else self.behavior)
        if self.reads_bodies:
            request.body = await _body(connection, request)
            request.complete = True
        answering = asyncio.ensure_future(behave(Exchange(request, connection, argument)))
        leaving = asyncio.ensure_future(connection.left())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() or isinstance(answering.exception(), ConnectionError):
                request.aborted.set()
                raise EOFError
            answering.result()
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)


async def _body(connection: _Socket, request: Received) -> bytes:
    if request.header(b"transfer-encoding") == b"chunked":
        body = b""
        while size := int((await connection.take_until(b"\r\n")).split(b";")[0], 16):
            body += (await connection.take(size + 2))[:-2]
        await connection.take_until(b"\r\n")
        return body
    return await connection.take(int(request.header(b"content-length") or 0))


def _find(behavior: str | Behavior) -> tuple[Behavior, str]:
    if not isinstance(behavior, str):
        return behavior, ""
    name, argument = re.fullmatch(r"([a-z0-9_|]+)[:(]?(.*?)\)?", behavior).groups()  # type: ignore[union-attr]
    return VOCABULARY[name], argument


@contextlib.contextmanager
def never_accepting() -> Iterator[str]:
    """The URL of a listener whose queue is full: connecting to it neither succeeds nor fails."""
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    fillers = [socket.socket() for _ in range(4)]
    try:
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        yield f"http://127.0.0.1:{full.getsockname()[1]}"
    finally:
        for one in (full, *fillers):
            one.close()


def seconds(text: str, otherwise: float = WAIT) -> float:
    found = re.match(r"[0-9.]+", text)
    return float(found[0]) if found else otherwise


def events(count: int, text: str = "word ") -> list[bytes]:
    """A chat completion as `count` server-sent events and the final [DONE]."""

    def event(delta: dict[str, str], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        return b"data: " + json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n\n"

    return [
        event({"role": "assistant", "content": text}),
        *[event({"content": text})] * (count - 2),
        event({}, "stop"),
        b"data: [DONE]\n\n",
    ]


def completion(text: str = "Hello.") -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return json.dumps(body).encode()


JSON = b"content-type: application/json"


async def echo(ex: Exchange) -> None:
    request = ex.request
    await ex.answer(request.body, 200, b"content-type: application/octet-stream", b"x-method: " + request.method.encode())


async def ok(ex: Exchange) -> None:
    await ex.answer(completion(), 200, JSON)


async def slow_headers(ex: Exchange) -> None:
    await asyncio.sleep(seconds(ex.argument))
    await ok(ex)


async def headers_then_silence(ex: Exchange) -> None:
    await ex.start_stream()
    await asyncio.sleep(seconds(ex.argument))


async def half_event_then_silence(ex: Exchange) -> None:
    await ex.start_stream()
    await ex.chunk(events(3)[0][:20])
    await asyncio.sleep(WAIT)


async def silence(ex: Exchange) -> None:
    first, *rest = events(3)
    await ex.start_stream()
    await ex.chunk(first)
    await asyncio.sleep(seconds(ex.argument))
    for event in rest:
        await ex.chunk(event)
    await ex.end_stream()


async def chunks(ex: Exchange) -> None:
    count, _, pause = ex.argument.partition("@")
    await ex.stream(events(int(count)), seconds(pause, 0.0))


async def rst_after(ex: Exchange) -> None:
    await ex.start_stream()
    if ex.argument != "headers":
        for event in events(int(seconds(ex.argument)) + 2)[: int(seconds(ex.argument))]:
            await ex.chunk(event)
    await asyncio.sleep(0.05)  # let what was sent arrive: a reset throws away what has not
    ex.reset()


async def eof_mid_event(ex: Exchange) -> None:
    await ex.start_stream()
    await ex.chunk(events(3)[0])
    await ex.send(b"40\r\ndata: {")
    ex.close()


async def eof_without_done(ex: Exchange) -> None:
    await ex.stream(events(5)[:-1])


async def short_content_length(ex: Exchange) -> None:
    await ex.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort")
    ex.close()


async def extra_bytes_after_response(ex: Exchange) -> None:
    await ex.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\ninjected")


async def extra_bytes_after_204(ex: Exchange) -> None:
    await ex.send(b"HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\ninjected")


async def extra_bytes_after_304(ex: Exchange) -> None:
    await ex.send(b"HTTP/1.1 304 Not Modified\r\netag: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\ninjected")


async def body_after_head(ex: Exchange) -> None:
    await ex.send(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\ninjected")


async def close_after_response_silently(ex: Exchange) -> None:
    await ok(ex)
    ex.close()


async def close_idle_after(ex: Exchange) -> None:
    await ok(ex)
    asyncio.get_running_loop().call_later(seconds(ex.argument), ex.close)


async def die_without_answer(ex: Exchange) -> None:
    ex.close()


async def h2_goaway(ex: Exchange) -> None:
    await ex.send(b"\x00\x00\x08\x07\x00\x00\x00\x00\x00" + b"\x00" * 8)
    ex.close()


def _streams(change: Callable[[bytes], Sequence[bytes]], text: str = "日本語 and 🙂 ") -> Behavior:
    """The bytes of a stream, changed and cut as the behavior says, each piece in a chunk of its own."""

    async def behave(ex: Exchange) -> None:
        await ex.stream(change(b"".join(events(20, text))))

    return behave


def _random_cuts(data: bytes) -> list[bytes]:
    cuts = sorted(random.Random(len(data)).sample(range(1, len(data)), 60))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


async def sse_line(ex: Exchange) -> None:
    await ex.stream(events(3, "x" * int(seconds(ex.argument, 4.0) * 1024 * 1024)))


async def sse_with_content_length(ex: Exchange) -> None:
    await ex.answer(b"".join(events(5)), 200, b"content-type: text/event-stream")


def _encoded(encoding: bytes, encode: Callable[[bytes], bytes]) -> Behavior:
    async def behave(ex: Exchange) -> None:
        await ex.answer(encode(completion("Hello. " * 50)), 200, JSON, b"content-encoding: " + encoding)

    return behave


async def gzip_sse(ex: Exchange) -> None:
    packer = zlib.compressobj(wbits=31)
    await ex.start_stream(b"content-encoding: gzip")
    for event in events(20):
        await ex.chunk(packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH))
    await ex.chunk(packer.flush())
    await ex.end_stream()


async def chunked_response(ex: Exchange) -> None:
    await ex.head(200, JSON, b"transfer-encoding: chunked")
    for piece in _random_cuts(completion("Hello. " * 50)):
        await ex.chunk(piece)
    await ex.end_stream()


async def whitespace_json(ex: Exchange) -> None:
    await ex.answer(b" " * 200 + completion(), 200, JSON)


async def logprobs_nan(ex: Exchange) -> None:
    await ex.answer(completion().replace(b'"finish_reason"', b'"logprobs": NaN, "finish_reason"'), 200, JSON)


async def n2_stream(ex: Exchange) -> None:
    await ex.stream(
        [piece for event in events(6)[:-1] for piece in (event, event.replace(b'"index": 0', b'"index": 1'))] + events(2)[-1:]
    )


async def status(ex: Exchange) -> None:
    code, *fields = ex.argument.split(",")
    body = b'{"error": {"message": "no",  "type": "x", "param": null, "code": "y"}}'
    await ex.answer(body, int(code.split()[0]), JSON, *[f.replace(":", ": ", 1).encode() for f in fields])


async def models_list(ex: Exchange) -> None:
    await ex.answer(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}', 200, JSON)


async def models_max_len(ex: Exchange) -> None:
    model = {"id": "m", "object": "model", "max_model_len": int(ex.argument)}
    await ex.answer(json.dumps({"object": "list", "data": [model]}).encode(), 200, JSON)


VOCABULARY: dict[str, Behavior] = {
    function.__name__: function
    for function in (
        echo, ok, slow_headers, headers_then_silence, half_event_then_silence, silence, chunks, rst_after, eof_mid_event,
        eof_without_done, short_content_length, extra_bytes_after_response, extra_bytes_after_204, extra_bytes_after_304,
        body_after_head, close_after_response_silently, close_idle_after, die_without_answer, h2_goaway, sse_line, sse_with_content_length, gzip_sse, chunked_response,
        whitespace_json, logprobs_nan, n2_stream, status, models_list, models_max_len,
    )
} | {
    "idle_stream": headers_then_silence,
    "sse_comments": _streams(lambda data: [data.replace(b"data:", b": OPENROUTER PROCESSING\n\ndata:")]),
    "sse_bare_colon": _streams(lambda data: [data.replace(b"data:", b":\n\ndata:")]),
    "sse_crlf_split": _streams(lambda data: re.split(rb"(?<=\r)", data.replace(b"\n", b"\r\n"))),
    "sse_nospace": _streams(lambda data: [data.replace(b"data: ", b"data:")]),
    "sse_bom": _streams(lambda data: [b"\xef\xbb\xbf" + data]),
    "sse_one_byte_segments": _streams(lambda data: [data[i : i + 1] for i in range(len(data))]),
    "sse_random_segments": _streams(_random_cuts),
    "gzip_response": _encoded(b"gzip", gzip.compress),
    "br_response": _encoded(b"br", brotli.compress),
}  # fmt: skip
