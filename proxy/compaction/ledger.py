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
from proxy.compaction.memo import Memo
from proxy.compaction.voices import Voice, voices
from proxy.conversation import Step, ToolCall
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
    draft = _Draft(previous)
    for step, voice in zip(steps, voices(steps), strict=True):
        draft.add(step, voice)
    return draft.finished()


class _Draft:
    """A ledger while steps are read into it: dictionaries keep the order of the newest mention."""

    def __init__(self, previous: Ledger) -> None:
        self.previous = previous
        self.goal = previous.goal
        self.requests = {request.text: request.answered for request in previous.user_requests}
        self.constraints = dict.fromkeys(previous.constraints)
        self.errors = {failure.signature: failure for failure in previous.errors}
        self.decisions = dict.fromkeys(previous.decisions)
        self.conclusions = dict.fromkeys(previous.conclusions)
        self.files = {use.path: use.operations for use in previous.files}
        self.commands = {(command.tool, command.arguments): command.outcome for command in previous.commands}
        self.entities = dict.fromkeys(previous.entities)
        self.tools = dict.fromkeys(previous.tools)
        self.active_task, self.next_step = previous.active_task, previous.next_step
        self.unresolved = {failure.command for failure in previous.errors if failure.resolved_by is None and failure.command}
        self.latest_command = ""
        self.messages = previous.folded_messages
        self.words: list[tuple[str, bool]] = []
        self.calls: list[ToolCall] = []

    def add(self, step: Step, voice: Voice) -> None:
        self.messages += len(step.messages)
        match voice:
            case "request":
                self._add_request(step.head.text)
            case "assistant":
                self._add_turn(step)
            case "observation" | "results":
                self._add_failures(step.head.text, self.latest_command)
            case _:
                pass

    def finished(self) -> Ledger:
        self._read_words()
        self._read_calls()
        return _evict(
            Ledger(
                goal=self.goal,
                user_requests=tuple(Request(text, answered) for text, answered in self.requests.items()),
                constraints=tuple(self.constraints),
                errors=tuple(self.errors.values()),
                decisions=tuple(self.decisions)[-MOST_FINDINGS:],
                conclusions=tuple(self.conclusions)[-MOST_FINDINGS:],
                files=tuple(FileUse(path, operations) for path, operations in self.files.items()),
                commands=tuple(Command(tool, arguments, outcome) for (tool, arguments), outcome in self.commands.items()),
                entities=tuple(self.entities)[-MOST_ENTITIES:],
                tools=tuple(self.tools),
                active_task=self.active_task,
                next_step=self.next_step,
                folded_messages=self.messages,
                folded_tokens=self.previous.folded_tokens,
            )
        )

    def _add_request(self, text: str) -> None:
        if not text.strip():
            return
        quoted = shortened(text.strip(), LONGEST_REQUEST)
        self.goal = self.goal or shortened(text.strip(), LONGEST_GOAL)
        self.requests.pop(quoted, None)
        self.requests[quoted] = False
        self.constraints.update(dict.fromkeys(signals.constraints(quoted)))
        asked = signals.requests(quoted)
        if asked:
            self.active_task = asked[-1]

    def _add_turn(self, step: Step) -> None:
        self._add_words(step.head.text, ends=not step.head.calls)
        for position, call in enumerate(step.head.calls):
            self._add_call(call, step.results[position].text if position < len(step.results) else None)
        for result in step.results[len(step.head.calls) :]:
            self._add_failures(result.text, "")

    def _add_words(self, text: str, *, ends: bool) -> None:
        if not text.strip():
            return
        self.words.append((text, ends))
        if ends:
            # What was asked is settled once an answer without calls follows it, unless that answer asks back.
            settled = not text.rstrip().endswith(("?", "？"))
            for request in reversed(self.requests):
                if self.requests[request]:
                    break
                self.requests[request] = settled or request != next(reversed(self.requests))

    def _read_words(self) -> None:
        """Decisions, conclusions and the next step: only of the newest turns, because older ones would be evicted anyway."""
        for text, ends in self.words[-MOST_FINDINGS:]:
            self.decisions.update(dict.fromkeys(signals.decisions(text)[:3]))
            concluded = signals.conclusion(text) if ends else ""
            if concluded:
                self.conclusions.pop(concluded, None)
                self.conclusions[concluded] = None
        for text, _ in reversed(self.words[-MOST_FINDINGS:]):
            if step := signals.next_step(text):
                self.next_step = step
                break

    def _read_calls(self) -> None:
        """Ids, hashes, addresses and numbers in the newest calls."""
        for call in self.calls[-MOST_ENTITIES:]:
            for name in names_of(call_line(call, 400)):
                if entities.kind(name) in ("id", "hash", "url", "number") and len(name) <= 120:
                    self.entities.pop(name, None)
                    self.entities[name] = None

    def _add_call(self, call: ToolCall, result: str | None) -> None:
        arguments = call_line(call, LONGEST_ARGUMENTS)
        command = self.latest_command = f"{call.name} {arguments}".strip()
        failed = bool(result) and bool(signals.error_lines(result or ""))
        self.commands.pop((call.name, arguments), None)
        self.commands[call.name, arguments] = "" if result is None else "error" if failed else "ok"
        self.tools[call.name] = None
        self._add_files(call)
        self.calls.append(call)
        if failed:
            self._add_failures(result or "", command)
        elif result is not None and command in self.unresolved:
            self._resolve(command)

    def _add_failures(self, text: str, command: str) -> None:
        for line in signals.error_lines(text):
            quoted = line.strip()
            signature = error_signature(quoted)
            known = self.errors.pop(signature, None)
            if known is None:
                self.errors[signature] = Failure(signature, quoted, quoted, command)
            else:
                by = command or known.command
                self.errors[signature] = replace(known, last=quoted, command=by, count=known.count + 1, resolved_by=None)
            if command:
                self.unresolved.add(command)

    def _resolve(self, command: str) -> None:
        self.unresolved.discard(command)
        for signature, failure in self.errors.items():
            if failure.command == command and failure.resolved_by is None:
                self.errors[signature] = replace(failure, resolved_by=command)

    def _add_files(self, call: ToolCall) -> None:
        operation, paths = files_of(call)
        for path in paths:
            operations = self.files.pop(path, ())
            self.files[path] = operations if operation in operations else (*operations, operation)


