"""What was said: messages and their parts, and the steps that may be removed whole.

Everything here is a value. A message that nobody touched carries the exact bytes that it came in; one that was edited
carries the bytes that it was made from, so that the fields we know nothing about survive the edit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

INSTRUCTION_ROLES = frozenset({"system", "developer"})
RESULT_ROLES = frozenset({"tool", "function"})


@dataclass(frozen=True, slots=True)
class Text:
    """Words of a message that is not a tool result. `raw` is the content part's own JSON when it came in a list."""

    text: str
    raw: bytes | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call by the assistant. `arguments` is the string as it came (usually, not always, a JSON object)."""

    id: str | None
    name: str
    arguments: str
    raw: bytes | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered: the text of a message with role `tool` or `function`, its parts joined."""

    call_id: str | None
    text: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Opaque:
    """Something that is kept or dropped whole, and never looked into or edited.

    kind: `image`, `audio`, `file`, `reasoning`, `refusal`, or the type that it came with; `unknown` for a whole message
    that is not an object. place: `content` for an item of the parts list, else the name of the message's field.
    raw: its exact JSON.
    """

    kind: str
    raw: bytes
    place: str = "content"


Part = Text | ToolCall | ToolResult | Opaque


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of the `messages` array; its identity is its role, name and parts.

    raw: the exact slice of JSON that came in; None once edited or when new.
    origin: the slice that an edited message was made from; its other fields are kept when it is written.
    """

    role: str
    parts: tuple[Part, ...]
    name: str | None = None
    raw: bytes | None = field(default=None, compare=False, repr=False)
    origin: bytes | None = field(default=None, compare=False, repr=False)
    calls: tuple[ToolCall, ...] = field(init=False, compare=False, repr=False)
    is_result: bool = field(init=False, compare=False, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # worked out once: a message is parsed once in its life, but looked at by every request that carries it
        set_field = object.__setattr__
        set_field(self, "calls", tuple(part for part in self.parts if isinstance(part, ToolCall)))
        set_field(self, "is_result", self.role in RESULT_ROLES)
        set_field(self, "_hash", hash((self.role, self.parts, self.name)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def text(self) -> str:
        """All words of the message, without calls, reasoning and media."""
        if len(self.parts) == 1 and isinstance(self.parts[0], (Text, ToolResult)):
            return self.parts[0].text
        return "".join(part.text for part in self.parts if isinstance(part, (Text, ToolResult)))

    @property
    def is_instruction(self) -> bool:
        return self.role in INSTRUCTION_ROLES

    def with_parts(self, parts: Iterable[Part]) -> Message:
        """The same message saying something else; itself when nothing differs."""
        changed = tuple(parts)
        if changed == self.parts:
            return self
        return replace(self, parts=changed, raw=None, origin=self.origin if self.raw is None else self.raw)


class Messages(tuple[Message, ...]):
    """The messages of a request, with notes of what was worked out about them.

    base: those of an earlier request that these begin with. Agents send their history again with each turn: what was worked
    out for the beginning is taken up. The notes of a tuple hold values that follow from its messages alone, by their name.
    """

    base: Messages | None
    notes: dict[Hashable, Any]

    def __new__(cls, messages: Iterable[Message] = (), base: Messages | None = None) -> Self:
        made = super().__new__(cls, messages)
        made.base, made.notes = base, {}
        if base is not None:
            base.base = None  # its own notes say what it took up; a chain of all turns would never be let go
        return made

    def note(self, name: Hashable) -> Any:
        """What was noted under this name, None when nothing was."""
        return self.notes.get(name)

    def keep(self, name: Hashable, value: Any) -> None:
        """Note it. A few names are usual; a client who thinks up many does not fill the memory."""
        if len(self.notes) >= 16:
            self.notes.clear()
        self.notes[name] = value

    def noted_of_base(self, name: Hashable) -> Any:
        """What was noted under this name of the messages that these begin with."""
        base = self.base  # read once: another thread may let go of it
        return None if base is None else base.notes.get(name)


@dataclass(frozen=True, slots=True)
class Step:
    """The only removable unit: one message, or an assistant message with all the results that answer its calls.

    start: index of its first message in the conversation.
    """

    messages: tuple[Message, ...]
    start: int

    @property
    def head(self) -> Message:
        return self.messages[0]

    @property
    def results(self) -> tuple[Message, ...]:
        return self.messages[1:]

    @property
    def stop(self) -> int:
        return self.start + len(self.messages)

    @property
    def is_pending(self) -> bool:
        """Calls are still to be answered."""
        return len(self.head.calls) > len(self.results)


@dataclass(frozen=True)
class Conversation:
    """The `messages` array: a preamble of instructions, then steps."""

    messages: tuple[Message, ...]

    @cached_property
    def preamble(self) -> tuple[Message, ...]:
        """The leading system and developer messages: never touched, never counted as history."""
        count = 0
        while count < len(self.messages) and self.messages[count].is_instruction:
            count += 1
        return self.messages[:count]

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Everything after the preamble. Results belong to the calls before them by position: ids are reused by real clients."""
        steps: list[Step] = []
        start = len(self.preamble)
        while start < len(self.messages):
            stop = start + 1
            if self.messages[start].calls:
                while stop < len(self.messages) and self.messages[stop].is_result:
                    stop += 1
            steps.append(Step(self.messages[start:stop], start))
            start = stop
        return tuple(steps)

    @cached_property
    def last_user(self) -> int | None:
        """Index in `steps` of the last user message."""
        return next((i for i in range(len(self.steps) - 1, -1, -1) if self.steps[i].head.role == "user"), None)

    @cached_property
    def first_user(self) -> int | None:
        """Index in `steps` of the first user message: the task."""
        return next((i for i, step in enumerate(self.steps) if step.head.role == "user"), None)

    @cached_property
    def protected(self) -> frozenset[int]:
        """Indices in `steps` of what may not be folded: last user message, newest step, pending calls, later instructions."""
        kept = {i for i, step in enumerate(self.steps) if step.is_pending or step.head.is_instruction}
        if self.steps:
            kept.add(len(self.steps) - 1)
        if self.last_user is not None:
            kept.add(self.last_user)
        return frozenset(kept)

    def with_messages(self, messages: Sequence[Message]) -> Conversation:
        """The conversation of these messages; itself when they are the very same objects."""
        if len(messages) == len(self.messages) and all(a is b for a, b in zip(messages, self.messages, strict=True)):
            return self
        return Conversation(tuple(messages))


def said(role: str, text: str) -> Message:
    """A message of our own."""
    return Message(role, (Text(text),))
