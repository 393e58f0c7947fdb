"""The body of `POST …/chat/completions`, and its messages one by one.

Every message is parsed once in its life: agents send the whole history again with each turn, so a slice that was seen before
is found by its exact bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from proxy.conversation import Conversation, Message, Messages, Opaque, Part, Text, ToolCall, ToolResult
from proxy.errors import Unreadable
from proxy.wire import Fields, Request, slices
from proxy.wire.prefixes import MESSAGE_BESIDE, Known, Prefixes

REASONING_FIELDS = ("reasoning_content", "reasoning", "reasoning_details", "thinking_blocks", "thinking")
OPAQUE_FIELDS = ("refusal", "audio")
KINDS = {
    "image_url": "image",
    "image": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio": "audio",
    "file": "file",
    "input_file": "file",
    "thinking": "reasoning",
    "redacted_thinking": "reasoning",
    "reasoning": "reasoning",
}
MAX_MESSAGES = 20_000
"""A longer array is no conversation that we could make fit; parsing a million messages would cost seconds."""


class MessageCache:
    """Parsed messages by the exact bytes that they came in, bounded in bytes.

    Two generations instead of a list of uses: what was not asked for during a whole generation goes.
    """

    def __init__(self, max_bytes: int = 64 * 1024 * 1024) -> None:
        self._limit = max_bytes // 2
        self._young: dict[bytes, Message] = {}
        self._old: dict[bytes, Message] = {}
        self._size = 0

    def get(self, raw: bytes) -> Message:
        """The message that these bytes say."""
        message = self._young.get(raw)
        if message is None:
            message = self._old.get(raw) or read_message(raw)
            size = len(raw) + MESSAGE_BESIDE
            if self._size + size > self._limit:
                self._old, self._young, self._size = self._young, {}, 0
            self._young[raw] = message
            self._size += size
        return message


def matches(path: str) -> bool:
    """Whether a request path (without query) is this endpoint, under any prefix."""
    return path.endswith("/chat/completions")


def read(body: bytes, parse: Callable[[bytes], Message] | None = None, prefixes: Prefixes | None = None) -> Request:
    """What a body says. `parse` is a MessageCache's `get`; prefixes: histories that were read before.

    Raises Unreadable, and then the body goes on as it came.
    """
    known = prefixes.find(body) if prefixes is not None else None
    if prefixes is None or known is None:
        return _read_whole(body, parse or read_message, prefixes)
    if len(body) == known.size and body.endswith(known.rest):
        if prefixes.newest is not known:
            prefixes.used(known)
        return known.request
    parse = parse or read_message
    request = _read_on(body, known, parse, prefixes)
    return _read_whole(body, parse, prefixes) if request is None else request


def _read_whole(body: bytes, parse: Callable[[bytes], Message], prefixes: Prefixes | None) -> Request:
    """The same for one whose beginning is not known. Raises Unreadable."""
    fields = slices.split_object(body)
    raw_messages = fields.get("messages")
    if raw_messages is None or raw_messages[:1] != b"[":
        raise Unreadable("no_messages")
    items = slices.split_array(raw_messages)
    if len(items) > MAX_MESSAGES:
        raise Unreadable("too_many_messages")
    messages = Messages(parse(item) for item in items)
    before = list(fields).index("messages")
    del fields["messages"]
    request = _request(fields, before, messages, _carry_media(messages))
    if prefixes is not None and items:
        _learn(body, raw_messages, messages, request, prefixes)
    return request


def _request(fields: Mapping[str, bytes], before: int, messages: Messages, media: bool) -> Request:
    return Request(
        model=_string_or_empty(fields.get("model")),
        conversation=Conversation(messages),
        fields=Fields(fields),
        before=before,
        stream=fields.get("stream") == b"true",
        max_output=_output_tokens(fields),
        media=media,
    )


def _carry_media(messages: Iterable[Message]) -> bool:
    return any(isinstance(part, Opaque) for message in messages for part in message.parts)


def _grown(known: Known, items: Iterable[bytes], parse: Callable[[bytes], Message]) -> tuple[Messages, bool]:
    """The messages of a history and these after them, and whether they carry media."""
    new = tuple(map(parse, items))
    return Messages(known.messages + new, known.messages), known.request.media or _carry_media(new)


def _read_on(body: bytes, known: Known, parse: Callable[[bytes], Message], prefixes: Prefixes) -> Request | None:
    """What another body says whose beginning is known; None where only the whole of it can tell."""
    start, stop = len(known.prefix), len(body) - len(known.rest)
    if start > stop or not body.endswith(known.rest):
        return _read_rest(body, known, parse, prefixes)
    # It ends as the one before did: when what is new between the two is more messages, all else is said again.
    new = body[start:stop].strip(_SPACE)
    try:
        items = slices.split_array(b"[" + new[1:] + b"]") if new[:1] == b"," else ()
    except Unreadable:
        items = ()
    if not items:
        return _read_rest(body, known, parse, prefixes)
    if len(known.messages) + len(items) > MAX_MESSAGES:
        return None
    messages, media = _grown(known, items, parse)
    request = msgspec.structs.replace(known.request, conversation=Conversation(messages), media=media)
    _keep(body, stop, known, messages, request, prefixes)
    return request


def _read_rest(body: bytes, known: Known, parse: Callable[[bytes], Message], prefixes: Prefixes) -> Request | None:
    """The same for one that ends in another way than the last: its fields are read anew."""
    rest = body[len(known.prefix) :].lstrip(_SPACE)
    if rest[:1] == b",":
        rest = rest[1:].lstrip(_SPACE)
        if rest[:1] == b"]":
            return None
    elif rest[:1] != b"]":
        return None
    if b"\\u0000" in rest:  # the name under which the rest of the messages is read must not be there a second time
        return None
    try:
        fields = slices.split_object(_TAIL + rest)
        raw_messages = fields.pop("\0")
        items = slices.split_array(raw_messages)
    except Unreadable:
        return None
    repeated = "messages" in fields or not known.fields.keys().isdisjoint(fields)
    if repeated or len(known.messages) + len(items) > MAX_MESSAGES:
        return None
    fields = {**known.fields, **fields}
    if not items:
        prefixes.used(known)
        return _request(fields, len(known.fields), known.messages, known.request.media)
    messages, media = _grown(known, items, parse)
    request = _request(fields, len(known.fields), messages, media)
    _keep(body, len(body) - len(rest) + len(raw_messages) - 2, known, messages, request, prefixes)
    return request


def _keep(body: bytes, stop: int, known: Known, messages: Messages, request: Request, prefixes: Prefixes) -> None:
    """Remember the history that grew from a known one. stop: where its messages end, or the space after them."""
    prefix = body[:stop].rstrip(_SPACE)
    prefixes.keep(Known(prefix, known.fields, body[len(prefix) :], messages, request, len(body)), instead_of=known)


def _learn(body: bytes, raw_messages: bytes, messages: Messages, request: Request, prefixes: Prefixes) -> None:
    """Remember the history of a body that was read whole."""
    if len(body) < prefixes.shortest or 2 * len(raw_messages) <= len(body):
        return  # not worth it; or it could stand there twice
    start = body.rfind(raw_messages[-256:]) + min(256, len(raw_messages)) - len(raw_messages)
    if start < 0 or not body.startswith(raw_messages, start):
        return
    try:
        fields = slices.split_object(body[:start] + b"[]}")  # as they stand before the messages, whatever comes after
    except Unreadable:
        return
    if fields.popitem() == ("messages", b"[]"):  # it stands last unless it stood there before
        cut = start + len(raw_messages[:-1].rstrip(_SPACE))
        prefixes.keep(Known(body[:cut], fields, body[cut:], messages, request, len(body)))


_SPACE = b" \t\n\r"
_TAIL = b'{"\\u0000":['


def write(request: Request, conversation: Conversation) -> bytes:
    """The request's body with these messages: untouched ones as the slices that came in, other fields in their order."""
    fields = list(request.fields.items())
    messages = slices.join_array([write_message(message) for message in conversation.messages])
    fields.insert(request.before, ("messages", messages))
    return slices.join_object(fields)