_DIGITS = re.compile(r"0x[0-9a-f]+|\d+|\s+", re.I)


def error_signature(line: str) -> str:
    """The line without what changes from run to run: numbers, addresses, spacing, case."""
    return _DIGITS.sub(lambda hit: " " if hit[0].isspace() else "#", line.strip().lower())[:200]


_EDITS = re.compile(r"edit|write|create|replace|patch|insert|update|delete|remove|move|rename|save|append", re.I)
_READS = re.compile(r"read|view|open|cat|show|get|fetch|load|grep|search|find|list|ls|glob", re.I)
_PATH_KEYS = ("path", "file_path", "filepath", "file", "filename", "target_file", "notebook_path", "uri", "relative_path")


def files_of(call: ToolCall) -> tuple[str, tuple[str, ...]]:
    """What a call does (`edit`, `read`, `run`) and the files that it names."""
    arguments = arguments_of(call)
    named = tuple(value for key in _PATH_KEYS if isinstance(value := arguments.get(key), str) and value)
    if _EDITS.search(call.name) or arguments.get("command") in ("create", "str_replace", "insert"):
        return "edit", named
    if named or _READS.search(call.name) or "command" not in arguments:
        return "read", named
    found = [name for name in names_of(str(arguments["command"])[:2_000]) if entities.kind(name) in ("path", "file")]
    return "run", tuple(found[:4])


def names_of(text: str) -> tuple[str, ...]:
    return entities.scan(text).distinct


def arguments_of(call: ToolCall) -> dict[str, object]:
    """The call's arguments as an object, not to be changed; empty when they are not one."""
    return _known_arguments(call.arguments)


def _decoded(arguments: str) -> dict[str, object]:
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


_known_arguments = Memo(_decoded, 1_000_000)


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
    for _ in range(12):
        tokens = ruler.text(text)
        if tokens <= max_tokens:
            return text
        characters = min(characters * 4 // 5, len(text) * max_tokens * 95 // (100 * max(1, tokens)))
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
