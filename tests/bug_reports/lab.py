"""A running proxy between a raw client and an upstream that does as it is told, and what passed on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bug_reports.judge import worse
from bug_reports.rows import KEY, Request
from live.toxic import Behavior, Received, Toxic, _find
from live.toxic import Exchange as Toxicity
from running import RunningProxy

OURS = re.compile(r"^x-compaction")
PATIENCE = 60.0
"""Seconds after which a client's socket gives up, so that a hang is a failure and not the end of the run."""


@dataclass(frozen=True)
class Answer:
    """What came back, undone of its framing. clean: it ended as its framing says that it ends. raw: as it came."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    clean: bool
    raw: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def outcome(self) -> str | None:
        return self.header("x-compaction")

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def tokens(self) -> tuple[int, int] | None:
        before, after = self.header("x-compaction-tokens-before"), self.header("x-compaction-tokens-after")
        return None if before is None or after is None else (int(before), int(after))


def read_answer(raw: bytes) -> Answer:
    """Undoes one HTTP/1.1 answer; informational ones before it are skipped."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    status = int(head[9:12]) if head[9:12].isdigit() else 0
    if 100 <= status < 200 and status != 101:
        return read_answer(rest)
    lines = [line.split(":", 1) for line in head.decode("latin-1").split("\r\n")[1:]]
    headers = tuple((name.lower(), value.strip()) for name, value in lines)
    fields = dict(headers)
    if fields.get("transfer-encoding") == "chunked":
        body, clean = _dechunked(rest)
    elif "content-length" in fields:
        body, clean = rest, len(rest) == int(fields["content-length"])
    else:
        body, clean = rest, status in (204, 304)
    return Answer(status, headers, body, clean, raw)


def _dechunked(data: bytes) -> tuple[bytes, bool]:
    pieces, at = [], 0
    while (end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:end].split(b";")[0] or b"0", 16)
        if size == 0:
            return b"".join(pieces), True
        piece = data[end + 2 : end + 2 + size]
        pieces.append(piece)
        if len(piece) < size:
            break
        at = end + 2 + size + 2
    return b"".join(pieces), False


@dataclass
class Exchanged:
    """One request and all that became of it. received: what reached the upstream; sent: the upstream's own last answer."""

    request: Request
    answer: Answer
    received: list[Received]
    sent: Answer | None
    turns: bool = False

    @property
    def untouched(self) -> bool:
        return len(self.received) == 1 and self.received[0].body == self.request.body

    @property
    def forwarded(self) -> bytes:
        assert len(self.received) == 1, f"{len(self.received)} requests reached the upstream"
        return self.received[0].body

    @property
    def messages(self) -> list[Any]:
        """As they reached the upstream."""
        found = json.loads(self.forwarded)["messages"]
        assert isinstance(found, list)
        return found


@dataclass
class Lab:
    """proxy: a real process. upstream: answers as told. turns: whether the proxy knows that its template wants turns."""

    proxy: RunningProxy
    upstream: Toxic
    sent: list[list[bytes]] = field(default_factory=list)
    turns: bool = False

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.proxy.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def answers(self, behavior: str | Behavior) -> None:
        """What the upstream does from now on."""
        behave, argument = _find(behavior)

        async def recorded(exchange: Toxicity) -> None:
            plain, written = exchange.send, []
            self.sent.append(written)

            async def send(*pieces: bytes) -> None:
                written.extend(pieces)
                await plain(*pieces)

            exchange.send, exchange.argument = send, argument  # type: ignore[method-assign]
            await behave(exchange)

        self.upstream.requests.clear()
        self.sent.clear()
        self.upstream.behavior = recorded

    def send(self, request: Request, behavior: str | Behavior = "ok") -> Exchanged:
        """One request on a connection of its own, up to its end."""
        self.answers(behavior)
        answer = read_answer(self.bytes_back(request.raw()))
        sent = read_answer(b"".join(self.sent[-1])) if self.sent else None
        return Exchanged(request, answer, list(self.upstream.requests), sent, self.turns)

    def bytes_back(self, data: bytes) -> bytes:
        """All that the proxy says to these bytes until it closes the connection."""
        with self.connection() as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(data)
            return received_to_end(client)

    @contextlib.contextmanager
    def connection(self) -> Iterator[socket.socket]:
        with socket.create_connection(self.address, timeout=PATIENCE) as client:
            yield client

    def admin(self, path: str) -> str:
        with urllib.request.urlopen(self.proxy.admin + path, timeout=PATIENCE) as answer:
            return str(answer.read().decode())

    def metric(self, line: str) -> float:
        """The value of a series, spelled as it is in the exposition; 0 while it is missing."""
        found = re.search(rf"^{re.escape(line)} (\S+)$", self.admin("/metrics"), re.M)
        return float(found[1]) if found else 0.0

    @property
    def told(self) -> str:
        """All that the proxy has said to its operator."""
        return "\n".join([*self.proxy.lines, *self.proxy.errors])

    def memory(self) -> int:
        """Bytes that the proxy's process holds."""
        with open(f"/proc/{self.proxy.process.pid}/status", encoding="ascii") as status:
            found = re.search(r"^VmRSS:\s+(\d+) kB", status.read(), re.M)
        assert found is not None
        return int(found[1]) * 1024