def read_messages(raw: bytes) -> Conversation:
    """A bare messages array. Raises Unreadable."""
    return Conversation(tuple(read_message(item) for item in slices.split_array(raw)))


def read_message(raw: bytes) -> Message:
    """One message; what does not have the shape of one is kept whole as Opaque. Raises Unreadable only for depth."""
    if raw[:1] != b"{":
        return Message("", (Opaque("unknown", raw, "message"),), raw=raw)
    fields = slices.split_object(raw)
    role = _string_or_empty(fields.get("role"))
    try:
        parts = tuple(_parts(role, fields))
    except _WrongShape:
        return Message(role, (Opaque("unknown", raw, "message"),), raw=raw)
    return Message(role, parts, name=_string_or_none(fields.get("name")), raw=raw)


def write_message(message: Message) -> bytes:
    """One message's JSON: the slice that came in, or what it was made from with its parts replaced, or a new one."""
    if message.raw is not None:
        return message.raw
    if len(message.parts) == 1 and isinstance(message.parts[0], Opaque) and message.parts[0].place == "message":
        return message.parts[0].raw
    if message.origin is None:
        return slices.join_object(list(_new_fields(message)))
    return slices.join_object(list(_edited_fields(message, slices.split_object(message.origin))))


class _WrongShape(Exception):
    """A field whose type is not one that we can edit."""


