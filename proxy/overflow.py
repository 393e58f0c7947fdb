"""Does this answer say that the request was too long?  Refusals of some thirty upstreams, read into one shape.

Every upstream words it in its own way, and changes the words. So nothing here knows whole messages: a sentence must
*say* that something does not fit, and then each number in the text is given its meaning by the words beside it. All of
it is plain searching in bounded text: no answer, however hostile, costs more than a few milliseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["prompt", "max_tokens", "tpm"]


@dataclass(frozen=True, slots=True)
class Overflow:
    """What a refusal says, in tokens; None where it does not say.

    kind: `prompt` is too long (compact and retry); `max_tokens` is too much while the prompt fits (never compact for it);
    `tpm` is a cap on tokens a minute that one request exceeds (passed on). limit: what the upstream takes: a window, or
    with of_prompt a limit on the prompt alone. input, output: what it counted. exact: it stated the limit, and `input` is
    a count; not so when it is an estimate or a lower bound: never calibrate on that.
    """

    kind: Kind
    limit: int | None
    input: int | None
    output: int | None
    exact: bool
    of_prompt: bool = False


# ---------------------------------------------------------------- words


# Codes and types that mean nothing else, wherever they stand in the body.
_CODES: Final = (
    *("context_length_exceeded", "exceed_context_size", "context_window_exceeded", "contextwindowexceeded", "context_exceeded"),
    *("contextlengthexceeded", "max_prompt_tokens_exceeded", "input_too_long", "prompt_too_long", "tokens_limit_reached"),
    *("code: 1261 ", "code: 5021 "),  # Zhipu, Cloudflare
)

# Turns of phrase that mean nothing else.
_SAYINGS: Final = (
    *("maximum context length is", "maximum context length of", "maximum prompt length is", "prompt exceeds", "prompt too long"),
    *("context overflow", "context the overflows", "truncate prompt", "超长", "长度超", "tokens超"),
    *("reduce the length of the messages", "reduce the length of the prompt", "reduce the length of the input"),
    *("reduce the length of either", "reduce your prompt", "request body too large for"),
)

# What must be in one sentence together with one of the verbs below.
_SUBJECTS: Final = (
    *("context length", "context window", "context size", "context limit", "model length", "prompt length", "input length"),
    *("model token limit", "input token", "prompt token", "prompt_tokens", "token count", "requested tokens", "max_seq_len"),
    *("max_model_len", "n_ctx", "inputs must", "inputs tokens", "prompt is", "prompt (", "input is", "input (", "input prompt"),
    *("total tokens", "tokens in the prompt", "上下文", "输入长度", "输入token"),
)
_VERBS: Final = (
    *("exceed", "too long", "too large", "longer than", "greater than", "larger than", "less than", "overflow", "must be <="),
    *("should be [", ">=", "cannot be more", "does not fit", "超过", "超出"),
)

# Who says one of these speaks of something else, unless a code or a saying is there too.
_ELSEWHERE: Final = (
    *("throttl", "rate limit", "rate_limit", "quota", "too many requests", "please wait", "per min", "per day", "per second"),
    *("string_above_max_length", "number of images", "number of tools", "timeout", "timed out"),
)

# Words that make a count an estimate or a bound.
_HEDGES: Final = ("requested about", "contains at least", "upper bound for", "estimated number", "approximately")

Meaning = Literal["limit", "prompt limit", "input", "part", "output", "total", "nothing"]

# What the words right after a number make of it; the first that fits.
_AFTER: Final[tuple[tuple[Meaning, tuple[str, ...]], ...]] = (
    ("nothing", ("characters", "draft", "chars", "bytes", "images", "tools")),
    ("output", ("output tokens", "in the completion", "in the output", "for the completion", "tokens for the completion")),
    ("output", ("max_new_tokens", "completion tokens", "tokens in the completion", "tokens for the output")),
    ("part", ("in the messages", "in the functions", "of text input", "of tool input", "of image input", "of audio input")),
    ("part", ("of file input", "of video input", "of pdf input")),
    ("limit", ("maximum", "token limit", "token context")),
    ("input", ("+",)),
)

# What the words right before a number make of it; the first that fits.
_BEFORE: Final[tuple[tuple[Meaning, tuple[str, ...]], ...]] = (
    ("nothing", ("upper bound for", "exceeded by", "length by", "more than", "window by", "limit by")),
    ("prompt limit", ("prompt length is", "prompt length of", "input length of", "tokens allowed", "configured limit of")),
    ("prompt limit", ("length should be [1,", "length should be [0,", "inputs must have less than")),
    ("limit", ("context length is", "context length of", "context length", "model length of", "model length", "of only")),
    ("limit", ("context window of", "context window is", "context window", "window limit", "context size of", "context size is")),
    ("limit", ("context size", "context limit of", "context limit is", "context limit", "n_ctx", "max_seq_len")),
    ("limit", ("max_model_len", "max_num_tokens", "session_len")),
    ("limit", ("token limit", "token limit is", "limit of", "limit is", "less than", "<=", ">", "cannot exceed", "not exceed")),
    ("limit", ("maximum length", "maximum length of", "max length", "max length of", "max size", "maximum of", "of total input")),
    ("output", ("+", "is too large", "max_tokens", "max_completion_tokens", "max_new_tokens", "completion tokens")),
    ("total", ("requested", "requested about", "total of", "maximum output tokens")),
    ("input", ("resulted in", "resolved to", "given", "contains", "contains at least", "request has", "prompt has", "prompt is")),
    ("input", ("token count of", "token count is", "token count", "too long", "length is", "n_keep", "prompt_tokens", "(length")),
    ("input", ("total length", "prompt length", "input length", "keep the first", "prompt tokens", "input tokens", "received")),
    ("input", ("requested tokens", "input prompt", "input", "prompt", "request", "input_tokens", "input token count is")),
)

# Less sure than what stands before a number: `requested 700 input tokens`, but also `has 700 input tokens`.
_AFTER_LAST: Final[tuple[tuple[Meaning, tuple[str, ...]], ...]] = (
    (
        "input",
        ("input tokens", "in your prompt", "tokens from the input", "inputs tokens", "prompt tokens", "tokens in the messages"),
    ),
    ("input", ("tokens in your prompt", "tokens in the prompt")),
)


# ---------------------------------------------------------------- reading


def classify(status: int, body: bytes) -> Overflow | None:
    """What an answer with this status and body (decoded, whole or its beginning) says of the request's length.

    None: it says nothing of it. Never raises, whatever the body is.
    """
    if status < 400:
        return None
    answer = _parsed(body)
    beginning = body[:_TEXT].decode("utf-8", "replace").partition('"input":')[0]
    return _judged(status, _text(beginning if answer is None else answer))


def _judged(status: int, text: str) -> Overflow | None:
    capped = _per_minute(text)
    if capped is not None:
        return capped
    if status in (401, 402, 403, 404, 407, 429) or status > 500:
        return None
    if not _says_too_long(text):
        # Cerebras sends no body at all; a server that counts bytes is helped by a shorter request as well
        unsaid = status == 413 and not any(word in text for word in _ELSEWHERE)
        return Overflow("prompt", None, None, None, exact=False) if unsaid else None
    return _measured(text)


def classify_event(event: bytes) -> Overflow | None:
    """The same for the first event of a stream that began with 200, given with or without its `data:`; what follows it is
    not read.

    Only an event that is an error is read: text that a model wrote is never taken for one.
    """
    answer = _parsed(_first_data(event[:_BODY]))
    if not isinstance(answer, dict):
        return None
    error = answer.get("error")
    if not error and answer.get("type") != "error" and answer.get("object") != "error":
        return None
    stated = error.get("code", error.get("status")) if isinstance(error, dict) else answer.get("code")
    status = stated if isinstance(stated, int) and 400 <= stated <= 599 else 400
    return _judged(status, _text(error if error else answer))


def _first_data(received: bytes) -> bytes:
    """The data of the first event in a stream's beginning, comments left out; or the JSON that stands in its place."""
    data: list[bytes] = []
    for line in received.splitlines():
        if line.startswith((b"data:", b"{")):
            data.append(line.removeprefix(b"data:").strip())
        elif data and not line:
            break
    return b"\n".join(data)


