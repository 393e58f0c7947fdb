"""Checkpoints as they are used turn after turn: their messages parsed and judged once, and what was forwarded last upon each."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from operator import is_

from proxy.checkpoints.checkpoint import Checkpoint
from proxy.conversation import Conversation, Message, Messages, ToolResult
from proxy.wire.chat_completions import read_message

Parse = Callable[[bytes], Message]
"""A message from its JSON: `read_message`, or a MessageCache's `get`. May raise Unreadable."""


@dataclass(slots=True)
class Thawed:
    """One checkpoint at hand. costs: tokens of the replacement by the name of the rule that counts. forwarded: the last messages
    that went out upon it, so that what was worked out about them is taken up by those that begin with them."""

    checkpoint: Checkpoint
    messages: tuple[Message, ...]
    is_paired: bool
    costs: dict[Hashable, int] = field(default_factory=dict)
    forwarded: Messages | None = None

    def grown(self, messages: tuple[Message, ...]) -> Messages:
        """These messages, upon the last ones where they begin with them."""
        before = self.forwarded
        # the very same objects: messages that say the same may differ in their bytes
        grew = before is not None and len(messages) >= len(before) and all(map(is_, messages, before))
        if before is not None and grew and len(messages) == len(before):
            return before
        self.forwarded = Messages(messages, before if grew else None)
        return self.forwarded


class Thaws:
    """The checkpoints used last, bounded in bytes."""

    def __init__(self, parse: Parse = read_message, max_bytes: int = 16 * 1024 * 1024) -> None:
        self._parse, self._limit = parse, max_bytes
        self._held: OrderedDict[int, Thawed] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, checkpoint: Checkpoint) -> Thawed:
        """Raises Unreadable."""
        found = self._held.get(id(checkpoint))
        if found is None:
            messages = tuple(self._parse(raw) for raw in checkpoint.replacement)
            found = Thawed(checkpoint, messages, is_paired(messages))
        with self._lock:
            if id(checkpoint) not in self._held:
                self._size += checkpoint.size
            self._held[id(checkpoint)] = found
            self._held.move_to_end(id(checkpoint))
            while self._size > self._limit and len(self._held) > 1:
                self._size -= self._held.popitem(last=False)[1].checkpoint.size
        return found


def is_paired(messages: tuple[Message, ...]) -> bool:
    """Every call is answered right after it, every result answers one: ids where there are any, else numbers."""
    for step in Conversation(messages).steps:
        wanted = sorted(call.id or "" for call in step.head.calls)
        given = sorted(part.call_id or "" for message in step.results for part in message.parts if isinstance(part, ToolResult))
        if step.head.is_result or len(wanted) != len(given) or (all(wanted) and all(given) and wanted != given):
            return False
    return True
