"""A scripted upstream on a real loopback socket: records what it receives, answers as it is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHARACTERS_A_TOKEN = 3
"""The scripted upstream's own, simple idea of a token: it owes nothing to the counts under test."""

DISCOVERY = frozenset({"/props", "/api/ps", "/info", "/api/v0/models", "/v1/model/info"})
"""What a proxy asks a server that does not state every model's window in its list."""


@dataclass(frozen=True)
class Received:
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)


@dataclass(frozen=True)
class Reply:
    """chunks are sent one by one with `pause` seconds between them; cut: stop without an end after them."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("content-type", "application/json"),)
    chunks: Sequence[bytes] = ()
    pause: float = 0.0
    cut: bool = False
    delay: float = 0.0


def completion(text: str = "All done.", *, model: str = "gpt-4o-2024-08-06", prompt_tokens: int = 11, **message: Any) -> Reply:
    answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text, **message}}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 3, "total_tokens": prompt_tokens + 3},
    }
    return Reply(chunks=[json.dumps(answer).encode()])


def event(delta: dict[str, Any], **fields: Any) -> bytes:
    chunk = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "gpt-4o",
        "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
        **fields,
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def stream(*deltas: dict[str, Any], usage: dict[str, int] | None = None, pause: float = 0.0, cut: bool = False) -> Reply:
    chunks = [event(delta) for delta in deltas]
    if usage is not None:
        chunks.append(event({}, choices=[], usage=usage))
    if not cut:
        chunks.append(b"data: [DONE]\n\n")
    return Reply(headers=(("content-type", "text/event-stream; charset=utf-8"),), chunks=chunks, pause=pause, cut=cut)


def too_long(limit: int, got: int) -> Reply:
    message = (
        f"This model's maximum context length is {limit} tokens. However, your messages resulted in {got} tokens. "
        "Please reduce the length of the messages."
    )
    error = {"message": message, "type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded"}
    return Reply(status=400, chunks=[json.dumps({"error": error}).encode()])


def size(body: dict[str, Any]) -> int:
    """Tokens by the scripted upstream's own idea."""
    return len(json.dumps(body.get("messages"), ensure_ascii=False)) // CHARACTERS_A_TOKEN


Script = Callable[[Received], Reply]


@dataclass
class ScriptedUpstream:
    """window: refuses larger requests as OpenAI does. models: the answer to GET /models."""

    script: Script | None = None
    window: int | None = None
    models: list[dict[str, Any]] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    broken: list[float] = field(default_factory=list)

    @property
    def chats(self) -> list[Received]:
        return [one for one in self.received if one.method == "POST" and "chat/completions" in one.target]

    def reset(self) -> None:
        self.script, self.window, self.models = None, None, []
        self.received.clear()
        self.broken.clear()

    def answer(self, one: Received) -> Reply:
        if one.method == "GET" and one.target.split("?")[0].endswith("/models"):
            return Reply(chunks=[json.dumps({"object": "list", "data": self.models}).encode()])
        if one.method == "GET" and one.target in DISCOVERY:
            return Reply(404, chunks=[b"{}"])
        if self.window is not None and one.method == "POST" and size(one.json) > self.window:
            return too_long(self.window, size(one.json))
        if self.script is not None:
            return self.script(one)
        if one.method == "POST" and b'"stream": true' in one.body.replace(b'"stream":true', b'"stream": true'):
            return stream(
                {"role": "assistant", "content": "All "},
                {"content": "done."},
                usage={"prompt_tokens": 11, "completion_tokens": 2},
            )
        return completion()

    def start(self) -> Iterator[ScriptedUpstream]:
        """Serves while the generator is suspended."""
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                one = Received(self.command, self.path, tuple(self.headers.items()), self._body())
                upstream.received.append(one)
                try:
                    self._reply(upstream.answer(one))
                except OSError:
                    upstream.broken.append(time.monotonic())
                    self.close_connection = True

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_HEAD = _serve

            def _body(self) -> bytes:
                if self.headers.get("transfer-encoding") == "chunked":
                    pieces = []
                    while length := int(self.rfile.readline().split(b";")[0], 16):
                        pieces.append(self.rfile.read(length))
                        self.rfile.readline()
                    self.rfile.readline()
                    return b"".join(pieces)
                return self.rfile.read(int(self.headers.get("content-length") or 0))

            def _reply(self, reply: Reply) -> None:
                time.sleep(reply.delay)
                chunked = len(reply.chunks) != 1 or reply.cut
                self.send_response_only(reply.status)
                for name, value in reply.headers:
                    self.send_header(name, value)
                if chunked:
                    self.send_header("transfer-encoding", "chunked")
                else:
                    self.send_header("content-length", str(len(reply.chunks[0])))
                self.end_headers()
                for chunk in reply.chunks:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk) if chunked else chunk)
                    self.wfile.flush()
                    time.sleep(reply.pause)
                if reply.cut:
                    self.close_connection = True
                elif chunked:
                    self.wfile.write(b"0\r\n\r\n")

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join(5)
