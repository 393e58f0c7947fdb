"""Caps on what one tool may say: each result, all results of a step together, and all results of a conversation."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.compaction.outputs import Output, outputs, with_text
from proxy.compaction.shorten import SMALLEST, shorten
from proxy.conversation import Conversation, Message
from proxy.tokens import Ruler
from proxy.windows import Budget

_LONG = 1_000_000  # characters: a text that is still too long once it was shortened is shortened further, not anew


@dataclass(frozen=True, slots=True)
class ToolResultBudget:
    """Shortens results beyond a cap: head and tail, errors and outline, JSON as JSON. The newest step is left alone, unless
    it is so large that choosing what stays of it would take longer than a request waits."""

    per_result: int = 8_000
    """Tokens of one result."""
    per_step: int = 24_000
    """Tokens of all results of one step; the largest are cut first."""
    head: float = 0.6
    """Of what is left after the important lines: the share of the beginning."""
    per_conversation: int = 200_000
    """Tokens of all results together, or what the window holds if that is more: no more is given to the layers that weigh each
    line to choose what stays."""

    @property
    def name(self) -> str:
        return "tool_result_budget"

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        messages = list(conversation.messages)
        said = outputs(conversation)
        sizes = {output.index: budget.ruler.message(output.message) for output in said}
        most = _level(list(sizes.values()), max(self.per_conversation, budget.usable))
        by_step: dict[int, list[Output]] = {}
        for output in said:
            by_step.setdefault(output.step, []).append(output)
        for group in by_step.values():
            cap = min(most, self.per_result, _level([sizes[output.index] for output in group], self.per_step))
            for output in group:
                own = most if output.protected else cap
                if sizes[output.index] > own and (not output.protected or _has_just_come(output, conversation)):
                    messages[output.index] = capped(output.message, own, budget.ruler, self.head)
        return conversation.with_messages(messages)


def _has_just_come(output: Output, conversation: Conversation) -> bool:
    """It stands in the newest step. What a person said last stays, even where it looks like output, once something follows."""
    return output.step == len(conversation.steps) - 1


def capped(message: Message, tokens: int, ruler: Ruler, head: float = 0.6) -> Message:
    """The message with its words shortened so that it costs at most `tokens` (or next to nothing is left of them)."""
    text = message.text
    size = ruler.message(message)
    rest = max(0, size - ruler.text(text)) if len(text) < 2_000 else 0
    limit = len(text)
    for _ in range(4):
        if size <= tokens or limit <= SMALLEST:
            break
        limit = max(SMALLEST, min(limit - 1, int(limit * max(0, tokens - rest) / max(1, size - rest) * 0.98)))
        shorter = with_text(message, shorten(text, limit, head=head))
        if ruler.message(shorter) >= ruler.message(message):
            break
        size, limit = ruler.message(shorter), min(limit, len(shorter.text))
        best = shorter
        text = shorter.text if len(text) > _LONG else text
    return best if size < ruler.message(message) else message


def _level(sizes: list[int], total: int) -> int:
    """The cap on each that brings their sum to `total`: the small ones stay whole, the large share what they leave."""
    if sum(sizes) <= total:
        return max(sizes, default=0)
    left, count = total, len(sizes)
    for size in sorted(sizes):
        if size * count > left:
            break
        left, count = left - size, count - 1
    return max(1, left // count)
