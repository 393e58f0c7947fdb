"""What a folded history must not forget, as data: goal, requests, constraints, errors, decisions, files, commands.

`extract` reads steps and merges them into an earlier ledger; `render` writes it for the model in a given style and size.
Nothing here is prose of ours: every item is quoted from the history.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from proxy.compaction import entities, graphemes, signals
from proxy.compaction.voices import Voice, voices
from proxy.conversation import Message, Step, ToolCall
from proxy.tokens import Ruler

Style = Literal["detailed", "brief", "blocks", "json"]

LONGEST_GOAL = 6_000
"""Characters of the first task that are kept; the middle of a longer one is left out."""
LONGEST_REQUEST = 2_400
"""Characters of one request that are kept."""
LONGEST_ARGUMENTS = 120
"""Characters of a call's arguments that tell one command from another."""
MOST_COMMANDS, MOST_ENTITIES, MOST_FILES, MOST_RESOLVED, MOST_FINDINGS, MOST_ANSWERED = 60, 120, 400, 12, 24, 200
"""How many of each stay: the oldest of what may be evicted goes first."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a person asked for, verbatim (bounded). answered: the assistant came to an end after it."""

    text: str
    answered: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """An error, told apart by its signature (its first line without numbers). command: what was run. resolved_by: the same
    command, or another call on the same file, that went well later."""

    signature: str
    first: str
    last: str
    command: str = ""
    count: int = 1
    resolved_by: str | None = None


@dataclass(frozen=True, slots=True)
class FileUse:
    """A file and what was done with it, in order of first time: read, edited, run, mentioned."""

    path: str
    operations: tuple[str, ...]

    @property
    def edited(self) -> bool:
        return "edit" in self.operations


