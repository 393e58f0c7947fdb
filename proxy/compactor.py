"""One request's compaction: read it, measure it, and decide whether it fits or an event must make it fit.

Reading and deciding are pure and quick; what takes longer goes to a worker thread with a deadline, so that the event loop
serves everyone else meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b

from proxy import __version__, tokens
from proxy.checkpoints import CheckpointStore, open_store
from proxy.checkpoints.chain import Digests
from proxy.checkpoints.first_seen import FirstSeen
from proxy.checkpoints.thaw import Thaws
from proxy.compaction import Layer
from proxy.compaction.strategies import ask_for_ages
from proxy.compaction.summary import sealing
from proxy.compaction.validation import OPENAI, Rules
from proxy.decisions import NOBODY, Basis, Caller, Decision, Measured, Mode, Wish
from proxy.errors import Unreadable
from proxy.events import Events
from proxy.learned import Learned
from proxy.overflow import Overflow
from proxy.summarizers.background import Background
from proxy.threads import Threads
from proxy.tokens.calibration import WIDEST_MARGIN
from proxy.tokens.chat import ChatRuler
from proxy.walk import Marks, Policy
from proxy.windows import Budget, Window, Windows, budget, requested_model
from proxy.wire import Request, chat_completions, encodings
from proxy.wire.prefixes import Prefixes
from proxy.wire.sse import Usage

INLINE_BODY = 1024 * 1024
"""Bodies up to this size are split on the event loop (about 1 ms)."""
MESSAGE_OVERHEAD = 16
"""Bound on the tokens that a message adds beyond its own bytes; its JSON punctuation alone is longer than that."""
RENDERING = 2
"""Bound on how much longer tools are as the upstream renders them than as their JSON."""
WORST_SLOPE = 2
"""Bound on how many tokens an upstream counts where we count one."""
MOST_LIMITS = 1024
"""Combinations of windows and wishes whose limits are kept; clients choose the wishes."""
RETRY_SHARE = 0.95
"""Of a limit that was just exceeded: the second try must not fail by a rounding of ours."""
UNSTATED_SHARE = 0.5
"""Of what was refused, when the upstream did not say how much it takes."""
UNKNOWN = 0
"""Stands for a window that is guessed anew with each refusal: checkpoints are found by the window that they were made for."""


class Compactor:
    """Decides for each request of one upstream; holds what is remembered between them.

    secret: keys the names under which checkpoints are stored; replicas that share a store share it.
    """

    def __init__(
        self,
        windows: Windows,
        layers: Sequence[Layer],
        marks: Marks | None = None,
        *,
        store: CheckpointStore | None = None,
        secret: bytes = b"",
        rules: Rules = OPENAI,
        enabled: bool = True,
        shadow: bool = False,
        upstream: str = "",
        max_body_bytes: int = 64 * 1024 * 1024,
        threads: int = 2,
        summaries: Background | None = None,
    ) -> None:
        self.windows = windows
        self.learned = Learned(windows, upstream)
        self._marks = marks or Marks()
        self._secret = secret
        self._enabled = enabled
        self._usual: Mode = "shadow" if shadow else "auto"
        self._max_body_bytes = max_body_bytes
        self._cache = chat_completions.MessageCache()
        self._read = partial(chat_completions.read, parse=self._cache.get, prefixes=Prefixes())
        self._limits: dict[tuple[int, int | None, int | None, float], tuple[Window, Budget]] = {}
        self._threads = Threads(threads)
        digests, layers = Digests(), tuple(layers)
        self._seen = FirstSeen(digests) if ask_for_ages(layers) else None
        self._events = Events(
            Policy(layers, self._marks, rules, Thaws(self._cache.get), seen=self._seen),
            store if store is not None else open_store("memory://"),
            self._threads,
            digests,
            secret=secret,
            fingerprint=blake2b(repr((layers, self._marks, rules, upstream, __version__)).encode()).hexdigest(),
            summaries=summaries,
        )

    async def decide(self, body: bytes, path: str, wish: Wish, content_encoding: str = "", caller: Caller = NOBODY) -> Decision:
        """What to forward for this body. Never raises for its content; a failure of ours is for those to catch who call this.

        caller: who asks; `narrowed_to` is the window of the same wish.
        """
        mode = self._usual if wish.mode == "auto" else wish.mode
        if mode == "off":
            return Decision("bypassed", "bypass_header")
        if mode == "auto" and not self._enabled:
            return Decision("none", "disabled")
        started = time.perf_counter()
        try:
            if content_encoding or len(body) > INLINE_BODY:
                request, size = await self._threads.run(partial(self._understand, body, content_encoding))
            else:
                request, size = self._read(body), len(body)
        except Unreadable:
            return Decision("none", "unreadable")
        asked = path, mode, caller.narrowed_to
        basis: Basis | None = request.fields.note
        if basis is not None and basis.asked != asked:
            basis = None
        model = requested_model(path, request.model) if basis is None else basis.model
        window = self.windows.lookup(model, time.monotonic())
        if window is None and caller.narrowed_to is not None:
            window = Window(caller.narrowed_to, None, None, "default", None, None, None)
        messages = request.conversation.messages
        if self._seen is not None:
            self._seen.note(caller.credential, messages, time.monotonic())
        seconds = {"read": time.perf_counter() - started}
        if window is None:
            return Decision("none", "unknown_window", request=request, model=model, seconds=seconds, caller=caller)
        if basis is None or basis.window is not window:
            basis = request.fields.note = self._basis(request, asked, model, window)
        if not request.media and size + MESSAGE_OVERHEAD * len(messages) <= basis.room:
            known, margin = self.learned.measure(basis.plain, basis.keys[False], messages)
            aim = self._limit(window, request, caller.narrowed_to, margin)
            # what is not known is counted while the upstream thinks
            return Decision(
                "none", "fits", None, request, model, window, aim, known, known, seconds=seconds, caller=caller, basis=basis
            )
        key = basis.keys[request.media]
        ruler = self.learned.calibrated(basis.plain, key, messages)
        aim = self._budget(window, request, ruler, caller.narrowed_to)
        steady = self._budget(window, request, self.learned.steady(basis.plain, key), caller.narrowed_to)
        measured = Measured(request, model, window, ruler, aim, steady, caller)
        with sealing(self._seal(caller)):
            decision = await self._judge(measured, mode)
        return decision.but(seconds={**seconds, **decision.seconds}, basis=basis)

    async def count(self, decision: Decision) -> Decision:
        """The decision with its tokens counted, off the event loop where that takes long."""
        if decision.before is not None or decision.request is None:
            return decision
        started = time.perf_counter()
        ruler = self._ruler(decision, decision.request)
        total = await self._threads.total(ruler, decision.request.conversation)
        seconds = {**decision.seconds, "count": time.perf_counter() - started}
        return decision.but(before=total, after=total, seconds=seconds)

    async def harder(self, decision: Decision, refused: Overflow) -> Decision | None:
        """The decision after the upstream said that what we forwarded is too long; None when there is nothing to try.

        What the upstream counted corrects our own count for this one request.
        """
        with sealing(self._seal(decision.caller)):
            return await self._harder(decision, refused)

    def _seal(self, caller: Caller) -> bytes:
        """The key that this caller's summaries are sealed with."""
        return blake2b(caller.credential, key=blake2b(self._secret).digest()).digest()

    async def _harder(self, decision: Decision, refused: Overflow) -> Decision | None:
        request, forwarded, narrowed_to = decision.request, decision.forwarded, decision.caller.narrowed_to
        if request is None or not forwarded:
            return None
        model = decision.model or ""
        window = _window_after(refused, forwarded, decision)
        ruler = self._ruler(decision, request)
        aim = self._budget(window, request, ruler, narrowed_to)
        ratio = max(refused.input / forwarded, 0.5) if refused.input else 1.0
        fits = max(1, min(int(aim.usable * RETRY_SHARE / ratio), forwarded - 1))
        aim = replace(aim, usable=fits, trigger=min(aim.trigger, fits), target=max(1, min(int(aim.target / ratio), fits)))
        # what the next turn will go by, which is to find what is forwarded now
        known = self.windows.lookup(model, time.monotonic()) or decision.window
        steady = self._budget(known or window, request, self.learned.steady_ruler(request, model, known), narrowed_to)
        steady = steady if known is not None else replace(steady, window=UNKNOWN)
        before = await self._threads.total(ruler, request.conversation)
        started = time.perf_counter()
        measured = Measured(request, model, window, ruler, aim, steady, decision.caller)
        harder = await self._events.harder(measured, aim, steady, before)
        if harder is None:
            return None
        return harder.but(seconds={**decision.seconds, "compact": time.perf_counter() - started})

    def answered(self, decision: Decision, usage: Usage) -> None:
        """Takes what the answer to a forwarded request says of the upstream."""
        request, model, basis = decision.request, decision.model, decision.basis
        counted, reported = decision.before if decision.body is None else decision.after, usage.prompt
        if request is None or model is None or not counted or reported is None:
            return
        key = (self.learned.keys(request, model) if basis is None else basis.keys)[request.media]
        if not self.learned.answered(model, key, counted, reported, usage.model):
            return
        plain = self.learned.plain_ruler(request, model, decision.window) if basis is None else basis.plain
        messages = request.conversation.messages
        if decision.body is not None and decision.result is not None:
            messages = decision.result.conversation.messages
        self.learned.observed(plain, key, messages, reported)

    async def aclose(self) -> None:
        """Ends summaries under way, lets go of the store, and lets the worker threads end."""
        self._threads.close()
        await self._events.aclose()

    def _understand(self, body: bytes, content_encoding: str) -> tuple[Request, int]:
        """What the body says, and how many bytes that are without its codings. Raises Unreadable."""
        plain = encodings.decoded(body, content_encoding, self._max_body_bytes) if content_encoding else body
        return self._read(plain), len(plain)

    def _basis(self, request: Request, asked: tuple[str, Mode, int | None], model: str, window: Window) -> Basis:
        _, mode, narrowed_to = asked
        # Bytes alone can prove that a request fits: text has no more tokens than bytes. Media must be counted: they are no text.
        least = self._limit(window, request, narrowed_to, WIDEST_MARGIN)  # whatever answers have taught
        most = min(least.trigger, self._events.earliest(least, mode)) // WORST_SLOPE
        room = -1 if mode == "force" else most - RENDERING * sum(map(len, request.fields.values()))
        plain, keys = self.learned.plain_ruler(request, model, window), self.learned.keys(request, model)
        return Basis(asked, model, window, plain, keys, room)

    def _ruler(self, decision: Decision, request: Request) -> ChatRuler:
        """Counts as answers have calibrated it by now."""
        basis, model = decision.basis, decision.model or ""
        if basis is None:
            return self.learned.ruler(request, model, decision.window)
        return self.learned.calibrated(basis.plain, basis.keys[request.media], request.conversation.messages)

    def _budget(self, window: Window, request: Request, ruler: ChatRuler, narrowed_to: int | None = None) -> Budget:
        return self._limit(window, request, narrowed_to, ruler.calibration.margin).by(ruler)

    def _limit(self, window: Window, request: Request, narrowed_to: int | None, margin: float) -> Budget:
        """A budget's figures; whose ruler it has is of no account."""
        key = id(window), request.max_output, narrowed_to, margin
        known = self._limits.get(key)
        if known is None or known[0] is not window:
            made = budget(
                window,
                requested_output=request.max_output,
                ruler=tokens.ruler("", {}),
                trigger=self._marks.trigger,
                target=self._marks.target,
                narrowed_to=narrowed_to,
                margin=margin,
            )
            if len(self._limits) >= MOST_LIMITS:
                self._limits.clear()
            known = self._limits[key] = window, made
        return known[1]

    async def _judge(self, measured: Measured, mode: Mode) -> Decision:
        aim, steady = measured.budget, measured.steady
        started = time.perf_counter()
        before = await self._threads.total(measured.ruler, measured.request.conversation)
        counted = time.perf_counter()
        lasting = steady.ruler.total(measured.request.conversation.messages)
        if mode != "force" and before <= aim.usable and lasting <= steady.trigger:
            decision = measured.decided("none", "fits", before)
            self._events.foresee(measured, steady, lasting, mode)
        else:
            decision = await self._events.fit(measured, aim, steady, before, mode)
        apart = decision.seconds
        compacting = time.perf_counter() - counted - sum(apart.values())
        return decision.but(seconds={"count": counted - started, "compact": compacting, **apart})


def _window_after(refused: Overflow, forwarded: int, decision: Decision) -> Window:
    """The window as a refusal leaves it, for one more try: a configured one may say more."""
    known = decision.window
    if refused.limit is None:
        limit = int(min(refused.input or forwarded, forwarded) * UNSTATED_SHARE)
        return Window(max(limit, 1), None, None, "learned", None, None, None)
    price = known.price if known is not None else None
    if not refused.of_prompt:
        return Window(refused.limit, None, None, "learned", None, None, price)
    asked = decision.request.max_output if decision.request is not None else None
    whole = known.tokens if known is not None else refused.limit + (asked or 0)
    return Window(max(whole, refused.limit), None, refused.limit, "learned", None, None, price)
