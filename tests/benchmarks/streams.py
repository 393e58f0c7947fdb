"""Event streams: CPU per chunk, added delay and boundaries, many at once; paced, as a model talks, and as a flood.

    python tests/benchmarks/streams.py --streams 256,800,2000 --seconds 5 --rounds 5

A paced stream sends an event each 20 ms; of more than 1,000 streams, each 100 ms, since the client is one core as well. When, is
the stub's choice and the same behind every proxy: each stream at a moment of its own, or 40 of them together, which costs less,
since one wake-up serves many. Each event carries the time it was sent; the delay is what the client sees later than that, less
the same on the direct line. Delays and CPU are counted from when all streams have begun; what it costs to begin one is a row of
its own. Boundaries: the share of chunks that arrive as they were sent. A flood is as fast as the slowest takes it. Head of line: how
late the chunks of 64 streams are while 50 requests of 1 MB a second go through the same proxy.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop
from peers import compare
from rig import Part, Running, asking, body, memory_mb, options

CHUNK = re.compile(rb'[0-9A-Fa-f]+\r\ndata: [^\n]*"content": ?"[0-9.]+"[^\n]*\n\n\r\n')
SENT = re.compile(rb'"content": ?"(\d+\.\d{6})"')
LONGEST = 2_000
"""Bytes of an event at most, whatever a proxy makes of it: more need not be kept of what came."""
MANY = 1_000
TOGETHER, BATCH_SECONDS = 40, 0.02
"""Streams that begin at once, that long apart; and those whose events come at the same moment, where not each has its own."""
BESIDE = 50
"""Requests of 1 MB a second beside the streams."""


class Reader(asyncio.Protocol):
    """One client: notes how late each event comes and whether its chunk is the one that was sent. first: of the delays that count."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self.request, self.done, self.rest, self.seen = request, done, b"", 0
        self.delays: list[float] = []
        self.unchanged, self.begun, self.first = 0, False, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.time()
        if not self.begun and b" 200 " not in data[:20]:
            self.transport.close()
            return
        self.begun = True
        data, end = self.rest + data, 0
        for sent in SENT.finditer(data, self.seen):
            self.delays.append(now - float(sent[1]))
            self.seen = sent.end()
        for chunk in CHUNK.finditer(data):
            self.unchanged += 1
            end = chunk.end()
        end = max(end, len(data) - LONGEST)
        self.rest, self.seen = data[end:], max(0, self.seen - end)
        if data.endswith(b"\r\n0\r\n\r\n"):
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True)
class Chunks:
    """What came of a number of streams. start: CPU µs that it takes to begin one, on a new connection. cost: CPU µs a chunk. half,
    late: median and p99 of the delay in ms. unchanged: share of the chunks. rate: chunks a second. memory: KB that an open stream
    costs."""

    start: float
    cost: float
    half: float
    late: float
    unchanged: float
    rate: float
    memory: float


