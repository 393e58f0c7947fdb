"""Old tool results by their best lines, or as one line each that still says what was there; long old arguments shorter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxy.compaction import digest, forecast, graphemes, json_text
from proxy.compaction.digest import Picks, Source
from proxy.compaction.line_kinds import important, kind_of
from proxy.compaction.outputs import Output, outputs, with_text
from proxy.compaction.plan import History
from proxy.compaction.shorten import cut_middle, shorten
from proxy.conversation import Conversation, Message, ToolCall
from proxy.tokens import Ruler
from proxy.windows import Budget

_WORD = re.compile(r"[\w./-]*[\w/][./_][\w./-]*\w|[A-Z]\w*[a-z][A-Z]\w+|\b[0-9a-f]{7,40}\b")
_LINE = 160  # characters of a quoted line
_ARGUMENTS = 120  # characters of the arguments in a stub


@dataclass(frozen=True, slots=True)
class Microcompact:
    """Results older than the newest `keep_recent` keep the lines that are most likely needed again, as many as meet the target;
    where not even that is possible, they become stubs, and over-long old arguments are cut."""

    keep_recent: int = 10
    """Results that stay whole."""
    min_tokens: int = 200
    """Smaller results and arguments stay as they are."""
    key_lines: int = 3
    """Lines that a stub quotes: errors, then those that name what later turns speak of."""
    min_kept: float = 0.5
    """Share of the old results that the target must leave room for: with less, a fold of whole steps keeps more of what will
    be needed, so this layer leaves it to that. 0: it always does what it can."""

    @property
    def name(self) -> str:
        return "microcompact"

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        excess = budget.ruler.total(conversation.messages) - budget.target
        if excess <= 0:
            return conversation
        said = outputs(conversation)
        recent = max(0, len(said) - self.keep_recent)
        old = [output for output in said[:recent] if not output.protected]
        old = [output for output in old if budget.ruler.message(output.message) >= self.min_tokens]
        whole = sum(budget.ruler.message(output.message) for output in old)
        if self.min_kept and whole - excess < self.min_kept * whole:
            return conversation
        later = _later_words(conversation)
        stubs = {output.index: with_text(output.message, stub(output, later, self.key_lines)) for output in old}
        stubs = {o.index: stubs[o.index] for o in old if _saved(o.message, stubs[o.index], budget.ruler) > 0}
        spared = sum(_saved(conversation.messages[index], shorter, budget.ruler) for index, shorter in stubs.items())
        if spared >= excess:
            return _with_best_lines(conversation, stubs, budget)
        stubbed = conversation.with_messages([stubs.get(i, message) for i, message in enumerate(conversation.messages)])
        return _with_short_arguments(stubbed, said[recent - 1].index if recent else 0, self.min_tokens, budget)


def _saved(before: Message, after: Message, ruler: Ruler) -> int:
    return ruler.message(before) - ruler.message(after)


def _with_best_lines(conversation: Conversation, stubs: Mapping[int, Message], budget: Budget) -> Conversation:
    """The old results by those of their lines that are most likely needed again, as many as the target leaves room for;
    a result of which no line is worth it is its stub."""
    ruler = budget.ruler
    history = History(conversation, ruler)
    sources = [
        Source(i, "", conversation.messages[i].text, history.rate(conversation.messages[i]), inline=True, output=True)
        for i in stubs
    ]
    picks = Picks(sources)
    for i, message in enumerate(conversation.messages):
        if i not in stubs:
            for text in (message.text, *(call.arguments for call in message.calls)):
                picks.show_all(text)
    bare = conversation.with_messages([stubs.get(i, message) for i, message in enumerate(conversation.messages)])
    room = budget.target - ruler.total(bare.messages)
    digest.choose(picks, forecast.needs(tuple(history.mentions())), room)
    digest.fill(picks, room)
    while True:
        changed = dict(stubs)
        for source, chosen in zip(sources, picks.chosen, strict=True):
            if chosen:
                changed[source.place] = _by_lines(conversation.messages[source.place], chosen, stubs[source.place], ruler)
        made = conversation.with_messages([changed.get(i, message) for i, message in enumerate(conversation.messages)])
        excess = ruler.total(made.messages) - budget.target
        if excess <= 0 or not picks.drop(excess):
            return made


def _by_lines(message: Message, chosen: set[int], stubbed: Message, ruler: Ruler) -> Message:
    """A result by the chosen lines; JSON as JSON. Its stub where that is not more, itself where nothing would be saved."""
    text = digest.in_place(message.text, chosen)
    if json_text.parse(message.text) is not None and text is not message.text:
        text = shorten(message.text, len(text))
    if len(text) <= len(stubbed.text):
        return stubbed
    shorter = with_text(message, text)
    return shorter if ruler.message(shorter) < ruler.message(message) else message


def _with_short_arguments(conversation: Conversation, border: int, min_tokens: int, budget: Budget) -> Conversation:
    """Over-long arguments of the calls before `border`, oldest first, until the target is met."""
    messages = list(conversation.messages)
    excess = budget.ruler.total(messages) - budget.target
    for step in conversation.steps:
        if excess <= 0 or step.start > border:
            break
        if step.head.calls and step.stop < len(messages) and not step.is_pending:
            shorter = with_short_arguments(step.head, min_tokens, budget.ruler)
            excess -= _saved(step.head, shorter, budget.ruler)
            messages[step.start] = shorter
    return conversation.with_messages(messages)


def stub(output: Output, later: frozenset[str], key_lines: int = 3) -> str:
    """One line on what the tool said, and the lines of it that matter most."""
    text = output.text
    lines = text.split("\n")
    arguments = f"({digest_of(output.call.arguments)})" if output.call is not None else ""
    header = f"[{_name(output.tool)}{arguments}: {len(text):,} characters, {len(lines):,} lines, cut]"
    quotes = _key_lines(lines, later, key_lines)
    first = next((line.strip() for line in lines if line.strip()), "")
    if first and all(first[:40] not in quote for quote in quotes):
        quotes = [first, *quotes]
    return "\n".join([header, *(cut_middle(quote, _LINE) for quote in quotes)])


def digest_of(arguments: str) -> str:
    """A call's arguments on one line, bounded."""
    value = json_text.parse(arguments)
    if isinstance(value, dict) and len(value) <= 6:
        shown = ", ".join(f"{key}={_one_line(item)}" for key, item in value.items())
    else:
        shown = _one_line(arguments)
    return cut_middle(shown, _ARGUMENTS)