@dataclass(frozen=True, slots=True)
class Command:
    """One call. outcome: `ok`, `error`, an exit code, or empty when it cannot be told."""

    tool: str
    arguments: str
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Everything is quoted, in order of appearance, newest last."""

    goal: str = ""
    user_requests: tuple[Request, ...] = ()
    constraints: tuple[str, ...] = ()
    errors: tuple[Failure, ...] = ()
    decisions: tuple[str, ...] = ()
    conclusions: tuple[str, ...] = ()
    files: tuple[FileUse, ...] = ()
    commands: tuple[Command, ...] = ()
    entities: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    active_task: str = ""
    next_step: str = ""
    folded_messages: int = 0
    folded_tokens: int = 0

    @property
    def open_requests(self) -> tuple[Request, ...]:
        return tuple(request for request in self.user_requests if not request.answered)

    @property
    def unresolved(self) -> tuple[Failure, ...]:
        return tuple(failure for failure in self.errors if failure.resolved_by is None)


EMPTY = Ledger()


# --- extraction -----------------------------------------------------------------------------------------------------


def extract(steps: Sequence[Step], previous: Ledger = EMPTY) -> Ledger:
    """`previous` with everything that these newly folded steps add. Deterministic; nothing that may not be evicted is lost."""
    speaking = voices(steps)
    ledger = previous
    for step, voice in zip(steps, speaking, strict=True):
        ledger = _add(ledger, step, voice)
    return _evict(replace(ledger, folded_messages=ledger.folded_messages + sum(len(step.messages) for step in steps)))


def _add(ledger: Ledger, step: Step, voice: Voice) -> Ledger:
    text = step.head.text
    match voice:
        case "request":
            return _add_request(ledger, text)
        case "assistant":
            return _add_turn(ledger, step)
        case "observation" | "results":
            last = ledger.commands[-1] if ledger.commands else None
            return _add_failures(ledger, text, f"{last.tool} {last.arguments}".strip() if last else "")
        case _:
            return ledger


def _add_request(ledger: Ledger, text: str) -> Ledger:
    if not text.strip():
        return ledger
    quoted = shortened(text.strip(), LONGEST_REQUEST)
    known = tuple(request for request in ledger.user_requests if request.text != quoted)
    found = tuple(quote for quote in signals.constraints(text) if quote not in ledger.constraints)
    return replace(
        ledger,
        goal=ledger.goal or shortened(text.strip(), LONGEST_GOAL),
        user_requests=(*known, Request(quoted)),
        constraints=ledger.constraints + tuple(dict.fromkeys(found)),
        active_task=signals.requests(text)[-1] if signals.requests(text) else ledger.active_task,
    )


def _add_turn(ledger: Ledger, step: Step) -> Ledger:
    text = step.head.text
    ledger = _add_words(ledger, text, ends=not step.head.calls)
    for position, call in enumerate(step.head.calls):
        result = step.results[position] if position < len(step.results) else None
        ledger = _add_call(ledger, call, result)
    for result in step.results[len(step.head.calls) :]:
        ledger = _add_failures(ledger, result.text, "")
    return ledger


def _add_words(ledger: Ledger, text: str, *, ends: bool) -> Ledger:
    if not text.strip():
        return ledger
    decided = tuple(quote for quote in signals.decisions(text)[:3] if quote not in ledger.decisions)
    concluded = signals.conclusion(text) if ends else ""
    requests = ledger.user_requests
    if ends and requests and not requests[-1].answered:
        # What was asked before the newest request is settled once an answer without calls follows it.
        requests = (
            *(replace(request, answered=True) for request in requests[:-1]),
            replace(requests[-1], answered=not text.rstrip().endswith(("?", "？"))),
        )
    return replace(
        ledger,
        decisions=(ledger.decisions + decided)[-MOST_FINDINGS:],
        conclusions=(*(c for c in ledger.conclusions if c != concluded), concluded)[-MOST_FINDINGS:]
        if concluded
        else ledger.conclusions,
        user_requests=requests,
        next_step=signals.next_step(text) or ledger.next_step,
    )


def _add_call(ledger: Ledger, call: ToolCall, result: Message | None) -> Ledger:
    arguments = call_line(call, LONGEST_ARGUMENTS)
    command = f"{call.name} {arguments}".strip()
    text = result.text if result is not None else ""
    failed = any(map(signals.is_error_line, text.split("\n")[:400])) if text else False
    outcome = "" if result is None else "error" if failed else "ok"
    entry = Command(call.name, arguments, outcome)
    ledger = replace(
        ledger,
        commands=(*(known for known in ledger.commands if (known.tool, known.arguments) != (call.name, arguments)), entry),
        tools=ledger.tools if call.name in ledger.tools else (*ledger.tools, call.name),
        files=_with_files(ledger.files, call),
        entities=_with_entities(ledger.entities, call),
    )
    if failed:
        return _add_failures(ledger, text, command)
    return _resolve(ledger, command) if outcome == "ok" else ledger


def _add_failures(ledger: Ledger, text: str, command: str) -> Ledger:
    errors = {failure.signature: failure for failure in ledger.errors}
    for line in signals.error_lines(text):
        quoted = shortened(line.strip(), signals.LONGEST_ERROR_LINE)
        signature = error_signature(quoted)
        known = errors.pop(signature, None)
        if known is None:
            errors[signature] = Failure(signature, quoted, quoted, command)
        else:
            errors[signature] = replace(
                known, last=quoted, command=command or known.command, count=known.count + 1, resolved_by=None
            )
    return replace(ledger, errors=tuple(errors.values()))


def _resolve(ledger: Ledger, command: str) -> Ledger:
    if not any(failure.command == command and failure.resolved_by is None for failure in ledger.errors):
        return ledger
    return replace(
        ledger,
        errors=tuple(
            replace(failure, resolved_by=command) if failure.command == command and failure.resolved_by is None else failure
            for failure in ledger.errors
        ),
    )


_DIGITS = re.compile(r"0x[0-9a-f]+|\d+|\s+", re.I)


def error_signature(line: str) -> str:
    """The line without what changes from run to run: numbers, addresses, spacing, case."""
    return _DIGITS.sub(lambda hit: " " if hit[0].isspace() else "#", line.strip().lower())[:200]


_EDITS = re.compile(r"edit|write|create|replace|patch|insert|update|delete|remove|move|rename|save|append", re.I)
_READS = re.compile(r"read|view|open|cat|show|get|fetch|load|grep|search|find|list|ls|glob", re.I)
_PATH_KEYS = ("path", "file_path", "filepath", "file", "filename", "target_file", "notebook_path", "uri", "relative_path")


def _with_files(files: tuple[FileUse, ...], call: ToolCall) -> tuple[FileUse, ...]:
    arguments = arguments_of(call)
    operation = "edit" if _EDITS.search(call.name) or arguments.get("command") in ("create", "str_replace", "insert") else "read"
    if (
        operation == "read"
        and not _READS.search(call.name)
        and "command" in arguments
        and not any(key in arguments for key in _PATH_KEYS)
    ):
        operation = "run"
    named = [value for key in _PATH_KEYS if isinstance(value := arguments.get(key), str) and value]
    if not named and operation == "run":
        named = [name for name in _names(str(arguments["command"])) if entities.kind(name) in ("path", "file")][:4]
    known = {use.path: use for use in files}
    for path in named:
        use = known.pop(path, FileUse(path, ()))
        known[path] = use if operation in use.operations else replace(use, operations=(*use.operations, operation))
    return tuple(known.values())


def _with_entities(known: tuple[str, ...], call: ToolCall) -> tuple[str, ...]:
    line = call_line(call, 400)
    found = [name for name in _names(line) if entities.kind(name) in ("id", "hash", "url", "number") and len(name) <= 120]
    if not found:
        return known
    fresh = set(found)
    return (*(name for name in known if name not in fresh), *dict.fromkeys(found))[-MOST_ENTITIES:]


def _names(text: str) -> Iterable[str]:
    return dict.fromkeys(name for names in entities.scan(text).names for name in names)


def arguments_of(call: ToolCall) -> dict[str, object]:
    """The call's arguments as an object; empty when they are not one."""
    try:
        decoded = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def call_line(call: ToolCall, longest: int) -> str:
    """The arguments of a call on one line, bounded: values that tell what was done, long ones shortened."""
    arguments = arguments_of(call)
    if not arguments:
        return shortened(" ".join(call.arguments.split()), longest) if call.arguments.strip() not in ("", "{}") else ""
    pieces = []
    for key, value in arguments.items():
        words = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        pieces.append(f"{key}={shortened(' '.join(words.split()), longest)}")
    return shortened(" ".join(pieces), longest)


