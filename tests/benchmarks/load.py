"""Load on a proxy: the same request again and again over a number of connections, by wrk, or by a client of our own without it."""

from __future__ import annotations

import asyncio
import re
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rig import OTHER_CORE, Running, which

LUA = """local f = io.open("{path}", "rb"); wrk.body = f:read("*a"); f:close()
wrk.method = "POST"; {headers}
"""
SLOWEST = 20.0
"""Seconds that a proxy has for its first answer."""


@dataclass(frozen=True)
class Load:
    """answered: requests. rate: of them a second. half: the median latency in ms."""

    answered: int
    rate: float
    half: float


def load(one: Running, body: bytes, connections: int, seconds: float) -> Load:
    """Raises RuntimeError when an answer is not 200, or none comes at all."""
    found = None
    if which("wrk") is not None and seconds >= 1:
        found = _wrk(one, body, connections, round(seconds))
    return found or uvloop.run(_own(one, body, connections, seconds))


def _wrk(one: Running, body: bytes, connections: int, seconds: int) -> Load | None:
    """None when not one answer came in that time."""
    command = ["taskset", "-c", str(OTHER_CORE), which("wrk") or "wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency"]
    fields = ["content-type: application/json", "authorization: Bearer sk-bench", *one.fields]
    headers = "".join(f'wrk.headers["{name}"] = "{value}"; ' for name, _, value in (line.partition(": ") for line in fields))
    with tempfile.TemporaryDirectory() as folder:
        path, script = Path(folder) / "body", Path(folder) / "load.lua"
        path.write_bytes(body)
        script.write_text(LUA.format(path=path, headers=headers))
        output = subprocess.run(
            [*command, "-s", str(script), f"http://127.0.0.1:{one.port}/v1/chat/completions"], capture_output=True, text=True
        ).stdout
    answered = re.search(r"(\d+) requests in", output)
    if "Non-2xx" in output or answered is None:
        raise RuntimeError(f"under load: {output[-300:]}")
    if answered[1] == "0":
        return None
    rate = float(re.search(r"Requests/sec: +([\d.]+)", output)[1])  # type: ignore[index]
    number, unit = re.search(r"50% +([\d.]+)(us|ms|s)", output).groups()  # type: ignore[union-attr]
    return Load(int(answered[1]), rate, float(number) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[unit])


class Client(asyncio.Protocol):
    """A connection that asks anew as soon as it has its answer."""

    def __init__(self, request: bytes) -> None:
        self.request, self.rest, self.sent = request, b"", 0.0
        self.delays: list[float] = []
        self.failure = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.ask()

    def ask(self) -> None:
        self.rest, self.sent = b"", time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.rest += data
        head, mark, body = self.rest.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        if mark and (len(body) >= int(length[1]) if length else body.endswith(b"0\r\n\r\n")):
            if b" 200 " not in head[:20]:
                self.failure = self.rest
                self.transport.close()
                return
            self.delays.append(time.perf_counter() - self.sent)
            self.ask()


async def _own(one: Running, body: bytes, connections: int, seconds: float) -> Load:
    loop, request = asyncio.get_running_loop(), one.request(body)
    begun = time.perf_counter()
    pairs = [await loop.create_connection(lambda: Client(request), "127.0.0.1", one.port) for _ in range(connections)]
    await asyncio.sleep(seconds)
    while not any(client.delays or client.failure for _, client in pairs) and time.perf_counter() < begun + SLOWEST:
        await asyncio.sleep(0.05)
    took = time.perf_counter() - begun
    delays = [delay for _, client in pairs for delay in client.delays]
    failures = [client.failure for _, client in pairs if client.failure]
    for transport, _ in pairs:
        transport.abort()
    if failures or not delays:
        raise RuntimeError(f"under load: {b''.join(failures)[:300]!r}")
    return Load(len(delays), len(delays) / took, statistics.median(delays) * 1e3)
