"""What answers say of their prompt's tokens, taken out or put right in place: every other byte stays as the upstream wrote it."""

from __future__ import annotations

import re

from proxy.errors import Unreadable
from proxy.wire import slices, sse

HELD = 64 * 1024
"""Bytes of one event that are held until its end is there: one with usage and without choices is far shorter."""
COUNTED = ("prompt_tokens", "total_tokens")

_EVENT_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE = re.compile(rb"[^\r\n]*+(?:\r\n|\n|\r|$)")
_MENTIONED = b'"usage"'


def with_more_prompt(answer: bytes, saved: int) -> bytes:
    """A JSON answer (or one chunk of a stream) whose usage counts `saved` prompt tokens more; as it came when it has none."""
    try:
        slices.split_object(answer)
        start, end = slices.spans(answer).get("usage", (0, 0))
        usage = answer[start:end]
        if usage[:1] != b"{":
            return answer
        places = sorted(slices.spans(usage)[name] for name in COUNTED if name in slices.split_object(usage))
    except Unreadable:
        return answer
    for first, last in reversed(places):
        number = usage[first:last]
        if number.isdigit() and len(number) <= 12:
            usage = usage[:first] + b"%d" % (int(number) + saved) + usage[last:]
    return answer[:start] + usage + answer[end:]


def is_usage_only(chunk: bytes) -> bool:
    """Whether a stream's chunk is the one that carries usage and nothing else."""
    try:
        fields = slices.split_object(chunk)
        return fields.get("usage", b"")[:1] == b"{" and slices.split_array(fields.get("choices", b"null")) == []
    except Unreadable:
        return False


class StreamEditor:
    """Feed it an event stream as it comes, in any pieces; it gives back what goes to the client.

    saved: prompt tokens that the usage is to count more. without_usage: the chunk that only carries usage is left out.
    Whole events leave at once; the beginning of one waits for its end, up to `HELD` bytes.
    """

    def __init__(self, *, saved: int = 0, without_usage: bool = False) -> None:
        self._saved, self._without_usage = saved, without_usage
        self._held = b""
        self._passing = False
        self._swallow = False

    def feed(self, piece: bytes) -> bytes:
        if self._swallow and piece:
            piece, self._swallow = piece.removeprefix(b"\n"), False
        if not self._held and not self._passing and _MENTIONED not in piece and piece.endswith((b"\n\n", b"\r\n\r\n")):
            return piece
        data, at, out = self._held + piece, 0, []
        for end in _EVENT_END.finditer(data):
            event = data[at : end.end()]
            kept = event if self._passing or _MENTIONED not in event else self._edited(event)
            # a line's end may be cut in two; the other half belongs to what was left out
            self._swallow = kept is not event and event.endswith(b"\r") and not kept.strip(b"\r\n")
            self._passing, at = False, end.end()
            out.append(kept)
        rest = data[at:]
        if self._passing or len(rest) > HELD:
            self._passing = True
            self._held = rest[len(rest.rstrip(b"\r\n")) :]
            out.append(rest[: len(rest) - len(self._held)])
        else:
            self._held = rest
        return b"".join(out)

    def end(self) -> bytes:
        """What was held back when the stream ended."""
        held, self._held = self._held, b""
        return self._edited(held) if _MENTIONED in held and not self._passing else held

    def _edited(self, event: bytes) -> bytes:
        """One event without the chunk that was not asked for, or with its usage put right; comments in it stay."""
        lines = _LINE.findall(event)
        said = [(place, chunk) for place, line in enumerate(lines) if (chunk := sse.payload(line)) is not None]
        if len(said) != 1:
            return event
        [(place, chunk)] = said
        if self._without_usage and is_usage_only(chunk):
            before = event[: len(event) - len(event.lstrip(b"\r\n"))]
            comments = b"".join(line for line in lines if line.startswith(b":"))
            return before + comments + (lines[-2] if comments and not lines[-2].strip() else b"")
        if self._saved:
            lines[place] = lines[place].replace(chunk, with_more_prompt(chunk, self._saved))
        return b"".join(lines)
