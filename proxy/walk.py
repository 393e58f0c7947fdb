"""One walk over a history: where an event is due, what it may do there, and what came of it."""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from proxy import tokens
from proxy.checkpoints.chain import Chain, edition
from proxy.checkpoints.checkpoint import Checkpoint
from proxy.checkpoints.first_seen import FirstSeen
from proxy.checkpoints.resume import Decide, Refusals, Replayed, decision_points, freeze, replay, resume, rule
from proxy.checkpoints.resume import Decision as Event
from proxy.checkpoints.thaw import Thaws
from proxy.checkpoints.trail import Move
from proxy.compaction import CompactionResult, CriticalItems, Layer, LayerReport
from proxy.compaction.pipeline import compact
from proxy.compaction.strategies import with_ages
from proxy.compaction.validation import OPENAI, Rules, violations
from proxy.conversation import Conversation, Message
from proxy.decisions import Decision, Measured, Mode
from proxy.pricing import Bill, worth_it
from proxy.summarizers.background import Adoption, Standing
from proxy.windows import Budget
from proxy.wire import chat_completions

TAKES_ANY_TURN = re.compile(r"gpt-|chatgpt|o[134](-|$)|codex|claude|gemini")
"""Models (bare names) whose hosts take messages in any order of roles."""
LEAST_GAIN = 0.95
"""Of what came: an event that leaves more is not worth a broken prompt cache."""
PRESSING = 0.9
"""Of what is usable: from here on no event is put off. The rest is for what the steady measure may be wrong about."""


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