SMALLEST_CONTEXT: Final = 512
"""Tokens: the smallest context that a server starts with when nobody says otherwise (llama-cpp-python)."""

_NEAR: Final = 0.5
"""Of a known window: a request below cannot have been too long, however wrong our count of it is."""


def ended_empty(received: bytes, *, forwarded: int, window: int | None) -> Overflow | None:
    """What a stream means that ended well and said nothing (`received` is all of it): some local servers answer a prompt
    that is too long like that.

    forwarded: our count of the prompt. It is taken for an overflow only if the prompt may really have been too long: at
    least half of the window, or of the smallest context there is when no window is known.
    """
    if any(line[5:].strip() not in (b"", b"[DONE]") for line in received.splitlines() if line.startswith(b"data:")):
        return None
    if received.lstrip()[:1] in (b"{", b"["):
        return None
    possible = forwarded >= (SMALLEST_CONTEXT if window is None else window * _NEAR)
    return Overflow("prompt", None, None, None, exact=False) if possible else None


def truncated(forwarded: int, reported: int, *, calibrated: bool = False, media: bool = False) -> bool:
    """Whether the upstream silently dropped a part of the prompt: it reports far fewer tokens than we forwarded.

    forwarded: our count of what was sent. reported: usage.prompt_tokens. Conservative, because a wrong yes costs a day of
    needless compaction: an unknown tokenizer may need half of what ours does, so it must be less than half (less than
    three quarters with five and more samples of this model, `calibrated`), 512 tokens are the least that a server keeps,
    and a prompt with media, whose tokens we estimate, is never judged. Servers that report only what was not in their
    cache look the same: ask for two such answers in a row, and take `reported` as a bound, not as the exact limit.
    """
    if media or reported < SMALLEST_CONTEXT:
        return False
    return reported < forwarded * (0.75 if calibrated else 0.5)


