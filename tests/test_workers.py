"""Several workers on one port: any of them answers, a dead one is replaced and told of, all drain together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import read_all

PROGRAM = """
import asyncio, json, os, sys
from dataclasses import dataclass
from proxy.workers import serve_workers

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        if os.path.exists(sys.argv[4] + "/refuse"):
            await send({"type": "lifespan.startup.failed", "message": "no"})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        open(sys.argv[4] + f"/stopped-{os.getpid()}", "w").close()
        await send({"type": "lifespan.shutdown.complete"})
        return
    state = scope["state"]["draining"].active
    await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
    for tick in range(int(scope["path"][1:])):
        await send({"type": "http.response.body", "body": b"tick", "more_body": True})
        await asyncio.sleep(0.05)
    await send({"type": "http.response.body", "body": json.dumps([os.getpid(), state]).encode()})

@dataclass(frozen=True)
class Build:
    def __call__(self):
        return app, app

def gone(pid):
    print("gone", pid, flush=True)

if __name__ == "__main__":
    sys.exit(serve_workers(Build(), 2, host="127.0.0.1", port=int(sys.argv[2]), admin_host="127.0.0.1", admin_port=0,
                           drain_timeout=float(sys.argv[1]), on_started=lambda a: print(json.dumps([os.getpid(), a]), flush=True),
                           on_worker_gone=gone))
"""


class Workers:
    """Two workers under a supervisor, in processes of their own."""

    def __init__(self, folder: Path, drain: float = 5.0, port: int = 0) -> None:
        self.folder = folder
        program = folder / "program.py"
        program.write_text(PROGRAM)
        command = [sys.executable, str(program), str(drain), str(port), "-", str(folder)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def start(self) -> Workers:
        assert self.process.stdout is not None
        _, (proxy, admin) = json.loads(self.process.stdout.readline())
        self.proxy, self.admin = tuple(proxy), tuple(admin)
        return self

    def ask(self, path: str = "/0", port: str = "proxy") -> socket.socket:
        connection = socket.create_connection(getattr(self, port))
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return connection

    def who(self, port: str = "proxy") -> int:
        return int(json.loads(read_all(self.ask("/0", port)).split(b"\r\n")[-4])[0])

    def all(self, count: int = 2) -> set[int]:
        seen: set[int] = set()
        while len(seen) < count:
            try:
                seen.add(self.who())
            except (ConnectionError, IndexError, ValueError):
                continue
        return seen

    def end(self) -> tuple[int, str, str]:
        output, errors = self.process.communicate()
        return self.process.returncode, output, errors


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    started = Workers(tmp_path).start()
    yield started
    if started.process.poll() is None:
        started.process.kill()
    started.process.communicate()


def test_any_worker_answers_on_both_ports_and_a_signal_ends_all(workers: Workers) -> None:
    pids = workers.all()
    admins = {workers.who("admin") for _ in range(40)}

    workers.process.terminate()
    code, output, errors = workers.end()

    assert admins <= pids
    assert (code, errors) == (0, "")
    assert {int(line.split()[1]) for line in output.splitlines()} == pids
    assert {path.name for path in workers.folder.glob("stopped-*")} == {f"stopped-{pid}" for pid in pids}
    assert not any(map(alive, pids))


def test_a_dead_worker_is_told_of_and_replaced(workers: Workers) -> None:
    victim = workers.who()

    os.kill(victim, signal.SIGKILL)
    assert workers.process.stdout is not None
    assert workers.process.stdout.readline() == f"gone {victim}\n"
    successors = workers.all()

    assert victim not in successors
    workers.process.terminate()
    code, _, errors = workers.end()
    assert code == 0
    assert "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_streams_finish_while_the_workers_drain(workers: Workers, number: int) -> None:
    streams = [workers.ask("/20") for _ in range(6)]
    for stream in streams:
        assert stream.recv(10)

    # as a terminal does it: the whole group gets the signal
    os.killpg(workers.process.pid, number) if number == signal.SIGINT else workers.process.send_signal(number)
    answers = [read_all(stream) for stream in streams]

    assert all(answer.endswith(b"\r\n0\r\n\r\n") for answer in answers)
    assert workers.end()[0] == 0


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    workers = Workers(tmp_path, drain=60.0).start()
    pids = workers.all()
    stream = workers.ask("/4000")
    assert stream.recv(10)
    started = time.monotonic()

    workers.process.terminate()
    while True:  # draining has begun once nobody accepts any more
        try:
            workers.ask().close()
        except ConnectionError:
            break
        time.sleep(0.02)
    workers.process.terminate()

    assert not read_all(stream).endswith(b"0\r\n\r\n")
    assert workers.end()[0] == 0
    assert time.monotonic() - started < 30.0
    assert not any(map(alive, pids))


def test_workers_do_not_outlive_a_supervisor_that_was_killed(workers: Workers) -> None:
    pids = workers.all()

    workers.process.kill()
    workers.process.wait()

    while any(map(alive, pids)):
        time.sleep(0.02)


def test_an_app_that_refuses_to_start_ends_all(tmp_path: Path) -> None:
    (tmp_path / "refuse").touch()
    workers = Workers(tmp_path)

    code, _, errors = workers.end()

    assert code == 1
    assert "Traceback" not in errors


def test_a_port_in_use_is_said_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output, errors = Workers(tmp_path, port=port).end()

    assert (code, output, errors) == (1, "", f"compaction-proxy: cannot listen on 127.0.0.1:{port}: address already in use\n")


def test_the_supervisor_needs_no_settings_of_ours(tmp_path: Path) -> None:
    """A sanity check of the program above: it runs only in its main module, as the console command does."""
    done: Any = subprocess.run([sys.executable, "-c", "import proxy.workers"], capture_output=True, check=True)
    assert done.stderr == b""
