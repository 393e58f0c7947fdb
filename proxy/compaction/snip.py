"""What is said twice, or was never worth saying: duplicates, superseded reads, terminal noise, empty turns, old reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.compaction.outputs import Output, outputs, with_text
from proxy.compaction.voices import speaker
from proxy.conversation import Conversation, Message, Opaque, Step, Text, ToolCall
from proxy.tokens import Ruler
from proxy.windows import Budget

_SHORTEST = 200  # characters: below, a stub would not be shorter
_READS = re.compile(
    r"(?:^|_|-|\b)(?:read|view|cat|open|show|get|fetch|list|ls|search|grep|glob|find|status|stat|query|lookup|inspect)",
    re.IGNORECASE,
)
_SHELL_READS = re.compile(
    r"\s*(?:cd \S+ && )?(?:cat|head|tail|sed -n|ls|find|grep|rg|wc|tree|pwd|git (?:status|diff|log|show|branch))\b[^|;&<>]*"
    r"(?:\|\s*(?:head|tail|grep|wc|sort)[^|;&<>]*)*\Z"
)
_SIGNED_PLACES = frozenset({"content", "thinking_blocks", "thinking"})
_COMMAND_KEYS = ("command", "cmd", "script", "input")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|\x08+")


@dataclass(frozen=True, slots=True)
class Snip:
    """Takes out of the history what the rest of it says as well. The newest of equal things stays; protected steps stay too."""

    reasoning: bool = True
    """Drop the reasoning of finished turns: all of it, whole."""

    @property
    def name(self) -> str:
        return "snip"

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        messages = list(conversation.messages)
        for output in outputs(conversation):
            if not output.protected:
                messages[output.index] = _smaller(output.message, _cleaned(output.message), budget.ruler)
        conversation = conversation.with_messages(messages)
        conversation = _without_repeats(conversation, budget.ruler)
        if self.reasoning:
            conversation = without_old_reasoning(conversation)
        return _without_empty_turns(conversation)


def without_old_reasoning(conversation: Conversation) -> Conversation:
    """No reasoning in the turns before the last user message, where the upstream allows that.

    Signed thinking is only needed in the turn that is going on. Of reasoning in a plain field some upstreams want all or
    nothing: it goes only where the turn that is going on (which needs its own inside a tool loop) has none.
    """
    last_user = conversation.last_user
    if last_user is None:
        return conversation
    border = conversation.steps[last_user].start
    needed = {part.place for message in conversation.messages[border:] for part in _reasoning(message)} - _SIGNED_PLACES
    messages = [_without_reasoning(message, needed) if i < border else message for i, message in enumerate(conversation.messages)]
    return conversation.with_messages(messages)


def clean(text: str) -> str:
    """The text as a terminal would have left it: no escape sequences, of each redrawn line only the last state."""
    if "\x1b" in text or "\x08" in text:
        text = _ESCAPES.sub("", text)
    if "\r" in text:
        text = "\n".join(_settled(line) for line in text.replace("\r\n", "\n").split("\n"))
    return text


def _settled(line: str) -> str:
    states = [state for state in line.split("\r") if state.strip()]
    return states[-1] if states else ""


def _cleaned(message: Message) -> Message:
    text = message.text
    if "\x1b" not in text and "\r" not in text and "\x08" not in text:
        return message
    cleaned = clean(text)
    return with_text(message, cleaned) if cleaned.strip() and len(cleaned) < len(text) else message


def _smaller(before: Message, after: Message, ruler: Ruler) -> Message:
    """The edited message where that saves a token, else the one that came."""
    return after if after is not before and ruler.message(after) < ruler.message(before) else before


def _without_repeats(conversation: Conversation, ruler: Ruler) -> Conversation:
    """Older results that a newer one repeats or replaces become a line that says so."""
    messages = list(conversation.messages)
    same_text: dict[str, Output] = {}
    same_call: dict[tuple[str, str], Output] = {}
    for output in reversed(outputs(conversation)):
        text = output.text
        if len(text) < _SHORTEST:
            continue
        key = _read_key(output.call)
        newer, reason = same_text.get(text), "the same output came again later"
        if newer is None and key is not None:
            newer, reason = same_call.get(key), "the same call was made again later"
            if newer is not None and len(newer.text) < len(text) // 2:
                newer = None  # an error, or a file that has shrunk: what was read before is not said again
        same_text.setdefault(text, output)
        if key is not None:
            same_call.setdefault(key, output)
        if newer is not None and not output.protected:
            stub = f"[{reason}; {len(text):,} characters of {_safe(output.tool)} cut here]"
            messages[output.index] = _smaller(output.message, with_text(output.message, stub), ruler)
    return conversation.with_messages(messages)


def _read_key(call: ToolCall | None) -> tuple[str, str] | None:
    """What a call reads, when calling again replaces what it said: the tool and its arguments in canonical form."""
    if call is None:
        return None
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict):
        return None
    command = next((arguments[key] for key in _COMMAND_KEYS if isinstance(arguments.get(key), str)), None)
    reads = _SHELL_READS.match(command) if command is not None else _READS.search(call.name)
    return (call.name, json.dumps(arguments, sort_keys=True)) if reads else None


def _safe(name: str) -> str:
    return re.sub(r"[^\w.:-]", "", name)[:64] or "output"


def _reasoning(message: Message) -> list[Opaque]:
    return [part for part in message.parts if isinstance(part, Opaque) and part.kind == "reasoning"]


def _without_reasoning(message: Message, needed: set[str]) -> Message:
    """The message without its reasoning: all of it, or none where some of it is needed."""
    thoughts = _reasoning(message)
    if message.role != "assistant" or not thoughts or any(part.place in needed for part in thoughts):
        return message
    rest = [part for part in message.parts if part not in thoughts]
    return message.with_parts(rest) if rest else message


def _without_empty_turns(conversation: Conversation) -> Conversation:
    """No assistant messages that say nothing, where taking them out does not bring two messages of one role together.

    Nor where only calls and results would stand between two user messages: to many templates these are no turn.
    """
    steps = conversation.steps
    kept: list[Message] = list(conversation.preamble)
    last: str | None = None
    for number, step in enumerate(steps):
        may_go = number not in conversation.protected and _is_empty(step) and _may_go(steps, number)
        if may_go and not (last == "user" == _next_speaker(steps, number)):
            continue
        kept.extend(step.messages)
        last = speaker(step.head) or last
    return conversation.with_messages(kept)


def _next_speaker(steps: Sequence[Step], number: int) -> str | None:
    return next((role for i in range(number + 1, len(steps)) if (role := speaker(steps[i].head)) is not None), None)


def _is_empty(step: Step) -> bool:
    message = step.head
    return (
        message.role == "assistant"
        and len(step.messages) == 1
        and all(isinstance(p, Text) and not p.text.strip() for p in message.parts)
    )


def _may_go(steps: Sequence[Step], number: int) -> bool:
    before = steps[number - 1].head.role if number else None
    after = steps[number + 1].head.role if number + 1 < len(steps) else None
    return before == "assistant" or (before is None and after == "user") or (after == "assistant" and before != "user")