@dataclass(frozen=True, slots=True)
class Policy:
    """What all walks have in common: the layers, when they work, what must hold after them, and what was learned on the way.

    seen: when which message came first, for layers that ask for it.
    """

    layers: tuple[Layer, ...]
    marks: Marks
    rules: Rules = OPENAI
    thaws: Thaws = field(default_factory=Thaws)
    refusals: Refusals = field(default_factory=Refusals)
    seen: FirstSeen | None = None

    def layers_now(self, measured: Measured) -> tuple[Layer, ...]:
        """The layers for the event of the request that waits: the only one that may be told how old messages are."""
        if self.seen is None:
            return self.layers
        ages = self.seen.ages(measured.caller.credential, measured.request.conversation.messages, time.monotonic())
        return with_ages(self.layers, ages)

    def refusal(self, result: CompactionResult, aim: Budget, forced: bool) -> str | None:
        """Why the result of an event is not worth forwarding; None when it is."""
        before, after = result.tokens_before, result.tokens_after
        if result.reason == "deadline" and after > aim.usable:
            return "deadline"
        if after > aim.usable:
            return "floor"
        if after >= before:
            return "fits" if before <= aim.target else result.reason or "no_gain"
        least = self.marks.min_gain if self.marks.min_gain is not None else max(aim.window // 50, 1_024)
        # a request that does not fit has no choice, and one that was asked for is done
        if before <= aim.usable and not forced and (before - after < least or after > LEAST_GAIN * before):
            return "no_gain"
        return None

    def rules_of(self, conversation: Conversation, model: str) -> Rules:
        """What must hold of this conversation when it is compacted. Local models' templates may refuse a conversation whose
        user and assistant do not take turns: one that does take turns is left so."""
        if self.rules.alternate or TAKES_ANY_TURN.match(tokens.bare_name(model)):
            return self.rules
        turns = Rules(alternate=True)
        return turns if violations(conversation, turns)["alternation"] == 0 else self.rules


class Walk:
    """One walk over a history: what it may do where an event is due, and what came of the event of the waiting request.

    summary: what a model has written for that event. stop: says when the walk must end.
    """

    def __init__(
        self,
        policy: Policy,
        measured: Measured,
        steady: Budget,
        linked: Chain,
        found: tuple[int, Checkpoint] | None,
        mode: Mode,
        move: Move,
    ) -> None:
        self._policy, self.measured, self.steady = policy, measured, steady
        self.chain, self.found, self.mode, self.move = linked, found, mode, move
        self.summary: Adoption | None = None
        self.stop: Callable[[], bool] = lambda: False
        self.reason: str | None = None
        self.tried: CompactionResult | None = None

    @cached_property
    def _points(self) -> tuple[int, ...]:
        return decision_points(self.measured.request.conversation, self.chain.cuts)

    def from_here(self, found: tuple[int, Checkpoint] | None) -> Walk:
        """The same walk from what the store knows now."""
        return Walk(self._policy, self.measured, self.steady, self.chain, found, self.mode, self.move)

    def looking(self) -> Replayed:
        """The walk as far as the first event that is due: complete when there is none."""
        return self._replay(None)

    def working(self) -> Replayed:
        return self._replay(self._event)

    def before(self) -> Conversation:
        """What would be forwarded without any further event, by what the store knew."""
        came = self.measured.request.conversation
        return (resume(came, self.found[1], self._policy.thaws) if self.found is not None else None) or came

    def standing(self, seed: bytes, checkpoint: Checkpoint | None) -> Standing:
        """Where the request stands behind this checkpoint."""
        return standing_at(self.chain, checkpoint, seed)

    def decision(self, before: int, after: int, replayed: Replayed) -> Decision:
        """What was found or made on the way, as a decision. before, after: tokens as answers have calibrated them."""
        measured = self.measured
        if replayed.conversation is measured.request.conversation or after >= before:
            reason = self.reason or ("breaker" if self.tried is None and self.mode != "force" else "no_gain")
            return measured.decided("rejected" if reason == "no_gain" else "none", reason, before).but(result=self.tried)
        resumed = measured.ruler.total(replayed.resumed.messages)
        reports = [LayerReport("checkpoint", before, resumed)] if resumed < before else []
        critical = CriticalItems()
        stages: tuple[tuple[str, Conversation], ...] = (("checkpoint", replayed.resumed),)
        if replayed.live is not None:
            reports += _rescaled(replayed.live.result.reports, resumed, after)
            critical, stages = replayed.live.result.critical, (*stages, *replayed.live.result.stages)
        result = CompactionResult(replayed.conversation, before, after, tuple(reports), critical, stages=stages)
        started = time.perf_counter()
        body = None if self.mode == "shadow" else chat_completions.write(measured.request, result.conversation)
        seconds = {"write": time.perf_counter() - started}
        if replayed.live is not None:
            seconds["validate"] = replayed.live.result.checking
        kept = replayed.checkpoint.layers if replayed.checkpoint is not None else ()
        in_shadow = self.mode == "shadow"
        made = measured.decided("shadow" if in_shadow else "applied", None, before).but(
            after=after,
            body=body,
            result=result,
            seconds=seconds,
            layers=result.layers if replayed.live is not None else kept,
        )
        if replayed.live is None and not replayed.made:
            return made if in_shadow else made.but(outcome="reused", prefix_break="edit" if self.move == "edited" else None)
        prefix_break, rewritten = self._broken(replayed.conversation, again=replayed.live is None)
        return made.but(is_event=True, prefix_break=None if in_shadow else prefix_break, rewritten=rewritten)

    def _broken(self, forwarded: Conversation, *, again: bool) -> tuple[str | None, int]:
        """What an event does to the upstream's prompt cache: why it breaks, and how many tokens must be read anew.

        Nothing was cached of a conversation whose first request this is. again: it was only found again by going through the
        history; for a process that did not see the requests before that is no break: the same bytes went out then.
        """
        if len(self._points) <= 1:
            return "new_conversation", 0
        if again and self.move != "on":
            return None, 0
        ruler, after = self.measured.ruler, forwarded.messages
        same = _common_head(self.before().messages, after)
        return "event", max(0, ruler.total(after) - ruler.total(after[:same]))

    def frozen(
        self, before: Conversation, checkpoint: Checkpoint | None, result: CompactionResult
    ) -> tuple[bytes, Checkpoint] | None:
        """An event outside of the walk as a checkpoint with its key. before: what it started from; checkpoint: the one in force,
        which it takes the place of."""
        came = self.measured.request.conversation
        parent = (None if checkpoint is None else self.key(checkpoint), checkpoint)
        return freeze(came, self.chain, before, Event(result), parent=parent, model=self.measured.model)

    def key(self, checkpoint: Checkpoint) -> bytes | None:
        """What a checkpoint of this history is stored under."""
        key = self.chain.key(checkpoint.cut)
        return None if key is None else edition(key, checkpoint.edition)

    def found_as(self, checkpoint: Checkpoint) -> tuple[int, Checkpoint] | None:
        """A checkpoint that somebody else made, as the store would give it; None where this history cannot be cut there."""
        return (self.chain.cuts.index(checkpoint.cut), checkpoint) if checkpoint.cut in self.chain.cuts else None

    def _replay(self, decide: Decide | None) -> Replayed:
        policy, conversation = self._policy, self.measured.request.conversation
        return replay(
            conversation,
            self.chain,
            decide,
            rule(conversation, self.steady, policy.marks.min_gain),
            found=self.found,
            force=self.mode == "force",
            thaws=policy.thaws,
            refusals=policy.refusals,
            stop=self.stop,
            model=self.measured.model,
        )

    def _event(self, conversation: Conversation, checkpoint: Checkpoint | None, waiting: bool) -> Event | None:
        policy = self._policy
        forced = waiting and self.mode == "force"
        if not forced and not self._is_worth_it(conversation, checkpoint):
            self.reason = "postponed" if waiting else self.reason
            return None
        result = (
            self._with_summary(conversation) if waiting and self.summary is not None else self._compacted(conversation, waiting)
        )
        reason = policy.refusal(result, self.steady, forced=forced)
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
        if not self._policy.marks.thrifty or price is None or size > PRESSING * self.steady.usable:
            return True
        start = len(self.measured.request.conversation.preamble)
        stood = 0 if checkpoint is None else checkpoint.cut - len(checkpoint.replacement)
        turns = bisect_right(self._points, stood + len(conversation.messages) - start)
        kept = self.steady.ruler.total(conversation.preamble)
        return worth_it(price, Bill(size, min(size, self.steady.target), kept), turns)

    def _compacted(self, conversation: Conversation, waiting: bool = True) -> CompactionResult:
        policy = self._policy
        layers = policy.layers_now(self.measured) if waiting else policy.layers
        rules = policy.rules_of(conversation, self.measured.model)
        return compact(conversation, self.steady, layers, stop=self.stop, rules=rules)

    def _with_summary(self, conversation: Conversation) -> CompactionResult:
        """The summary first, checked like any layer; the others where it is refused, or not enough."""
        assert self.summary is not None
        rules = self._policy.rules_of(conversation, self.measured.model)
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


def standing_at(linked: Chain, checkpoint: Checkpoint | None, seed: bytes) -> Standing:
    """Where a request stands behind this checkpoint. seed: where its owner's chains begin."""
    if checkpoint is None:
        return Standing(linked.keys, linked.keys[0] if linked.keys else seed, seed)
    at = bisect_right(linked.cuts, checkpoint.cut)
    return Standing(linked.keys[at:], linked.keys[at - 1] if at else seed, seed)


def _common_head(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages at the beginning are the same."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


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
