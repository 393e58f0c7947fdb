"""One event: the layers in their order, each checked, until the target is met."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from proxy.compaction import CompactionResult, CriticalItems, Layer, LayerReport, Stop, summary
from proxy.compaction.autocompact import AutoCompact
from proxy.compaction.collapse import ContextCollapse
from proxy.compaction.collapse import repair as mend
from proxy.compaction.emergency import Emergency, Way, floor
from proxy.compaction.folding import gaps_closed, in_turns, moved_to_gaps
from proxy.compaction.merging import Auto, Digested, MergedTurns
from proxy.compaction.outputs import newest_is_observation
from proxy.compaction.snip import Snip
from proxy.compaction.tool_results import ToolResultBudget
from proxy.compaction.validation import OPENAI, Needle, Rules, broken, missing, needles, violations
from proxy.conversation import Conversation, Message, Text, ToolResult
from proxy.tokens import Ruler
from proxy.windows import Budget

Repair = Callable[[Conversation, Sequence[str], Budget], Conversation]
"""Puts lines that got lost back, word by word."""

_QUOTES = 0.08  # of the target: what quotes of critical facts may take, but never more than half of what the floor leaves
_LEAST_QUOTES = 300  # tokens: where the target is small, so many come first
_BYTES_PER_TOKEN = 3
_SLACK = 0.2  # of the target: above the floor, when the floor comes near the target
_HEAVY = 0.3  # of what the rest of the floor leaves of the target: from here on layers may shorten the newest output
_SPARE = 16  # tokens
_MENDINGS = 3
_MANY = 2_000  # messages: from here on one fold takes so long that there is no time for a second try
_ROUNDS = 2  # more, where the target was not met: what the next event would still gain is gained in this one
_GAIN = 0.95  # of what came: where it fits anyway, less is not worth the prompt cache that every change costs
_NEAR = 1.1  # times the target: not worth losing what a milder layer has kept
_FULL = 0.95  # of what is usable: from here on the last resort may run


@dataclass(frozen=True, slots=True)
class Admitted:
    """A layer that waits until the conversation is that full: more than min(tokens, share × usable), or more than `messages`."""

    layer: Layer
    share: float
    tokens: int | None = None
    messages: int | None = None

    @property
    def name(self) -> str:
        return self.layer.name

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        full = self.admits(budget.ruler.total(conversation.messages), len(conversation.messages), budget)
        return self.layer.apply(conversation, budget) if full else conversation

    def admits(self, tokens: int, messages: int, budget: Budget) -> bool:
        """Whether a conversation of this size is full enough."""
        threshold = int(self.share * budget.usable)
        if self.tokens is not None:
            threshold = min(self.tokens, threshold)
        return tokens > threshold or (self.messages is not None and messages > self.messages)


def is_lossless(layer: Layer) -> bool:
    """It takes out only what is said elsewhere as well."""
    return isinstance(layer, Snip)


def starts_over(layer: Layer) -> bool:
    """It chooses what to keep from all there was: so it starts from the conversation as it came (less what is redundant), not
    from what milder layers that were not enough have left of it."""
    return isinstance(layer, (ContextCollapse, MergedTurns, Digested, Auto)) or (
        isinstance(layer, AutoCompact) and layer.level == "aggressive"
    )


def is_last_resort(layer: Layer) -> bool:
    """It may touch the live turn, and is never refused for what it had to lose."""
    return isinstance(layer, Emergency)


class _Stopped(Exception):
    """Raised out of a layer in the middle of its work, by the ruler that it measures with."""


@dataclass(frozen=True, slots=True)
class _Asking:
    """A ruler that asks before each measure whether there is still time. Layers do nothing long without measuring, and so stay
    functions of what they are given: they end early or come to the same."""

    ruler: Ruler
    stop: Stop

    @property
    def fixed(self) -> int:
        return self.ruler.fixed

    def text(self, text: str) -> int:
        self._ask()
        return self.ruler.text(text)

    def message(self, message: Message) -> int:
        self._ask()
        return self.ruler.message(message)

    def total(self, messages: Sequence[Message]) -> int:
        self._ask()
        return self.ruler.total(messages)

    def cold_bytes(self, messages: Sequence[Message], enough: int | None = None) -> int:
        return self.ruler.cold_bytes(messages, enough)

    def _ask(self) -> None:
        if self.stop():
            raise _Stopped


@dataclass(frozen=True, slots=True)
class _State:
    conversation: Conversation
    tokens: int
    reports: tuple[LayerReport, ...] = ()
    repaired: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    stages: tuple[tuple[str, Conversation], ...] = ()


def compact(
    conversation: Conversation,
    budget: Budget,
    pipeline: Sequence[Layer],
    *,
    stop: Stop = lambda: False,
    target: int | None = None,
    hard: bool = False,
    rules: Rules = OPENAI,
    repair: Repair = mend,
) -> CompactionResult:
    """The conversation after the first layers that bring it to the target.

    target: tokens, in place of the budget's. hard: the last resort may run however full the window is (the upstream has said
    that it is too long). rules: what the upstream's template asks for. `reason` is None when the target was met, else
    `floor` (what cannot be removed is too large), `deadline`, `no_gain` (nothing was saved: the conversation is the one that
    came) or `target` (it is smaller, but not that small). Never raises for content.

    A second run changes nothing: what met the target is not touched, and for the rest it is a property of the layers that the
    tests hold, so no layer is refused for it at run time.
    """
    aim = budget.target if target is None else target

    def once(conversation: Conversation) -> CompactionResult:
        before = budget.ruler.total(conversation.messages)
        if before <= aim:
            return CompactionResult(conversation, before, before)
        asking = replace(budget, ruler=_Asking(budget.ruler, stop))
        try:
            event = _Event(conversation, before, asking, aim, rules, repair, hard)
        except _Stopped:
            return CompactionResult(conversation, before, before, reason="deadline")
        return event.run(pipeline, stop)

    result = once(conversation)
    for _ in range(_ROUNDS):
        if result.reason not in ("target", "floor") or result.tokens_after >= result.tokens_before:
            break
        more = once(result.conversation)
        if more.tokens_after >= result.tokens_after:
            break
        result = _joined(result, more)
    return result


def _joined(first: CompactionResult, more: CompactionResult) -> CompactionResult:
    """Two rounds of one event."""
    notable = [report for report in more.reports if report.saved or report.refused]
    critical = replace(first.critical, lost=first.critical.lost + more.critical.lost)
    reports, stages = (*first.reports, *notable), (*first.stages, *more.stages)
    checking = first.checking + more.checking
    return replace(more, tokens_before=first.tokens_before, reports=reports, critical=critical, stages=stages, checking=checking)


def compact_in_place(messages: list[Message], budget: Budget, pipeline: Sequence[Layer], **options: Any) -> CompactionResult:
    """`compact` for a caller that keeps its history in a list: the list itself becomes what it was compacted to."""
    result = compact(Conversation(tuple(messages)), budget, pipeline, **options)
    messages[:] = result.conversation.messages
    return result


class _Event:
    """The state of one run."""

    def __init__(
        self, conversation: Conversation, before: int, budget: Budget, aim: int, rules: Rules, repair: Repair, hard: bool
    ) -> None:
        self._came = conversation
        self._before = before
        self._aim = aim
        self._floor = floor(conversation, budget)
        eased = aim if self._floor <= (1 - _SLACK) * aim else min(budget.usable, max(aim, self._floor + int(_SLACK * aim)))
        self._budget = replace(budget, target=eased)
        self._heavy = _newest_is_heavy(conversation, self._budget)
        self._folded_already = _is_folded(conversation)
        self._rules, self._repair, self._hard = rules, repair, hard
        self._needles: tuple[Needle, ...] | None = None
        self._checking = 0.0

    def run(self, pipeline: Sequence[Layer], stop: Stop) -> CompactionResult:
        if self._floor > self._budget.usable:
            return CompactionResult(self._came, self._before, self._before, reason="floor")
        state = _State(self._came, self._before)
        source = self._came  # for layers that start over
        lossy = False
        for entry in pipeline:
            layer = entry.layer if isinstance(entry, Admitted) else entry
            if stop():
                return self._result(state, "deadline")
            if state.tokens <= self._budget.target:
                break
            if isinstance(entry, Admitted) and not entry.admits(state.tokens, len(state.conversation.messages), self._budget):
                state = _noted(state, layer, skipped="below_threshold")
                continue
            if self._not_worth_it(layer, state.tokens):
                state = _noted(state, layer, skipped="not_worth_it")
                continue
            begin = source if starts_over(layer) and lossy else state.conversation
            try:
                after = self._try(layer, begin, state)
                if is_lossless(layer) and lossy:
                    source = layer.apply(source, self._budget)
            except _Stopped:
                return self._result(state, "deadline")
            if not lossy and (is_lossless(layer) or self._must_shrink(layer)):
                source = after.conversation
            elif after.conversation is not state.conversation and not is_lossless(layer):
                lossy = True
            state = after
        return self._result(state, None)

    def _must_shrink(self, layer: Layer) -> bool:
        """There is more than the layers that start over could weigh in time: they start from what this one leaves."""
        return isinstance(layer, ToolResultBudget) and self._before > max(layer.per_conversation, self._budget.usable)

    def _applied(self, layer: Layer, begin: Conversation, room: int | None = None) -> Conversation:
        """What the layer makes of it. room: tokens, in place of those that it aims at."""
        budget = self._budget
        if isinstance(layer, Emergency):
            return self._rescued(layer, begin, budget if room is None else replace(budget, usable=room))
        made = layer.apply(begin, budget if room is None else replace(budget, target=room))
        return self._turned(made, folded=starts_over(layer))

    def _rescued(self, layer: Emergency, begin: Conversation, budget: Budget) -> Conversation:
        """The gentlest way out that fits as it would be sent and that no rule forbids, else the smallest that none forbids.

        What milder layers have written may itself be in the way: from what came, the floor can be reached. And where a fold
        cannot be had, because the template wants turns that it breaks, the request still fits with the history dropped.
        """
        live = newest_is_observation(self._came)
        sources = (begin,) if begin is self._came else (begin, self._came)
        allowed: list[tuple[int, Conversation]] = []
        refused: Conversation | None = None
        for made in (self._sent(way, budget) for source in sources for way in layer.ways(source, live)):
            size = budget.ruler.total(made.messages)
            if self._broken(made, layer) is not None or self._is_longer(made):
                refused = refused or made
            elif size <= budget.usable:
                return made
            else:
                allowed.append((size, made))
        return min(allowed, key=lambda way: way[0])[1] if allowed else refused or begin

    def _sent(self, way: Way, budget: Budget) -> Conversation:
        """What this way makes, as it would be sent: where only the lines that keep the turns are too much, with room for them."""
        made = way(budget)
        sent = self._turned(made, folded=True)
        size, room = budget.ruler.total(sent.messages), budget.usable
        lines = size - budget.ruler.total(made.messages)
        if size <= room or size - lines > room:
            return sent
        return self._turned(way(replace(budget, usable=room - lines)), folded=True)

    def _not_worth_it(self, layer: Layer, tokens: int) -> bool:
        """The harshest layers do not run for the last few tokens."""
        if is_last_resort(layer):
            return not self._hard and tokens <= self._budget.usable * _FULL
        if not starts_over(layer):
            return False
        if self._folded_already and not self._heavy:
            return True
        return tokens < self._before and tokens <= min(self._budget.usable, _NEAR * self._budget.target)

    def _try(self, layer: Layer, begin: Conversation, state: _State) -> _State:
        """The state after one layer, or the state before it with a report that says why not."""
        budget = self._budget
        # Where there is no time for a second try, the quotes are left their room at once.
        in_one_go = starts_over(layer) and len(begin.messages) > _MANY
        made = self._applied(layer, begin, int((1 - _QUOTES) * budget.target) if in_one_go else None)
        tokens = budget.ruler.total(made.messages) if made is not begin else state.tokens
        if made is begin or made is state.conversation:
            return _noted(state, layer, skipped="nothing_to_do")
        if tokens >= state.tokens:
            return (
                _noted(state, layer, refused="size") if begin is state.conversation else _noted(state, layer, skipped="no_gain")
            )
        started = time.perf_counter()
        try:
            return self._checked(layer, begin, made, tokens, state)
        finally:
            self._checking += time.perf_counter() - started

    def _checked(self, layer: Layer, begin: Conversation, made: Conversation, tokens: int, state: _State) -> _State:
        """The state with the layer's work, or a report of the rule that it breaks.

        What critical facts it lost is put back; when that cannot be, the layer is refused (the last resort is not).
        """
        rule = self._broken(made, layer)
        if rule is not None:
            return _noted(state, layer, refused="structure", skipped=rule)
        if self._is_longer(made):
            return _noted(state, layer, refused="size", skipped="bytes")
        last_resort = is_last_resort(layer)
        if self._needles is None:
            room = min(max(_QUOTES * self._budget.target, _LEAST_QUOTES), (self._budget.target - self._floor) / 2)
            self._needles = needles(self._came, int(room * _BYTES_PER_TOKEN))
        limit = self._budget.usable if last_resort else state.tokens - 1
        made, tokens, lost, repaired = self._mended(layer, begin, made, tokens, limit)
        if tokens >= state.tokens:
            return _noted(state, layer, refused="size")
        fatal = [needle.kind for needle in lost if needle.kind != "reference"]
        if fatal and not last_resort:
            return _noted(state, layer, refused=f"lost_{fatal[0]}")
        reports = state.reports if begin is state.conversation else self._superseded(state.reports, begin)
        start = state.tokens if begin is state.conversation else self._budget.ruler.total(begin.messages)
        report = LayerReport(layer.name, start, tokens, touched=touched(begin, made))
        stages = (*state.stages, (layer.name, made))
        return _State(made, tokens, (*reports, report), repaired | state.repaired, frozenset(n.key for n in lost), stages)

    def _mended(
        self, layer: Layer, begin: Conversation, made: Conversation, tokens: int, limit: int
    ) -> tuple[Conversation, int, list[Needle], frozenset[str]]:
        """The layer's work with lost facts put back: (conversation, tokens, what is lost even so, keys of what was repaired).

        A layer that had filled its room is asked again for a little less, so that the quotes find theirs. Where not all of
        them fit below `limit` tokens, those that matter most go first.
        """
        wanted, ruler = self._needles or (), self._budget.ruler
        goal = limit if is_last_resort(layer) else self._budget.target
        room = goal
        for _ in range(_MENDINGS):
            lost = missing(wanted, made)
            if not lost:
                return made, tokens, [], frozenset()
            mended = self._mend(made, [needle.quote for needle in lost])
            size = ruler.total(mended.messages)
            if size <= goal or tokens > goal or not (starts_over(layer) or is_last_resort(layer)):
                break
            room -= size - goal + _SPARE
            made = self._applied(layer, begin, room)
            tokens = ruler.total(made.messages)
        lost = missing(wanted, made)
        quotes = [needle.quote for needle in lost]
        while quotes:
            mended = self._mend(made, quotes)
            size = ruler.total(mended.messages)
            if size <= limit and self._broken(mended, layer) is None:
                still = missing(wanted, mended)
                return mended, size, still, frozenset(needle.key for needle in lost) - {needle.key for needle in still}
            quotes = quotes[: len(quotes) // 2]
        return made, tokens, lost, frozenset()

    def _turned(self, made: Conversation, *, folded: bool = False) -> Conversation:
        """With user and assistant taking turns, where the upstream's template wants that.

        folded: turns were taken out, and what would break the turns that there were gets a line of ours. A layer that has no
        business to take any out is refused instead.
        """
        if not self._rules.alternate or made is self._came:
            return made
        if self._broken_as_it_came["alternation"]:
            return in_turns(made)
        turned = in_turns(moved_to_gaps(made))
        return gaps_closed(turned) if folded else turned

    def _mend(self, made: Conversation, quotes: Sequence[str]) -> Conversation:
        return self._turned(self._repair(made, quotes, self._budget))

    def _broken(self, made: Conversation, layer: Layer) -> str | None:
        may_change = is_last_resort(layer) or self._heavy
        return broken(self._came, made, self._rules, live_turn_may_change=may_change, known=self._broken_as_it_came)

    def _is_longer(self, made: Conversation) -> bool:
        """It takes more bytes than what came, however few tokens."""
        return size_of(made) > size_of(self._came)

    @cached_property
    def _broken_as_it_came(self) -> Counter[str]:
        """How often each rule was broken before anything was done."""
        return violations(self._came, self._rules)

    def _superseded(self, reports: Sequence[LayerReport], begin: Conversation) -> tuple[LayerReport, ...]:
        """The reports of layers whose work was put aside by one that starts over: only what took out redundancy still counts."""
        now, left = self._before, self._budget.ruler.total(begin.messages)
        rewritten: list[LayerReport] = []
        for report in reports:
            if report.layer == Snip().name and report.saved > 0 and now > left:
                rewritten.append(LayerReport(report.layer, now, left, report.touched))
                now = left
            else:
                skipped = "superseded" if report.saved > 0 else report.skipped
                rewritten.append(replace(report, before=now, after=now, touched=0, skipped=skipped))
        return tuple(rewritten)

    def _result(self, state: _State, reason: str | None) -> CompactionResult:
        if self._before <= self._budget.usable and state.tokens > _GAIN * self._before:
            return CompactionResult(
                self._came,
                self._before,
                self._before,
                _undone(state.reports, self._before),
                reason=reason or "no_gain",
                checking=self._checking,
            )
        wanted = [needle for needle in self._needles or () if needle.kind != "reference"]
        lost = sum(1 for needle in wanted if needle.key in state.lost)
        repaired = sum(1 for needle in wanted if needle.key in state.repaired and needle.key not in state.lost)
        critical = CriticalItems(len(wanted) - lost - repaired, repaired, lost)
        if reason is None and state.tokens > self._aim:
            reason = "floor" if self._budget.target > self._aim else "target"
        return CompactionResult(
            state.conversation, self._before, state.tokens, state.reports, critical, reason, state.stages, self._checking
        )


def _undone(reports: Sequence[LayerReport], tokens: int) -> tuple[LayerReport, ...]:
    """Reports of work that was not worth its price: nothing was saved after all."""
    return tuple(
        replace(report, before=tokens, after=tokens, touched=0, skipped="no_gain" if report.saved else report.skipped)
        for report in reports
    )


def _is_folded(conversation: Conversation) -> bool:
    """There is no history but one summary of ours: to fold it again would only lose what it says."""
    summaries = [i for i, step in enumerate(conversation.steps) if summary.is_summary(step.head)]
    kept = conversation.protected.union(summaries)
    return len(summaries) == 1 and len(kept) == len(conversation.steps)


def _newest_is_heavy(conversation: Conversation, budget: Budget) -> bool:
    """The output in the newest step leaves no room for anything beside it, so that layers may shorten it."""
    if not conversation.steps:
        return False
    ruler, newest = budget.ruler, len(conversation.steps) - 1
    kept = [i for i in conversation.protected if i != newest]
    rest = ruler.total(conversation.preamble) + sum(ruler.message(m) for i in kept for m in conversation.steps[i].messages)
    live = [m for m in conversation.steps[-1].messages if m.is_result]
    if newest_is_observation(conversation):
        live = [conversation.messages[-1]]
    return sum(map(ruler.message, live)) > _HEAVY * max(budget.target - rest, (budget.usable - rest) // 2)


def touched(before: Conversation, after: Conversation) -> int:
    """Messages changed or removed."""
    kept = {id(message) for message in after.messages}
    return sum(1 for message in before.messages if id(message) not in kept)


def size_of(conversation: Conversation) -> int:
    """Bytes of all that the messages say."""
    return sum(_bytes(message) for message in conversation.messages)


def _bytes(message: Message) -> int:
    size = 0
    for part in message.parts:
        if isinstance(part, (Text, ToolResult)):
            size += len(part.text.encode("utf-8", "surrogatepass"))
        else:
            size += len(part.raw or b"")
    return size


def _noted(state: _State, layer: Layer, refused: str | None = None, skipped: str | None = None) -> _State:
    return replace(
        state, reports=(*state.reports, LayerReport(layer.name, state.tokens, state.tokens, refused=refused, skipped=skipped))
    )
