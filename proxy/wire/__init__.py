"""Bodies ↔ conversations: what the bytes say, and the bytes that say it.

A wire format knows one endpoint's body: `matches(path)`, `read(body) -> Request`, `write(request, conversation) -> bytes`.
Only what was edited is written anew; everything else leaves as the slice that came in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from proxy.conversation import Conversation


class Fields(dict[str, bytes]):
    """Every top-level field but `messages`, in the order of the body, as raw JSON.

    The requests of a conversation that repeat them share one object. note: what somebody worked out from them, and takes up
    with the next request; None before.
    """

    __slots__ = ("note",)

    def __init__(self, fields: Mapping[str, bytes] | Iterable[tuple[str, bytes]] = ()) -> None:
        super().__init__(fields)
        self.note: Any = None


class Request(msgspec.Struct, frozen=True, gc=False):
    """A body that was understood.

    before: how many of `fields` stand before the messages; the rest follow them.
    max_output: tokens that the request asks for, None when it does not say. media: whether its messages carry anything whose
    tokens are not those of its text.
    """

    model: str
    conversation: Conversation
    fields: Fields
    before: int
    stream: bool
    max_output: int | None
    media: bool
