"""One request's compaction: read it, measure it, make it fit, and say what was done.

Reading and deciding are pure and quick; what takes longer goes to a worker thread with a deadline, so that the event loop
serves everyone else meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from proxy import overflow, tokens
from proxy.compaction import CompactionResult, Layer
from proxy.compaction.pipeline import compact
from proxy.conversation import Opaque
from proxy.errors import ClientError, Unreadable
from proxy.overflow import Overflow
from proxy.tokens.calibration import ENOUGH, Calibrator, Key, chain
from proxy.tokens.chat import ChatRuler
from proxy.windows import Budget, Window, Windows, budget, requested_model
from proxy.wire import Request, chat_completions, encodings
from proxy.wire.sse import Usage

T = TypeVar("T")
Mode = Literal["auto", "off", "force", "shadow"]
MODES: tuple[Mode, ...] = ("off", "force", "shadow")
Outcome = Literal["none", "applied", "reused", "shadow", "bypassed", "failed", "rejected"]

INLINE_BYTES = 32 * 1024
"""Uncached text up to this size is counted on the event loop (about 2 ms); a thread costs more than it saves."""
INLINE_BODY = 1024 * 1024
"""Bodies up to this size are split on the event loop (about 1 ms)."""
MESSAGE_OVERHEAD = 16
"""Bound on the tokens that a message adds beyond its own bytes; its JSON punctuation alone is longer than that."""
RENDERING = 2
"""Bound on how much longer tools are as the upstream renders them than as their JSON."""
RETRY_SHARE = 0.95
"""Of a limit that was just exceeded: the second try must not fail by a rounding of ours."""
UNSTATED_SHARE = 0.5
"""Of what was refused, when the upstream did not say how much it takes."""
SUSPECTS = 256
"""Models whose last answer seemed truncated; clients choose the names."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the client's control headers ask for. window: tokens; may only narrow."""

    mode: Mode = "auto"
    window: int | None = None


def read_wish(headers: Mapping[bytes, bytes]) -> Wish:
    """The control headers' meaning. Raises ClientError (400) that names a value that we do not know."""
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


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one request.

    body: the bytes to forward instead of those that came; None: as it came. reason: why nothing was done, or why it failed.
    before, after: prompt tokens by our count; None where they were not counted (yet). seconds: our own time by phase.
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
    result: CompactionResult | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def forwarded(self) -> int | None:
        """Prompt tokens of what goes to the upstream."""
        return self.before if self.body is None else self.after

    @property
    def layers(self) -> tuple[str, ...]:
        return self.result.layers if self.result is not None and self.outcome in ("applied", "shadow", "reused") else ()


@dataclass(frozen=True, slots=True)
class Measured:
    """A request that was understood, and its rulers. budget: None while the model's window is unknown."""

    request: Request
    model: str
    window: Window | None
    budget: Budget | None
    ruler: ChatRuler


@dataclass(frozen=True, slots=True)
class Marks:
    """When an event happens and how far it goes. trigger, target: fractions of usable, or tokens above 1. timeout: seconds."""

    trigger: float = 0.80
    target: float = 0.45
    min_gain: int | None = None
    timeout: float = 2.0


