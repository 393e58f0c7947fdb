"""Several processes on the same two sockets, by uvicorn's own supervisor: one that dies is replaced, and all drain together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from proxy.server import (
    LAST_WORDS_SECONDS,
    POLL_SECONDS,
    Addresses,
    CannotListen,
    Patience,
    Sockets,
    bind,
    flush_output,
    loop_factory,
    prepare_process,
    run_apps,
    tell,
)

STARTUP_SECONDS = 60.0
"""What a worker may take to start: it imports everything anew."""
WORKER_SILENCE_SECONDS = 30
"""A worker that says nothing for so long hangs, and is replaced."""


def serve_workers(
    build: Callable[[], tuple[ASGIApp, ASGIApp]],
    workers: int,
    *,
    host: str,
    port: int,
    admin_host: str,
    admin_port: int,
    drain_timeout: float = 30.0,
    header_timeout: float = 10.0,
    on_started: Callable[[Addresses], None] | None = None,
    on_worker_gone: Callable[[int], None] = lambda _: None,
) -> int:
    """`serve` in several processes on the same two sockets; one that dies is replaced.

    build: makes the two apps in each worker; it must be picklable. on_worker_gone: told, in this process, the id of each
    process that has ended.
    """
    try:
        sockets = bind(host, port), bind(admin_host, admin_port)
    except CannotListen as error:
        sys.stderr.write(f"compaction-proxy: {error}\n")
        return 1
    prepare_process()
    job = _Job(build, Patience(drain_timeout, header_timeout))
    supervisor = _Supervisor(job, workers, sockets, on_worker_gone)
    code = supervisor.serve(lambda: None if on_started is None else tell(on_started, sockets))
    flush_output()
    return code


@dataclass(frozen=True)
class _Job:
    """What a worker is to do."""

    build: Callable[[], tuple[ASGIApp, ASGIApp]]
    patience: Patience


class _Worker(Process):
    """uvicorn's worker process, with both of our sockets in it."""

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket], job: _Job) -> None:
        self._job, self._started = job, False
        super().__init__(config, sockets)

    def target(self, sockets: list[socket.socket] | None = None) -> None:
        """In the new process."""
        assert sockets is not None
        self.parent_conn.close()  # so that ours says when the supervisor is gone
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: the supervisor passes on what it means
        threading.Thread(target=self.always_pong, daemon=True).start()
        prepare_process()
        app, admin = self._job.build()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            code = runner.run(run_apps(app, admin, (sockets[0], sockets[1]), self._job.patience, (signal.SIGTERM,), self._ready))
        flush_output()
        sys.exit(STARTUP_FAILURE if code else 0)

    def _ready(self) -> None:
        self._started = True

    def terminate(self) -> None:
        """Ask it to drain. Unlike uvicorn's, this keeps the pipe: its end tells a worker that the supervisor is gone."""
        if self.pid is not None and self.process.exitcode is None:
            os.kill(self.pid, signal.SIGTERM)

    def pong(self) -> None:
        self.child_conn.recv()
        self.child_conn.send(self._started)

    def always_pong(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            super().always_pong()
        os.kill(os.getpid(), signal.SIGTERM)  # nobody is left to end us


class _Supervisor(Multiprocess):
    """uvicorn's supervisor, which also says who has gone and passes a second signal on."""

    def __init__(self, job: _Job, workers: int, sockets: Sockets, on_gone: Callable[[int], None]) -> None:
        config = uvicorn.Config("", workers=workers, log_config=None, timeout_worker_healthcheck=WORKER_SILENCE_SECONDS)
        self._job, self._on_gone = job, on_gone
        super().__init__(config, list(sockets))

    def serve(self, started: Callable[[], None]) -> int:
        self.init_processes()
        if all(process.wait_until_ready(STARTUP_SECONDS) for process in self.processes):
            started()
            while not self.should_exit.wait(0.2):
                self.handle_signals()
                self.keep_subprocess_alive()
            code = 0
        else:
            code = 1
        for sock in self.sockets:  # else clients would still be let in to wait, by us
            sock.close()
        self.terminate_all()
        self._wait_for_all()
        return code if self._startup_failures == 0 else 1

    def init_processes(self) -> None:
        self.processes = [self._start() for _ in range(self.processes_num)]

    def _start(self) -> _Worker:
        worker = _Worker(self.config, self.sockets, self._job)
        worker.start()
        return worker

    def keep_subprocess_alive(self) -> None:
        for place, worker in enumerate(self.processes):
            if self.should_exit.is_set() or worker.is_alive(timeout=self.config.timeout_worker_healthcheck):
                continue
            worker.kill()
            self._bury(worker)
            if worker.exitcode == STARTUP_FAILURE:  # the next one would fail as well
                self._startup_failures += 1
                self.should_exit.set()
                return
            logging.getLogger("uvicorn.error").warning("worker %s died and is replaced", worker.pid)
            self.processes[place] = self._start()

    def _wait_for_all(self) -> None:
        """Until the workers have drained; what comes as a second signal goes to them."""
        passed_on = len(self.signal_queue)
        deadline = time.monotonic() + self._job.patience.drain + 3 * LAST_WORDS_SECONDS
        while any(worker.process.is_alive() for worker in self.processes) and time.monotonic() < deadline:
            if len(self.signal_queue) > passed_on:
                passed_on = len(self.signal_queue)
                self.terminate_all()
            time.sleep(POLL_SECONDS)
        for worker in self.processes:
            worker.kill()
            self._bury(worker)

    def _bury(self, worker: Process) -> None:
        worker.join()
        if worker.pid is not None:
            self._on_gone(worker.pid)

    _startup_failures = 0

    def handle_hup(self) -> None:
        """A terminal that went away is no reason to do anything."""

    handle_ttin = handle_ttou = handle_hup
