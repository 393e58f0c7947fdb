"""The lines of a text and the names in each: paths, files, identifiers, error names, ids, hashes, numbers, quotes, addresses.

One pass over a text yields both. A name is a literal piece of its line, so that finding it again needs no rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from proxy.compaction import graphemes
from proxy.compaction.memo import Memo

Kind = Literal["path", "file", "name", "error", "id", "hash", "number", "quoted", "url", "word"]

LONGEST_LINE = 240
"""Characters: a longer line is cut at a sentence or a space, so that a pick stays cheap."""

LONGEST_NAME = 200
"""Characters: longer runs are data (base64, minified code), not names."""
LONGEST_PLAIN = 64
"""The same for names without slashes."""

_WORD = re.compile(r"\n|[\w./\\~@#$%+=&?:<>-]{4,}", re.A)
_QUOTED = re.compile(r'\n|"[^"\n]{4,90}"|`[^`\n]{4,90}`|[“「『《][^”」』》\n]{2,64}[”」』》]')
_BREAKS = re.compile(r"[=<>:?&$#%]+|\\[nrt\"']|\\\\?")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.A)
_EXTENSION = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,7}$")
_VERSIONLIKE = re.compile(r"v?\d+(?:\.\d+){1,3}(?:[-+]\w+)?$")
_FAILURES = ("Error", "Exception", "Warning", "Failure", "Fault", "Panic", "Interrupt")
_HEX = re.compile(r"(?:0x)?[0-9a-f]{7,64}$")
_UPPER_ID = re.compile(r"#?(?:[A-Z]+-?\d|\d+-?[A-Z])[A-Z\d-]*\Z")
_UUID = re.compile(r"(?:[\da-f]{4}-?){8}\Z", re.I)
_CAMEL = re.compile(r"[a-z0-9][A-Z]|[A-Z][A-Z][a-z]")
_NUMBER = re.compile(r"[-+$#]?\d+(?:[.,]\d+)*%?\Z")


@dataclass(frozen=True, slots=True)
class Scan:
    """A text taken apart. lines: verbatim pieces, at most about LONGEST_LINE long. names[i]: the distinct names in lines[i].
    whole[i]: False when lines[i] goes on in lines[i + 1] (one long line of the text). distinct: all names, in order."""

    lines: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]
    whole: tuple[bool, ...]
    distinct: tuple[str, ...]


REMEMBERED_CHARACTERS = 3_000_000
"""Text whose scans are kept: about four conversations of 200k tokens."""


def scan(text: str) -> Scan:
    """The lines of `text` and their names; remembered by the text itself."""
    return _scans(text)


def _scan(text: str) -> Scan:
    lines, whole = split_lines(text)
    if not lines:
        return Scan((), (), (), ())
    joined = "\n".join(lines)
    names: list[tuple[str, ...]] = []
    found: list[str] = []
    lookup = _names_of.get
    for word in _WORD.findall(joined):
        if word == "\n":
            names.append(tuple(dict.fromkeys(found)) if found else ())
            if found:
                found = []
            continue
        hit = lookup(word)
        if hit is None:
            hit = _classify(word)
        if hit:
            found.extend(hit)
    names.append(tuple(dict.fromkeys(found)) if found else ())
    if any(mark in joined for mark in '"`“「『《'):
        _add_quoted(joined, names)
    distinct = dict.fromkeys(name for found in names for name in found)
    return Scan(tuple(lines), tuple(names), tuple(whole), tuple(distinct))


_scans = Memo(_scan, REMEMBERED_CHARACTERS)


def _add_quoted(joined: str, names: list[tuple[str, ...]]) -> None:
    at = 0
    for hit in _QUOTED.findall(joined):
        if hit == "\n":
            at += 1
            continue
        inner = hit[1:-1].strip()
        if len(inner) > 1 and inner not in names[at] and any(c.isalnum() for c in inner):
            names[at] += (inner,)
            _quoted.setdefault(inner, "quoted")
            if len(_quoted) > MEMO:
                _quoted.clear()


MEMO = 60_000
"""Entries of each memo, which is cleared when full: a word's classification depends on nothing but the word."""

_names_of: dict[str, tuple[str, ...]] = {}
_kinds: dict[str, Kind] = {}
_quoted: dict[str, Kind] = {}


def _classify(word: str) -> tuple[str, ...]:
    if len(_names_of) > MEMO:
        _names_of.clear()
    bare = word.strip(".-+&?=,:<>#$%")
    if bare.isalpha() and (bare.islower() or bare.istitle()):
        _names_of[word] = ()  # by far the most words
        return ()
    found = _names_of[word] = tuple(dict.fromkeys(_names_in(word))) if len(word) <= LONGEST_NAME or "://" in word else ()
    return found


def _names_in(word: str) -> list[str]:
    if "://" in word:
        return _address(word)
    found: list[str] = []
    pieces = _BREAKS.split(word) if _BREAKS.search(word) else (word,)
    for piece in pieces:
        bare = piece.strip(".-+&?=,@") if not piece.startswith(("./", "../", "~", ".")) else piece.rstrip(".-+&?=,@")
        if len(bare) < 3:
            continue
        if "/" in bare:
            found.extend(_path(bare))
        else:
            found.extend(_plain(bare))
    return found


