"""Old steps become one summary message: what must not be forgotten, and the lines most likely needed again.

The plan says which steps stay and which are folded; the digest then chooses lines of folded steps and of shortened outputs
alike, until the whole meets the budget's target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from proxy.compaction import digest, entities, forecast, json_text, ledger, reserve, shorten, signals, summary
from proxy.compaction.digest import Picks, Source
from proxy.compaction.ledger import Ledger
from proxy.compaction.outputs import with_text
from proxy.compaction.plan import History, Mode, Plan, planned, told
from proxy.compaction.reserve import Quote
from proxy.compaction.summary import Earlier, is_summary
from proxy.conversation import Conversation, Message, Step
from proxy.windows import Budget

__all__ = ["ContextCollapse", "is_summary", "repair"]

FRAME_TOKENS = 60
"""About what a summary's own words cost: opening, headings, seal."""
SLACK = 0.02
"""Of the target: what may be left over."""
LEAD_SHARE = 0.15
"""Of the room: the ledger in another style than `detailed`, which comes first in the summary."""


@dataclass(frozen=True, slots=True)
class ContextCollapse:
    """Folds the steps before the newest ones into one summary message, so that the whole meets the budget's target."""

    keep_recent: int = 10
    """Messages that stay in place where they fit (more do, where there is room)."""
    style: ledger.Style = "detailed"
    """How the ledger is written: `detailed` quotes lines of the history too; the others are short."""
    mode: Mode = "prefix"
    """Which steps are folded: the old ones into one message; each old window into one; or by importance."""
    window: int = 10
    """sliding_window: messages in a window."""
    role: str = "user"
    """Role of the summary message; never an instruction's."""
    key: bytes = b""
    """Secret that the summary's seal is made with, so that nobody else can make one."""

    @property
    def name(self) -> str:
        return "context_collapse"

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        if not conversation.steps or budget.ruler.total(conversation.messages) <= budget.target:
            return conversation
        history = History(conversation, budget.ruler, self.key)
        plan = planned(history, budget.target, mode=self.mode, keep_recent=self.keep_recent, window=self.window)
        return _Fold(self, history, plan, budget.target).result()


# --- where lines may come from --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A text that lines may be taken from. message: the one that it stays in, None when it is folded into summary `group`."""

    source: Source
    message: Message | None
    group: int = 0


def _candidates(history: History, plan: Plan) -> list[_Candidate]:
    found: list[_Candidate] = []
    for earlier in history.earlier:
        for label, text in earlier.excerpts:
            found.append(_Candidate(Source(-1, label, text, history.ruler.text(text) / max(1, len(text))), None))
    group_of = {i: number for number, group in enumerate(plan.groups) for i in group}
    for i, step in enumerate(history.steps):
        if i in plan.partial:
            found.extend(_inline(history, i, step))
        elif i in group_of and i not in plan.silent and i not in history.summaries:
            found.extend(_Candidate(source, None, group_of[i]) for source in _folded(history, i, step))
    return [candidate for candidate in found if candidate.source.text.strip()]


def _inline(history: History, i: int, step: Step) -> Iterator[_Candidate]:
    outputs = step.messages if history.is_output(i) else step.results
    for index, message in enumerate(outputs, step.stop - len(outputs)):
        yield _Candidate(Source(index, "", message.text, history.rate(message), inline=True, output=True), message)


def _folded(history: History, i: int, step: Step) -> Iterator[Source]:
    head, rate, output = step.head, history.rate(step.head), history.is_output(i)
    who = (head.name or "output") if output else head.role
    number = step.start + history.folded_before
    yield Source(step.start, f"{number} {who}", told(head), rate, output=output)
    for position, result in enumerate(step.results, 1):
        name = head.calls[position - 1].name if position <= len(head.calls) else "result"
        yield Source(step.start + position, f"{number + position} {name}", result.text, history.rate(result), output=True)


# --- what is said ---------------------------------------------------------------------------------------------------


