"""Bodies ↔ conversations: what the bytes say, and the bytes that say it.

A wire format knows one endpoint's body: `matches(path)`, `read(body) -> Request`, `write(request, conversation) -> bytes`.
Only what was edited is written anew; everything else leaves as the slice that came in.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from proxy.conversation import Conversation


class Request(msgspec.Struct, frozen=True, gc=False):
    """A body that was understood.

    fields: every top-level field but `messages`, in the order of the body, as raw JSON.
    before, after: how many of `fields` stand before the messages; the rest follow them.
    max_output: tokens that the request asks for, None when it does not say.
    """

    model: str
    conversation: Conversation
    fields: Mapping[str, bytes]
    before: int
    stream: bool
    max_output: int | None