FORBIDDEN = (
    *(KEY, "SECRET-", "CANARY", "RULE-77", "KEY-GOAL", "PIN-4711", "log line 12345", "work work", "explain B"),
    *("Traceback", "BEGIN PRIVATE"),
)
"""What no log line, metric or answer of ours may hold: credentials, words of messages, tracebacks."""


def leaks(text: str) -> list[str]:
    return [word for word in FORBIDDEN if word in text]


def received_to_end(client: socket.socket) -> bytes:
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(256 * 1024):
            pieces.append(piece)
    return b"".join(pieces)


def until(condition: Any) -> None:
    """Waits until it is true; the suite's own limit ends a wait in vain."""
    while not condition():
        time.sleep(0.01)


def holds(exchanged: Exchanged) -> None:
    """What is true of every exchange with an upstream that can be reached, whatever was sent."""
    request, answer = exchanged.request, exchanged.answer
    assert answer.status, "no answer at all"
    assert answer.header("x-compaction-error") is None, f"an error of ours: {answer.status} {answer.body[:200]!r}"
    assert exchanged.sent is not None
    assert answer.status == exchanged.sent.status
    assert answer.outcome != "failed", "something of ours raised"
    assert KEY.encode() not in answer.raw
    assert answer.clean == exchanged.sent.clean
    if answer.clean:
        assert answer.body == exchanged.sent.body
    mine = [(k, v) for k, v in answer.headers if k not in FRAMING and not OURS.match(k)]
    assert mine == [(k, v) for k, v in exchanged.sent.headers if k not in FRAMING]
    for one in exchanged.received:
        assert not [name for name, _ in one.headers if name.startswith(b"x-compaction")]
    if answer.outcome in ("applied", "reused"):
        resumed = answer.outcome == "reused" or "checkpoint" in (answer.header("x-compaction-layers") or "")
        faults = worse(request.body, exchanged.forwarded, turns=exchanged.turns, resumed=resumed)
        assert faults == [], faults
        assert answer.tokens is not None
        before, after = answer.tokens
        assert after < before
        assert one_content_length(exchanged.received[0]) == len(exchanged.forwarded)
    else:
        assert exchanged.untouched, f"{len(exchanged.received)} requests, changed although {answer.outcome}"
        assert answer.tokens is None or answer.tokens[0] == answer.tokens[1] or answer.outcome == "shadow"


FRAMING = frozenset({"connection", "content-length", "transfer-encoding", "keep-alive"})


def one_content_length(received: Received) -> int:
    lengths = [value for name, value in received.headers if name == b"content-length"]
    assert len(lengths) == 1
    return int(lengths[0])


@contextlib.contextmanager
def toxic_upstream() -> Iterator[Toxic]:
    """An upstream that misbehaves on request, on an event loop of its own thread."""
    started, ended = threading.Event(), asyncio.Event()
    held: list[Any] = []

    async def serve() -> None:
        async with Toxic("ok") as upstream:
            held.extend((upstream, asyncio.get_running_loop()))
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    started.wait()
    upstream, loop = held
    try:
        yield upstream
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
