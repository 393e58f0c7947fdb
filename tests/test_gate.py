"""No web page from elsewhere uses a proxy that listens on this machine only; the programs of this machine all do."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from builders import chat, user
from fakes import ScriptedUpstream
from hypothesis import given
from hypothesis import strategies as st
from running import RunningProxy, read_all, running_proxy, send

from proxy.app import build_app
from proxy.config import load
from proxy.endpoints import Proxy
from proxy.gate import Gate, Gated, is_loopback

CHROMIUM = shutil.which("chromium")
BROWSES = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
SHOWS = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
HERE = "127.0.0.1:8080"


def refusal(gate: Gate, fields: dict[str, str]) -> str | None:
    return gate.refusal([(b"accept", b"*/*"), *((name.encode(), value.encode("latin-1")) for name, value in fields.items())])


PASSES = {
    "curl, an SDK": {"host": HERE},
    "by name": {"host": "localhost:8080"},
    "by name, in capitals and with its dot": {"host": "LocalHost.:8080"},
    "below localhost": {"host": "llm.localhost"},
    "IPv6": {"host": "[::1]:8080"},
    "an address that is forwarded to us": {"host": "192.168.1.5:8080"},
    "out of a container": {"host": "host.docker.internal:8080"},
    "no Host, as HTTP/1.0 allows": {},
    "a page of this machine": {"host": HERE, "origin": "http://localhost:3000", **BROWSES},
    "a page of this machine, by address": {"host": HERE, "origin": "https://127.0.0.1:3000", **BROWSES},
    "a page of this machine, by IPv6": {"host": HERE, "origin": "http://[::1]:3000", **BROWSES},
    "Tauri on Windows": {"host": HERE, "origin": "http://tauri.localhost", **BROWSES},
    "Tauri elsewhere": {"host": HERE, "origin": "tauri://localhost", **BROWSES},
    "Tauri, sent by its own HTTP client": {"host": HERE, "origin": "null"},
    "Obsidian": {"host": HERE, "origin": "app://obsidian.md", **BROWSES},
    "Obsidian on a telephone": {"host": HERE, "origin": "capacitor://localhost", **BROWSES},
    "Electron": {"host": HERE, "origin": "file://", **BROWSES},
    "Electron without web security": {"host": HERE, **BROWSES},
    "VS Code's webviews": {"host": HERE, "origin": "vscode-webview://1abc", **BROWSES},
    "VS Code's window": {"host": HERE, "origin": "vscode-file://vscode-app", **BROWSES},
    "an extension": {"host": HERE, "origin": "chrome-extension://abcdefgh", **BROWSES},
    "a link to the figures": {"host": HERE, "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
    "the address bar": {"host": HERE, "sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
    "a configured name": {"host": "llm.example.com"},
    "a page of a configured name": {"host": "llm.example.com", "origin": "https://llm.example.com", **BROWSES},
    "a name below a configured one": {"host": "a.b.example.org:8443"},
}
REFUSED = {
    "a name that was made to point here": {"host": "evil.example:8080"},
    "the same, its page being same-origin": {"host": "evil.example:8080", "origin": "http://evil.example:8080"},
    "a name that begins like ours": {"host": "localhost.evil.example"},
    "a name that ends like ours": {"host": "evillocalhost"},
    "a name that begins like an address": {"host": "127.0.0.1.evil.example"},
    "a user before the name": {"host": "localhost:8080@evil.example"},
    "what no name is": {"host": "\xff\x00"},
    "only what is below a configured name": {"host": "example.org"},
    "a page from elsewhere": {"host": HERE, "origin": "https://evil.example", **BROWSES},
    "a page from elsewhere that wants no answer": {"host": HERE, "origin": "http://evil.example:8080", **SHOWS},
    "a page of another address": {"host": HERE, "origin": "http://192.168.1.5:3000"},
    "a page that begins like ours": {"host": HERE, "origin": "http://localhost.evil.example"},
    "a page in a sandbox": {"host": HERE, "origin": "null", **SHOWS},
    "a page in a sandbox, by an address that browsers do not trust": {"host": "0.0.0.0:8080", "origin": "null"},
    "what no origin is": {"host": HERE, "origin": "evil.example"},
    "an empty origin": {"host": HERE, "origin": ""},
    "a picture on a page from elsewhere": {"host": HERE, **SHOWS},
}
GATE = Gate(("llm.example.com", "*.example.org"))


@pytest.mark.parametrize("fields", PASSES.values(), ids=PASSES.keys())
def test_programs_and_pages_of_this_machine_pass(fields: dict[str, str]) -> None:
    assert refusal(GATE, fields) is None


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED.keys())
def test_a_page_from_elsewhere_is_refused_and_told_the_setting(fields: dict[str, str]) -> None:
    said = refusal(GATE, fields)

    assert said is not None
    assert "server.allowed_hosts (COMPACTION_SERVER__ALLOWED_HOSTS)" in said


@given(st.lists(st.tuples(st.sampled_from([b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode"]), st.binary(max_size=30))))
def test_whatever_the_headers_hold_there_is_a_decision(headers: list[tuple[bytes, bytes]]) -> None:
    assert isinstance(GATE.refusal(headers), str | None)


def test_pages_without_an_origin_can_be_allowed_by_that_word() -> None:
    assert refusal(Gate(("null",)), {"host": HERE, "origin": "null", **SHOWS}) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "llm.localhost"])
def test_loopback_is_known(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.5", "127.0.0.1.example.com", "my-laptop"])
def test_what_others_may_reach_is_no_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("server", "gated"),
    [
        ({}, (True, True)),
        ({"host": "0.0.0.0"}, (False, True)),
        ({"host": "::", "admin_host": "::"}, (False, False)),
        ({"host": "0.0.0.0", "allowed_hosts": ["llm.example.com"]}, (True, True)),
        ({"allowed_hosts": ["*"]}, (False, False)),
    ],
)
def test_only_a_listener_on_loopback_or_with_names_of_its_own_has_a_gate(
    server: dict[str, object], gated: tuple[bool, bool]
) -> None:
    built = build_app(load({"server": server}, {}))

    inner = built.proxy._proxy  # type: ignore[attr-defined]
    assert (isinstance(inner, Gated), isinstance(built.admin, Gated)) == gated
    assert isinstance(inner, Gated | Proxy)  # nothing else stands between


def guarded(upstream: ScriptedUpstream, allowed: str = "", *flags: str) -> AbstractContextManager[RunningProxy]:
    """A proxy that asks its upstream nothing of its own."""
    environment = {"COMPACTION_COMPACTION__DISCOVERY": "false", "COMPACTION_SERVER__ALLOWED_HOSTS": allowed}
    return running_proxy("--upstream", upstream.url, *flags, environment=environment)


@pytest.fixture(scope="module")
def proxy(_scripted: ScriptedUpstream) -> Iterator[RunningProxy]:
    with guarded(_scripted, "llm.example.com, *.example.org") as started:
        yield started


def answered(url: str, fields: dict[str, str], path: str = "/v1/chat/completions") -> bytes:
    """What a request with just these headers gets, on a socket of its own."""
    place = urlsplit(url)
    body = chat([user("hi")]) if path.startswith("/v1") else b""
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    version = "1.1" if "host" in fields else "1.0"
    method = f"POST {path} HTTP/{version}\r\ncontent-length: {len(body)}\r\n" if body else f"GET {path} HTTP/{version}\r\n"
    with socket.create_connection((place.hostname, place.port)) as connection:
        connection.sendall(f"{method}{head}connection: close\r\n\r\n".encode("latin-1") + body)
        return read_all(connection)


@pytest.mark.parametrize("fields", PASSES.values(), ids=PASSES.keys())
def test_what_passes_reaches_the_upstream(proxy: RunningProxy, upstream: ScriptedUpstream, fields: dict[str, str]) -> None:
    answer = answered(proxy.url, fields)

    assert answer.split(b" ")[1] == b"200"
    assert b"access-control" not in answer.lower()  # what pages may read is the upstream's to say
    assert len(upstream.chats) == 1
    assert answered(proxy.admin, fields, "/healthz").split(b" ")[1] == b"200"


@pytest.mark.parametrize("fields", [one for name, one in REFUSED.items() if name != "what no name is"])
def test_what_is_refused_reaches_nothing(proxy: RunningProxy, upstream: ScriptedUpstream, fields: dict[str, str]) -> None:
    head, _, body = answered(proxy.url, fields).partition(b"\r\n\r\n")

    assert head.split(b" ")[1] == b"403"
    assert b"x-compaction-error: 1" in head
    assert b"access-control" not in head.lower()
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] in ("host_not_allowed", "origin_not_allowed")
    assert "server.allowed_hosts" in error["message"]
    assert b"evil" not in body
    assert upstream.received == []
    for path in ("/metrics", "/stats", "/healthz"):
        assert answered(proxy.admin, fields, path).split(b" ")[1] == b"403"


def test_a_question_before_a_request_from_elsewhere_is_refused_too(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    asked = {"origin": "https://evil.example", "access_control_request_method": "POST"}

    status, headers, _ = send(proxy, method="OPTIONS", **asked)

    assert status == 403
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert upstream.received == []


def test_refusals_are_counted_and_each_kind_is_logged_once(upstream: ScriptedUpstream) -> None:
    with guarded(upstream) as started:
        for _ in range(3):
            assert send(started, chat([user("hi")]), origin="https://evil.example")[0] == 403
            assert send(started, chat([user("hi")]), host="evil.example")[0] == 403
        metrics = answered(started.admin, {"host": "localhost"}, "/metrics").decode()

    (counted,) = [line for line in metrics.splitlines() if line.startswith("compaction_requests_total") and 'code="403"' in line]
    assert counted.endswith(" 6.0")
    logged = [json.loads(line) for line in started.errors if "a request was refused" in line]
    assert [line["origin"] or line["host"] for line in logged] == ["https://evil.example", "evil.example"]


def test_who_listens_for_others_serves_them_by_any_name(upstream: ScriptedUpstream) -> None:
    with guarded(upstream, "", "--host", "0.0.0.0") as started:
        answers = [
            answered(started.url, {"host": "llm.example.com"}),
            answered(started.url, {"host": HERE, "origin": "https://example.com"}),
        ]

    assert [answer.split(b" ")[1] for answer in answers] == [b"200", b"200"]


# --- a real browser -------------------------------------------------------------------------------------------------

ATTACKS = """<body><script>
const to = '%(target)s/v1/chat/completions', body = '{"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}';
const quietly = promise => promise.then(() => 0, () => 0);
const framed = html => new Promise(done => {
  const frame = document.createElement('iframe');
  frame.sandbox = 'allow-scripts allow-forms';
  frame.srcdoc = html;
  addEventListener('message', done, {once: true});
  document.body.append(frame);
});
onload = async () => {
  await quietly(fetch(to, {method: 'POST', mode: 'no-cors', body}));
  await quietly(fetch(to, {method: 'POST', body}));
  await quietly(fetch(to, {method: 'POST', headers: {'content-type': 'application/json'}, body}));
  await quietly(fetch('%(target)s/v1/models'));
  await new Promise(done => { const image = new Image(); image.onload = image.onerror = done; image.src = '%(target)s/v1/models'; });
  await framed(`<script>fetch('${to}', {method: 'POST', mode: 'no-cors', body: '${body}'})
    .then(() => 0, () => 0).then(() => parent.postMessage('done', '*'))<\\/script>`);
  await quietly(fetch('%(page)s/done', {mode: 'no-cors'}));
};
</script>"""


class Pages:
    """A web server whose page tries what pages can, and which is told when it has."""

    def __init__(self) -> None:
        self.target, self.done = "", threading.Event()
        pages = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                html = ATTACKS % {"target": pages.target, "page": pages.url}
                body = b"" if self.path == "/done" else html.encode()
                self.send_response(200)
                self.send_header("content-type", "text/html")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                if self.path == "/done":
                    pages.done.set()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def start(self) -> Iterator[Pages]:
        thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        thread.start()
        yield self
        self.server.shutdown()
        self.server.server_close()
        thread.join()


@pytest.fixture
def pages() -> Iterator[Pages]:
    yield from Pages().start()


def browse(pages: Pages, name: str, target: str, profile: Path) -> None:
    """Opens the page under that name, aimed at that URL, and waits until it has tried everything."""
    assert CHROMIUM is not None
    pages.target = target
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    command = [CHROMIUM, *flags, "--host-resolver-rules=MAP *.example 127.0.0.1", f"--user-data-dir={profile}"]
    url = pages.url.replace("127.0.0.1", name)
    process = subprocess.Popen([*command, url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while not pages.done.wait(0.5):
            assert process.poll() is None, "the browser has ended before it was done"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.mark.service
@needs_browser
def test_a_browser_sends_nothing_through_for_a_page_from_elsewhere(
    upstream: ScriptedUpstream, pages: Pages, tmp_path: Path
) -> None:
    with guarded(upstream) as started:
        browse(pages, "evil.example", started.url, tmp_path)

        assert upstream.received == []


@pytest.mark.service
@needs_browser
def test_a_browser_sends_nothing_through_to_a_name_that_was_made_to_point_here(
    upstream: ScriptedUpstream, pages: Pages, tmp_path: Path
) -> None:
    with guarded(upstream) as started:
        # to the browser the proxy is now a part of the page's own site
        browse(pages, "evil.example", started.url.replace("127.0.0.1", "evil.example"), tmp_path)

        assert upstream.received == []


@pytest.mark.service
@needs_browser
def test_a_browser_sends_what_a_page_of_this_machine_asks(upstream: ScriptedUpstream, pages: Pages, tmp_path: Path) -> None:
    with guarded(upstream) as started:
        browse(pages, "localhost", started.url, tmp_path)

    assert [one.method for one in upstream.received] == ["POST", "POST", "OPTIONS", "GET"]  # not what hides its origin


@pytest.mark.service
@needs_browser
def test_without_the_gate_the_page_would_have_got_through(upstream: ScriptedUpstream, pages: Pages, tmp_path: Path) -> None:
    with guarded(upstream, "*") as started:
        browse(pages, "evil.example", started.url, tmp_path)

    assert [one.method for one in upstream.received] == ["POST", "POST", "OPTIONS", "GET", "GET", "POST"]
