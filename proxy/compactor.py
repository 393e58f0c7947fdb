"""One request's compaction: read it, measure it, and decide whether it fits or an event must make it fit.

Reading and deciding are pure and quick; what takes longer goes to a worker thread with a deadline, so that the event loop
serves everyone else meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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
from proxy.conversation import Messages
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
from proxy.windows import Budget, Window, Windows, budget, kept_as, requested_model
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
MOST_LIMITS, MOST_MARGINS = 1024, 8
"""Combinations of windows and wishes whose budgets are kept, and how many of each; clients choose the wishes."""
RETRY_SHARE = 0.95
"""Of a limit that was just exceeded: the second try must not fail by a rounding of ours."""
UNSTATED_SHARE = 0.5
"""Of what was refused, when the upstream did not say how much it takes."""
UNKNOWN = 0
"""Stands for a window that is guessed anew with each refusal: checkpoints are found by the window that they were made for."""


class _Budgets(dict[float, Budget]):
    """What a window leaves for requests of one kind, by the margin of their counts; worked out when it is asked for.

    Whose ruler these budgets have is of no account.
    """

    def __init__(self, window: Window, max_output: int | None, narrowed_to: int | None, marks: Marks) -> None:
        super().__init__()
        self._of = partial(
            budget,
            window,
            requested_output=max_output,
            ruler=tokens.ruler("", {}),
            trigger=marks.trigger,
            target=marks.target,
            narrowed_to=narrowed_to,
        )

    def __missing__(self, margin: float) -> Budget:
        if len(self) >= MOST_MARGINS:
            self.clear()
        made = self[margin] = self._of(margin=margin)
        return made


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
        self._usual: Mode = "shadow" if shadow else "auto"
        self._unread = {"off": Decision("bypassed", "bypass_header")}
        """What becomes of requests that are not even read, by what their clients wish."""
        if not enabled and not shadow:
            self._unread["auto"] = Decision("none", "disabled")
        self._max_body_bytes = max_body_bytes
        self._cache = chat_completions.MessageCache()
        self._read = partial(chat_completions.read, parse=self._cache.get, prefixes=Prefixes())
        self._budgets: dict[tuple[Window, int | None, int | None], _Budgets] = {}
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
        if wish.mode in self._unread:
            return self._unread[wish.mode]
        started, size = time.perf_counter(), len(body)
        try:
            if content_encoding or size > INLINE_BODY:
                request, size = await self._threads.run(partial(self._understand, body, content_encoding))
            else:
                request = self._read(body)
        except Unreadable:
            return Decision("none", "unreadable")
        messages: Messages = request.conversation.messages  # type: ignore[assignment]  # of what was read they are
        if self._seen is not None:
            self._seen.note(caller.credential, messages, time.monotonic())
        basis: Basis | None = request.fields.note
        if basis is None or basis.asked != (path, wish) or basis.window is not self.windows.at_hand(basis.kept_as):
            basis = self._basis(request, path, wish, caller.narrowed_to)
        seconds = {"read": time.perf_counter() - started}
        if basis is None:
            model = requested_model(path, request.model)
            return Decision("none", "unknown_window", request=request, model=model, seconds=seconds, caller=caller)
        if request.media or size + MESSAGE_OVERHEAD * len(messages) > basis.room:
            return await self._weigh(request, basis, seconds, caller)
        known, margin = self.learned.measure(basis.plain, basis.keys[False], messages)
        # what is not known is counted while the upstream thinks
        return Decision(
            "none",
            "fits",
            None,
            request,
            basis.model,
            basis.window,
            basis.budgets[margin],
            known,
            known,
            seconds,
            caller,
            basis,
        )

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

    def _basis(self, request: Request, path: str, wish: Wish, narrowed_to: int | None) -> Basis | None:
        """What the request is decided by, noted for those that come after it; None when nobody knows how much its model holds."""
        noted: Basis | None = request.fields.note
        if noted is not None and noted.asked != (path, wish):
            noted = None
        model = requested_model(path, request.model) if noted is None else noted.model
        window = self.windows.lookup(model, time.monotonic())
        if window is None:
            if narrowed_to is None:
                return None
            window = Window(narrowed_to, None, None, "default", None, None, None)
        if noted is None or noted.window is not window:
            noted = request.fields.note = self._new_basis(request, path, wish, narrowed_to, model, window)
        return noted

    def _new_basis(self, request: Request, path: str, wish: Wish, narrowed_to: int | None, model: str, window: Window) -> Basis:
        mode, budgets = self._mode(wish), self._budgets_of(window, request, narrowed_to)
        # Bytes alone can prove that a request fits: text has no more tokens than bytes. Media must be counted: they are no text.
        least = budgets[WIDEST_MARGIN]  # whatever answers have taught
        most = min(least.trigger, self._events.earliest(least, mode)) // WORST_SLOPE
        room = -1 if mode == "force" else most - RENDERING * sum(map(len, request.fields.values()))
        plain, keys = self.learned.plain_ruler(request, model, window), self.learned.keys(request, model)
        return Basis((path, wish), model, kept_as(model), window, plain, keys, room, budgets)

    def _mode(self, wish: Wish) -> Mode:
        return self._usual if wish.mode == "auto" else wish.mode

    def _ruler(self, decision: Decision, request: Request) -> ChatRuler:
        """Counts as answers have calibrated it by now."""
        basis, model = decision.basis, decision.model or ""
        if basis is None:
            return self.learned.ruler(request, model, decision.window)
        return self.learned.calibrated(basis.plain, basis.keys[request.media], request.conversation.messages)

    def _budget(self, window: Window, request: Request, ruler: ChatRuler, narrowed_to: int | None) -> Budget:
        return _by(ruler, self._budgets_of(window, request, narrowed_to))

    def _budgets_of(self, window: Window, request: Request, narrowed_to: int | None) -> _Budgets:
        key = window, request.max_output, narrowed_to
        known = self._budgets.get(key)
        if known is None:
            if len(self._budgets) >= MOST_LIMITS:
                self._budgets.clear()
            known = self._budgets[key] = _Budgets(window, request.max_output, narrowed_to, self._marks)
        return known

    async def _weigh(self, request: Request, basis: Basis, seconds: Mapping[str, float], caller: Caller) -> Decision:
        """The decision on a request that must be counted first. seconds: what reading it took."""
        key, messages = basis.keys[request.media], request.conversation.messages
        ruler, steady = self.learned.calibrated(basis.plain, key, messages), self.learned.steady(basis.plain, key)
        aim, lasting = _by(ruler, basis.budgets), _by(steady, basis.budgets)
        measured = Measured(request, basis.model, basis.window, ruler, aim, lasting, caller)
        with sealing(self._seal(caller)):
            decision = await self._judge(measured, self._mode(basis.asked[1]))
        return decision.but(seconds={**seconds, **decision.seconds}, basis=basis)

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


def _by(ruler: ChatRuler, budgets: Mapping[float, Budget]) -> Budget:
    """What a request may weigh as this ruler counts."""
    return budgets[ruler.calibration.margin].by(ruler)


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
