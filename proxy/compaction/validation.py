"""Did a layer break anything?  Structure, size, and the facts that must survive, checked without asking the layers.

The detectors here are written on their own: a check that asked the extractor what is important would share its blind spots.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from proxy.compaction import summary
from proxy.compaction.outputs import newest_is_observation, outputs
from proxy.compaction.voices import is_line_of_ours, speaker
from proxy.conversation import Conversation, Message, Opaque, Step, Text, ToolCall, ToolResult

# --- structure ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rules:
    """What the upstream's template asks for beyond the API's own contract."""

    alternate: bool = False
    """User and assistant must take turns (tool calls and their results left out of account): Mistral, Gemma and their kin."""


OPENAI = Rules()


def rules_for(templates: Iterable[str]) -> Rules:
    """The rules of the configured templates: `alternation` asks for turns; the others hold in any case."""
    return Rules(alternate="alternation" in tuple(templates))


def violations(conversation: Conversation, rules: Rules = OPENAI) -> Counter[str]:
    """How often each rule of the contract is broken. Requests come in broken: what counts is that none is broken more often."""
    found: Counter[str] = Counter()
    for step in conversation.steps:
        found.update(_pairing(step))
    for message in conversation.messages:
        found.update(_content(message))
    found["instructions"] = sum(1 for step in conversation.steps if step.head.is_instruction)
    found["reasoning"] = _partial_reasoning(conversation.messages)
    if rules.alternate:
        found["alternation"] = _not_alternating(conversation)
    if conversation.messages and conversation.messages[-1].role == "assistant":
        found["ends_with_assistant"] = 1
    if not conversation.steps:
        found["nothing_said"] = 1
    return +found


def broken(
    before: Conversation,
    after: Conversation,
    rules: Rules = OPENAI,
    *,
    live_turn_may_change: bool = False,
    known: Counter[str] | None = None,
) -> str | None:
    """The first rule that `after` breaks and `before` did not, or None. Rules are short closed words.

    known: the violations of `before`, where they were counted already.
    """
    if not _same_objects(_instructions(before), _instructions(after)):
        return "instructions"
    if not _keeps_live_turn(before, after, live_turn_may_change):
        return "live_turn"
    if not _reasoning_whole(before, after):
        return "reasoning"
    old, new = violations(before, rules) if known is None else known, violations(after, rules)
    return next((rule for rule in sorted(new) if new[rule] > old[rule]), None)


def _pairing(step: Step) -> Iterator[str]:
    """Each call answered exactly once right after it, by id where there are ids."""
    if step.head.is_result:
        yield "orphan"
        return
    wanted = Counter(call.id for call in step.head.calls)
    for message in step.results:
        result = next((part for part in message.parts if isinstance(part, ToolResult)), None)
        answered = result.call_id if result is not None else None
        if wanted[answered] > 0:
            wanted[answered] -= 1
        else:
            yield "orphan"
    yield from ["unanswered"] * sum((+wanted).values())


def _content(message: Message) -> Iterator[str]:
    if not message.parts or (not message.is_result and all(isinstance(part, Text) and not part.text for part in message.parts)):
        yield "empty"
    for part in message.parts:
        if isinstance(part, ToolCall) and not _is_object(part.arguments):
            yield "arguments"


@lru_cache(maxsize=4096)
def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _partial_reasoning(messages: Sequence[Message]) -> int:
    """Some upstreams want reasoning on all assistant messages or on none: 1 when only some have it."""
    has = {_has_field_reasoning(message) for message in messages if message.role == "assistant"}
    return int(len(has) > 1)


def _has_field_reasoning(message: Message) -> bool:
    return any(isinstance(part, Opaque) and part.place == "reasoning_content" for part in message.parts)


def _reasoning_whole(before: Conversation, after: Conversation) -> bool:
    """What reasoning is left is left whole: signed blocks are checked by their upstream."""
    known = {part.raw for message in before.messages for part in message.parts if isinstance(part, Opaque)}
    return all(part.raw in known for message in after.messages for part in message.parts if isinstance(part, Opaque))


def _not_alternating(conversation: Conversation) -> int:
    roles = [role for step in conversation.steps if (role := speaker(step.head)) is not None]
    return sum(1 for a, b in pairwise(roles) if a == b) + int(bool(roles) and roles[0] != "user")


def _instructions(conversation: Conversation) -> tuple[Message, ...]:
    return tuple(message for message in conversation.messages if message.is_instruction)


def _keeps_live_turn(before: Conversation, after: Conversation, may_change: bool) -> bool:
    if not before.messages:
        return not after.messages
    if not after.messages or before.messages[-1].role != after.messages[-1].role:
        return False
    newest = before.steps[-1].messages if before.steps else ()
    last_user = before.steps[before.last_user].head if before.last_user is not None else None
    # What is live may be a summary of ours, or an observation that has just come in: nobody's last words.
    mine = last_user is None or (may_change and (last_user is before.messages[-1] or summary.is_summary(last_user)))
    if not mine and not any(message is last_user for message in after.messages):
        return False
    if not may_change:
        return _same_objects(newest, after.messages[len(after.messages) - len(newest) :])
    return _call_ids(before.steps[-1:]) == _call_ids(after.steps[-1:])


def _call_ids(steps: Sequence[Step]) -> list[str | None]:
    return [call.id for step in steps for call in step.head.calls]


def _same_objects(a: Sequence[Message], b: Sequence[Message]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


# --- critical items -------------------------------------------------------------------------------------------------

_QUOTE = 160  # characters of a fact that must be found again
_ERRORS = 5
_PER_MESSAGE = 3


@dataclass(frozen=True, slots=True)
class Needle:
    """A bounded verbatim quote that must be found in the result. kind: error, request, constraint, conclusion, reference."""

    kind: str
    quote: str
    source: Message
    name: str | None = None
    """Of a reference: what must be found, beside the live turn that refers to it; the quote is a line that says what it is."""

    @property
    def key(self) -> str:
        return _squeezed(self.name or self.quote)


_TROUBLE = re.compile(
    r"(?:error|exception|traceback|fatal|panic(?:ked)?|failed|failure|segfault|core dumped|denied|no such file)\b"
    r"|错误|失败|异常|エラー|例外",
    re.IGNORECASE,
)
_NOT_TROUBLE = re.compile(
    r"\s*(?:\d+\s*(?:→|\||\t|:)|[+\-@#>|*]|//|/\*|\"\"\"|'''|"
    r"(?:def|class|func|fn|return|raise|throw|import|from|if|elif|else|try|except|catch|const|let|var|for|while|with|case|self|"
    r"log\w*|print\w*|assert\w*|expect|it|describe|test)\b)"
    r"|.*(?:[;{}]\s*$|\w\s*[:+]?=\s*\S|\b(?:0|no) (?:errors?|fail)|\bwithout errors?)",
    re.IGNORECASE,
)
_ASKS = re.compile(
    r"\?\s*$|？|\b(?:please|could you|can you|would you|i want|i need|i'd like|we need|make|add|fix|write|change|remove|update|"
    r"create|implement|show|explain|run|use)\b|请|帮|需要|想|ください|お願い|してほしい|bitte|s'il|veux|quiero|por favor",
    re.IGNORECASE,
)
_BINDS = re.compile(
    r"\b(?:never|always|must|don'?t|do not|only|from now on|make sure|ensure|avoid|prefer|without|at most|at least|"
    r"no more than)\b"
    r"|不要|不能|必须|务必|禁止|始终|不得|しない|必ず|禁止|常に|niemals|immer|nicht|muss|jamais|toujours|ne pas|doit|nunca|"
    r"siempre|no debe",
    re.IGNORECASE,
)
_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n")


def needles(conversation: Conversation, budget_bytes: int) -> tuple[Needle, ...]:
    """The facts that must survive, the most important first, as many as fit into `budget_bytes` of quotes."""
    chosen: dict[str, Needle] = {}
    left = budget_bytes
    for needle in _candidates(conversation):
        size = len(needle.quote.encode("utf-8", "surrogatepass"))
        if size <= left and needle.key and needle.key not in chosen:
            chosen[needle.key] = needle
            left -= size
    return tuple(chosen.values())


def missing(wanted: Iterable[Needle], after: Conversation) -> list[Needle]:
    """Those that are not found in the result: neither the message that held them nor the words."""
    kept = {id(message) for message in after.messages}
    gone = [needle for needle in wanted if id(needle.source) not in kept]
    if not gone:
        return []
    live = {id(message) for message in _live_turn(after)}
    history = _squeezed("\n".join(_everything(message) for message in after.messages if id(message) not in live))
    text = history + _squeezed("\n".join(_everything(message) for message in after.messages if id(message) in live))
    return [needle for needle in gone if needle.key not in (history if needle.name else text)]


def _live_turn(conversation: Conversation) -> list[Message]:
    """The last user message and the newest step."""
    if not conversation.steps:
        return []
    heads = [step.head for step in reversed(conversation.steps)]
    asked = [message for message in heads if message.role == "user" and not summary.is_summary(message)][:1]
    return [*asked, *conversation.steps[-1].messages]


def _everything(message: Message) -> str:
    return "\n".join([message.text, *(call.arguments for call in message.calls)])


def _squeezed(text: str) -> str:
    """Without white space: JSON that is printed on one line, and lines that are wrapped, say the same."""
    return "".join(text.split())


def _candidates(conversation: Conversation) -> Iterator[Needle]:
    said = outputs(conversation)
    observed = {id(output.message) for output in said}
    heads = [step.head for step in reversed(conversation.steps)]
    summaries = [message for message in heads if summary.is_summary(message)]
    ours = [*summaries, *(message for message in heads if is_line_of_ours(message))]
    observed.update(map(id, ours))
    if newest_is_observation(conversation):
        observed.add(id(conversation.messages[-1]))
    people = [message for message in heads if message.role == "user" and id(message) not in observed]
    yield from _conclusion([message for message in heads if id(message) not in observed])
    for message in summaries:
        yield from _binding_items(message)
    for message in people:
        yield from (Needle("constraint", quote, message) for quote in _quotes(message.text, _BINDS))
    yield from _errors(conversation)
    for message in people:
        yield from (Needle("request", quote, message) for quote in _quotes(message.text, _ASKS, first=True))
    yield from _references(conversation)


_NAME = re.compile(r"[\w./~-]*\w[/._]\w[\w./-]*\w")
_NAMES = 12


def _references(conversation: Conversation) -> Iterator[Needle]:
    """What the live turn names and an earlier message told of (files, dotted and underscored names), with the newest line."""
    live = _live_turn(conversation)
    said = " ".join(message.text[:4_000] + " " + " ".join(call.arguments[:1_000] for call in message.calls) for message in live)
    names = [name for name in dict.fromkeys(_NAME.findall(said)) if len(name) > 5 and not name.replace(".", "").isdigit()][
        :_NAMES
    ]
    mine = {id(message) for message in live}
    history = [message for message in reversed(conversation.messages) if not message.is_instruction and id(message) not in mine]
    for name in names:
        source = next((message for message in history if name in message.text), None)
        if source is not None:
            line = next((line.strip() for line in source.text.split("\n") if name in line), name)
            at = max(0, line.find(name) - _QUOTE // 2)
            yield Needle("reference", line[at : at + _QUOTE], source, name)


_SECTION_KINDS = {
    "§ Goal": "request",
    "§ Constraints": "constraint",
    "§ User requests (open)": "request",
    "§ Errors (unresolved)": "error",
}


def _binding_items(message: Message) -> Iterator[Needle]:
    """What an earlier summary of ours holds that must not be forgotten by the next."""
    kind: str | None = None
    kept = False
    for line in message.text.split("\n"):
        if line.startswith("§"):
            kind, kept = _SECTION_KINDS.get(line), line == "§ Kept"
        elif kind is not None and line.startswith("- "):
            yield Needle(kind, line[2 : 2 + _QUOTE], message)
        elif kept and line.strip():
            yield Needle("constraint", line[:_QUOTE], message)


def _quotes(text: str, pattern: re.Pattern[str], first: bool = False) -> list[str]:
    sentences = [
        s for s in (piece.strip(" \t\r-*#>|") for piece in _END.split(text[:20_000])) if len(s) > 1 and s[:1] not in "<{[`"
    ]
    found = [s for s in sentences if len(s) <= 400 and pattern.search(s)]
    if first and sentences and sentences[0] not in found:
        found.insert(0, sentences[0])
    return [s[:_QUOTE] for s in found[:_PER_MESSAGE]]


def _conclusion(newest_first: Sequence[Message]) -> Iterator[Needle]:
    spoken = next((message for message in newest_first if message.role == "assistant" and message.text.strip()), None)
    lines = [line.strip() for line in spoken.text.split("\n") if len(line.strip()) > 3] if spoken is not None else []
    if spoken is not None and lines:
        yield Needle("conclusion", lines[-1][:_QUOTE], spoken)


def _errors(conversation: Conversation) -> Iterator[Needle]:
    """The newest distinct error lines whose call was not made again later without any."""
    healed: set[tuple[str, str]] = set()
    count = 0
    for output in reversed(outputs(conversation)):
        call = (output.call.name, output.call.arguments) if output.call is not None else None
        lines = trouble(output.text)
        if not lines and call is not None:
            healed.add(call)
        if call in healed:
            continue
        for line in reversed(lines[-_ERRORS:]):
            yield Needle("error", line[:_QUOTE], output.message)
            count += 1
        if count >= _ERRORS:
            return


def trouble(text: str) -> list[str]:
    """Lines of a tool's output that report a failure."""
    if _TROUBLE.search(text) is None:
        return []
    lines = (line.strip() for line in text.split("\n") if 8 < len(line) < 300)
    return [line for line in lines if _TROUBLE.search(line) and not _NOT_TROUBLE.match(line)]
