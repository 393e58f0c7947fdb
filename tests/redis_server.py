"""A real Redis (or Valkey) of our own on a free loopback port, where one is installed."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
MISSING = "redis-server is not installed"


@dataclass
class Redis:
    """folder: where it may write, which it is told not to."""

    folder: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Starts it, empty, on the port that it had before."""
        if not self.port:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
        command = [str(PROGRAM), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen([*command, "--dir", str(self.folder)], stdout=quiet, stderr=quiet)
        for _ in range(400):
            with contextlib.suppress(OSError):
                self.say("PING")
                return
            time.sleep(0.025)
        raise RuntimeError("redis-server did not start")

    def say(self, *words: str) -> bytes:
        """The beginning of its answer to a command."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as line:
            line.sendall(" ".join(words).encode() + b"\r\n")
            return line.recv(64)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def running_redis(folder: Path) -> Iterator[Redis]:
    server = Redis(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
