"""Taking up where an earlier event left off, and finding the same events again when nobody remembers them.

A client sends its whole history each turn. Whatever was forwarded for it follows from that history alone: the requests that it
must have sent are the prefixes before each assistant message, and an event happened at the first of them that was too large.
So a proxy that lost its store, or never saw the conversation, comes to the same bytes by going through these points again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import cast

from proxy.checkpoints.chain import Chain, digest, edition
from proxy.checkpoints.checkpoint import Checkpoint
from proxy.checkpoints.thaw import Thaws, is_paired
from proxy.compaction import CompactionResult, Stop
from proxy.conversation import Conversation, Message, Messages, Step
from proxy.errors import Unreadable
from proxy.tokens.chat import ChatRuler
from proxy.windows import Budget
from proxy.wire import slices
from proxy.wire.chat_completions import write_message

RULES = 8
"""Rules whose cost of one replacement is remembered: a conversation has one or two models."""

EDITIONS = 3
"""Events after one that left nothing behind it, on the very same history: a refusal, a second process that counts otherwise."""

COUNTED = ("response_format", "thinking")
"""Fields of a request that change what its messages cost."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When an event is due, in tokens.

    fixed: what every request carries besides its history: preamble, tools, priming. cost: of whole steps. trigger: an event
    is due above it. min_gain: so many new tokens must have come since the last event, or the last try, before the next.
    name: what two rules have in common that find the same cost for everything; None where that is not known.
    """

    fixed: int
    cost: Callable[[Sequence[Message]], int]
    trigger: int
    min_gain: int
    name: Hashable = None

    def size(self, conversation: Conversation) -> int:
        """Tokens of a whole request: what is held against the trigger."""
        return self.fixed + sum(self.cost(step.messages) for step in conversation.steps)


def rule(conversation: Conversation, budget: Budget, min_gain: int | None = None) -> Rule:
    """The rule of a request under its budget. min_gain: 2 % of the window, at least 1,024 tokens, where it is not set."""
    ruler = budget.ruler
    least = max(budget.window // 50, 1_024) if min_gain is None else min_gain
    return Rule(
        ruler.total(conversation.preamble),
        lambda step: ruler.total(step) - ruler.fixed,
        budget.trigger,
        least,
        (ruler.rules, ruler.calibration, ruler.fixed, *map(ruler.fields.get, COUNTED)) if isinstance(ruler, ChatRuler) else None,
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """What an event made of a request. ledger: what the next event needs to know of it, opaque here."""

    result: CompactionResult
    ledger: bytes = b""


Decide = Callable[[Conversation, Checkpoint | None, bool], Decision | None]
"""(what would be forwarded, the checkpoint behind it, is it the request that waits?) → the event; None when there is none.

