"""Upstreams that the log speaks of and the toxic one does not have: honest, strict, or saying more in their streams."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from bug_reports.judge import parsed, violations
from live.toxic import JSON, Behavior, Exchange, Received, completion

PROMPT, ANSWER = 12, 17
"""What these upstreams report of every stream: near the truth, so that nothing wrong is learned from it."""


def _plain() -> bytes:
    answer = json.loads(completion())
    del answer["usage"]
    return json.dumps(answer).encode()


COMPLETION = _plain()


async def silent(ex: Exchange) -> None:
    """A completion that says nothing of usage, so that no row teaches the next one how to count."""
    await ex.answer(COMPLETION, 200, JSON)


def refusing(status: int, message: str, code: str | None = None) -> Callable[[Exchange], Any]:
    error = {"message": message, "type": "invalid_request_error", "param": "messages", "code": code}

    async def behave(ex: Exchange) -> None:
        await ex.answer(json.dumps({"error": error}, indent=1).encode(), status, JSON)

    return behave


def window_of(tokens: int, bytes_a_token: float) -> Behavior:
    """Refuses what is longer, in OpenAI's words; counts bytes of the messages."""

    async def behave(ex: Exchange) -> None:
        size = int(len(json.dumps(parsed(ex.request.body)["messages"])) / bytes_a_token)
        if size <= tokens:
            return await silent(ex)
        text = f"This model's maximum context length is {tokens} tokens. However, your messages resulted in {size} tokens."
        return await refusing(400, text, "context_length_exceeded")(ex)

    return behave


def reporting(prompt_tokens: int) -> Behavior:
    """A completion with this usage."""

    async def behave(ex: Exchange) -> None:
        answer = json.loads(completion())
        answer["usage"] = {"prompt_tokens": prompt_tokens, "completion_tokens": 1, "total_tokens": prompt_tokens + 1}
        await ex.answer(json.dumps(answer).encode(), 200, JSON)

    return behave


def template(*rules: str) -> Behavior:
    """Refuses what its chat template cannot render; `rules` are those of the judge."""

    async def behave(ex: Exchange) -> None:
        broken = [rule for rule in rules if violations(parsed(ex.request.body)["messages"])[rule]]
        await (refusing(400, f"the template says: {broken[0]}")(ex) if broken else silent(ex))

    return behave


async def no_stream_options(ex: Exchange) -> None:
    if "stream_options" in parsed(ex.request.body):
        return await refusing(400, "unknown field stream_options")(ex)
    return await ex.stream(with_usage())


def chunk(delta: dict[str, Any] | None, index: int = 0, **fields: Any) -> bytes:
    choices = [] if delta is None else [{"index": index, "delta": delta, "finish_reason": None}]
    event = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **fields}
    return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"


USAGE = {"prompt_tokens": PROMPT, "completion_tokens": ANSWER, "total_tokens": PROMPT + ANSWER}
DONE = b"data: [DONE]\n\n"


def with_usage(*deltas: dict[str, Any]) -> list[bytes]:
    """The events of a stream that ends with its usage."""
    said = deltas or ({"role": "assistant", "content": "日本"}, {"content": "語 🙂"}, {"content": "é"})
    return [*(chunk(delta) for delta in said), chunk(None, usage=USAGE), DONE]


def spelled(change: Callable[[bytes], bytes] = bytes, cut: Callable[[bytes], Sequence[bytes]] = lambda data: [data]) -> Behavior:
    """A stream with usage, its bytes changed and cut."""

    async def behave(ex: Exchange) -> None:
        await ex.stream(cut(change(b"".join(with_usage()))))

    return behave


async def usage_beside_choices(ex: Exchange) -> None:
    await ex.stream([chunk({"content": "a"}), chunk({"content": ""}, usage=USAGE), DONE])


async def tool_call_fragments(ex: Exchange) -> None:
    def part(index: int, **function: str) -> bytes:
        return chunk({"tool_calls": [{"index": index, "function": function}]})

    pieces = [part(n, name=f"f{n}", arguments="") for n in range(2)]
    pieces += [part(n % 2, arguments=text) for n, text in enumerate(['{"a"', '{"b"', ":1", ":2", "}", "}"])]
    await ex.stream([*pieces, chunk(None, usage=USAGE), DONE])


async def two_choices(ex: Exchange) -> None:
    await ex.stream([chunk({"content": str(n)}, n % 2) for n in range(6)] + [chunk(None, usage=USAGE), DONE])


async def compressed_stream(ex: Exchange) -> None:
    packer = zlib.compressobj(wbits=31)
    await ex.start_stream(b"content-encoding: gzip")
    for piece in with_usage():
        await ex.chunk(packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH))
    await ex.chunk(packer.flush())
    await ex.end_stream()


async def compressed_completion(ex: Exchange) -> None:
    answer = json.dumps({**json.loads(COMPLETION), "usage": USAGE}).encode()
    await ex.answer(gzip.compress(answer), 200, JSON, b"content-encoding: gzip")


async def unending(ex: Exchange) -> None:
    """A head, then nothing: it ends only when the peer leaves."""
    await ex.start_stream()
    await asyncio.Event().wait()


async def never(ex: Exchange) -> None:
    """Not even a head."""
    await asyncio.Event().wait()


async def pausing(ex: Exchange) -> None:
    """A first event, a pause, the rest."""
    first, *rest = with_usage()
    await ex.start_stream()
    await ex.chunk(first)
    await asyncio.sleep(1.0)
    for piece in rest:
        await ex.chunk(piece)
    await ex.end_stream()


def field(received: Received, name: str) -> str | None:
    """A header as the upstream got it."""
    value = received.header(name.encode())
    return None if value is None else value.decode("latin-1")
