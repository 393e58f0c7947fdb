"""Memory of the proxy: at rest, with many idle streams open, after many conversations, and over time.

    python tests/benchmarks/memory.py --streams 2000 --conversations 1000 --soak 60

Figures are the proportional set size in MB; a stream's share is what it adds while it is open. The soak sends requests,
a twentieth of which break off, for SOAK minutes and prints how memory, open files and sockets in CLOSE_WAIT develop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import time
from pathlib import Path

import uvloop
from rig import OTHER_CORE, PEERS, machine, memory_mb, peer, stub, table


async def send(port: int, body: bytes, stream: str | None = None, leave: float | None = None) -> None:
    """One request; `leave`: seconds after which the client goes, whatever has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    extra = f"X-Stream: {stream}\r\n" if stream else ""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n{extra}"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    with contextlib.suppress(TimeoutError, ConnectionError):
        await asyncio.wait_for(reader.read(-1), leave)
    writer.close()


def conversation(number: int, turns: int) -> bytes:
    chance = random.Random(number)
    text = lambda: " ".join(f"word{chance.randrange(10_000)}" for _ in range(60))  # noqa: E731
    messages = [{"role": "user" if turn % 2 == 0 else "assistant", "content": text()} for turn in range(turns)]
    return json.dumps({"model": "bench-model", "messages": messages}).encode()


async def idle_streams(port: int, pid: int, count: int) -> tuple[float, float]:
    """Memory before and while `count` streams are open and silent."""
    before = memory_mb(pid)
    body = b'{"model":"bench-model","stream":true,"messages":[{"role":"user","content":"hello"}]}'
    visits = [asyncio.ensure_future(send(port, body, "2@30", leave=20.0)) for _ in range(count)]
    await asyncio.sleep(8.0)
    during = memory_mb(pid)
    for visit in visits:
        visit.cancel()
    await asyncio.gather(*visits, return_exceptions=True)
    return before, during


async def many_conversations(port: int, count: int) -> None:
    gate = asyncio.Semaphore(8)

    async def one(number: int) -> None:
        async with gate:
            for turns in (4, 8, 12):
                await send(port, conversation(number, turns))

    await asyncio.gather(*(one(number) for number in range(count)))


def close_waits(pid: int) -> int:
    inodes = {os.readlink(path)[8:-1] for path in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(path).startswith("socket:")}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(fields[3] == "08" and fields[9] in inodes for fields in lines)


async def soak(port: int, pid: int, minutes: float, rows: list[list[str]]) -> None:
    chance, end, number = random.Random(5), time.monotonic() + minutes * 60, 0
    mark = time.monotonic()
    while time.monotonic() < end:
        leave = chance.uniform(0.0, 0.05) if chance.random() < 0.05 else None
        await asyncio.gather(*(send(port, conversation(chance.randrange(500), 6), "20@0.001", leave) for _ in range(5)))
        number += 5
        await asyncio.sleep(0.1)
        if time.monotonic() >= mark:
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            rows.append([f"soak, {number} requests", f"{memory_mb(pid):.1f}", f"{files} files, {close_waits(pid)} in CLOSE_WAIT"])
            mark += minutes * 60 / 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES")
    options = parser.parse_args()
    os.sched_setaffinity(0, {OTHER_CORE})
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    print(f"memory: {machine()}")
    ours = next(one for one in PEERS if one.name == "compaction-proxy")
    rows: list[list[str]] = []
    with stub() as upstream, peer(ours, upstream) as running:
        assert running is not None
        port, pid = running
        time.sleep(1.0)
        rows.append(["at rest", f"{memory_mb(pid):.1f}", ""])
        uvloop.run(send(port, conversation(0, 4)))
        rows.append(["after one request", f"{memory_mb(pid):.1f}", ""])
        before, during = uvloop.run(idle_streams(port, pid, options.streams))
        share = (during - before) * 1024 / max(1, options.streams)
        rows.append([f"{options.streams} idle streams", f"{during:.1f}", f"{share:.1f} KB a stream"])
        time.sleep(2.0)
        rows.append(["after they left", f"{memory_mb(pid):.1f}", ""])
        uvloop.run(many_conversations(port, options.conversations))
        rows.append([f"after {options.conversations} conversations", f"{memory_mb(pid):.1f}", ""])
        if options.soak:
            uvloop.run(soak(port, pid, options.soak, rows))
    table(["state", "PSS MB", "remark"], rows)


if __name__ == "__main__":
    main()