def _parts(role: str, fields: Mapping[str, bytes]) -> Iterator[Part]:
    content = fields.get("content", b"null")
    items = _content_items(content)
    if role in ("tool", "function"):
        text = "".join(item.text for item in items if isinstance(item, Text))
        yield ToolResult(_string_or_none(fields.get("tool_call_id")), text, _string_or_none(fields.get("name")))
        yield from (item for item in items if not isinstance(item, Text))
    else:
        yield from items
    for name in REASONING_FIELDS:
        if fields.get(name, b"null") != b"null":
            yield Opaque("reasoning", fields[name], name)
    for name in OPAQUE_FIELDS:
        if fields.get(name, b"null") != b"null":
            yield Opaque(name, fields[name], name)
    calls = fields.get("tool_calls", b"null")
    if calls != b"null":
        if calls[:1] != b"[":
            raise _WrongShape
        yield from (_call(item) for item in slices.split_array(calls))
    if fields.get("function_call", b"null")[:1] == b"{":
        function = slices.split_object(fields["function_call"])
        yield ToolCall(None, _string_or_empty(function.get("name")), _arguments(function), fields["function_call"])


def _content_items(content: bytes) -> list[Part]:
    match content[:1]:
        case b'"':
            return [Text(slices.read_string(content))]
        case b"n":
            return []
        case b"[":
            return [_content_part(item) for item in slices.split_array(content)]
        case _:
            raise _WrongShape


def _content_part(raw: bytes) -> Part:
    if raw[:1] != b"{":
        return Text(slices.read_string(raw), raw) if raw[:1] == b'"' else Opaque("unknown", raw)
    fields = slices.split_object(raw)
    kind = _string_or_empty(fields.get("type"))
    if kind in ("text", "input_text", "output_text") and fields.get("text", b"")[:1] == b'"':
        return Text(slices.read_string(fields["text"]), raw)
    return Opaque(KINDS.get(kind, kind or "unknown"), raw)


def _call(raw: bytes) -> ToolCall:
    if raw[:1] != b"{":
        raise _WrongShape
    fields = slices.split_object(raw)
    function = fields.get("function", b"null")
    if function[:1] == b"{":
        inner = slices.split_object(function)
        return ToolCall(_string_or_none(fields.get("id")), _string_or_empty(inner.get("name")), _arguments(inner), raw)
    custom = fields.get("custom", b"null")
    inner = slices.split_object(custom) if custom[:1] == b"{" else {}
    text = _string_or_empty(inner.get("input"))
    return ToolCall(_string_or_none(fields.get("id")), _string_or_empty(inner.get("name")), text, raw)


def _arguments(function: Mapping[str, bytes]) -> str:
    raw = function.get("arguments", b'""')
    return slices.read_string(raw) if raw[:1] == b'"' else slices.read_text(raw)


def _string_or_empty(raw: bytes | None) -> str:
    return slices.read_string(raw) if raw is not None and raw[:1] == b'"' else ""


def _string_or_none(raw: bytes | None) -> str | None:
    return slices.read_string(raw) if raw is not None and raw[:1] == b'"' else None