class _Fold:
    """One collapse under way: the ledger and quotes of each group, the lines picked so far."""

    def __init__(self, layer: ContextCollapse, history: History, plan: Plan, target: int) -> None:
        self.layer, self.history, self.plan, self.target = layer, history, plan, target
        self.candidates = _candidates(history, plan)
        self.picks = Picks([candidate.source for candidate in self.candidates])
        self.books: list[Ledger] = []
        self.quotes: list[list[Quote]] = []
        self.leads: list[str] = []

    def result(self) -> Conversation:
        self._show_kept()
        room = self._quote(self.plan.room - FRAME_TOKENS * len(self.plan.groups))
        lines = self.layer.style == "detailed" or self.plan.partial
        choice = digest.Choice(self.picks, forecast.needs(tuple(self.history.mentions())) if lines else {})
        self._pick(choice, room)
        made = self._assembled()
        excess = self.history.ruler.total(made.messages) - self.target
        if -excess > SLACK * self.target:
            # The estimates lean high: what they left over is given out once more.
            self._pick(choice, self.picks.spent - excess)
            made = self._assembled()
            excess = self.history.ruler.total(made.messages) - self.target
        while excess > 0 and (self.picks.drop(excess) or self._drop_quotes()):
            made = self._assembled()
            excess = self.history.ruler.total(made.messages) - self.target
        return made

    def _pick(self, choice: digest.Choice, room: float) -> None:
        choice.take(room)
        if self.layer.style == "detailed":
            digest.fill(self.picks, room)

    def _show_kept(self) -> None:
        """What is said in place anyway needs no line."""
        history, plan = self.history, self.plan
        kept = list(history.conversation.preamble)
        for i in sorted(plan.whole):
            kept.extend((plan.edited.get(i, history.steps[i].head), *history.steps[i].results))
        kept.extend(history.steps[i].head for i in sorted(plan.partial) if not history.is_output(i))
        for message in kept:
            self.picks.show_all(told(message))

    def _quote(self, room: float) -> float:
        """The quotes of each group; what is left of the room."""
        history, ruler = self.history, self.history.ruler
        errors = self._recent_errors(room)
        share = room / max(1, len(self.plan.groups))
        for number, group in enumerate(self.plan.groups):
            steps = [history.steps[i] for i in group if i not in history.summaries]
            carried = _merged(history.earlier) if number == 0 else ledger.EMPTY
            weight = sum(history.cost(i) for i in group if i not in history.summaries)
            book = ledger.extract(steps, replace(carried, folded_tokens=carried.folded_tokens + weight))
            last = number == len(self.plan.groups) - 1
            lead = ""
            if self.layer.style != "detailed":
                lead = ledger.render(book, style=self.layer.style, max_tokens=max(24, int(LEAD_SHARE * share)), ruler=ruler)
            quotes = reserve.quotes(
                book,
                last_words=self._last_words() if last else "",
                errors=errors if last else (),
                room=share,
                ruler=ruler,
                goal=history.task is None and number == 0,
                carried=carried,
            )
            self.books.append(book)
            self.leads.append(lead)
            self.quotes.append(quotes)
            room -= ruler.text(lead) + sum(ruler.text(quote.text) + 3 for quote in quotes)
            for quote in quotes:
                it = entities.scan(quote.text)
                for text, names in zip(it.lines, it.names, strict=True):
                    self.picks.show(text, names)
        return room

    def _last_words(self) -> str:
        """The newest words of the assistant, when they do not stay in place."""
        history = self.history
        spoken = (i for i in range(history.newest, -1, -1) if history.voices[i] == "assistant")
        last = next((i for i in spoken if history.steps[i].head.text.strip()), None)
        return "" if last is None or self.plan.stays(last) else history.steps[last].head.text

    def _recent_errors(self, room: float) -> list[str]:
        """Distinct error lines of folded outputs, the most telling first; those of outputs that stay in place are taken there."""
        found: dict[str, None] = {}
        purse = reserve.errors_room(room)
        for position, line in self._telling(reserve.ERRORS + reserve.MORE_ERRORS):
            if not self.candidates[position].source.inline:
                found[line.strip()] = None
                continue
            number = next((n for n, text in enumerate(self.picks.scans[position].lines) if text == line), None)
            if number is not None and number not in self.picks.chosen[position]:
                cost = self.picks.cost(position, number)
                if cost <= purse:
                    purse -= cost
                    self.picks.take(position, number)
        return list(found)

    def _telling(self, most: int) -> list[tuple[int, str]]:
        """Error lines with the output that holds them: the last line (often the exit code) and the first of each, newest output
        first; then what is between."""
        ends: list[tuple[int, str]] = []
        middles: list[tuple[int, str]] = []
        for position in range(len(self.candidates) - 1, -1, -1):
            source = self.candidates[position].source
            failing = signals.error_lines(source.text) if source.output else ()
            if failing:
                ends.extend((position, line) for line in dict.fromkeys((failing[-1], failing[0])))
                middles.extend((position, line) for line in failing[-2:0:-1][:most])
            if len(ends) > 2 * most:
                break
        return ends + middles[:most]

    def _drop_quotes(self) -> bool:
        """Last of all the quotes go, half of them at a time; False when there are none."""
        fullest = max(self.quotes, key=len, default=[])
        if fullest:
            del fullest[len(fullest) // 2 :]
        return bool(fullest) or any(self.quotes)

    def _assembled(self) -> Conversation:
        changed: dict[int, Message] = {}
        excerpts: list[list[summary.Excerpt]] = [[] for _ in self.plan.groups]
        detailed = self.layer.style == "detailed"
        for candidate, scan, chosen in zip(self.candidates, self.picks.scans, self.picks.chosen, strict=True):
            if candidate.message is not None:
                changed[candidate.source.place] = with_text(candidate.message, _kept_text(candidate.source, chosen))
            elif chosen and detailed and excerpts:
                excerpts[candidate.group].append((candidate.source.label, digest.excerpt(scan, chosen)))
        written = [
            summary.write(
                book.folded_messages,
                quotes,
                quoted,
                tokens=book.folded_tokens,
                lead=lead,
                role=self.layer.role,
                key=self.layer.key,
            )
            for book, quotes, quoted, lead in zip(self.books, self.quotes, excerpts, self.leads, strict=True)
        ]
        return self.history.conversation.with_messages(self._ordered(changed, written))

    def _ordered(self, changed: dict[int, Message], written: Sequence[Message]) -> list[Message]:
        """The preamble, then what stays; each summary where its first step was, but all before the last user message: what a
        person said last must stay the last thing that a person said."""
        history, plan = self.history, self.plan
        out = list(history.conversation.preamble)
        first = {group[0]: number for number, group in enumerate(plan.groups)}
        placed: set[int] = set()
        for i, step in enumerate(history.steps):
            due = range(len(written)) if i == history.last_user else [first[i]] if i in first else []
            out.extend(written[number] for number in due if number not in placed)
            placed.update(due)
            if i in plan.edited:
                out.append(plan.edited[i])
            elif plan.stays(i):
                out.extend(changed.get(index, message) for index, message in enumerate(step.messages, step.start))
        return out


def _merged(earlier: Sequence[Earlier]) -> Ledger:
    """The ledgers of several summaries as one: usually there is one."""
    merged = earlier[0].ledger if earlier else ledger.EMPTY
    for more in (other.ledger for other in earlier[1:]):
        merged = replace(
            merged,
            goal=merged.goal or more.goal,
            user_requests=tuple(dict.fromkeys(merged.user_requests + more.user_requests)),
            constraints=tuple(dict.fromkeys(merged.constraints + more.constraints)),
            errors=tuple(dict.fromkeys(merged.errors + more.errors)),
            decisions=tuple(dict.fromkeys(merged.decisions + more.decisions)),
            conclusions=tuple(dict.fromkeys(merged.conclusions + more.conclusions)),
            files=tuple(dict.fromkeys(merged.files + more.files)),
            commands=tuple(dict.fromkeys(merged.commands + more.commands)),
            entities=tuple(dict.fromkeys(merged.entities + more.entities)),
            active_task=more.active_task or merged.active_task,
            next_step=more.next_step or merged.next_step,
            folded_messages=merged.folded_messages + more.folded_messages,
            folded_tokens=merged.folded_tokens + more.folded_tokens,
        )
    return merged


def _kept_text(source: Source, chosen: set[int]) -> str:
    """An output that stays in place, by its chosen lines; JSON stays JSON, in about as many characters."""
    text = digest.in_place(source.text, chosen)
    if len(text) >= len(source.text):
        return source.text
    if json_text.parse(source.text) is None:
        return text
    return shorten.shorten(source.text, max(shorten.SMALLEST, len(text)))


KEPT = "Kept"
"""Heading of lines that were put back."""


def repair(
    conversation: Conversation, lines: Sequence[str], budget: Budget, *, role: str = "user", key: bytes = b""
) -> Conversation:
    """The conversation with these verbatim lines in its last summary message, or in a new one before the last user message."""
    missing = [line for line in dict.fromkeys(lines) if line.strip()]
    if not missing:
        return conversation
    messages = list(conversation.messages)
    quoted = "\n".join(summary.escape(line) for line in missing)
    for index in range(len(messages) - 1, -1, -1):
        body = summary.body_of(messages[index], key)
        if body is not None:
            messages[index] = summary.sealed(f"{body}\n{summary.MARK} {KEPT}\n{quoted}", messages[index].role, key)
            return conversation.with_messages(messages)
    messages.insert(len(conversation.preamble), summary.write(0, (), [(KEPT, missing)], role=role, key=key))
    return conversation.with_messages(messages)
