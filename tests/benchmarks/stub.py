"""A fast upstream for the benchmarks: a raw protocol that reads a request by its length and answers at once, or streams.

`POST …/chat/completions` gets a completion of 1 KB. With `x-stream: COUNT@PAUSE` it gets COUNT events, one each PAUSE
seconds (0: as fast as the socket takes them); the text of an event holds the time it was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time

import uvloop

ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant",'
)
ANSWER += (
    b'"content":"'
    + b"word " * 150
    + b'"},"finish_reason":"stop"}],"usage":{"prompt_tokens":%d,"completion_tokens":150,"total_tokens":157}}'
)
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"word"}}],"t":%.6f}\n\n'


class Stub(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self.head = b""
        self.left = 0
        self.writable = asyncio.Event()
        self.writable.set()
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        if self.left:
            self.left -= len(data)
        else:
            self.head += data
            end = self.head.find(b"\r\n\r\n")
            if end < 0:
                return
            found = re.search(rb"(?i)content-length: *(\d+)", self.head[:end])
            self.left = (int(found[1]) if found else 0) - (len(self.head) - end - 4)
        if self.left <= 0:
            head, self.head, self.left = self.head, b"", 0
            self.answer(head)

    def answer(self, head: bytes) -> None:
        found = re.search(rb"(?i)x-stream: *(\d+)@([\d.]+)", head[:2000])
        if found:
            self.task = asyncio.ensure_future(self.stream(int(found[1]), float(found[2])))
        else:
            length = re.search(rb"(?i)content-length: *(\d+)", head[:2000])
            answer = ANSWER % (int(length[1]) // 5 if length else 0)  # about what the benchmark's text has
            self.transport.write(WHOLE % len(answer) + answer)

    async def stream(self, count: int, pause: float) -> None:
        loop, write = asyncio.get_running_loop(), self.transport.write
        write(HEAD)
        due = loop.time()
        for number in range(count):
            event = EVENT % time.time()
            write(b"%x\r\n%b\r\n" % (len(event), event))
            if pause:
                due += pause
                await asyncio.sleep(max(0.0, due - loop.time()))
            elif not self.writable.is_set():
                await self.writable.wait()
            elif number % 16 == 15:
                await asyncio.sleep(0)
        write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    uvloop.run(serve(parser.parse_args().port))
