"""The front proxies of `deploy/fronts`, each as it is handed out, before the real proxy: streams pass, and a client that left is seen."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fakes import Received, Reply, ScriptedUpstream, event
from running import running_proxy

FRONTS = Path(__file__).parents[2] / "deploy/fronts"
PLACES = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"))
BODY = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}).encode()


def program(name: str) -> str:
    found = shutil.which(name, path=PLACES)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def replaced(text: str, **changes: str) -> str:
    """With each of these words, which must be there, replaced."""
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


def nginx(folder: Path, port: int, proxy: str) -> list[str]:
    names = ("-keyout", folder / "privkey.pem", "-out", folder / "fullchain.pem", "-subj", "/CN=llm.example.com")
    made = [program("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *map(str, names)]
    subprocess.run(made, check=True, capture_output=True)
    changes = {"/etc/nginx/tls": str(folder), "listen 8443": f"listen 127.0.0.1:{port}", "127.0.0.1:8080": proxy}
    folders = "".join(f"{kind}_temp_path {folder}/{kind}; " for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    changes["http {"] = f"http {{ access_log off; {folders}"
    text = replaced((FRONTS / "nginx.conf").read_text(), **changes)
    (folder / "nginx.conf").write_text(f"daemon off; pid {folder}/nginx.pid; {text}")
    return [program("nginx"), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]


def caddy(folder: Path, port: int, proxy: str) -> list[str]:
    changes = {"llm.example.com {": f"http://127.0.0.1:{port} {{", "127.0.0.1:8080": proxy}
    text = replaced((FRONTS / "Caddyfile").read_text(), **changes)
    (folder / "Caddyfile").write_text(f"{{\n\tadmin off\n\tauto_https off\n}}\n{text}")
    return [program("caddy"), "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]


def envoy(folder: Path, port: int, proxy: str) -> list[str]:
    changes = {
        "address: 0.0.0.0, port_value: 8443": f"address: 127.0.0.1, port_value: {port}",
        "port_value: 8080": f"port_value: {proxy.partition(':')[2]}",
    }
    (folder / "envoy.yaml").write_text(replaced((FRONTS / "envoy.yaml").read_text(), **changes))
    return [
        program("envoy"),
        "-c",
        str(folder / "envoy.yaml"),
        "--log-level",
        "off",
        "--disable-hot-restart",
        "--concurrency",
        "1",
    ]


Front = Callable[[Path, int, str], list[str]]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def connection(front: Front, folder: Path, proxy: str) -> Iterator[http.client.HTTPConnection]:
    """A client's connection to a running front."""
    port = free_port()
    command = front(folder, port, proxy)
    environment = {**os.environ, "HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment)
    trusting = ssl._create_unverified_context()
    client = (
        http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=trusting)
        if front is nginx
        else http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    )
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                client.connect()
                break
            time.sleep(0.05)
        assert process.poll() is None, (folder / "log").read_text()
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait()


class Gated(Sequence[bytes]):
    """The pieces of an answer, of which only the first comes before the gate is opened."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces, self.gate = pieces, threading.Event()

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> bytes:  # type: ignore[override]
        if index:
            self.gate.wait(60)
        return self.pieces[index]


def streaming(pieces: Gated, pause: float = 0.0) -> Callable[[Received], Reply]:
    return lambda _: Reply(headers=(("content-type", "text/event-stream"),), chunks=pieces, pause=pause)


every_front = pytest.mark.parametrize("front", [nginx, caddy, envoy])


@pytest.mark.service
@every_front
def test_a_chunk_arrives_before_the_next_one_is_sent(front: Front, upstream: ScriptedUpstream, tmp_path: Path) -> None:
    pieces = Gated(event({"content": "first"}), event({"content": "second"}), b"data: [DONE]\n\n")
    upstream.script = streaming(pieces)

    with running_proxy("--upstream", upstream.url) as proxy, connection(front, tmp_path, urlsplit(proxy.url).netloc) as client:
        client.request("POST", "/v1/chat/completions", BODY, {"content-type": "application/json"})
        answer = client.getresponse()
        first = answer.readline()
        pieces.gate.set()
        rest = answer.read()

    assert answer.status == 200
    assert b'"first"' in first
    assert b'"second"' not in first
    assert b'"second"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    assert answer.headers["x-compaction"] == "none"


@pytest.mark.service
@every_front
def test_the_upstream_is_let_go_when_the_fronts_client_leaves(front: Front, upstream: ScriptedUpstream, tmp_path: Path) -> None:
    pieces = Gated(*(event({"content": str(number)}) for number in range(400)))
    upstream.script = streaming(pieces, pause=0.05)

    with running_proxy("--upstream", upstream.url) as proxy, connection(front, tmp_path, urlsplit(proxy.url).netloc) as client:
        client.request("POST", "/v1/chat/completions", BODY, {"content-type": "application/json"})
        answer = client.getresponse()
        first = answer.readline()
        client.close()
        answer.close()
        pieces.gate.set()
        while not upstream.broken:
            time.sleep(0.05)

    assert b'"0"' in first