def shortened(text: str, longest: int) -> str:
    """`text`, or its head and tail around ` … ` when it has more than `longest` characters."""
    if len(text) <= longest:
        return text
    head = graphemes.before(text, longest * 2 // 3)
    tail = graphemes.after(text, len(text) - (longest - head - 3))
    return f"{text[:head].rstrip()} … {text[tail:].lstrip()}"


def _evict(ledger: Ledger) -> Ledger:
    """Oldest first, only of what may go: resolved errors, old commands, entities, answered requests, files never edited."""
    resolved = [failure for failure in ledger.errors if failure.resolved_by is not None]
    dropped = {failure.signature for failure in resolved[: max(0, len(resolved) - MOST_RESOLVED)]}
    answered = [request for request in ledger.user_requests if request.answered]
    old = {id(request) for request in answered[: max(0, len(answered) - MOST_ANSWERED)]}
    unedited = [use for use in ledger.files if not use.edited]
    surplus = {use.path for use in unedited[: max(0, len(ledger.files) - MOST_FILES)]}
    return replace(
        ledger,
        errors=tuple(failure for failure in ledger.errors if failure.signature not in dropped),
        user_requests=tuple(request for request in ledger.user_requests if id(request) not in old),
        commands=ledger.commands[-MOST_COMMANDS:],
        files=tuple(use for use in ledger.files if use.path not in surplus),
    )


# --- rendering ------------------------------------------------------------------------------------------------------


def render(ledger: Ledger, *, style: Style, max_tokens: int, ruler: Ruler) -> str:
    """The ledger as text of at most `max_tokens` tokens (best effort below about 30). Least needed items are left out first.

    detailed: sections of quotes. brief: `User requests: … . Tools used: … . Key findings: …`. blocks: project status, key
    files, in progress. json: one object with type `compressed_history`.
    """
    writer: Callable[[Ledger, int], str] = {"detailed": _detailed, "brief": _brief, "blocks": _blocks, "json": _json}[style]
    characters = 4 * max_tokens
    text = writer(ledger, characters)
    for _ in range(6):
        tokens = ruler.text(text)
        if tokens <= max_tokens:
            return text
        characters = min(characters - 1, len(text) * max_tokens * 95 // (100 * max(1, tokens)))
        text = writer(ledger, characters)
    return text


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a rendered ledger. section: its heading. rank: what is left out last has the lowest."""

    section: str
    text: str
    rank: int


def items(ledger: Ledger) -> list[Item]:
    """Every item of the ledger in the order of reading, ranked by what must stay."""
    found: list[Item] = []
    if ledger.goal:
        found.append(Item("Goal", ledger.goal, 0))
    found.extend(_ranked("Constraints", ledger.constraints, 1))
    for request in ledger.user_requests:
        section, rank = ("User requests (answered)", 5) if request.answered else ("User requests (open)", 2)
        found.append(Item(section, request.text, rank))
    for failure in ledger.errors:
        done = failure.resolved_by is not None
        found.append(Item("Errors (resolved)" if done else "Errors (unresolved)", failure_line(failure), 9 if done else 3))
    found.extend(_ranked("Decisions", ledger.decisions, 6))
    found.extend(_ranked("Conclusions", ledger.conclusions, 5))
    if ledger.active_task:
        found.append(Item("Active task", ledger.active_task, 2))
    if ledger.next_step:
        found.append(Item("Next step", ledger.next_step, 4))
    found.extend(Item("Files", f"{use.path} ({', '.join(use.operations)})", 4 if use.edited else 7) for use in ledger.files)
    found.extend(
        Item("Commands", " ".join(filter(None, (c.tool, c.arguments, f"→ {c.outcome}" if c.outcome else ""))), 8)
        for c in ledger.commands
    )
    found.extend(_ranked("Entities", ledger.entities, 8))
    return found


def failure_line(failure: Failure) -> str:
    """An error as one item: first line, last line when it differs, how often, and what was run."""
    more = f" … {failure.last}" if failure.last != failure.first else ""
    times = f" (×{failure.count})" if failure.count > 1 else ""
    return f"{failure.first}{more}{times}"


def _ranked(section: str, texts: Iterable[str], rank: int) -> list[Item]:
    return [Item(section, text, rank) for text in texts]


def _fitting(found: list[Item], characters: int) -> list[Item]:
    """The items that fit, chosen by rank and then newest first, in the order of reading."""
    room = characters
    chosen: set[int] = set()
    opened: set[str] = set()
    for position in sorted(range(len(found)), key=lambda i: (found[i].rank, -i)):
        item = found[position]
        cost = len(item.text) + 3 + (0 if item.section in opened else len(item.section) + 3)
        if cost <= room:
            room -= cost
            chosen.add(position)
            opened.add(item.section)
    return [item for position, item in enumerate(found) if position in chosen]


def _detailed(ledger: Ledger, characters: int) -> str:
    lines: list[str] = []
    section = ""
    for item in sorted(_fitting(items(ledger), characters), key=lambda item: SECTIONS.index(item.section)):
        if item.section != section:
            section = item.section
            lines.append(f"{section}:")
        lines.append("- " + item.text.replace("\n", "\n  "))
    return "\n".join(lines)


SECTIONS = (
    "Goal", "Constraints", "User requests (open)", "User requests (answered)", "Active task", "Next step",
    "Errors (unresolved)", "Errors (resolved)", "Decisions", "Conclusions", "Files", "Commands", "Entities",
)  # fmt: skip


def _brief(ledger: Ledger, characters: int) -> str:
    share = max(24, characters // 3)
    points = []
    asked = [signals.requests(request.text) for request in ledger.user_requests]
    if any(asked):
        points.append("User requests: " + shortened(", ".join(quote for quotes in asked for quote in quotes), share))
    if ledger.tools:
        points.append("Tools used: " + shortened(", ".join(ledger.tools), share))
    if ledger.conclusions:
        points.append("Key findings: " + shortened("; ".join(ledger.conclusions), share))
    return ". ".join(points)


def _blocks(ledger: Ledger, characters: int) -> str:
    share = max(40, characters // 3)
    done = [*ledger.decisions, *ledger.conclusions] or [ledger.goal]
    status = "\n".join(f"- {line}" for line in _newest_within(done, share))
    files = "\n".join(f"- {path}" for path in _newest_within([use.path for use in ledger.files], share))
    doing = "\n".join(_newest_within([quote for quote in (ledger.active_task, ledger.next_step) if quote], share))
    return f"=== Project status ===\n{status}\n\n=== Key files ===\n{files}\n\n=== In progress ===\n{doing}"


def _newest_within(texts: Sequence[str], characters: int) -> list[str]:
    kept: list[str] = []
    room = characters
    for text in reversed(texts):
        quoted = shortened(text, max(20, min(characters, 400)))
        room -= len(quoted) + 3
        if room < 0 and kept:
            break
        kept.append(quoted)
    return kept[::-1]


def _json(ledger: Ledger, characters: int) -> str:
    share = max(24, characters // 5)
    return json.dumps(
        {
            "type": "compressed_history",
            "summary": shortened(ledger.conclusions[-1] if ledger.conclusions else ledger.goal, share),
            "decisions": _newest_within(ledger.decisions, share),
            "files_touched": _newest_within([use.path for use in ledger.files], share),
            "active_task": shortened(ledger.active_task, share),
            "next_step": shortened(ledger.next_step, share),
        },
        ensure_ascii=False,
    )