# ---------------------------------------------------------------- deciding


def _per_minute(text: str) -> Overflow | None:
    """A cap on tokens in a time that this one request exceeds by itself; not that the cap is used up."""
    if "request too large" not in text or not ("per min" in text or "per day" in text or "(tpm)" in text):
        return None
    limit = requested = None
    for before, number, _ in _numbers(text):
        if before.endswith("limit"):
            limit = limit or number
        elif before.endswith("requested"):
            requested = requested or number
    return Overflow("tpm", limit, requested, None, exact=limit is not None)


def _says_too_long(text: str) -> bool:
    if any(word in text for word in _CODES) or any(word in text for word in _SAYINGS):
        return True
    if any(word in text for word in _ELSEWHERE):
        return False
    return any(_is_refusal(sentence) for sentence in re.split(r"[.;\0] ", text))


def _is_refusal(sentence: str) -> bool:
    return any(word in sentence for word in _SUBJECTS) and any(word in sentence for word in _VERBS)


def _measured(text: str) -> Overflow:
    """The refusal with its numbers: of each meaning the first counts, but the parts of a prompt are added up."""
    first: dict[Meaning, int] = {}
    parts: list[int] = []
    for before, number, after in _numbers(text):
        meaning = _meaning(before, after)
        first.setdefault(meaning, number)
        if meaning == "part":
            parts.append(number)
    stated = first.get("limit", first.get("prompt limit"))
    output = first.get("output")
    counted = sum(parts) if parts else first.get("input")
    if counted is None and "total" in first:
        counted = max(0, first["total"] - (output or 0))
    exact = stated is not None and not any(hedge in text for hedge in _HEDGES)
    of_prompt = "limit" not in first and "prompt limit" in first
    return Overflow(_kind(stated, counted, output, text), stated, counted, output, exact, of_prompt)


def _kind(limit: int | None, counted: int | None, output: int | None, text: str) -> Kind:
    """Too much output is what remains when the prompt by itself would have fitted.

    A lower bound does not show that it would.
    """
    if limit is None or output is None or "contains at least" in text:
        return "prompt"
    if counted is None:
        return "max_tokens" if output >= limit else "prompt"
    return "max_tokens" if counted < limit else "prompt"


