"""One request's compaction: read it, measure it, take up an earlier event or make a new one, and say what was done.

Reading and deciding are pure and quick; what takes longer goes to a worker thread with a deadline, so that the event loop
serves everyone else meanwhile.
"""

from __future__ import annotations

import asyncio
import contextvars
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal, TypeVar

from proxy import __version__, tokens
from proxy.checkpoints import CheckpointStore, open_store
from proxy.checkpoints.chain import Chain, Digests, chain, namespace
from proxy.checkpoints.checkpoint import Checkpoint
from proxy.checkpoints.first_seen import FirstSeen
from proxy.checkpoints.resume import Decide, Refusals, Replayed, decision_points, freeze, replay, resume, rule
from proxy.checkpoints.resume import Decision as Event
from proxy.checkpoints.thaw import Thaws
from proxy.checkpoints.trail import Move, Trail
from proxy.compaction import CompactionResult, CriticalItems, Layer, LayerReport
from proxy.compaction.pipeline import compact
from proxy.compaction.strategies import ask_for_ages, with_ages
from proxy.compaction.summary import sealing
from proxy.compaction.validation import OPENAI, Rules, violations
from proxy.conversation import Conversation, Message
from proxy.errors import ClientError, Unreadable
from proxy.learned import Learned, has_media
from proxy.overflow import Overflow
from proxy.pricing import Bill, worth_it
from proxy.summarizers import Headers
from proxy.summarizers.background import Adoption, Background, Standing
from proxy.tokens.chat import ChatRuler
from proxy.windows import Budget, Window, Windows, budget, requested_model
from proxy.wire import Request, chat_completions, encodings
from proxy.wire.prefixes import Prefixes
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
WORST_SLOPE = 2
"""Bound on how many tokens an upstream counts where we count one."""
RETRY_SHARE = 0.95
"""Of a limit that was just exceeded: the second try must not fail by a rounding of ours."""
UNSTATED_SHARE = 0.5
"""Of what was refused, when the upstream did not say how much it takes."""
REPLAY_SHARE = 0.6
"""Of the deadline: what going through a history again may take; one event from what came is left the rest."""
TAKES_ANY_TURN = re.compile(r"gpt-|chatgpt|o[134](-|$)|codex|claude|gemini")
"""Models (bare names) whose hosts take messages in any order of roles."""
LEAST_GAIN = 0.95
"""Of what came: an event that leaves more is not worth a broken prompt cache."""
PRESSING = 0.9
"""Of what is usable: from here on no event is put off. The rest is for what the steady measure may be wrong about."""
SIBLINGS = 8
"""Checkpoints of histories that share a beginning with this one: so many are passed over in search of its own."""
WRITERS = 3
"""Times that a history is gone through again because somebody else had written first."""


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
    before, after: prompt tokens by our count; None where they were not counted (yet). layers: who had a part in `after`.
    seconds: our own time by phase. prefix_break: why the upstream's prompt cache is of no use from some message on, where that
    is known: `event`, `edit`, `new_conversation`. rewritten: tokens which it must read anew because of an event. seal: the key
    that this caller's summaries are sealed with.
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
    layers: tuple[str, ...] = ()
    is_event: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    prefix_break: str | None = None
    rewritten: int = 0
    seal: bytes = field(default=b"", repr=False)

    @property
    def forwarded(self) -> int | None:
        """Prompt tokens of what goes to the upstream."""
        return self.before if self.body is None else self.after


@dataclass(frozen=True, slots=True)
class Measured:
    """A request that was understood.

    budget: by what answers have taught, None while the model's window is unknown; steady: by the model's name alone.
    credential: what the client authenticates with: nothing is shared beyond it. headers: it, as it came.
    """

    request: Request
    model: str
    window: Window | None
    ruler: ChatRuler
    budget: Budget | None
    steady: Budget | None
    credential: bytes
    headers: Headers = ()

    def decided(self, outcome: Outcome, reason: str | None = None, before: int | None = None) -> Decision:
        """A decision that forwards it as it came."""
        return Decision(outcome, reason, None, self.request, self.model, self.window, self.budget, before, before)