class Compactor:
    """Decides for each request of one upstream; holds what is remembered between them."""

    def __init__(
        self,
        windows: Windows,
        layers: Sequence[Layer],
        marks: Marks | None = None,
        *,
        enabled: bool = True,
        shadow: bool = False,
        upstream: str = "",
        max_body_bytes: int = 64 * 1024 * 1024,
        threads: int = 2,
    ) -> None:
        self.windows = windows
        self.calibrator = Calibrator()
        self._upstream = upstream
        self._short_answers: dict[str, int] = {}
        self._layers = tuple(layers)
        self._marks = marks or Marks()
        self._enabled, self._shadow = enabled, shadow
        self._max_body_bytes = max_body_bytes
        self._cache = chat_completions.MessageCache()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compaction")

    async def decide(self, body: bytes, path: str, wish: Wish, content_encoding: str = "") -> Decision:
        """What to forward for this body. Never raises for its content; a failure of ours is the caller's to catch."""
        mode: Mode = "shadow" if self._shadow and wish.mode == "auto" else wish.mode
        if mode == "off":
            return Decision("bypassed", "bypass_header")
        if not self._enabled and mode == "auto":
            return Decision("none", "disabled")
        started = time.perf_counter()
        try:
            measured = await self._read(body, path, wish, content_encoding)
        except Unreadable:
            return Decision("none", "unreadable")
        read = time.perf_counter()
        decision = await self._judge(measured, len(body), mode)
        return replace(decision, seconds={"read": read - started, **decision.seconds})

    async def count(self, decision: Decision) -> Decision:
        """The decision with its tokens counted, off the event loop where that takes long."""
        if decision.before is not None or decision.request is None:
            return decision
        request = decision.request
        started = time.perf_counter()
        ruler = self._ruler(request, decision.model or "", decision.window)
        total = await self._total(ruler, request)
        seconds = {**decision.seconds, "count": time.perf_counter() - started}
        return replace(decision, before=total, after=total, seconds=seconds)

    async def harder(self, decision: Decision, refused: Overflow) -> Decision | None:
        """The decision after the upstream said that what we forwarded is too long; None when there is nothing to try.

        The limit was learned by the caller; what the upstream counted corrects our own count for this one request.
        """
        request, forwarded = decision.request, decision.forwarded
        if request is None or not forwarded:
            return None
        model = decision.model or ""
        window = self._window_after(refused, forwarded, decision)
        ruler = self._ruler(request, model, decision.window)
        aim = self._budget(window, request, ruler)
        # what the upstream counted corrects our own count, for this one try
        ratio = max(refused.input / forwarded, 0.5) if refused.input else 1.0
        fits = int(aim.usable * RETRY_SHARE / ratio)
        aim = replace(aim, usable=fits, trigger=min(aim.trigger, fits), target=max(1, int(aim.target / ratio)))
        before = forwarded if decision.body is None else await self._total(ruler, request)
        harder = await self._event(Measured(request, model, window, aim, ruler), before, "force")
        if harder.body is None or (harder.after or 0) >= forwarded:
            return None
        return replace(harder, seconds={**decision.seconds, **harder.seconds})

    def _window_after(self, refused: Overflow, forwarded: int, decision: Decision) -> Window:
        """The window as a refusal leaves it, for this one try: a configured one may say more."""
        known = decision.window
        if refused.limit is None:
            limit = int(min(refused.input or forwarded, forwarded) * UNSTATED_SHARE)
            return Window(limit, None, None, "learned", None, None, None)
        price = known.price if known is not None else None
        if not refused.of_prompt:
            return Window(refused.limit, None, None, "learned", None, None, price)
        asked = decision.request.max_output if decision.request is not None else None
        whole = known.tokens if known is not None else refused.limit + (asked or 0)
        return Window(max(whole, refused.limit), None, refused.limit, "learned", None, None, price)

    def refused(self, decision: Decision, refused: Overflow) -> None:
        """Takes what a refusal says of the model's limit."""
        if decision.model is not None and refused.limit is not None and refused.kind != "tpm":
            now = time.monotonic()
            self.windows.learn(decision.model, refused.limit, exact=True, now=now, prompt_only=refused.of_prompt)

    def learned(self, decision: Decision, usage: Usage) -> None:
        """Takes what the answer to a forwarded request says: how the upstream counts, a limit that proved wrong, a silent
        truncation, a model's real name."""
        request, model, forwarded = decision.request, decision.model, decision.forwarded
        if request is None or model is None or usage.prompt is None or not forwarded:
            return
        messages = request.conversation.messages
        if decision.body is not None and decision.result is not None:
            messages = decision.result.conversation.messages
        key, ruler = self._key(request, model), self._ruler(request, model, decision.window)
        if self._seems_truncated(key, forwarded, usage.prompt):
            self.windows.learn(model, usage.prompt, exact=False, now=time.monotonic())
            return
        self.calibrator.observe(key, ruler.raw(messages), usage.prompt, prefixes=chain(messages, ruler.raw(())))
        self.windows.accepted(model, usage.prompt)
        if usage.model:
            self.windows.answered_as(model, usage.model)

    def _seems_truncated(self, key: Key, forwarded: int, reported: int) -> bool:
        """Twice in a row far fewer tokens than we sent: once may be an upstream that counts only what was not cached."""
        calibrated = self.calibrator.calibration(key).samples >= ENOUGH
        if not overflow.truncated(forwarded, reported, calibrated=calibrated, media=key.media):
            self._short_answers.pop(key.model, None)
            return False
        seen = self._short_answers.get(key.model, 0) + 1
        if seen == 1 and len(self._short_answers) >= SUSPECTS:
            self._short_answers.clear()
        self._short_answers[key.model] = seen
        return seen >= 2

    def close(self) -> None:
        """Lets the worker threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _read(self, body: bytes, path: str, wish: Wish, content_encoding: str) -> Measured:
        if len(body) > INLINE_BODY or content_encoding:
            return await self._off_loop(lambda: self._understand(body, path, wish, content_encoding))
        return self._understand(body, path, wish, content_encoding)

    def _understand(self, body: bytes, path: str, wish: Wish, content_encoding: str) -> Measured:
        plain = encodings.decoded(body, content_encoding, self._max_body_bytes) if content_encoding else body
        request = chat_completions.read(plain, self._cache.get)
        model = requested_model(path, request.model)
        window = self.windows.lookup(model, time.monotonic())
        ruler = self._ruler(request, model, window)
        if window is None and wish.window is not None:
            window = Window(wish.window, None, None, "default", None, None, None)
        aim = None if window is None else self._budget(window, request, ruler, wish.window)
        return Measured(request, model, window, aim, ruler)

    def _key(self, request: Request, model: str) -> Key:
        """What shares a calibration."""
        offered = any(request.fields.get(name, b"null")[:1] == b"[" for name in ("tools", "functions"))
        return Key(self._upstream, tokens.bare_name(model), offered, _has_media(request))

    def _ruler(self, request: Request, model: str, window: Window | None) -> ChatRuler:
        """The ruler as far as answers have calibrated it by now."""
        encoding = window.encoding if window is not None else None
        plain = tokens.ruler(model, request.fields, encoding=encoding)
        marks = chain(request.conversation.messages, plain.raw(()))
        calibration = self.calibrator.calibration(self._key(request, model), marks)
        return tokens.ruler(model, request.fields, encoding=encoding, calibration=calibration)

    def _budget(self, window: Window, request: Request, ruler: ChatRuler, narrowed_to: int | None = None) -> Budget:
        return budget(
            window,
            requested_output=request.max_output,
            ruler=ruler,
            trigger=self._marks.trigger,
            target=self._marks.target,
            narrowed_to=narrowed_to,
            margin=ruler.calibration.margin,
        )

    async def _judge(self, measured: Measured, size: int, mode: Mode) -> Decision:
        known = Decision("none", None, None, measured.request, measured.model, measured.window, measured.budget)
        aim = measured.budget
        if aim is None:
            return replace(known, reason="unknown_window")
        if mode != "force" and self._plainly_fits(measured, size):
            return replace(known, reason="fits")
        started = time.perf_counter()
        before = await self._total(measured.ruler, measured.request)
        counted = time.perf_counter() - started
        if mode != "force" and before <= aim.trigger:
            return replace(known, reason="fits", before=before, after=before, seconds={"count": counted})
        decision = await self._event(measured, before, mode)
        return replace(decision, seconds={"count": counted, **decision.seconds})

    def _plainly_fits(self, measured: Measured, size: int) -> bool:
        """Whether the bytes alone prove it: text has no more tokens than bytes. Media are not text: they must be counted."""
        aim, request = measured.budget, measured.request
        assert aim is not None
        extra = RENDERING * sum(map(len, request.fields.values())) + MESSAGE_OVERHEAD * len(request.conversation.messages)
        if size + extra > aim.trigger:
            return False
        return not _has_media(request)

    async def _event(self, measured: Measured, before: int, mode: Mode) -> Decision:
        """Compacts within the deadline. What gains nothing, or does not fit even so, goes on as it came."""
        request, aim = measured.request, measured.budget
        assert aim is not None
        started = time.perf_counter()
        limit = time.monotonic() + self._marks.timeout
        gone = threading.Event()

        def work() -> tuple[CompactionResult, bytes]:
            result = compact(request.conversation, aim, self._layers, stop=lambda: gone.is_set() or time.monotonic() > limit)
            return result, chat_completions.write(request, result.conversation) if result.tokens_after < before else b""

        known = Decision("none", None, None, request, measured.model, measured.window, aim, before, before)
        try:
            result, body = await asyncio.wait_for(self._off_loop(work), self._marks.timeout)
        except TimeoutError:
            return replace(known, reason="deadline")
        finally:
            gone.set()
        known = replace(known, seconds={"compact": time.perf_counter() - started}, result=result)
        reason = self._refusal(result, aim, mode)
        if reason is not None:
            outcome: Outcome = "rejected" if reason == "no_gain" else "none"
            return replace(known, outcome=outcome, reason=reason)
        if mode == "shadow":
            return replace(known, outcome="shadow", after=result.tokens_after)
        return replace(known, outcome="applied", body=body, after=result.tokens_after)

    def _refusal(self, result: CompactionResult, aim: Budget, mode: Mode) -> str | None:
        """Why a result is not worth forwarding; None when it is."""
        before, after = result.tokens_before, result.tokens_after
        if after > aim.usable:
            return result.reason if result.reason in ("deadline", "floor") else "floor"
        if after >= before:
            return result.reason if result.reason in ("deadline", "floor") else "no_gain"
        least = self._marks.min_gain if self._marks.min_gain is not None else max(aim.window // 50, 1_024)
        # a request that does not fit has no choice, and one that was asked for is done
        if before <= aim.usable and mode != "force" and (before - after < least or after > 0.95 * before):
            return "no_gain"
        return None

    async def _total(self, ruler: ChatRuler, request: Request) -> int:
        messages = request.conversation.messages
        if ruler.cold_bytes(messages) <= INLINE_BYTES:
            return ruler.total(messages)
        return await self._off_loop(lambda: ruler.total(messages))

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _has_media(request: Request) -> bool:
    return any(isinstance(part, Opaque) for message in request.conversation.messages for part in message.parts)
