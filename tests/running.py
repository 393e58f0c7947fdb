"""A real proxy process on loopback ports of the system's choice."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class RunningProxy:
    """A proxy that was started with the console command. base_url: to paste into a client; admin: its admin listener."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    base_url: str = ""
    admin: str = ""

    @property
    def url(self) -> str:
        return self.base_url.removesuffix("/v1")


@contextlib.contextmanager
def running_proxy(*flags: str, environment: dict[str, str] | None = None, cwd: str | None = None) -> Iterator[RunningProxy]:
    """Starts `compaction-proxy serve`, waits for its banner, and ends it with SIGTERM."""
    command = [sys.executable, "-m", "proxy", "serve", "--port", "0", "--admin-port", "0", *flags]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("COMPACTION_")}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**clean, "PYTHONUNBUFFERED": "1", **(environment or {})},
        cwd=cwd,
    )
    proxy = RunningProxy(process)
    assert process.stderr is not None
    assert process.stdout is not None
    reader = threading.Thread(target=_collect, args=(process.stderr, proxy.errors), daemon=True)
    reader.start()
    output = threading.Thread(target=lambda: None, daemon=True)
    try:
        for line in process.stdout:
            proxy.lines.append(line.rstrip())
            if found := re.search(r"base_url +(\S+)", line):
                proxy.base_url = found[1]
            if found := re.search(r"metrics +(\S+)/metrics", line):
                proxy.admin = found[1]
                break
        if not proxy.admin:
            process.wait(10)
            reader.join(5)
            raise RuntimeError("the proxy did not start:\n" + "\n".join(proxy.lines + proxy.errors))
        output = threading.Thread(target=_collect, args=(process.stdout, proxy.lines), daemon=True)
        output.start()
        yield proxy
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(5)
        if output.is_alive():
            output.join(5)
        process.stdout.close()
        process.stderr.close()


def send(
    proxy: RunningProxy, body: bytes = b"", path: str = "/v1/chat/completions", method: str = "POST", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """One request on a connection of its own: status, headers, body. Headers are named with `_` for `-`."""
    connection = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=30)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side ends the connection, in whatever way."""
    got = b""
    try:
        while data := connection.recv(65536):
            got += data
    except ConnectionError:
        pass
    connection.close()
    return got


def _collect(pipe: object, lines: list[str]) -> None:
    with contextlib.suppress(ValueError):
        for line in pipe:  # type: ignore[attr-defined]
            lines.append(line.rstrip())