def _address(word: str) -> list[str]:
    start = word.find("://")
    begin = start
    while begin > 0 and word[begin - 1].isalpha():
        begin -= 1
    address = word[begin:].rstrip(".,;:!?")
    rest = address[start - begin + 3 :]
    found = [address] if len(address) <= 4 * LONGEST_NAME else []
    tail = rest.rsplit("/", 1)
    if len(tail) == 2 and tail[1]:
        found.extend(_plain(tail[1].split("?")[0].split("#")[0]))
    host = rest.split("/", 1)[0]
    if "." in host:
        found.append(host)
    return found


def _path(word: str) -> list[str]:
    if not any(c.isalpha() for c in word):
        return []
    pieces = [piece for piece in word.split("/") if piece]
    if not pieces:
        return []
    found = []
    plausible = len(pieces) > 2 or word[0] in "./~" or "." in pieces[-1] or len(word) >= 12
    if plausible and len(word) > 4:
        found.append(word.rstrip("/"))
    for piece in pieces[-3:]:
        found.extend(_plain(piece))
    return found


def _plain(word: str) -> list[str]:
    """Names in a word without slashes: itself when it is one, and the identifiers that it is made of."""
    word = word.strip(".-+&?=,@$%~")
    if len(word) < 3:
        return []
    if "." in word:
        found = []
        if _EXTENSION.search(word) or (any(c.isalpha() for c in word) and len(word) > 4) or _VERSIONLIKE.match(word):
            found.append(word)
        elif _NUMBER.match(word) and sum(c.isdigit() for c in word) > 3:
            return [word]
        for piece in word.split("."):
            if _is_name(piece):
                found.append(piece)
        return found
    if _is_name(word):
        if "-" in word and not _UUID.match(word):
            return [word, *(piece for piece in word.split("-") if _is_name(piece))]
        return [word]
    if "-" in word:
        return [piece for piece in word.split("-") if _is_name(piece)]
    return []


def _is_name(word: str) -> bool:
    if not 4 <= len(word) <= LONGEST_PLAIN:
        return False
    if word.isalpha():
        return bool(_CAMEL.search(word)) and len(word) > 4 if not word.isupper() else len(word) >= 6
    if word.isdigit() or _NUMBER.match(word):
        return len(_DIGITS.findall(word)) > 3
    if "_" in word.strip("_"):
        return True
    if _CAMEL.search(word):
        return len(word) > 4
    digits = len(_DIGITS.findall(word))
    if digits:
        return bool(_HEX.match(word) or _UPPER_ID.match(word) or _UUID.match(word) or ("-" in word and digits > 1))
    return word.isupper() and len(word) >= 6


_DIGITS = re.compile(r"\d")


def kind(name: str) -> Kind:
    """What sort of name it is, from its looks alone."""
    known = _kinds.get(name)
    if known is None:
        if len(_kinds) > MEMO:
            _kinds.clear()
        known = _kinds[name] = _kind(name)
    return known


def _kind(name: str) -> Kind:
    if "://" in name:
        return "url"
    if " " in name or not name.isascii():
        return "quoted"
    if "/" in name:
        return "path"
    if _NUMBER.match(name) or _VERSIONLIKE.match(name):
        return "number"
    if name.endswith(_FAILURES) and name[0].isupper():
        return "error"
    if _UUID.match(name) or (_HEX.match(name) and _DIGITS.search(name)):
        return "hash"
    if _DIGITS.search(name) and _UPPER_ID.match(name):
        return "id"
    if "." in name and _EXTENSION.search(name) and not name.endswith((".get", ".append", ".join", ".format", ".map", ".push")):
        return "file"
    if "_" in name or "." in name or _CAMEL.search(name) or "-" in name or name.isupper():
        return "name"
    return "word"


# --- lines ----------------------------------------------------------------------------------------------------------


def split_lines(text: str) -> tuple[list[str], list[bool]]:
    """The lines of a text, long ones in pieces; and whether each ends a line of the text. Blank lines are left out."""
    lines: list[str] = []
    whole: list[bool] = []
    for line in text.split("\n"):
        if len(line) <= LONGEST_LINE:
            if line and not line.isspace():
                lines.append(line.rstrip())
                whole.append(True)
            continue
        pieces = cut_long(line.rstrip())
        lines.extend(pieces)
        whole.extend([False] * (len(pieces) - 1))
        whole.append(True)
    return lines, whole


_SOFT = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？；])|(?<=[,}\])])\s+|\s{2,}|(?<=\},)|(?<=\\n)")


def cut_long(line: str) -> list[str]:
    """Pieces of a long line, cut at a sentence, else a space, else between graphemes; nothing but space is lost."""
    pieces: list[str] = []
    start, length = 0, len(line)
    while length - start > LONGEST_LINE:
        stop = _soft_stop(line, start)
        piece = line[start:stop].strip()
        if piece:
            pieces.append(piece)
        start = stop
    rest = line[start:].strip()
    if rest:
        pieces.append(rest)
    return pieces


def _soft_stop(line: str, start: int) -> int:
    limit = start + LONGEST_LINE
    best = 0
    for hit in _SOFT.finditer(line, start + LONGEST_LINE // 3, limit):
        best = hit.end()
    if best:
        return best
    space = line.rfind(" ", start + LONGEST_LINE // 3, limit)
    if space > start:
        return space + 1
    return max(start + 1, graphemes.before(line, limit))
