"""What answers have taught about an upstream: how it counts, how much its models hold, and what they are really called."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import ceil

from proxy import overflow, tokens
from proxy.conversation import Message, Messages
from proxy.overflow import Overflow
from proxy.tokens.calibration import ENOUGH, Calibrator, Key, chain, cold
from proxy.tokens.chat import ChatRuler
from proxy.windows import Window, Windows
from proxy.wire import Request

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
        key = self.keys(request, model)[request.media]
        return self.calibrated(self.plain_ruler(request, model, window), key, request.conversation.messages)

    def calibrated(self, plain: ChatRuler, key: Key, messages: Sequence[Message]) -> ChatRuler:
        """The same for a request of which `plain_ruler` and `keys` are at hand."""
        return plain.calibrated(self.calibrator.calibration(key, chain(messages, plain.around)))

    def steady_ruler(self, request: Request, model: str, window: Window | None) -> ChatRuler:
        """Counts by the model's name alone: for deciding when an event is due and what it keeps, which must come out the
        same in every process, whatever answers it has seen."""
        return self.steady(self.plain_ruler(request, model, window), self.keys(request, model)[request.media])

    def steady(self, plain: ChatRuler, key: Key) -> ChatRuler:
        """The same for a request of which `plain_ruler` and `keys` are at hand."""
        return plain.calibrated(cold(key.model))

    def plain_ruler(self, request: Request, model: str, window: Window | None) -> ChatRuler:
        """Counts as the model's rules say, without any calibration."""
        return tokens.ruler(model, request.fields, encoding=window.encoding if window is not None else None)

    def keys(self, request: Request, model: str) -> tuple[Key, Key]:
        """What the request shares a calibration with: when its messages carry no media, and when they do."""
        fields = request.fields
        offered = fields.get("tools", b"")[:1] == b"[" or fields.get("functions", b"")[:1] == b"["
        key = Key(self._upstream, tokens.bare_name(model), offered)
        return key, key._replace(media=True)

    def measure(self, plain: ChatRuler, key: Key, messages: Messages) -> tuple[int | None, float]:
        """Tokens of a request as far as look-ups tell (None where there is anything to tokenize), and the margin of such counts.

        plain, key: what `plain_ruler` and `keys` say of it.
        """
        noted: tuple[int, list[int]] | None = messages.notes.get(plain.around)
        if noted is None:
            raw = plain.known(messages)
            if raw is None:
                return None, self.calibrator.calibration(key).margin
            noted = raw, chain(messages, plain.around)
            messages.keep(plain.around, noted)
        raw, marks = noted
        line = self.calibrator.calibration(key, marks)
        return ceil(line.tokens(raw)), line.margin

    def refused(self, model: str, refusal: Overflow) -> None:
        """Takes what a refusal says of a model's limit."""
        if refusal.limit is not None and refusal.kind != "tpm":
            self.windows.learn(model, refusal.limit, exact=True, now=time.monotonic(), prompt_only=refusal.of_prompt)

    def answered(self, model: str, key: Key, counted: int, reported: int, real: str | None) -> bool:
        """Takes what an answer says of the model. Whether it says something new of how the upstream counts: see `observed`.

        key: of its request. counted, reported: tokens of the whole request by our count and by theirs. real: the model's name.
        """
        if self.calibrator.says_all(key, counted, reported):
            if self._short_answers:
                self._short_answers.pop(key.model, None)
            if (model, real) not in self.windows.heard:
                self.windows.answered(model, reported, real)
            return False
        if self._seems_truncated(key, counted, reported):
            self.windows.learn(model, reported, exact=False, now=time.monotonic())
            return False
        self.windows.answered(model, reported, real)
        return True

    def observed(self, plain: ChatRuler, key: Key, messages: Sequence[Message], reported: int) -> None:
        """Takes what an answer says of how the upstream counts. messages: as they were forwarded."""
        self.calibrator.observe(key, plain.raw(messages), reported, prefixes=chain(messages, plain.around))

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
