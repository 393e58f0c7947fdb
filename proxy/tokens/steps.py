"""The messages of a chat in the groups that have one cost, and what to read of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from proxy.conversation import Message, Opaque, Text, ToolCall, ToolResult

Step = tuple[Message, ...]


def steps(messages: Sequence[Message]) -> Iterator[Step]:
    """The messages in groups that have one cost: a message, or calls together with the results that follow them."""
    start = 0
    while start < len(messages):
        stop = start + 1
        if messages[start].calls:
            while stop < len(messages) and messages[stop].is_result:
                stop += 1
        yield tuple(messages[start:stop])
        start = stop


def spoken_by(message: Message) -> str:
    """Who is named at the head of a message."""
    return f"{message.role}:{message.name}" if message.name else message.role


def texts(message: Message) -> Iterator[str]:
    """What there is to tokenize of a message."""
    for part in message.parts:
        if isinstance(part, ToolCall):
            yield part.arguments
        elif isinstance(part, (Text, ToolResult)):
            yield part.text


def held(message: Message) -> int:
    """Bytes that remembering this message keeps alive, about."""
    return 400 + sum(
        (part.raw if isinstance(part, Opaque) else part.arguments if isinstance(part, ToolCall) else part.text).__sizeof__()
        for part in message.parts
    )


def called(message: Message, index: int, calls: tuple[ToolCall, ...]) -> str:
    """The name of the function that this result answers: by id, else by its own name, else by its place."""
    result = next((part for part in message.parts if isinstance(part, ToolResult)), None)
    if result is None:
        return message.name or ""
    for call in calls:
        if call.id is not None and call.id == result.call_id:
            return call.name
    if result.name:
        return result.name
    return calls[index - 1].name if 0 < index <= len(calls) else ""


def shared(whole: int, step: Step) -> Iterator[tuple[int, int]]:
    """The cost of a merged list of results, spread over them by their length."""
    lengths = [len(message.text) + 1 for message in step[1:]]
    left, weight = whole, sum(lengths)
    for index, length in enumerate(lengths, 1):
        share = left * length // weight
        yield index, share
        left, weight = left - share, weight - length