@dataclass(frozen=True, slots=True)
class Marks:
    """When an event happens and how far it goes. trigger, target: fractions of usable, or tokens above 1. timeout: seconds.

    thrifty: an event that nothing forces waits while it would cost more than it is expected to save.
    """

    trigger: float = 0.80
    target: float = 0.45
    min_gain: int | None = None
    timeout: float = 2.0
    thrifty: bool = True


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
        self._layers = tuple(layers)
        self._marks = marks or Marks()
        self._rules = rules
        self._store = store if store is not None else open_store("memory://")
        self._secret = secret
        self._fingerprint = blake2b(repr((self._layers, self._marks, rules, upstream, __version__)).encode()).hexdigest()
        self._enabled, self._shadow = enabled, shadow
        self._max_body_bytes = max_body_bytes
        self._cache = chat_completions.MessageCache()
        self._prefixes = Prefixes()
        self._digests = Digests()
        self._seen = FirstSeen(self._digests) if ask_for_ages(self._layers) else None
        self._thaws = Thaws(self._cache.get)
        self._refusals = Refusals()
        self._trail = Trail()
        self._summaries = summaries
        self._events: dict[bytes, asyncio.Future[None]] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compaction")

    async def decide(
        self,
        body: bytes,
        path: str,
        wish: Wish,
        content_encoding: str = "",
        credential: bytes = b"",
        headers: Headers = (),
    ) -> Decision:
        """What to forward for this body. Never raises for its content; a failure of ours is the caller's to catch.

        headers: the client's credentials, for a summary by a model; without any none is asked for on its behalf.
        """
        mode: Mode = "shadow" if self._shadow and wish.mode == "auto" else wish.mode
        if mode == "off":
            return Decision("bypassed", "bypass_header")
        if not self._enabled and mode == "auto":
            return Decision("none", "disabled")
        started = time.perf_counter()
        try:
            measured = await self._read(body, path, wish, content_encoding, credential)
        except Unreadable:
            return Decision("none", "unreadable")
        if headers:
            measured = replace(measured, headers=headers)
        if self._seen is not None:
            self._seen.note(credential, measured.request.conversation.messages, time.monotonic())
        read = time.perf_counter()
        seal = blake2b(credential, key=blake2b(self._secret).digest()).digest()
        with sealing(seal):
            decision = await self._judge(measured, len(body), mode)
        return replace(decision, seal=seal, seconds={"read": read - started, **decision.seconds})

    async def count(self, decision: Decision) -> Decision:
        """The decision with its tokens counted, off the event loop where that takes long."""
        if decision.before is not None or decision.request is None:
            return decision
        started = time.perf_counter()
        ruler = self.learned.ruler(decision.request, decision.model or "", decision.window)
        total = await self._total(ruler, decision.request.conversation)
        seconds = {**decision.seconds, "count": time.perf_counter() - started}
        return replace(decision, before=total, after=total, seconds=seconds)

    async def harder(self, decision: Decision, refused: Overflow) -> Decision | None:
        """The decision after the upstream said that what we forwarded is too long; None when there is nothing to try.

        What the upstream counted corrects our own count for this one request.
        """
        with sealing(decision.seal):
            return await self._harder(decision, refused)

    async def _harder(self, decision: Decision, refused: Overflow) -> Decision | None:
        request, forwarded = decision.request, decision.forwarded
        if request is None or not forwarded:
            return None
        model = decision.model or ""
        window = _window_after(refused, forwarded, decision)
        ruler = self.learned.ruler(request, model, decision.window)
        aim = self._budget(window, request, ruler)
        ratio = max(refused.input / forwarded, 0.5) if refused.input else 1.0
        fits = max(1, int(aim.usable * RETRY_SHARE / ratio))
        aim = replace(aim, usable=fits, trigger=min(aim.trigger, fits), target=max(1, int(aim.target / ratio)))
        measured = Measured(request, model, window, ruler, aim, aim, b"")
        before = await self._total(ruler, request.conversation)
        started = time.perf_counter()
        stop = self._stop()
        result = await self._within(
            lambda: compact(
                request.conversation, aim, self._layers, stop=stop, hard=True, rules=self.rules_of(request.conversation, model)
            )
        )
        if result is None or result.tokens_after > aim.usable or result.tokens_after >= forwarded:
            return None
        seconds = {**decision.seconds, "compact": time.perf_counter() - started}
        return replace(self._applied(measured, before, result, "auto"), seconds=seconds)

    def answered(self, decision: Decision, usage: Usage) -> None:
        """Takes what the answer to a forwarded request says of the upstream."""
        request, forwarded = decision.request, decision.forwarded
        if request is None or decision.model is None or not forwarded:
            return
        messages = request.conversation.messages
        if decision.body is not None and decision.result is not None:
            messages = decision.result.conversation.messages
        self.learned.answered(request, decision.model, decision.window, messages, forwarded, usage)

    async def aclose(self) -> None:
        """Ends summaries under way, lets go of the store, and lets the worker threads end."""
        if self._summaries is not None:
            await self._summaries.aclose()
        self._pool.shutdown(wait=False, cancel_futures=True)
        await self._store.aclose()

    async def _read(self, body: bytes, path: str, wish: Wish, content_encoding: str, credential: bytes) -> Measured:
        if len(body) > INLINE_BODY or content_encoding:
            return await self._off_loop(lambda: self._understand(body, path, wish, content_encoding, credential))
        return self._understand(body, path, wish, content_encoding, credential)

    def _understand(self, body: bytes, path: str, wish: Wish, content_encoding: str, credential: bytes) -> Measured:
        plain = encodings.decoded(body, content_encoding, self._max_body_bytes) if content_encoding else body
        request = chat_completions.read(plain, self._cache.get, self._prefixes)
        model = requested_model(path, request.model)
        window = self.windows.lookup(model, time.monotonic())
        ruler = self.learned.ruler(request, model, window)
        if window is None and wish.window is not None:
            window = Window(wish.window, None, None, "default", None, None, None)
        if window is None:
            return Measured(request, model, None, ruler, None, None, credential)
        aim = self._budget(window, request, ruler, wish.window)
        steady = self._budget(window, request, self.learned.steady_ruler(request, model, window), wish.window)
        return Measured(request, model, window, ruler, aim, steady, credential)

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
        aim, steady = measured.budget, measured.steady
        if aim is None or steady is None:
            return measured.decided("none", "unknown_window")
        early = steady.trigger
        if self._summaries is not None and mode == "auto":
            early = min(early, int(self._summaries.terms.prefetch * steady.usable))
        if mode != "force" and _plainly_fits(measured.request, size, min(aim.trigger, early)):
            messages = measured.request.conversation.messages
            known = measured.ruler.cold_bytes(messages, 0) == 0  # then a count costs less than to ask for it later
            return measured.decided("none", "fits", measured.ruler.total(messages) if known else None)
        started = time.perf_counter()
        before = await self._total(measured.ruler, measured.request.conversation)
        counted = time.perf_counter()
        lasting = steady.ruler.total(measured.request.conversation.messages)
        if mode != "force" and before <= aim.usable and lasting <= steady.trigger:
            decision = measured.decided("none", "fits", before)
            if self._summaries is not None and mode == "auto" and self._summaries.is_due(lasting, steady):
                seed, linked = self._linked(measured, steady)
                self._prepare(measured, steady, _standing(linked, None, seed), measured.request.conversation)
        else:
            decision = await self._fit(measured, aim, steady, before, mode)
        return replace(decision, seconds={"count": counted - started, "compact": time.perf_counter() - counted})

    def _linked(self, measured: Measured, steady: Budget) -> tuple[bytes, Chain]:
        """Whose history this is, and its keys."""
        seed = namespace(self._secret, measured.credential, self._fingerprint, measured.model, str(steady.window))
        return seed, chain(measured.request.conversation, seed, self._digests)

    async def _fit(self, measured: Measured, aim: Budget, steady: Budget, before: int, mode: Mode) -> Decision:
        """Takes up where an earlier event left off, and makes a new one where that is due."""
        conversation = measured.request.conversation
        seed, linked = self._linked(measured, steady)
        own, others = await self._known(linked.keys)
        walk = _Walk(self, measured, steady, linked, own, mode, self._trail.take(linked.keys))
        replayed: Replayed | None = walk.looking()
        if replayed is not None and not replayed.complete:
            due = replayed.due
            replayed = None if others is None else await self._joined(walk, others)
            if replayed is None:
                walk, replayed = await self._event(walk if others is None else walk.from_here(others), due, seed)
        if replayed is None or not replayed.complete:
            return await self._squeeze(walk, aim, before, conversation)
        forwarded = replayed.conversation
        after = before if forwarded is conversation else await self._total(measured.ruler, forwarded)
        decision = self._resumed(measured, before, after, replayed, walk, mode)
        if decision.outcome == "reused" and walk.move == "edited":
            decision = replace(decision, prefix_break="edit")
        if after > aim.usable:
            squeezed = await self._squeeze(walk, aim, before, forwarded, replayed.checkpoint)
            return replace(decision, reason=squeezed.reason) if squeezed.after == before and after < before else squeezed
        if self._summaries is not None and mode == "auto":
            lasting = steady.ruler.total(forwarded.messages)
            if self._summaries.is_due(lasting, steady):
                self._prepare(measured, steady, walk.standing(seed, replayed.checkpoint), forwarded)
        return decision

    async def _known(self, keys: Sequence[bytes]) -> tuple[tuple[int, Checkpoint] | None, tuple[int, Checkpoint] | None]:
        """The longest checkpoint whose event lies on the way of this history; and a longer one of another history that has only
        its beginning in common with this one, if there is one."""
        others, passed = None, frozenset(keys)
        for _ in range(SIBLINGS):
            found = await self._store.get_longest(keys)
            if found is None or not found[1].origin or found[1].origin in passed:
                return found, others
            others, keys = others or found, keys[: found[0]]
        return None, others

    async def _joined(self, walk: _Walk, others: tuple[int, Checkpoint]) -> Replayed | None:
        """Where an event is due anyway, the one of a history with the same beginning will do (before an edit, in a branch): what
        it left is in the upstream's cache. None when that is not enough."""
        looked = walk.from_here(others).looking()
        if not looked.complete or not walk.chain.keys:
            return None
        key = walk.chain.keys[-1]
        checkpoint = replace(others[1], origin=key, seen=walk.chain.cuts[-1])
        await self._store.put_if_absent(key, checkpoint)
        return replace(looked, made=((key, checkpoint),))

    async def _event(self, walk: _Walk, due: bytes | None, seed: bytes) -> tuple[_Walk, Replayed | None]:
        """Goes through a history where events are due, and leaves what became of them in the store.

        Parallel requests of one conversation come to the same event: one makes it, the others wait and take it up. Where
        somebody else wrote first, another process perhaps, what that one wrote is what counts.
        """
        if due is not None and due in self._events:
            await asyncio.wait([self._events[due]], timeout=self._marks.timeout)
            own, others = await self._known(walk.chain.keys)
            walk = walk.from_here(own or others)
            looked = walk.looking()
            if looked.complete:
                return walk, looked
            due = looked.due
        mine = due is not None and due not in self._events
        if due is not None and mine:
            self._events[due] = asyncio.get_running_loop().create_future()
        try:
            return await self._written(walk, seed)
        finally:
            if due is not None and mine:
                self._events.pop(due).set_result(None)

    async def _written(self, walk: _Walk, seed: bytes) -> tuple[_Walk, Replayed | None]:
        """The walk that stands in the end, after whoever wrote first."""
        replayed: Replayed | None = None
        for _ in range(WRITERS):
            if self._summaries is not None:
                walk.summary = await self._taken(walk, seed)
            walk.stop = self._stop(REPLAY_SHARE)
            replayed = await self._within(walk.working)
            if replayed is None or not replayed.complete:
                return walk, replayed
            winner = await self._stored(walk, replayed)
            if winner is None:
                break
            walk = walk.from_here(winner)
        return walk, replayed

    async def _stored(self, walk: _Walk, replayed: Replayed) -> tuple[int, Checkpoint] | None:
        """Puts what was made into the store; returns what stands there instead of it, if somebody else was first."""
        for key, checkpoint in replayed.made:
            if not await self._store.put_if_absent(key, checkpoint):
                winner = await self._store.get_longest(walk.chain.keys)
                if winner is not None and winner[1] not in [made for _, made in replayed.made]:
                    return winner
        return None

    async def _taken(self, walk: _Walk, seed: bytes) -> Adoption | None:
        """A prepared summary for the event of the request that waits. Whoever waits for summaries has one started at once."""
        assert self._summaries is not None
        standing = walk.standing(seed, walk.found[1] if walk.found is not None else None)
        if self._summaries.terms.wait > 0 and walk.mode == "auto":
            self._prepare(walk.measured, walk.steady, standing, walk.before())
        return await self._summaries.take(standing)

    def _prepare(self, measured: Measured, steady: Budget, standing: Standing, forwarded: Conversation) -> None:
        assert self._summaries is not None
        came = measured.request.conversation
        self._summaries.prepare(standing, came, forwarded, steady, measured.model, measured.headers)

    async def _squeeze(
        self, walk: _Walk, aim: Budget, before: int, forwarded: Conversation, checkpoint: Checkpoint | None = None
    ) -> Decision:
        """One event with the last resort: for what does not fit by what answers have taught although the steady measure is
        content, and for a history that is too long to be gone through in time.

        It starts from what would be forwarded, or from what came where that is not enough. What comes of it is stored like any
        event, or the next request, which is as long, would break the prompt cache again.
        """
        measured = walk.measured
        came = measured.request.conversation
        result = await self._within(self._last_resort(forwarded, aim, measured.model))
        if forwarded is not came and (result is None or result.tokens_after > aim.usable):
            forwarded, checkpoint = came, None
            result = await self._within(self._last_resort(came, aim, measured.model))
        if result is None or (result.reason == "deadline" and result.tokens_after > aim.usable):
            return measured.decided("none", "deadline", before)
        if result.tokens_after > aim.usable or result.tokens_after >= before:
            return replace(measured.decided("none", "floor" if before > aim.usable else "no_gain", before), result=result)
        if walk.mode != "shadow" and (frozen := walk.frozen(forwarded, checkpoint, result)) is not None:
            await self._store.put_if_absent(*frozen)
        if result.tokens_before < before:
            earlier = LayerReport("checkpoint", before, result.tokens_before)
            stages = (("checkpoint", forwarded), *result.stages)
            result = replace(result, tokens_before=before, reports=(earlier, *result.reports), stages=stages)
        return replace(self._applied(measured, before, result, walk.mode), **walk.broken(result.conversation))

    def _resumed(self, measured: Measured, before: int, after: int, replayed: Replayed, walk: _Walk, mode: Mode) -> Decision:
        """What was found or made on the way, as a decision."""
        if replayed.conversation is measured.request.conversation or after >= before:
            reason = walk.reason or ("breaker" if walk.tried is None and mode != "force" else "no_gain")
            return replace(measured.decided("rejected" if reason == "no_gain" else "none", reason, before), result=walk.tried)
        resumed = measured.ruler.total(replayed.resumed.messages)
        reports = [LayerReport("checkpoint", before, resumed)] if resumed < before else []
        critical = CriticalItems()
        stages: tuple[tuple[str, Conversation], ...] = (("checkpoint", replayed.resumed),)
        if replayed.live is not None:
            reports += _rescaled(replayed.live.result.reports, resumed, after)
            critical, stages = replayed.live.result.critical, (*stages, *replayed.live.result.stages)
        result = CompactionResult(replayed.conversation, before, after, tuple(reports), critical, stages=stages)
        decision = self._applied(measured, before, result, mode)
        if replayed.live is not None or replayed.made:
            layers = result.layers if replayed.live is not None else _layers(replayed)
            return replace(decision, layers=layers, **walk.broken(replayed.conversation, again=replayed.live is None))
        outcome: Outcome = "shadow" if mode == "shadow" else "reused"
        return replace(decision, outcome=outcome, layers=_layers(replayed), is_event=False, prefix_break=None)

    def _applied(self, measured: Measured, before: int, result: CompactionResult, mode: Mode) -> Decision:
        body = chat_completions.write(measured.request, result.conversation) if mode != "shadow" else None
        return replace(
            measured.decided("shadow" if mode == "shadow" else "applied", None, before),
            after=result.tokens_after,
            body=body,
            result=result,
            layers=result.layers,
            is_event=True,
            prefix_break="event" if body is not None else None,
        )

    def layers_now(self, measured: Measured) -> tuple[Layer, ...]:
        """The layers for the event of the request that waits: the only one that may be told how old messages are."""
        if self._seen is None:
            return self._layers
        ages = self._seen.ages(measured.credential, measured.request.conversation.messages, time.monotonic())
        return with_ages(self._layers, ages)

    def refusal(self, result: CompactionResult, aim: Budget, forced: bool) -> str | None:
        """Why the result of an event is not worth forwarding; None when it is."""
        before, after = result.tokens_before, result.tokens_after
        if result.reason == "deadline" and after > aim.usable:
            return "deadline"
        if after > aim.usable:
            return "floor"
        if after >= before:
            return "fits" if before <= aim.target else result.reason or "no_gain"
        least = self._marks.min_gain if self._marks.min_gain is not None else max(aim.window // 50, 1_024)
        # a request that does not fit has no choice, and one that was asked for is done
        if before <= aim.usable and not forced and (before - after < least or after > LEAST_GAIN * before):
            return "no_gain"
        return None

    def rules_of(self, conversation: Conversation, model: str) -> Rules:
        """What must hold of this conversation when it is compacted. Local models' templates may refuse a conversation whose
        user and assistant do not take turns: one that does take turns is left so."""
        if self._rules.alternate or TAKES_ANY_TURN.match(tokens.bare_name(model)):
            return self._rules
        turns = Rules(alternate=True)
        return turns if violations(conversation, turns)["alternation"] == 0 else self._rules

    def _last_resort(self, conversation: Conversation, aim: Budget, model: str) -> Callable[[], CompactionResult]:
        """An event for a request that must become smaller, whatever it costs."""
        stop = self._stop()
        rules = self.rules_of(conversation, model)
        return lambda: compact(conversation, aim, self._layers, stop=stop, hard=True, rules=rules)

    def _stop(self, share: float = 1.0) -> Callable[[], bool]:
        limit = time.monotonic() + self._marks.timeout * share
        return lambda: time.monotonic() > limit

    async def _within(self, work: Callable[[], T]) -> T | None:
        """The work's result from a worker thread, None when the deadline passes first; the work asks for itself, too."""
        try:
            return await asyncio.wait_for(self._off_loop(work), self._marks.timeout)
        except TimeoutError:
            return None

    async def _total(self, ruler: ChatRuler, conversation: Conversation) -> int:
        if ruler.cold_bytes(conversation.messages, INLINE_BYTES) <= INLINE_BYTES:
            return ruler.total(conversation.messages)
        return await self._off_loop(lambda: ruler.total(conversation.messages))

    async def _off_loop(self, work: Callable[[], T]) -> T:
        # a thread does not inherit what is in force here: the key that summaries are sealed with
        inherited = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: inherited.run(work))


