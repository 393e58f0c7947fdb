"""Memory of the proxies: at rest, with many open streams, after many conversations, and over time.

    python tests/benchmarks/memory.py --streams 2000 --conversations 1000 --soak 60 --peers compaction-proxy

Figures are the proportional set size in MB; a stream's share is what it adds while it is open and silent. The soak sends requests, a
twentieth of which break off, for that many minutes; its slope is that of the straight line through what was read after the first
sixth, in MB an hour, beside the open files and the sockets in CLOSE_WAIT at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import time
from pathlib import Path

import uvloop
from peers import compare
from rig import Part, Running, asking, body, family, memory_mb, options

READINGS = 60
"""Of the memory during a soak."""


async def _send(one: Running, content: bytes, leave: float | None = None) -> None:
    """One request on a connection of its own; `leave`: seconds after which the client goes, whatever has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
    writer.write(one.request(content).replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
    with contextlib.suppress(TimeoutError, ConnectionError):
        await asyncio.wait_for(reader.read(-1), leave)
    writer.close()


def _conversation(number: int, turns: int) -> bytes:
    chance = random.Random(number)
    text = [" ".join(f"word{chance.randrange(10_000)}" for _ in range(60)) for _ in range(turns)]
    messages = [{"role": "assistant" if turn % 2 else "user", "content": words} for turn, words in enumerate(text)]
    return json.dumps({"model": "bench-model", "messages": messages}).encode()


def _memory(one: Running) -> float:
    assert one.pid is not None
    return memory_mb(one.pid)


def at_rest(one: Running) -> dict[str, float]:
    return {"memory after the first answer, MB ↓": _memory(one), "start to first answer, s ↓": one.first_answer}


def idle_streams(one: Running, count: int) -> dict[str, float]:
    before = _memory(one)
    during = uvloop.run(_hold(one, count))
    return {
        f"memory with {count:,} idle streams, MB ↓": during,
        f"{count:,} idle streams, KB a stream ↓": (during - before) * 1024 / count,
    }


async def _hold(one: Running, count: int) -> float:
    """Memory while that many clients have had the first event of their stream and wait for the next."""
    request, writers = one.request(asking(f"2@{600_000_000}")), []
    for number in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        writer.write(request)
        writers.append((reader, writer))
        if number % 50 == 49:
            await asyncio.sleep(0.02)
    for reader, _ in writers:
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    during = _memory(one)
    for _, writer in writers:
        writer.close()
    await asyncio.sleep(0.5)
    return during


def many_conversations(one: Running, count: int) -> dict[str, float]:
    async def visit() -> None:
        gate = asyncio.Semaphore(8)

        async def talk(number: int) -> None:
            async with gate:
                for turns in (5, 9, 13):
                    await _send(one, _conversation(number, turns))

        await asyncio.gather(*(talk(number) for number in range(count)))

    uvloop.run(visit())
    return {f"memory after {count:,} conversations, MB ↓": _memory(one)}


def soak(one: Running, minutes: float) -> dict[str, float]:
    readings = uvloop.run(_soak(one, minutes * 60))
    kept = readings[len(readings) // 6 :]
    assert one.pid is not None
    return {
        f"soak of {minutes:g} minutes: slope, MB an hour ↓": statistics.linear_regression(*zip(*kept, strict=True)).slope * 3600,
        f"soak of {minutes:g} minutes: memory at its end, MB ↓": readings[-1][1],
        "open files at its end ↓": sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in family(one.pid)),
        "sockets in CLOSE_WAIT at its end ↓": close_waits(one.pid),
    }


async def _soak(one: Running, seconds: float) -> list[tuple[float, float]]:
    chance, begun, readings = random.Random(5), time.monotonic(), list[tuple[float, float]]()
    streamed = asking("20@1000")
    while (now := time.monotonic() - begun) < seconds:
        if now >= len(readings) * seconds / READINGS:
            readings.append((now, _memory(one)))
        contents = [streamed, *(_conversation(chance.randrange(500), 6) for _ in range(3)), body(100_000)]
        leaves = [chance.uniform(0.0, 0.05) if chance.random() < 0.05 else None for _ in contents]
        await asyncio.gather(*(_send(one, content, leave) for content, leave in zip(contents, leaves, strict=True)))
        await asyncio.sleep(0.1)
    return [*readings, (time.monotonic() - begun, _memory(one))]


def close_waits(pid: int) -> int:
    """Sockets of the family whose other side has gone and that nobody closes."""
    inodes = set()
    for member in family(pid):
        for path in Path(f"/proc/{member}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(path).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(fields[3] == "08" and fields[9] in inodes for fields in lines)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES")
    parser.set_defaults(rounds=1)
    asked = parser.parse_args()
    parts = [
        Part(at_rest, proxies_only=True),
        Part(lambda one: idle_streams(one, asked.streams), heavy=True, proxies_only=True),
        Part(lambda one: many_conversations(one, asked.conversations), heavy=True, proxies_only=True),
    ]
    if asked.soak:
        parts.append(Part(lambda one: soak(one, asked.soak), heavy=True, proxies_only=True))
    compare("memory", parts, asked)


if __name__ == "__main__":
    main()