Must depend on its arguments alone, or a replay differs; only for the waiting request may it use more (a model's summary).
"""


@dataclass(frozen=True, slots=True)
class Replayed:
    """conversation: what to forward. checkpoint: the one behind it, if any. made: new ones with their keys, oldest first.

    live: the event of the waiting request itself, if it had one; resumed: the conversation before that event.
    complete: False when `stop` said so before the end, or when an event is due and nobody decides; then nothing of this should
    be used. due: the key of the first point where one is due, for whoever only looked; None where that point has no key.
    """

    conversation: Conversation
    resumed: Conversation
    checkpoint: Checkpoint | None = None
    made: tuple[tuple[bytes, Checkpoint], ...] = ()
    live: Decision | None = None
    complete: bool = True
    due: bytes | None = None


class Refusals:
    """Points of histories where an event was tried in vain: going through them again would come to the same nothing."""

    def __init__(self, limit: int = 16_384) -> None:
        self._limit = limit
        self._keys: dict[bytes, None] = {}

    def add(self, key: bytes) -> None:
        if len(self._keys) >= self._limit:
            del self._keys[next(iter(self._keys))]
        self._keys[key] = None

    def __contains__(self, key: bytes | None) -> bool:
        return key in self._keys


def decision_points(conversation: Conversation, cuts: Sequence[int]) -> tuple[int, ...]:
    """Where a request must have been sent, as numbers of messages after the preamble, ascending; the last is all of them.

    cuts: where the history may be cut (`chain`): with a call pending, or in the middle of its results, nobody asks a model.
    """
    messages, start = conversation.messages, len(conversation.preamble)
    total = len(messages) - start
    points = [
        cut
        for cut in cuts
        if cut < total and messages[start + cut].role == "assistant" and messages[start + cut - 1].role != "assistant"
    ]
    return (*points, total) if total else ()


def resume(conversation: Conversation, checkpoint: Checkpoint, thaws: Thaws | None = None) -> Conversation | None:
    """The conversation with its beginning replaced: live preamble, replacement, live rest. None when that would not be legal."""
    messages, start = conversation.messages, len(conversation.preamble)
    cut = start + checkpoint.cut
    if checkpoint.cut <= 0 or cut > len(messages) or not _is_boundary(messages, start, cut):
        return None
    try:
        thawed = (thaws or Thaws()).get(checkpoint)
    except Unreadable:
        return None
    if not thawed.is_paired and is_paired(messages[start:cut]):
        return None
    if len(messages) - start < checkpoint.seen and not _leaves_live(messages, cut, thawed.messages):
        return None
    return Conversation(thawed.grown((*conversation.preamble, *thawed.messages, *messages[cut:])))


def _is_boundary(messages: Sequence[Message], start: int, cut: int) -> bool:
    """Whether a whole step ends here and no result of it comes later."""
    head = cut - 1
    while head > start and messages[head].is_result:
        head -= 1
    later = cut < len(messages) and messages[cut].is_result
    return not later and len(messages[head].calls) <= cut - 1 - head


def _leaves_live(messages: Sequence[Message], cut: int, replacement: Sequence[Message]) -> bool:
    """Whether what is live now is still there: a client may go back to a message that was history when it was replaced.

    Asked of histories that are shorter than the one of the event; in all others it is the event that had to leave it alone.
    """
    user = next((at for at in range(len(messages) - 1, -1, -1) if messages[at].role == "user"), len(messages))
    if user < cut:
        kept = next((message for message in reversed(replacement) if message.role == "user"), None)
        if kept is None or digest(kept) != digest(messages[user]):
            return False
    if cut < len(messages):
        return True
    # the newest step itself was part of the event: it may have been shortened, and it is still the last one
    old, new = Conversation(tuple(messages)).steps[-1:], Conversation(tuple(replacement)).steps[-1:]
    return [_shape(step) for step in old] == [_shape(step) for step in new]


def _shape(step: Step) -> tuple[str, list[str | None], int]:
    return step.head.role, [call.id for call in step.head.calls], len(step.results)


def freeze(
    history: Conversation,
    chain: Chain,
    before: Conversation,
    decision: Decision,
    *,
    parent: tuple[bytes | None, Checkpoint | None] = (None, None),
    model: str = "",
    calibration: tuple[float, float] = (1.0, 0.0),
) -> tuple[bytes, Checkpoint] | None:
    """An event as a checkpoint with its key. history: what the client sent; before: what the event started from.

    The cut is put as early as the untouched rest allows, so that edits of late messages still find it. Where the parent has
    left nothing behind it to cut, this becomes its next edition. None when the event left no legal cut, or touched the preamble:
    it serves this request only.
    """
    after, start = decision.result.conversation, len(history.preamble)
    if after.messages[:start] != history.preamble:
        return None
    total = len(history.messages) - start
    # behind the parent's cut, or the first writer, which is the parent, would win
    earliest = parent[1].cut + 1 if parent[1] else 1
    at = bisect_left(chain.cuts, max(earliest, total - _common_tail(before.messages, after.messages)))
    number = 0
    if at == len(chain.cuts):
        if parent[1] is None or parent[1].cut != total or parent[1].edition >= EDITIONS or chain.cuts[-1:] != (total,):
            return None
        at, number = at - 1, parent[1].edition + 1
    cut = chain.cuts[at]
    stop = len(after.messages) - (total - cut)
    return edition(chain.keys[at], number), Checkpoint(
        cut=cut,
        replacement=tuple(unmarked(write_message(message)) for message in after.messages[start:stop]),
        seen=total,
        ledger=decision.ledger,
        generation=parent[1].generation + 1 if parent[1] else 1,
        parent=parent[0],
        tokens_before=decision.result.tokens_before,
        tokens_after=decision.result.tokens_after,
        layers=decision.result.layers,
        model=model,
        calibration=calibration,
        origin=chain.key(total) or b"",
        edition=number,
    )


def unmarked(raw: bytes) -> bytes:
    """A message's JSON without cache marks, which are not worth keeping in what is frozen.

    Clients move them from turn to turn, so a replay would differ in them; and upstreams take only a few in one request, which
    the live rest may use up. A text that was put into a part only to carry one becomes a string again.
    """
    if b'"cache_control"' not in raw or raw[:1] != b"{":
        return raw
    fields = slices.split_object(raw)
    fields.pop("cache_control", None)
    for name in ("content", "tool_calls"):
        if fields.get(name, b"")[:1] == b"[":
            items = [_unmarked_item(item) for item in slices.split_array(fields[name])]
            fields[name] = _only_text(items) or slices.join_array(items)
    return slices.join_object(list(fields.items()))


def _unmarked_item(raw: bytes) -> bytes:
    if b'"cache_control"' not in raw or raw[:1] != b"{":
        return raw
    return slices.join_object([(key, value) for key, value in slices.split_object(raw).items() if key != "cache_control"])


def _only_text(items: Sequence[bytes]) -> bytes | None:
    if len(items) != 1 or items[0][:1] != b"{":
        return None
    fields = slices.split_object(items[0])
    return fields["text"] if fields.keys() == {"type", "text"} and fields["type"] == b'"text"' else None


def replay(
    conversation: Conversation,
    chain: Chain,
    decide: Decide | None,
    rule: Rule,
    *,
    found: tuple[int, Checkpoint] | None = None,
    force: bool = False,
    thaws: Thaws | None = None,
    refusals: Refusals | None = None,
    stop: Stop = lambda: False,
    model: str = "",
    calibration: tuple[float, float] = (1.0, 0.0),
) -> Replayed:
    """What to forward for this conversation, and the checkpoints on the way.

    found: what the store knew (`get_longest(chain.keys)`); only what came after it is gone through. force: an event for the
    waiting request whatever its size. decide: None only looks, and stops where an event is due. Points that are not above the
    trigger cost one addition each.
    """
    start = len(conversation.preamble)
    walk = _Walk(conversation, chain, rule, thaws or Thaws(), found)
    made: list[tuple[bytes, Checkpoint]] = []
    points = decision_points(conversation, chain.cuts)
    live: Decision | None = None
    resumed: Conversation | None = None
    while (point := walk.next_point(points, force)) is not None:
        waiting = point == points[-1]
        if stop():
            return Replayed(conversation, conversation, complete=False)
        key = chain.key(point)
        walk.tried(point)
        if key is not None and refusals is not None and key in refusals and not (waiting and force):
            continue
        if decide is None:
            return Replayed(conversation, conversation, complete=False, due=key)
        history = conversation if waiting else Conversation(conversation.messages[: start + point])
        before = walk.forwarded(history)
        decision = decide(before, walk.checkpoint, waiting)
        if stop():
            return Replayed(conversation, conversation, complete=False)
        if decision is None:
            if key is not None and refusals is not None and not (waiting and force):
                refusals.add(key)
            continue
        frozen = freeze(
            history, chain, before, decision, parent=(walk.key, walk.checkpoint), model=model, calibration=calibration
        )
        if waiting:
            live, resumed = decision, before
        if frozen is not None:
            made.append(frozen)
            walk.adopt(*frozen)
        elif waiting:
            return Replayed(decision.result.conversation, before, walk.checkpoint, tuple(made), decision)
    forwarded = walk.forwarded(conversation)
    return Replayed(forwarded, resumed or forwarded, walk.checkpoint, tuple(made), live)


class _Walk:
    """Going through the points of one history: the checkpoint in force, and from which size on an event is due."""

    def __init__(
        self, conversation: Conversation, chain: Chain, rule: Rule, thaws: Thaws, found: tuple[int, Checkpoint] | None
    ) -> None:
        self._conversation, self._rule, self._thaws = conversation, rule, thaws
        self.key: bytes | None = None
        self.checkpoint: Checkpoint | None = None
        self._whole: Conversation | None = None
        if found is not None and found[1].cut in chain.cuts[: found[0] + 1]:
            self._whole = resume(conversation, found[1], thaws)
        if found is not None and self._whole is not None:
            self.key, self.checkpoint = edition(chain.keys[found[0]], found[1].edition), found[1]
        self._total = len(conversation.messages) - len(conversation.preamble)
        self._sums = self._added_up(chain.cuts, self.checkpoint.cut if self.checkpoint else 0)
        self._base = rule.fixed
        self._done = 0
        self._ended = False
        self._due = rule.trigger
        if self.checkpoint is not None:
            self._stand_on(self.checkpoint)

    def next_point(self, points: Sequence[int], force: bool) -> int | None:
        """The next point where an event is due; the last one also when it is forced."""
        if not points or self._ended:
            return None
        # sizes grow with the points while the checkpoint stays: the first that is too large is found by halving
        low = bisect_left(points, self._done + 1)
        at = bisect_left(points, self._due + 1, lo=low, key=self._size)
        if at < len(points):
            return points[at]
        # the waiting request may be shorter than the one that the checkpoint was made for, and yet be another one
        return points[-1] if force or self._size(points[-1]) > self._due else None

    def tried(self, point: int) -> None:
        """An event was tried at this point: the next one takes new tokens."""
        self._done = point
        self._ended = point == self._total
        self._due = max(self._rule.trigger, self._size(point) + self._rule.min_gain - 1)

    def adopt(self, key: bytes, checkpoint: Checkpoint) -> None:
        """From here on this checkpoint is in force."""
        self.key, self.checkpoint, self._whole = key, checkpoint, None
        self._stand_on(checkpoint)

    def forwarded(self, history: Conversation) -> Conversation:
        """What is sent for this history."""
        if self.checkpoint is None:
            return history
        if history is self._conversation and self._whole is not None:
            return self._whole
        return resume(history, self.checkpoint, self._thaws) or history

    def _added_up(self, cuts: Sequence[int], first: int) -> dict[int, int]:
        """Tokens from the cut `first` up to every later cut, and to the end."""
        messages, start = self._conversation.messages, len(self._conversation.preamble)
        name = ("sums", self._rule.name, first, start)
        known: dict[int, int] | None = None
        if isinstance(messages, Messages) and self._rule.name is not None:
            if (noted := messages.note(name)) is not None:
                return cast(dict[int, int], noted)
            known = messages.noted_of_base(name)
        sums = {first: 0}
        # what stood at the end of the last request may have been half of a step
        for cut in cuts[bisect_right(cuts, first) :]:
            if known is None or cut not in known:
                break
            sums[cut] = known[cut]
        at = next(reversed(sums))
        total = sums[at]
        for cut in (*cuts[bisect_right(cuts, at) :], self._total):
            if cut > at:
                total += self._rule.cost(messages[start + at : start + cut])
                sums[cut] = total
                at = cut
        if isinstance(messages, Messages) and self._rule.name is not None:
            messages.keep(name, sums)
        return sums

    def _stand_on(self, checkpoint: Checkpoint) -> None:
        thawed = self._thaws.get(checkpoint)
        replaced = thawed.costs.get(self._rule.name)
        if replaced is None or self._rule.name is None:
            stands = Conversation(thawed.messages)
            replaced = sum(self._rule.cost(step.messages) for step in (*_alone(stands.preamble), *stands.steps))
            if len(thawed.costs) < RULES:
                thawed.costs[self._rule.name] = replaced
        self._base = self._rule.fixed + replaced - self._sums[checkpoint.cut]
        self._done = max(checkpoint.cut, checkpoint.seen)
        self._due = max(self._rule.trigger, checkpoint.tokens_after + self._rule.min_gain - 1)

    def _size(self, point: int) -> int:
        return self._base + self._sums[point]


def _alone(messages: Sequence[Message]) -> tuple[Step, ...]:
    return tuple(Step((message,), at) for at, message in enumerate(messages))


def _common_tail(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages at the end are the very same, also in their bytes."""
    count = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a is not b and (a != b or a.raw != b.raw or a.raw is None):
            break
        count += 1
    return count
