"""What answers have taught about an upstream: how it counts, how much its models hold, and what they are really called."""

from __future__ import annotations

import time
from collections.abc import Iterable

from proxy import overflow, tokens
from proxy.conversation import Message, Messages, Opaque
from proxy.overflow import Overflow
from proxy.tokens.calibration import ENOUGH, Calibrator, Key, chain, cold
from proxy.tokens.chat import ChatRuler
from proxy.windows import Window, Windows
from proxy.wire import Request
from proxy.wire.sse import Usage

SUSPECTS = 256
"""Models whose last answer seemed truncated; clients choose the names."""


class Learned:
    """One upstream's lessons, and the rulers that follow from them."""

    def __init__(self, windows: Windows, upstream: str = "") -> None:
        self.windows = windows
        self.calibrator = Calibrator()
        self._upstream = upstream
        self._short_answers: dict[str, int] = {}

    def ruler(self, request: Request, model: str, window: Window | None) -> ChatRuler:
        """Counts as the upstream's answers have calibrated it by now: for deciding what fits."""
        plain = self._plain_ruler(request, model, window)
        marks = chain(request.conversation.messages, plain.around)
        return plain.calibrated(self.calibrator.calibration(self._key(request, model), marks))

    def steady_ruler(self, request: Request, model: str, window: Window | None) -> ChatRuler:
        """Counts by the model's name alone: for deciding when an event is due and what it keeps, which must come out the
        same in every process, whatever answers it has seen."""
        return self._plain_ruler(request, model, window).calibrated(cold(tokens.bare_name(model)))

    def refused(self, model: str, refusal: Overflow) -> None:
        """Takes what a refusal says of a model's limit."""
        if refusal.limit is not None and refusal.kind != "tpm":
            self.windows.learn(model, refusal.limit, exact=True, now=time.monotonic(), prompt_only=refusal.of_prompt)

    def answered(
        self, request: Request, model: str, window: Window | None, messages: tuple[Message, ...], counted: int, usage: Usage
    ) -> None:
        """Takes what an answer says. messages: as they were forwarded; counted: our count of the whole request then."""
        if usage.prompt is None:
            return
        key = self._key(request, model)
        if self._seems_truncated(key, counted, usage.prompt):
            self.windows.learn(model, usage.prompt, exact=False, now=time.monotonic())
            return
        if not self.calibrator.says_all(key, counted, usage.prompt):
            ruler = self._plain_ruler(request, model, window)
            self.calibrator.observe(key, ruler.raw(messages), usage.prompt, prefixes=chain(messages, ruler.around))
        self.windows.accepted(model, usage.prompt)
        if usage.model:
            self.windows.answered_as(model, usage.model)

    def _plain_ruler(self, request: Request, model: str, window: Window | None) -> ChatRuler:
        return tokens.ruler(model, request.fields, encoding=window.encoding if window is not None else None)

    def _key(self, request: Request, model: str) -> Key:
        """What shares a calibration."""
        fields = request.fields
        offered = fields.get("tools", b"")[:1] == b"[" or fields.get("functions", b"")[:1] == b"["
        return Key(self._upstream, tokens.bare_name(model), offered, has_media(request))

    def _seems_truncated(self, key: Key, counted: int, reported: int) -> bool:
        """Twice in a row far fewer tokens than we sent: once may be an upstream that counts only what was not cached."""
        plain = not overflow.truncated(counted, reported, calibrated=True, media=key.media)
        if plain or not overflow.truncated(counted, reported, calibrated=self._is_calibrated(key), media=key.media):
            self._short_answers.pop(key.model, None)
            return False
        seen = self._short_answers.get(key.model, 0) + 1
        if seen == 1 and len(self._short_answers) >= SUSPECTS:
            self._short_answers.clear()
        self._short_answers[key.model] = seen
        return seen >= 2

    def _is_calibrated(self, key: Key) -> bool:
        return self.calibrator.calibration(key).samples >= ENOUGH


def has_media(request: Request) -> bool:
    """Whether there is anything whose tokens are not those of its text."""
    messages = request.conversation.messages
    if not isinstance(messages, Messages):
        return _carries_media(messages)
    noted: bool | None = messages.note("media")
    if noted is None:
        base = messages.base
        known: bool | None = None if base is None else base.note("media")
        new = messages if known is None or base is None else messages[len(base) :]
        noted = bool(known) or _carries_media(new)
        messages.keep("media", noted)
    return noted


def _carries_media(messages: Iterable[Message]) -> bool:
    return any(isinstance(part, Opaque) for message in messages for part in message.parts)
