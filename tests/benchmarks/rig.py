"""What the benchmarks share: where programs run and what they cost, the stub upstream, the requests, what a measurement is."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CORES = sorted(os.sched_getaffinity(0))
PROXY_CORE, OTHER_CORE = CORES[0], CORES[-1]
"""The proxy has one core for itself; the stub and the load share the other."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def which(name: str) -> str | None:
    """A program in one of the directories of BENCH_PATH, beside our Python, or where programs are."""
    places = [os.environ.get("BENCH_PATH", ""), str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"]
    return shutil.which(name, path=os.pathsep.join(places))


def family(pid: int) -> list[int]:
    """The process and all its descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                found += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
    return found


def cpu_seconds(pid: int) -> float:
    """Of the whole family. From the scheduler's own count: that of /proc/PID/stat has steps of 10 ms."""
    total = 0
    for member in family(pid):
        with contextlib.suppress(OSError):
            total += sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{member}/task").iterdir())
    return total / 1e9


def memory_mb(pid: int) -> float:
    """Proportional set size of the whole family, in MB."""
    total = 0
    for member in family(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


@dataclass(frozen=True)
class Running:
    """A proxy that answers, or the stub itself. upstream: the stub's port. fields: headers that its requests need. first_answer:
    seconds from its start."""

    name: str
    port: int
    upstream: int
    pid: int | None = None
    fields: tuple[str, ...] = ()
    first_answer: float = 0.0

    def request(self, body: bytes) -> bytes:
        """A chat request on the wire."""
        lines = [
            "POST /v1/chat/completions HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            "Authorization: Bearer sk-bench",
            *self.fields,
            f"Content-Length: {len(body)}",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def cpu(self) -> float:
        """Seconds of CPU so far."""
        return cpu_seconds(self.pid) if self.pid is not None else 0.0


@contextlib.contextmanager
def started(command: Sequence[str], port: int, core: int, environment: dict[str, str] | None = None) -> Iterator[int]:
    """Runs it on one core and waits for its port; yields its process id and ends it at the end."""

    def alone() -> None:
        os.sched_setaffinity(0, {core})

    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, preexec_fn=alone, stdout=output, stderr=output, env={**os.environ, **(environment or {})}, cwd=ROOT
        )
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise RuntimeError(f"{command[0]} did not start: {output.read()[-500:].decode()}")
                time.sleep(0.005)
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def stub() -> Iterator[Running]:
    """The upstream, compiled from stub.c."""
    compiler = which("cc") or which("gcc")
    if compiler is None:
        raise SystemExit("the benchmarks' upstream is written in C: a C compiler (cc or gcc) is needed")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "stub")
        subprocess.run([compiler, "-O2", "-o", program, str(HERE / "stub.c")], check=True)
        port = free_port()
        with started([program, str(port)], port, OTHER_CORE):
            yield Running("(direct)", port, port)


@functools.cache
def body(size: int) -> bytes:
    """A chat request of about this many bytes, as a client sends it again and again."""
    sentence = "The quick brown fox jumps over the lazy dog and opens src/main.py at line 42. "
    messages = [{"role": "system", "content": "You are a careful programmer."}]
    while len(json.dumps(messages)) < size:
        number = len(messages)
        messages.append(
            {"role": "user" if number % 2 else "assistant", "content": f"{number}: " + sentence * min(8, 1 + size // 2000)}
        )
    return json.dumps({"model": "bench-model", "messages": messages}).encode()


def asking(wish: str) -> bytes:
    """The body of a short streaming request that has the stub do something (see stub.c)."""
    return b'{"model":"bench-model","stream":true,"messages":[{"role":"user","content":"stub=%b"}]}' % wish.encode()


def prepare() -> None:
    """The measuring process: on the other core, with as many files as it may have."""
    os.sched_setaffinity(0, {OTHER_CORE})
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


Measure = Callable[[Running], Mapping[str, float]]
"""Figures of one proxy by the name of their row. An arrow in the name says where better is; a name that begins with `added` is
given as it was measured, and shown less what was measured on the direct line in the same round."""


@dataclass(frozen=True)
class Part:
    """One of the things that are measured. once: in the first round only. heavy: not with proxies that it would take minutes.
    proxies_only: it says nothing of the direct line."""

    measure: Measure
    once: bool = False
    heavy: bool = False
    proxies_only: bool = False


def machine() -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?"
    )
    load = os.getloadavg()[0]
    return (
        f"{time.strftime('%Y-%m-%d')}, {model}, {len(CORES)} cores, Python {sys.version.split()[0]}, load {load:.1f} at the start"
    )


def options(told: str | None) -> argparse.ArgumentParser:
    """What every benchmark takes. told: its docstring."""
    parser = argparse.ArgumentParser(description=told, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", help="names with commas between; all that are installed otherwise")
    return parser
