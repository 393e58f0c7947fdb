"""What the benchmarks share: a stub upstream, the proxies that stand beside ours, their CPU and memory, and tables.

Every peer is optional: one that is not installed is named as missing. A directory with more programs (Envoy, Caddy, wrk)
can be given in BENCH_PATH. Peers run one after another against the same stub, so ratios come from one run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TICK = os.sysconf("SC_CLK_TCK")
CORES = sorted(os.sched_getaffinity(0))
PROXY_CORE, OTHER_CORE = CORES[0], CORES[-1]
"""The proxy has one core for itself; the stub and the load share the other."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def which(name: str) -> str | None:
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
    total = 0
    for member in family(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / TICK


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
class Peer:
    """A proxy by name. command(folder, port, upstream_port) → argv; None when it is not installed here."""

    name: str
    command: Callable[[Path, int, int], list[str] | None]
    environment: dict[str, str] = field(default_factory=dict)


def _ours(folder: Path, port: int, upstream: int, *settings: str) -> list[str]:
    config = folder / "ours.yaml"
    config.write_text('models: {"bench*": {window: 1000000}}\nlog: {level: error}\n' + "\n".join(settings))
    ports = ["--port", str(port), "--admin-port", "0"]
    return [sys.executable, "-m", "proxy", "serve", "--upstream", f"http://127.0.0.1:{upstream}", *ports, "--config", str(config)]


def _nginx(folder: Path, port: int, upstream: int) -> list[str] | None:
    program = which("nginx")
    (folder / "nginx.conf").write_text(
        f"""worker_processes 1; daemon off; error_log /dev/null; pid {folder}/nginx.pid;
events {{ worker_connections 16384; }}
http {{ access_log off; keepalive_requests 1000000000; client_max_body_size 64m; client_body_buffer_size 2m;
  client_body_temp_path {folder}; proxy_temp_path {folder};
  upstream up {{ server 127.0.0.1:{upstream}; keepalive 4096; keepalive_requests 1000000000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096;
    location / {{ proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; proxy_read_timeout 1h; }} }} }}"""
    )
    return [program, "-c", str(folder / "nginx.conf"), "-p", str(folder)] if program else None


def _envoy(folder: Path, port: int, upstream: int) -> list[str] | None:
    program = which("envoy")
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    target = {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": upstream}}}}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "up", "timeout": "0s", "idle_timeout": "0s"}}
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "b",
        "route_config": {"virtual_hosts": [{"name": "b", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
            }
        ],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    limits = {"thresholds": [{"max_connections": 99999, "max_pending_requests": 99999, "max_requests": 99999}]}
    cluster = {
        "name": "up",
        "type": "STATIC",
        "connect_timeout": "5s",
        "circuit_breakers": limits,
        "load_assignment": {"cluster_name": "up", "endpoints": [{"lb_endpoints": [target]}]},
    }
    listener = {"name": "l", "address": address, "filter_chains": [{"filters": filters}]}
    config = {"static_resources": {"listeners": [listener], "clusters": [cluster]}}
    (folder / "envoy.json").write_text(json.dumps(config))
    base = ["--concurrency", "1", "--log-level", "off", "--disable-hot-restart"]
    return [program, "-c", str(folder / "envoy.json"), *base] if program else None


def _caddy(folder: Path, port: int, upstream: int) -> list[str] | None:
    program = which("caddy")
    up = {"handler": "reverse_proxy", "upstreams": [{"dial": f"127.0.0.1:{upstream}"}], "flush_interval": -1}
    server = {"listen": [f"127.0.0.1:{port}"], "routes": [{"handle": [up]}], "automatic_https": {"disable": True}}
    config = {
        "admin": {"disabled": True},
        "logging": {"logs": {"default": {"level": "ERROR"}}},
        "apps": {"http": {"servers": {"b": server}}},
    }
    (folder / "caddy.json").write_text(json.dumps(config))
    return [program, "run", "--config", str(folder / "caddy.json")] if program else None


def _stock(folder: Path, port: int, upstream: int) -> list[str]:
    return [sys.executable, str(HERE / "stock.py"), str(port), str(upstream)]


PEERS = (
    Peer("nginx", _nginx),
    Peer("envoy", _envoy),
    Peer("caddy", _caddy, {"GOMAXPROCS": "1"}),
    Peer("starlette+httpx", _stock),
    Peer("compaction-proxy", _ours),
)


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
            deadline = time.monotonic() + 20
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise RuntimeError(f"{command[0]} did not start: {output.read()[-500:].decode()}")
                time.sleep(0.02)
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def stub() -> Iterator[int]:
    """The upstream; yields its port."""
    port = free_port()
    with started([sys.executable, str(HERE / "stub.py"), str(port)], port, OTHER_CORE):
        yield port


@contextlib.contextmanager
def peer(which_one: Peer, upstream: int) -> Iterator[tuple[int, int] | None]:
    """Port and process id of a running peer; None when it is missing here."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        command = which_one.command(Path(folder), port, upstream)
        if command is None:
            yield None
            return
        with started(command, port, PROXY_CORE, which_one.environment) as pid:
            yield port, pid


def body(size: int, stream: bool = False) -> bytes:
    """A chat request of about this many bytes, as a client sends it again and again."""
    sentence = "The quick brown fox jumps over the lazy dog and opens src/main.py at line 42. "
    messages = [{"role": "system", "content": "You are a careful programmer."}]
    while len(json.dumps(messages)) < size:
        number = len(messages)
        messages.append(
            {"role": "user" if number % 2 else "assistant", "content": f"{number}: " + sentence * min(8, 1 + size // 2000)}
        )
    return json.dumps({"model": "bench-model", "stream": stream, "messages": messages}).encode()


def middle(values: Sequence[float]) -> str:
    """Median and range."""
    if not values:
        return "–"
    low, mid, high = min(values), statistics.median(values), max(values)
    digits = 0 if mid >= 100 else 1 if mid >= 10 else 2
    return f"{mid:,.{digits}f} ({low:,.{digits}f}–{high:,.{digits}f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(str(row[column])) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")


def machine() -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?"
    )
    load = os.getloadavg()[0]
    return (
        f"{time.strftime('%Y-%m-%d')}, {model}, {len(CORES)} cores, Python {sys.version.split()[0]}, load {load:.1f} at the start"
    )
