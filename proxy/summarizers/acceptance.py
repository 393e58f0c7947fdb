"""Whether a summary may be used: held against what it sums up, repaired where code knows better, else refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proxy.conversation import Message
from proxy.errors import SummaryFailed
from proxy.summarizers import Facts, SummaryRequest
from proxy.summarizers.language import detect, spoken
from proxy.summarizers.prompts import Prompt

LARGEST_SHARE = 0.5
"""Of what it replaces: a summary that is longer than half is not worth its loss."""

LONGEST_QUOTE, MOST_CONSTRAINTS = 400, 24
"""Characters of a constraint, and constraints, that are put back."""

_FORGED = re.compile(
    r"<\|[\w ]{1,40}\|>|\[/?INST\]|<</?SYS>>|^\s*(?:#{1,4}\s*)?(?:system|assistant|developer)\s*:\s*\S|</?(?:system|assistant)>"
    r"|<\s*/?(?:tool_call|function_calls?|invoke)\b|<function=|^\s*\{\s*\"(?:name|tool_calls?|function)\"\s*:",
    re.I | re.M,
)
_COMMANDING = re.compile(
    r"""(?:ignore|disregard|forget|override)\s+(?:all\s+|any\s+|the\s+|your\s+)*(?:previous|prior|earlier|above|other|system)\b
    |(?:you|the\ (?:assistant|model|agent|ai))\s+(?:must|should|shall|are\ (?:now|required\ to))\s+(?:now\s+|always\s+)?
        (?:ignore|reveal|send|upload|post|exfiltrate|obey|comply|disable|bypass|pretend)\b
    |new\ (?:system\ )?instructions?\s*:|system\ prompt\s*:|do\ not\ (?:tell|inform|mention\ (?:this|it)\ to)\ the\ user
    |忽略(?:之前|以上|先前|所有)|无视(?:之前|以上|先前|所有)|不要告诉用户
    |(?:以前|上記|これまで)の指示(?:は|を)?(?:すべて)?無視|ユーザーには(?:言わ|伝え)ない
    |(?:ignoriere|missachte|vergiss)\s+(?:alle\s+|die\s+)*(?:vorherigen|bisherigen|obigen)
    |(?:ignore[rz]?|oublie[rz]?)\s+(?:toutes\s+)?(?:les\s+)?instructions\s+pr[ée]c[ée]dentes
    |(?:ignora|olvida)\s+(?:todas\s+)?(?:las\s+)?instrucciones\s+(?:anteriores|previas)""",
    re.I | re.X,
)
_URL = re.compile(r"\b(?:https?|ftp|wss?)://[^\s<>\"'`)\]}，。、；]+", re.I)
_RISKY = re.compile(
    r"(?:^\s*(?:[-*]\s+)?[$>]\s+|`)"
    r"((?:sudo|curl|wget|bash|sh|rm|nc|ncat|ssh|scp|chmod|eval|powershell|iex|base64)\s[^`\n]{3,300})",
    re.M,
)
_QUOTE = re.compile(r"\"([^\"\n]+)\"|“([^”\n]+)”|„([^“”\n]+)[“”]|«\s*([^»\n]+?)\s*»|「([^」\n]+)」|『([^』\n]+)』")
_NUMBERED = re.compile(r"^\d{1,2}[.)]\s*")
_COLON = re.compile(r"[:：]")
_NOTHING = frozenset({"", "-", "–", "—", "none", "n/a"})


@dataclass(frozen=True, slots=True)
class Accepted:
    """A summary that may be used. repaired: things put in or taken out."""

    text: str
    repaired: int


def accept(text: str, request: SummaryRequest, prompt: Prompt, kinds: Sequence[str]) -> Accepted:
    """The summary in its normal form, repaired. kinds: what the prompt's sections hold (`constraints`, `goal`, …), in order.

    Raises SummaryFailed: too_long, injected, unfounded, wrong_language, no_headings.
    """
    if request.count(text) >= LARGEST_SHARE * request.tokens:
        raise SummaryFailed("too_long")
    source = Source(request)
    _check_voice(text, source)
    _check_grounds(text, source)
    _check_language(text, request)
    sections = _sections(text, prompt.sections)
    repaired = 0
    for title, kind in zip(prompt.sections, kinds, strict=True):
        known = _known(kind, request.facts)
        if title not in sections:
            if not known:
                raise SummaryFailed("no_headings", title)
            sections[title] = _bullets(known)
            repaired += 1
        elif kind == "constraints":
            sections[title], changes = _literal(sections[title], known, source)
            repaired += changes
    made = "\n\n".join(f"## {title}\n{sections[title]}" for title in prompt.sections)
    if request.count(made) >= LARGEST_SHARE * request.tokens:
        raise SummaryFailed("too_long")
    return Accepted(made, repaired)


class Source:
    """Everything that a summary may speak of, to look for quotes in: white space and case make no difference."""

    def __init__(self, request: SummaryRequest) -> None:
        facts = request.facts
        said = (
            *_texts(request.folded),
            request.previous,
            facts.goal,
            *facts.constraints,
            *facts.requests,
            *facts.errors,
            *facts.files,
        )
        self._everything = squeezed("\n".join(said))
        self._users = squeezed("\n".join(message.text for message in request.folded if message.role == "user"))

    def holds(self, quote: str) -> bool:
        return squeezed(quote) in self._everything

    def users_said(self, quote: str) -> bool:
        return squeezed(quote) in self._users


def squeezed(text: str) -> str:
    """Without differences that no reader sees: white space, case, and the two kinds of quotation marks."""
    return " ".join(text.replace("’", "'").replace("\\n", " ").replace('\\"', '"').casefold().split())


def _texts(messages: Iterable[Message]) -> Iterable[str]:
    for message in messages:
        yield message.text
        yield from (f"{call.name} {call.arguments}" for call in message.calls)


def _check_voice(text: str, source: Source) -> None:
    """It must not speak as another role, call tools, or give orders that no user gave."""
    forged = _FORGED.search(text)
    if forged is not None:
        raise SummaryFailed("injected", "role")
    for match in _COMMANDING.finditer(text):
        if not source.users_said(match[0]):
            raise SummaryFailed("injected", "order")


def _check_grounds(text: str, source: Source) -> None:
    """It must not send anybody to an address or give a command that was never there."""
    for match in _URL.finditer(text):
        if not source.holds(match[0].rstrip(".,;:!?*_")):
            raise SummaryFailed("unfounded", "address")
    for match in _RISKY.finditer(text):
        if not source.holds(match[1].strip()):
            raise SummaryFailed("unfounded", "command")


def _check_language(text: str, request: SummaryRequest) -> None:
    wanted, got = spoken(request.folded, request.facts.goal), detect(_QUOTE.sub(" ", text))
    if wanted is not None and got is not None and wanted != got:
        raise SummaryFailed("wrong_language", f"{got} for {wanted}")


def _sections(text: str, titles: Sequence[str]) -> dict[str, str]:
    """The words under each title that is there, however it was marked up; what stands before the first is small talk."""
    by_name = {title.casefold(): title for title in titles}
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        title, rest = _title(line, by_name)
        if title is None:
            if current is not None:
                current.append(line)
            continue
        current = found.setdefault(title, [])
        if rest:
            current.append(rest)
    return {title: "\n".join(lines).strip() or "–" for title, lines in found.items()}


def _title(line: str, by_name: dict[str, str]) -> tuple[str | None, str]:
    """The title that a line is, and what follows it on the line: `## Goal`, `**Goal:** words`, `1. Goal`, `Goal:`."""
    marked = line.lstrip().startswith(("#", "*"))
    bare = _NUMBERED.sub("", line.strip().strip("#* ")).strip("* ")
    if (title := by_name.get(bare.rstrip(":：").strip("* ").casefold())) is not None:
        return title, ""
    name, *rest = _COLON.split(bare, maxsplit=1)
    if marked and rest and (title := by_name.get(name.strip("* ").casefold())) is not None:
        return title, rest[0].strip("* ")
    return None, ""


def _known(kind: str, facts: Facts) -> tuple[str, ...]:
    match kind:
        case "goal":
            return (facts.goal,) if facts.goal else ()
        case "constraints":
            return facts.constraints[-MOST_CONSTRAINTS:]
        case "files":
            return facts.files
        case "errors":
            return facts.errors
        case _:
            return ()


def _literal(body: str, known: Sequence[str], source: Source) -> tuple[str, int]:
    """The constraints whose words are in the source, and those that code found there and the model left out."""
    kept: list[str] = []
    dropped = 0
    for line in body.splitlines():
        words = line.strip().lstrip("-*•· ").strip()
        if words.casefold() in _NOTHING:
            continue
        quotes = [next(filter(None, match.groups())) for match in _QUOTE.finditer(words)] or [words]
        if all(source.holds(quote.strip(" .。")) for quote in quotes):
            kept.append(line)
        else:
            dropped += 1
    have = squeezed("\n".join(kept))
    missing = [quote for quote in known if squeezed(quote[:LONGEST_QUOTE]) not in have]
    lines = [*kept, *(_bullets(missing).splitlines() if missing else ())]
    return "\n".join(lines) or "–", dropped + len(missing)


def _bullets(quotes: Sequence[str]) -> str:
    return "\n".join(f'- "{" ".join(quote[:LONGEST_QUOTE].split())}"' for quote in quotes)
