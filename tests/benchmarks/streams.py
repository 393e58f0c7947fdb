"""Event streams: CPU per chunk, added delay and boundaries, many at once; paced, as a model talks, and as a flood.

    python tests/benchmarks/streams.py --streams 256 --seconds 5

A paced stream sends an event each 20 ms (50 chunks/s). Each event carries the time it was sent; the delay is what the client
sees later than that, so the direct line is measured as well. Boundaries: the share of chunks that arrive as they were sent.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import time
from collections import defaultdict

import uvloop
from rig import OTHER_CORE, PEERS, Peer, cpu_seconds, machine, middle, peer, stub, table

BODY = b'{"model":"bench-model","stream":true,"messages":[{"role":"user","content":"hello"}]}'
CHUNK = re.compile(rb"([0-9a-f]+)\r\ndata: [^\n]*\"t\":([0-9.]+)\}\n\n\r\n")


class Reader(asyncio.Protocol):
    """One client: notes how late each event comes and whether its chunk is the one that was sent."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self.request, self.done, self.rest = request, done, b""
        self.delays: list[float] = []
        self.whole = self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self.request)  # type: ignore[attr-defined]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.time()
        data = self.rest + data
        end = 0
        for found in CHUNK.finditer(data):
            self.whole += 1
            end = found.end()
        for sent in re.finditer(rb'"t":([0-9.]+)\}', data):
            if sent.end() <= max(end, len(data) - 5):
                self.delays.append(now - float(sent[1]))
                self.events += 1
                end = max(end, sent.end())
        self.rest = data[end:]
        if b"0\r\n\r\n" in data[-64:] and b"[DONE]" in data[-200:]:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def visit(port: int, streams: int, count: int, pause: float) -> list[Reader]:
    loop = asyncio.get_running_loop()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Stream: {count}@{pause}\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    readers, waits = [], []
    for number in range(streams):
        done = loop.create_future()
        reader = Reader(request, done)
        await loop.create_connection(lambda reader=reader: reader, "127.0.0.1", port)  # type: ignore[misc]
        readers.append(reader)
        waits.append(done)
        if number % 20 == 19:
            await asyncio.sleep(0.02)  # spread over the pause, as clients are
    await asyncio.gather(*waits)
    return readers


def measure(port: int, pid: int | None, streams: int, count: int, pause: float) -> tuple[float, float, float, float, float]:
    """CPU µs a chunk, delay p50 and p99 in ms, share of chunks unchanged, chunks/s."""
    before, started = cpu_seconds(pid) if pid else 0.0, time.perf_counter()
    readers = uvloop.run(visit(port, streams, count, pause))
    took = time.perf_counter() - started
    used = (cpu_seconds(pid) if pid else 0.0) - before
    delays = sorted(delay for reader in readers for delay in reader.delays)
    events = sum(reader.events for reader in readers)
    if events < streams * count * 0.99:
        raise RuntimeError(f"only {events} of {streams * count} events arrived")
    whole = sum(reader.whole for reader in readers)
    return (
        used / events * 1e6,
        delays[len(delays) // 2] * 1e3,
        delays[int(len(delays) * 0.99)] * 1e3,
        whole / events,
        events / took,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="256")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peers", default=",".join(one.name for one in PEERS))
    options = parser.parse_args()
    os.sched_setaffinity(0, {OTHER_CORE})
    print(f"streams: {machine()}")

    cases = [(int(number), kind) for number in options.streams.split(",") for kind in ("paced", "flood")]
    found: dict[tuple[str, int, str], list[tuple[float, ...]]] = defaultdict(list)
    failed: dict[tuple[str, int, str], str] = {}
    chosen = [None, *(one for one in PEERS if one.name in options.peers.split(","))]
    with stub() as upstream:
        for _ in range(options.rounds):
            for one in chosen:
                _round(one, upstream, cases, options.seconds, found, failed)

    rows = []
    for streams, kind in cases:
        for one in chosen:
            key = (one.name if one else "(direct)", streams, kind)
            if key in failed:
                rows.append([streams, kind, key[0], failed[key], "", "", "", ""])
            elif found[key]:
                cost, half, late, whole, rate = zip(*found[key], strict=True)
                shown = [
                    middle(cost) if one else "–",
                    middle(half),
                    middle(late),
                    f"{statistics.median(whole):.1%}",
                    middle(rate),
                ]
                rows.append([streams, kind, key[0], *shown])
    table(["streams", "kind", "proxy", "CPU µs/chunk", "delay p50 ms", "delay p99 ms", "chunks unchanged", "chunks/s"], rows)


def _round(
    one: Peer | None,
    upstream: int,
    cases: list[tuple[int, str]],
    seconds: float,
    found: dict[tuple[str, int, str], list[tuple[float, ...]]],
    failed: dict[tuple[str, int, str], str],
) -> None:
    for streams, kind in cases:
        count, pause = (int(seconds * 50), 0.02) if kind == "paced" else (max(40, int(100_000 * seconds / 4 / streams)), 0)
        key = (one.name if one else "(direct)", streams, kind)
        try:
            if one is None:
                found[key].append(measure(upstream, None, streams, count, pause))
                continue
            with peer(one, upstream) as running:
                if running is not None:
                    measure(running[0], running[1], min(streams, 32), 20, 0)  # warm
                    found[key].append(measure(*running, streams, count, pause))
        except (RuntimeError, OSError) as error:
            failed[key] = f"failed: {error}"[:60]


if __name__ == "__main__":
    main()