def measure(one: Running, streams: int, count: int, pause: float, beside: int = 0, together: int = 1) -> Chunks:
    """Has `streams` clients read `count` events each, `pause` seconds apart, once all have begun; a pause of 0: from the start.

    Raises RuntimeError when not all arrive in time.
    """
    if pause:
        count += round((BATCH_SECONDS * streams / TOGETHER + 0.5) / pause)
    at_rest = memory_mb(one.pid) if one.pid else 0.0
    before, begun = one.cpu(), time.perf_counter()
    request = one.request(asking(f"{count}@{round(pause * 1e6)}/{together}"))
    readers, memory, all_began = uvloop.run(_visit(one, request, streams, beside, 20 + 4 * count * pause, wait=pause > 0))
    took, used = time.perf_counter() - begun, one.cpu() - all_began
    delays = sorted(delay for reader in readers for delay in reader.delays[reader.first :])
    arrived = sum(len(reader.delays) for reader in readers)
    if arrived < streams * count * 0.99 or not delays:
        raise RuntimeError(f"only {arrived} of {streams * count} events arrived")
    return Chunks(
        start=(all_began - before) / streams * 1e6,
        cost=used / len(delays) * 1e6,
        half=delays[len(delays) // 2] * 1e3,
        late=delays[int(len(delays) * 0.99)] * 1e3,
        unchanged=sum(reader.unchanged for reader in readers) / arrived,
        rate=len(delays) / took,
        memory=(memory - at_rest) * 1024 / streams,
    )


async def _visit(
    one: Running, request: bytes, streams: int, beside: int, patience: float, wait: bool
) -> tuple[list[Reader], float, float]:
    """The readers at the end, the memory with all streams open, and the CPU that was used when all had begun."""
    loop = asyncio.get_running_loop()
    readers, waits, before = list[Reader](), [], one.cpu()
    others = [asyncio.ensure_future(_ask_on(one, beside / 4)) for _ in range(4 if beside else 0)]
    for number in range(streams):
        done = loop.create_future()
        _, reader = await loop.create_connection(lambda done=done: Reader(request, done), "127.0.0.1", one.port)  # type: ignore[misc]
        readers.append(reader)
        waits.append(done)
        if number % TOGETHER == TOGETHER - 1:
            await asyncio.sleep(BATCH_SECONDS)  # as many connects at once as any backlog holds
    if wait:
        while not all(reader.begun for reader in readers) and (patience := patience - BATCH_SECONDS) > 0:
            await asyncio.sleep(BATCH_SECONDS)
        before = one.cpu()
        for reader in readers:
            reader.first = len(reader.delays)
    memory = 0.0
    if one.pid and streams > MANY:
        await asyncio.sleep(0.5)  # the last ones are on their way
        memory = memory_mb(one.pid)
    await asyncio.wait(waits, timeout=patience)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for reader in readers:
        reader.transport.abort()
    return readers, memory, before


async def _ask_on(one: Running, rate: float) -> None:
    """A client that sends a request of 1 MB `rate` times a second on one connection."""
    loop, request = asyncio.get_running_loop(), one.request(body(1_000_000))
    reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
    try:
        due = loop.time()
        while True:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            await (reader.readexactly(int(length[1])) if length else reader.readuntil(b"\r\n0\r\n\r\n"))
            due += 1 / rate
            await asyncio.sleep(due - loop.time())
    finally:
        writer.close()


def paced(one: Running, streams: int, seconds: float) -> dict[str, float]:
    pause = 0.1 if streams > MANY else 0.02
    got = measure(one, streams, max(3, round(seconds / pause)), pause)
    name = f"{streams:,} streams of {round(1 / pause)} chunks/s"
    found = {
        f"added delay p50, {name}, ms ↓": got.half,
        f"added delay p99, {name}, ms ↓": got.late,
        f"{name}: chunks unchanged, % ↑": got.unchanged * 100,
    }
    if one.pid is not None:
        found[f"{name}: CPU µs a chunk ↓"] = got.cost
        found[f"{name}: CPU µs to begin one on a new connection ↓"] = got.start
        if streams > MANY:
            found[f"{name}: KB a stream ↓"] = got.memory
    return found


def in_batches(one: Running, streams: int, seconds: float) -> dict[str, float]:
    if one.pid is None:
        return {}
    pause = 0.02
    got = measure(one, streams, max(3, round(seconds / pause)), pause, together=TOGETHER)
    return {f"{streams:,} streams of {round(1 / pause)} chunks/s, {TOGETHER} at a time: CPU µs a chunk ↓": got.cost}


def flood(one: Running, streams: int, seconds: float) -> dict[str, float]:
    got = measure(one, streams, max(40, int(30_000 * seconds / streams)), 0)
    name = f"{streams:,} floods"
    cost = {} if one.pid is None else {f"{name}: CPU µs a chunk ↓": got.cost}
    return {f"{name}: chunks/s ↑": got.rate} | cost


def head_of_line(one: Running, seconds: float) -> dict[str, float]:
    got = measure(one, 64, max(10, round(seconds / 0.02)), 0.02, BESIDE)
    return {f"chunk p99 beside {BESIDE} requests/s of 1 MB, ms ↓": got.late}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--streams", default="256")
    asked = parser.parse_args()
    compare("streams", parts([int(number) for number in asked.streams.split(",")], asked.seconds), asked)


def parts(numbers: Sequence[int], seconds: float) -> list[Part]:
    each = [
        Part(lambda one, kind=kind, number=number: kind(one, number, seconds), heavy=number > MANY)  # type: ignore[misc]
        for number in numbers
        for kind in (paced, in_batches, flood)
    ]
    return [*each, Part(lambda one: head_of_line(one, seconds))]


if __name__ == "__main__":
    main()
