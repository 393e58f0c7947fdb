"""What becomes of one request: what its client wishes, what it was found to be, and what was decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from proxy.compaction import CompactionResult
from proxy.errors import ClientError
from proxy.summarizers import Headers
from proxy.tokens.calibration import Key
from proxy.tokens.chat import ChatRuler
from proxy.windows import Budget, Window
from proxy.wire import Request

Mode = Literal["auto", "off", "force", "shadow"]
MODES: tuple[Mode, ...] = ("off", "force", "shadow")
Outcome = Literal["none", "applied", "reused", "shadow", "bypassed", "failed", "rejected"]


@dataclass(frozen=True, slots=True)
class Wish:
    """What the client's control headers ask for. window: tokens; may only narrow."""

    mode: Mode = "auto"
    window: int | None = None


NO_WISH = Wish()


def read_wish(fields: Sequence[tuple[bytes, bytes]]) -> Wish:
    """What the control headers among these say. Raises ClientError (400) that names a value that we do not know."""
    headers = {name: value for name, value in fields if name.startswith(b"x-compaction")}
    if not headers:
        return NO_WISH
    mode = headers.get(b"x-compaction", b"").decode("latin-1").strip().lower()
    if mode and mode not in MODES:
        raise _unknown("x-compaction", mode, "off, force or shadow")
    narrow = headers.get(b"x-compaction-window")
    if narrow is not None and not (narrow.isdigit() and int(narrow[:12]) > 0 and len(narrow) <= 12):
        raise _unknown("x-compaction-window", narrow.decode("latin-1"), "a number of tokens above 0")
    return Wish(next((known for known in MODES if known == mode), "auto"), None if narrow is None else int(narrow))


def _unknown(header: str, value: str, takes: str) -> ClientError:
    shown = "".join(c if c.isprintable() else "?" for c in value[:40])
    return ClientError(f"unknown value {shown!r} of the header {header}: it takes {takes}", code="unknown_value", param=header)


class Caller(msgspec.Struct, frozen=True, gc=False):
    """Who asks. credential: what it authenticates with: nothing is shared beyond it. headers: the same as it came, for a summary
    by a model; without any none is asked for. narrowed_to: the window that it wishes, which a Wish says too."""

    credential: bytes = b""
    headers: Headers = ()
    narrowed_to: int | None = None

    def __repr__(self) -> str:
        return "Caller()"  # a credential is shown to nobody


NOBODY = Caller()


class Basis(msgspec.Struct, frozen=True):
    """What a request is decided by apart from its messages. It is kept with the fields, which a client sends again each turn.

    asked: (path, wish) that it holds for; it holds no longer when `window` is not the model's any more. kept_as: the name by
    which that is known. plain: the ruler as no answer has calibrated it. keys: of its calibration, without media and with any.
    room: bytes of a body, with what its messages add, that plainly fit; none do below 0. budgets: by the margin of the counts;
    whose ruler they have is of no account.
    """

    asked: tuple[str, Wish]
    model: str
    kept_as: str
    window: Window
    plain: ChatRuler
    keys: tuple[Key, Key]
    room: int
    budgets: Mapping[float, Budget]


# Structs, because one is made for every request, and a frozen dataclass of so many fields takes five times as long to make
class Decision(msgspec.Struct, frozen=True, gc=False):
    """What becomes of one request.

    body: the bytes to forward instead of those that came; None: as it came. reason: why nothing was done, or why it failed.
    before, after: prompt tokens by our count; None where they were not counted (yet). seconds: our own time by phase.
    caller: for whom. basis: what else it was decided by, None where that does not matter. layers: who had a part in `after`.
    prefix_break: why the upstream's prompt cache is of no use from some message on, where that is known: `event`, `edit`,
    `new_conversation`. rewritten: tokens which it must read anew because of an event.
    """

    outcome: Outcome
    reason: str | None = None
    body: bytes | None = None
    request: Request | None = None
    model: str | None = None
    window: Window | None = None
    budget: Budget | None = None
    before: int | None = None
    after: int | None = None
    seconds: Mapping[str, float] = {}
    caller: Caller = NOBODY
    basis: Basis | None = None
    result: CompactionResult | None = None
    layers: tuple[str, ...] = ()
    is_event: bool = False
    prefix_break: str | None = None
    rewritten: int = 0

    @property
    def forwarded(self) -> int | None:
        """Prompt tokens of what goes to the upstream."""
        return self.before if self.body is None else self.after

    def but(self, **changes: Any) -> Decision:
        """The same decision with these fields changed."""
        return msgspec.structs.replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Measured:
    """A request that was understood.

    budget: by what answers have taught; steady: by the model's name alone. caller: for whom.
    """

    request: Request
    model: str
    window: Window
    ruler: ChatRuler
    budget: Budget
    steady: Budget
    caller: Caller

    def decided(self, outcome: Outcome, reason: str | None = None, before: int | None = None) -> Decision:
        """A decision that forwards it as it came."""
        request, window, aim = self.request, self.window, self.budget
        return Decision(outcome, reason, None, request, self.model, window, aim, before, before, caller=self.caller)