def with_short_arguments(message: Message, min_tokens: int, ruler: Ruler) -> Message:
    """The message with arguments of more than `min_tokens` shortened: the same keys, long values cut. What is no object stays."""
    parts = []
    for part in message.parts:
        if isinstance(part, ToolCall) and len(part.arguments) > 2 * min_tokens and ruler.text(part.arguments) > min_tokens:
            part = short_call(part, 2 * min_tokens)
        parts.append(part)
    return message.with_parts(parts)


def short_call(call: ToolCall, limit: int) -> ToolCall:
    """The call with its arguments in about `limit` characters, still an object with its keys; itself when that cannot be."""
    value = json_text.parse(call.arguments)
    if not isinstance(value, dict):
        return call
    shorter = json_text.shorten(call.arguments, limit, cut_middle)
    if shorter is None or len(shorter) >= len(call.arguments):
        return call
    return ToolCall(call.id, call.name, shorter, call.raw)


def _key_lines(lines: Sequence[str], later: frozenset[str], most: int) -> list[str]:
    errors = important(lines, kind_of(lines))
    chosen = dict.fromkeys(errors[-most:])
    if len(chosen) < most:
        for i, line in enumerate(lines):
            if i not in chosen and len(line) < 400 and any(word in later for word in _WORD.findall(line)):
                chosen[i] = None
                if len(chosen) >= most:
                    break
    return [lines[i].strip() for i in sorted(chosen) if lines[i].strip()]


def _later_words(conversation: Conversation) -> frozenset[str]:
    """Names that the assistant's newest turns speak of."""
    words: set[str] = set()
    for step in conversation.steps[-12:]:
        if step.head.role == "assistant":
            words.update(_WORD.findall(step.head.text[:4_000]))
            for call in step.head.calls:
                words.update(_WORD.findall(call.arguments[:1_000]))
    return frozenset(words)


def _one_line(value: object) -> str:
    text = value if isinstance(value, str) else json_text.dump(value)
    return cut_middle(
        re.sub(r"\s+", " ", text[: 4 * _ARGUMENTS]).strip(), _ARGUMENTS // 2 if len(text) > _ARGUMENTS // 2 else _ARGUMENTS
    )


def _name(tool: str) -> str:
    cleaned = re.sub(r"[^\w.:-]", "", tool)
    return cleaned[: graphemes.before(cleaned, 64)] or "output"