def _meaning(before: str, after: str) -> Meaning:
    for meaning, words in _AFTER:
        if after.startswith(words):
            return meaning
    for meaning, words in _BEFORE:
        if before.endswith(words):
            return meaning
    for meaning, words in _AFTER_LAST:
        if after.startswith(words):
            return meaning
    return "nothing"


# ---------------------------------------------------------------- bounded text


_BODY: Final = 1024 * 1024
"""Bytes: of a longer body only the beginning is read, as text. An error is shorter by far."""
_NESTED: Final = 64 * 1024
"""Characters of a string that is opened when it holds JSON."""
_TEXT: Final = 16 * 1024
"""Characters in all, and a quarter of it of one string: beyond that it is an echo of the request."""
_NODES: Final = 500
"""JSON values that are visited."""
_DEPTH: Final = 8
_NUMBERS: Final = 100
_ECHOES: Final = frozenset({"input", "inputs", "messages", "request", "body", "prompt", "content", "loc", "url", "headers"})
"""Keys under which validators send back what they were sent: a conversation about context windows is no refusal."""
_QUOTES: Final = str.maketrans(dict.fromkeys("`'\"’\\*", ""))
_NUMBER: Final = re.compile(r"[0-9][0-9,_]*")


def _numbers(text: str) -> Iterator[tuple[str, int, str]]:
    """The numbers in the text, each with the words before and after it, brackets and colons between them left out."""
    for seen, found in enumerate(_NUMBER.finditer(text)):
        digits = found[0].replace(",", "").replace("_", "")
        if seen >= _NUMBERS:
            return
        if len(digits) > 9:
            continue
        trailing = len(found[0]) - len(found[0].rstrip(",_"))
        before = text[max(0, found.start() - 40) : found.start()]
        words = before.rstrip(" (:") if not before.endswith("exceeds limit (") else ""
        yield (
            (before.rstrip() if before.endswith("(length ") else words),
            int(digits),
            text[found.end() - trailing :][:40].lstrip(" )"),
        )


def _text(answer: object) -> str:
    """The strings of an error as one lower-case text, each closed by a NUL, quotes and extra blanks left out."""
    if isinstance(answer, str) and answer.lstrip()[:1] == "<":
        return ""  # a page of some gateway on the way
    pieces: list[str] = []
    length = 0
    for piece in _strings(answer):
        pieces.append(" ".join(piece[: _TEXT // 4].partition("'input':")[0].translate(_QUOTES).lower().split()))
        length += len(pieces[-1])
        if length > _TEXT:
            break
    return "".join(f"{piece} \0 " for piece in pieces if piece)


def _strings(answer: object) -> Iterator[str]:
    """Strings in an answer in their order, JSON in strings opened; numbers as `key: number`; what echoes left out."""
    waiting: list[tuple[str, object, int]] = [("", answer, 0)]
    for _ in range(_NODES):
        if not waiting:
            return
        key, value, depth = waiting.pop()
        if isinstance(value, str):
            inner = _nested(value) if depth < _DEPTH else None
            if inner is not None:
                waiting.append((key, inner, depth + 1))
            else:
                yield f"{key}: {value}" if key == "code" else value
        elif isinstance(value, int):
            yield f"{key}: {value}" if abs(value) < 10**9 else ""
        elif depth < _DEPTH and isinstance(value, dict):
            inside = list(value.items())[:_NODES]
            waiting += [(str(name), item, depth + 1) for name, item in reversed(inside) if name not in _ECHOES]
        elif depth < _DEPTH and isinstance(value, list):
            waiting += [(key, item, depth + 1) for item in reversed(value[:_NODES])]


def _nested(text: str) -> object:
    """The JSON in a string, None when it holds none."""
    opens = text[:100].lstrip()[:1] in ("{", "[") and len(text) <= _NESTED
    return _parsed(text.encode("utf-8", "replace")) if opens else None


def _parsed(body: bytes) -> object:
    try:
        return json.loads(body) if len(body) <= _BODY else None
    except (ValueError, RecursionError):
        return None