class _Walk:
    """One walk over a history: what it may do where an event is due, and what came of the event of the waiting request.

    summary: what a model has written for that event. stop: says when the walk must end.
    """

    def __init__(
        self,
        compactor: Compactor,
        measured: Measured,
        steady: Budget,
        linked: Chain,
        found: tuple[int, Checkpoint] | None,
        mode: Mode,
        move: Move,
    ) -> None:
        self._compactor, self.measured, self.steady = compactor, measured, steady
        self.chain, self.found, self.mode, self.move = linked, found, mode, move
        self.summary: Adoption | None = None
        self.stop: Callable[[], bool] = lambda: False
        self.reason: str | None = None
        self.tried: CompactionResult | None = None

    @cached_property
    def _points(self) -> tuple[int, ...]:
        return decision_points(self.measured.request.conversation, self.chain.cuts)

    def from_here(self, found: tuple[int, Checkpoint] | None) -> _Walk:
        """The same walk from what the store knows now."""
        return _Walk(self._compactor, self.measured, self.steady, self.chain, found, self.mode, self.move)

    def looking(self) -> Replayed:
        """The walk as far as the first event that is due: complete when there is none."""
        return self._replay(None)

    def working(self) -> Replayed:
        return self._replay(self._event)

    def before(self) -> Conversation:
        """What would be forwarded without any further event."""
        came = self.measured.request.conversation
        return (resume(came, self.found[1], self._compactor._thaws) if self.found is not None else None) or came

    def standing(self, seed: bytes, checkpoint: Checkpoint | None) -> Standing:
        """Where the request stands behind this checkpoint."""
        return _standing(self.chain, checkpoint, seed)

    def broken(self, forwarded: Conversation, *, again: bool = False) -> dict[str, Any]:
        """What an event does to the upstream's prompt cache.

        Nothing was cached of a conversation whose first request this is. again: it was only found again by going through the
        history; for a process that did not see the requests before that is no break: the same bytes went out then.
        """
        if len(self._points) <= 1:
            return {"prefix_break": "new_conversation"}
        if again and self.move != "on":
            return {"prefix_break": None}
        ruler, after = self.measured.ruler, forwarded.messages
        same = _common_head(self.before().messages, after)
        return {"rewritten": max(0, ruler.total(after) - ruler.total(after[:same]))}

    def frozen(
        self, before: Conversation, checkpoint: Checkpoint | None, result: CompactionResult
    ) -> tuple[bytes, Checkpoint] | None:
        """An event outside of the walk as a checkpoint with its key."""
        came = self.measured.request.conversation
        parent = (None if checkpoint is None else self.chain.key(checkpoint.cut), checkpoint)
        return freeze(came, self.chain, before, Event(result), parent=parent, model=self.measured.model)

    def _replay(self, decide: Decide | None) -> Replayed:
        compactor, conversation = self._compactor, self.measured.request.conversation
        return replay(
            conversation,
            self.chain,
            decide,
            rule(conversation, self.steady, compactor._marks.min_gain),
            found=self.found,
            force=self.mode == "force",
            thaws=compactor._thaws,
            refusals=compactor._refusals,
            stop=self.stop,
            model=self.measured.model,
        )

    def _event(self, conversation: Conversation, checkpoint: Checkpoint | None, waiting: bool) -> Event | None:
        compactor = self._compactor
        forced = waiting and self.mode == "force"
        if not forced and not self._is_worth_it(conversation, checkpoint):
            self.reason = "postponed" if waiting else self.reason
            return None
        result = (
            self._with_summary(conversation) if waiting and self.summary is not None else self._compacted(conversation, waiting)
        )
        reason = compactor.refusal(result, self.steady, forced=forced)
        if waiting:
            self.reason, self.tried = reason, result
        return Event(result) if reason is None else None

    def _is_worth_it(self, conversation: Conversation, checkpoint: Checkpoint | None) -> bool:
        """Whether an event now is expected to save more than the prompt cache that it breaks; by history and settings alone.

        A conversation is expected to go on for as many turns as it has had: of what has lasted for so long, half lasts for that
        long again.
        """
        price = self.measured.window.price if self.measured.window is not None else None
        size = self.steady.ruler.total(conversation.messages)
        if not self._compactor._marks.thrifty or price is None or size > PRESSING * self.steady.usable:
            return True
        start = len(self.measured.request.conversation.preamble)
        stood = 0 if checkpoint is None else checkpoint.cut - len(checkpoint.replacement)
        turns = bisect_right(self._points, stood + len(conversation.messages) - start)
        kept = self.steady.ruler.total(conversation.preamble)
        return worth_it(price, Bill(size, min(size, self.steady.target), kept), turns)

    def _compacted(self, conversation: Conversation, waiting: bool = True) -> CompactionResult:
        compactor = self._compactor
        layers = compactor.layers_now(self.measured) if waiting else compactor._layers
        rules = compactor.rules_of(conversation, self.measured.model)
        return compact(conversation, self.steady, layers, stop=self.stop, rules=rules)

    def _with_summary(self, conversation: Conversation) -> CompactionResult:
        """The summary first, checked like any layer; the others where it is refused, or not enough."""
        assert self.summary is not None
        rules = self._compactor.rules_of(conversation, self.measured.model)
        adopted = compact(conversation, self.steady, (self.summary,), stop=self.stop, rules=rules)
        if adopted.tokens_after <= self.steady.target:
            return adopted
        rest = self._compacted(adopted.conversation)
        one, other = adopted.critical, rest.critical
        critical = (
            other
            if adopted.conversation is conversation
            else CriticalItems(max(0, one.kept - other.lost), one.repaired + other.repaired, one.lost + other.lost)
        )
        return replace(rest, tokens_before=adopted.tokens_before, reports=(*adopted.reports, *rest.reports), critical=critical)


