"""The last resort: whatever it takes so that a request fits whose floor fits.

From the mildest to the harshest: media of the history, the history itself but for what must not be forgotten, the live turn's
tool results, its arguments, its reasoning, then also the quotes that are left of the history, the live turn's media, its words.
Instructions and the user's last words are never touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from proxy.compaction import summary
from proxy.compaction.autocompact import folded
from proxy.compaction.folding import last_asked
from proxy.compaction.microcompact import short_call
from proxy.compaction.outputs import newest_is_observation, outputs, with_text
from proxy.compaction.shorten import SMALLEST, cut_middle
from proxy.compaction.tool_results import capped
from proxy.conversation import Conversation, Message, Opaque, Text, ToolCall
from proxy.tokens import Ruler
from proxy.windows import Budget

Stage = Callable[[Conversation, Budget, bool], Conversation]
"""One way of making it smaller; the flag says that the newest message is output (an observation)."""
Way = Callable[[Budget], Conversation]
"""Stages after one another, for a budget, until what they make fits."""
_LEAST = 8  # tokens: in fewer nothing can be said of a result but its length
_CUT = re.compile(r"\[[\d,]+ characters cut\]")  # what a result was cut to: the length of that is no news
_MEDIA = frozenset({"image", "audio", "file"})


@dataclass(frozen=True, slots=True)
class Emergency:
    """Runs its stages until the request fits into what is usable."""

    @property
    def name(self) -> str:
        return "emergency"

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        """The first of its `ways` that fits, else the smallest."""
        tried: list[tuple[int, Conversation]] = []
        for way in self.ways(conversation, newest_is_observation(conversation)):
            made = way(budget)
            size = budget.ruler.total(made.messages)
            if size <= budget.usable:
                return made
            tried.append((size, made))
        return min(tried, key=lambda made: made[0])[1]

    def ways(self, conversation: Conversation, newest_is_output: bool) -> tuple[Way, ...]:
        """What can be made of it, the gentlest first; the last is as small as it gets. Whoever asks takes the first that does.

        newest_is_output: of the conversation as it came; with the history folded nobody can tell.
        """
        # Folding is gentle, but where there is hardly any room the summary itself may be too much: then without one.
        ways = (_STAGES, (_drop_history, *_LIVE))
        return tuple(partial(_through, stages, conversation, newest_is_output) for stages in ways)


def _through(stages: Sequence[Stage], conversation: Conversation, live_output: bool, budget: Budget) -> Conversation:
    """The conversation after the first stages that make it fit."""
    best, smallest = conversation, budget.ruler.total(conversation.messages)
    for stage in stages:
        if smallest <= budget.usable:
            break
        shorter = stage(best, budget, live_output)
        if shorter is not best and (size := budget.ruler.total(shorter.messages)) < smallest:
            best, smallest = shorter, size
    return best


def floor(conversation: Conversation, budget: Budget) -> int:
    """Tokens that cannot be saved: fixed fields, instructions, the last user message, and the newest step at its shortest."""
    return budget.ruler.total(_bare(conversation, budget.ruler).messages)


def _bare(conversation: Conversation, ruler: Ruler) -> Conversation:
    tiny = Budget(0, 0, 0, 0, 0, ruler)
    live = newest_is_observation(conversation)
    bare = _drop_history(conversation, tiny, live)
    for stage in _LIVE:
        bare = stage(bare, tiny, live)
    return bare


def _without_old_media(conversation: Conversation, budget: Budget, live_output: bool) -> Conversation:
    return _each(conversation, lambda number, message: message if number in conversation.protected else without_media(message))


def _without_media(conversation: Conversation, budget: Budget, live_output: bool) -> Conversation:
    return _each(conversation, lambda number, message: message if number == conversation.last_user else without_media(message))


def without_media(message: Message) -> Message:
    """The message with a word in place of each image, sound and file."""
    media = [part for part in message.parts if isinstance(part, Opaque) and part.kind in _MEDIA and part.place == "content"]
    if not media:
        return message
    if message.is_result:
        words = "".join(f"\n[{part.kind} cut to fit]" for part in media)
        return with_text(message.with_parts(part for part in message.parts if part not in media), message.text + words)
    return message.with_parts(Text(f"[{part.kind} cut to fit]") if part in media else part for part in message.parts)


def _fold_some(conversation: Conversation, budget: Budget, live_output: bool) -> Conversation:
    return folded(conversation, 5, budget)


def _fold_all(conversation: Conversation, budget: Budget, live_output: bool) -> Conversation:
    return folded(conversation, 0, budget)


def _drop_history(conversation: Conversation, budget: Budget, live_output: bool) -> Conversation:
    """Only what is protected, and something that is said; a summary of ours is not protected, even where no user message is
    left beside it."""
    steps, last = conversation.steps, len(conversation.steps) - 1
    kept = {i for i in conversation.protected if i == last or not summary.is_summary(steps[i].head)}
    if (asked := last_asked(conversation)) is not None:
        kept.add(asked)
    if all(steps[i].head.is_instruction for i in kept):
        kept.update([i for i, step in enumerate(steps) if not step.head.is_instruction][-1:])
    messages = list(conversation.preamble)
    for i in sorted(kept):
        messages.extend(steps[i].messages)
    return conversation.with_messages(messages)


def _cut_results(conversation: Conversation, budget: Budget, live_output: bool) -> Conversation:
    """Tool results that are left share what is left of the room; the small ones stay whole.

    Some cost more in their batch than alone: then they are cut again, into as much less, until it fits or nothing is left.
    """
    ruler = budget.ruler
    # The last user message may be an observation: it is only cut where it is what has just come in.
    live = [(output.index, output.message) for output in outputs(conversation) if output.step != conversation.last_user]
    if live_output:
        live.append((len(conversation.messages) - 1, conversation.messages[-1]))
    sizes = [ruler.message(message) for _, message in live]
    room = max(0, budget.usable - (ruler.total(conversation.messages) - sum(sizes)))
    for times in count():
        cap = _level(sizes, room)
        messages = list(conversation.messages)
        for (index, message), size in zip(live, sizes, strict=True):
            if size > cap:
                messages[index] = _shortest(message, cap, ruler)
        excess = ruler.total(messages) - budget.usable
        if excess <= 0 or room == 0:
            break
        room = max(0, room - (excess << times))
    return conversation.with_messages(messages)


def _shortest(message: Message, cap: int, ruler: Ruler) -> Message:
    if _CUT.fullmatch(message.text) is not None:
        return message
    shorter = capped(message, cap, ruler) if cap >= _LEAST else message
    if ruler.message(shorter) <= cap:
        return shorter
    bare = with_text(message, f"[{len(message.text):,} characters cut]")
    return min((shorter, bare), key=ruler.message)


def _level(sizes: list[int], total: int) -> int:
    left, count = total, len(sizes)
    for size in sorted(sizes):
        if size * count > left:
            break
        left, count = left - size, count - 1
    return left // count if count else max(sizes, default=0)


def _cut_arguments(conversation: Conversation, budget: Budget, live_output: bool) -> Conversation:
    """Arguments that are left share what is left of the room; the short ones stay whole."""
    ruler = budget.ruler
    lengths = [len(call.arguments) for step in conversation.steps for call in step.head.calls]
    excess = ruler.total(conversation.messages) - budget.usable
    sizes = sum(ruler.text(call.arguments) for step in conversation.steps for call in step.head.calls)
    limit = max(SMALLEST, _level(lengths, max(0, int(sum(lengths) * (1 - 1.1 * excess / max(1, sizes))))))

    def shorter(number: int, message: Message) -> Message:
        return message.with_parts(_with_short_arguments(message, limit)) if message.calls else message

    return _each(conversation, shorter)


def _with_short_arguments(message: Message, limit: int) -> Iterator[Text | ToolCall | Opaque]:
    for part in message.parts:
        yield short_call(part, limit) if isinstance(part, ToolCall) and len(part.arguments) > limit else part  # type: ignore[misc]


def _cut_all_arguments(conversation: Conversation, budget: Budget, live_output: bool) -> Conversation:
    """JSON does not shorten to the character: where it was not enough, as short as can be."""
    return _cut_arguments(conversation, replace(budget, usable=0), live_output)


def _without_reasoning(conversation: Conversation, budget: Budget, live_output: bool) -> Conversation:
    def bare(number: int, message: Message) -> Message:
        rest = [part for part in message.parts if not (isinstance(part, Opaque) and part.kind == "reasoning")]
        return message.with_parts(rest) if rest and message.role == "assistant" else message

    return _each(conversation, bare)


def _cut_words(conversation: Conversation, budget: Budget, live_output: bool) -> Conversation:
    """The assistant's words in what is left, each text cut in its middle."""

    def shorter(number: int, message: Message) -> Message:
        if message.role != "assistant" or len(message.text) <= SMALLEST:
            return message
        return message.with_parts(
            Text(cut_middle(part.text, SMALLEST)) if isinstance(part, Text) and len(part.text) > SMALLEST else part
            for part in message.parts
        )

    return _each(conversation, shorter)


def _each(conversation: Conversation, change: Callable[[int, Message], Message]) -> Conversation:
    """Every message of every step but instructions, changed."""
    messages = list(conversation.messages)
    for number, step in enumerate(conversation.steps):
        if not step.head.is_instruction:
            for i in range(step.start, step.stop):
                messages[i] = change(number, messages[i])
    return conversation.with_messages(messages)


_LIVE: tuple[Stage, ...] = (_cut_results, _cut_all_arguments, _without_reasoning, _without_media, _cut_words)
_STAGES: tuple[Stage, ...] = (
    _without_old_media,
    _fold_some,
    _fold_all,
    _cut_results,
    _cut_arguments,
    _cut_all_arguments,
    _without_reasoning,
    _drop_history,
    *_LIVE,
)