def _output_tokens(fields: Mapping[str, bytes]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        raw = fields.get(name)
        # more than twelve digits is no size of anything: Python would take quadratic time to read a million of them
        if raw is not None and raw.isdigit() and len(raw) <= 12 and int(raw) > 0:
            return int(raw)
    return None


def _new_fields(message: Message) -> Iterator[tuple[str, bytes]]:
    yield "role", slices.write_string(message.role)
    if message.name is not None:
        yield "name", slices.write_string(message.name)
    result = next((part for part in message.parts if isinstance(part, ToolResult)), None)
    if result is not None and result.call_id is not None:
        yield "tool_call_id", slices.write_string(result.call_id)
    yield "content", _content(message, b'""' if not message.calls else b"null")
    if message.calls:
        yield "tool_calls", slices.join_array([_call_json(call) for call in message.calls])
    yield from ((part.place, part.raw) for part in message.parts if isinstance(part, Opaque) and part.place != "content")


def _edited_fields(message: Message, origin: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    kept = {part.place: part.raw for part in message.parts if isinstance(part, Opaque) and part.place != "content"}
    has_content = any(isinstance(part, (Text, ToolResult)) or _is_content(part) for part in message.parts)
    calls = message.calls
    function = None
    if origin.get("function_call", b"null")[:1] == b"{":  # was read as the last call
        calls, function = calls[:-1], calls[-1] if calls else None
    for key, value in origin.items():
        if key == "content":
            yield key, _content(message, value)
        elif key == "tool_calls" and value != b"null":
            if calls or value.strip(b"[] \t\r\n") == b"":
                yield key, slices.join_array([_call_json(call) for call in calls])
        elif key == "function_call" and value[:1] == b"{":
            if function is not None:
                yield key, _edited_function(function, value)
        elif key in REASONING_FIELDS or key in OPAQUE_FIELDS:
            if key in kept or value == b"null":
                yield key, value
        else:
            yield key, value
    if "content" not in origin and has_content:
        yield "content", _content(message, b"null")


def _is_content(part: Part) -> bool:
    return isinstance(part, Opaque) and part.place == "content"


def _content(message: Message, origin: bytes) -> bytes:
    """The content field: a string where it was one, a list where it was one or where a string cannot say it."""
    items = [part for part in message.parts if isinstance(part, (Text, ToolResult)) or _is_content(part)]
    was_list = origin[:1] == b"["
    if not was_list and len(items) == 1 and isinstance(items[0], (Text, ToolResult)):
        return slices.write_string(items[0].text)
    if not items:
        return origin if origin in (b"null", b'""') or (was_list and not slices.split_array(origin)) else b"null"
    first = next((raw for raw in slices.split_array(origin) if b'"text"' in raw), None) if was_list else None
    return slices.join_array([_content_json(item, first) for item in items])


def _content_json(item: Part, model: bytes | None) -> bytes:
    match item:
        case Text(text, raw):
            return _text_json(text, raw)
        case ToolResult(_, text, _):
            return _text_json(text, model)
        case Opaque(_, raw, _):
            return raw
        case _:
            raise _WrongShape


def _text_json(text: str, raw: bytes | None) -> bytes:
    """A text part. `raw` is the part that it was made from: kept as it is when it says the same, else its other fields are."""
    if raw is None:
        return b'{"type":"text","text":' + slices.write_string(text) + b"}"
    if raw[:1] == b'"':
        return slices.write_string(text)
    fields = slices.split_object(raw)
    if slices.read_string(fields["text"]) == text:
        return raw
    return slices.join_object([(key, slices.write_string(text) if key == "text" else value) for key, value in fields.items()])


def _call_json(call: ToolCall) -> bytes:
    if call.raw is None:
        function = _function_json(call)
        identity = [("id", slices.write_string(call.id))] if call.id is not None else []
        return slices.join_object([*identity, ("type", b'"function"'), ("function", function)])
    fields = slices.split_object(call.raw)
    if "function" in fields:
        return slices.join_object([(k, _edited_function(call, v) if k == "function" else v) for k, v in fields.items()])
    if "custom" in fields:
        return slices.join_object([(k, _edited_custom(call, v) if k == "custom" else v) for k, v in fields.items()])
    return call.raw


def _function_json(call: ToolCall) -> bytes:
    return slices.join_object([("name", slices.write_string(call.name)), ("arguments", slices.write_string(call.arguments))])


def _edited_function(call: ToolCall, origin: bytes) -> bytes:
    fields = slices.split_object(origin)
    if _arguments(fields) == call.arguments:
        return origin
    return slices.join_object([(k, slices.write_string(call.arguments) if k == "arguments" else v) for k, v in fields.items()])


def _edited_custom(call: ToolCall, origin: bytes) -> bytes:
    fields = slices.split_object(origin)
    return slices.join_object([(k, slices.write_string(call.arguments) if k == "input" else v) for k, v in fields.items()])