def _standing(linked: Chain, checkpoint: Checkpoint | None, seed: bytes) -> Standing:
    if checkpoint is None:
        return Standing(linked.keys, linked.keys[0] if linked.keys else seed, seed)
    at = bisect_right(linked.cuts, checkpoint.cut)
    return Standing(linked.keys[at:], linked.keys[at - 1] if at else seed, seed)


def _common_head(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages at the beginning are the same."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _layers(replayed: Replayed) -> tuple[str, ...]:
    return replayed.checkpoint.layers if replayed.checkpoint is not None else ()


def _rescaled(reports: Sequence[LayerReport], before: int, after: int) -> list[LayerReport]:
    """The same work told in another ruler's tokens, so that it adds up to before − after."""
    worked = [report for report in reports if report.saved > 0 and report.refused is None]
    whole = sum(report.saved for report in worked)
    scaled: list[LayerReport] = []
    done, at = 0, before
    for report in reports:
        if report not in worked or whole == 0:
            scaled.append(replace(report, before=at, after=at))
            continue
        done += report.saved
        now = before - round((before - after) * done / whole)
        scaled.append(replace(report, before=at, after=now))
        at = now
    return scaled


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


def _plainly_fits(request: Request, size: int, trigger: int) -> bool:
    """Whether the bytes alone prove it: text has no more tokens than bytes. Media are not text: they must be counted."""
    messages = request.conversation.messages
    extra = RENDERING * sum(map(len, request.fields.values())) + MESSAGE_OVERHEAD * len(messages)
    return (size + extra) * WORST_SLOPE <= trigger and not has_media(request)
