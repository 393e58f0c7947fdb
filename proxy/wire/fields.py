"""Single fields of a request's body changed in place: every other byte stays as the client wrote it."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.errors import Unreadable
from proxy.wire import slices

OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens")
"""How a request says how long its answer may be; an upstream that knows both takes the first."""
_ASKED = b'{"include_usage":true}'


def with_usage_asked(body: bytes, fields: Mapping[str, bytes]) -> bytes | None:
    """The body of a streamed request that asks for usage; None when the client asks for it already, or cannot be made to.

    fields: the body's own, as raw JSON (`Request.fields`).
    """
    if fields.get("stream") != b"true":
        return None
    given = fields.get("stream_options", b"null")
    if given == b"null":
        return with_field(body, fields, "stream_options", _ASKED)
    if given[:1] != b"{":
        return None
    options = slices.split_object(given)
    if options.get("include_usage") == b"true":
        return None
    return with_field(body, fields, "stream_options", with_field(given, options, "include_usage", b"true"))


def with_less_output(body: bytes, fields: Mapping[str, bytes], most: int) -> bytes | None:
    """The body with its own limits on the answer lowered to `most` tokens; None when none of them is above that."""
    lowered = None
    for name in OUTPUT_LIMITS:
        asked = fields.get(name, b"")
        if most > 0 and asked.isdigit() and len(asked) <= 12 and int(asked) > most:
            lowered = with_field(lowered or body, fields, name, b"%d" % most)
    return lowered


def with_field(body: bytes, fields: Mapping[str, bytes], name: str, value: bytes) -> bytes:
    """An object with one field set: where it stands, else behind all others. Raises Unreadable when it is no object."""
    if name in fields:
        start, end = slices.spans(body)[name]
        return body[:start] + value + body[end:]
    end = body.rstrip().rfind(b"}")
    if end < 0:
        raise Unreadable("not_an_object")
    gap = b"," if fields else b""
    return body[:end] + gap + slices.write_string(name) + b":" + value + body[end:]
