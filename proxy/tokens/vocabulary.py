"""Which words a model knows: the encodings and their rank files (in the package; no network, nothing written).

A rank file is gzip over: the number of tokens (4 bytes, big-endian), one length byte per token, then the tokens' bytes; the
rank of a token is its place in the file.
"""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Callable, Mapping
from gzip import decompress
from importlib.resources import files

import tiktoken

from proxy.tokens.memory import Remembered

O200K = "o200k_base"
CL100K = "cl100k_base"
HARMONY = "o200k_harmony"
"""The ranks and the pattern of o200k_base with more special tokens, which are no concern of ours: text is all that we count."""

ENCODINGS = (O200K, CL100K, HARMONY)

PATTERNS = {
    O200K: "|".join(
        (
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
    CL100K: (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ),
}
SPECIAL = {
    O200K: {"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
    CL100K: {
        "<|endoftext|>": 100257,
        "<|fim_prefix|>": 100258,
        "<|fim_middle|>": 100259,
        "<|fim_suffix|>": 100260,
        "<|endofprompt|>": 100276,
    },
}

SLICE = 100_000
"""Characters handed to the tokenizer at once: it panics on one run of about a million, and a slice costs at most a token."""

SEARCH = 2_000
"""How far back from the end of a slice a word boundary is looked for: longer words than this are not words."""

REMEMBERED_BYTES = 8 * 2**20
"""Per encoding: the strings of about ten long conversations, for messages that come back edited."""

_BOUNDARY = re.compile(r"[^\s] (?=[^\W\d_])")


class Vocabulary:
    """One encoding. Loaded at the first count; a rank file that cannot be read makes every count an estimate, and says so.

    read: gives the bytes of its rank file; the package's own by default.
    """

    def __init__(self, name: str, read: Callable[[], bytes] | None = None) -> None:
        self.name = name
        self.degraded = False
        self._read = read or (lambda: _packaged(name))
        self._encoding: tiktoken.Encoding | None = None
        self._lock = threading.Lock()
        self._known: Remembered[str] = Remembered(REMEMBERED_BYTES)

    def load(self) -> bool:
        """Read the ranks now (200 ms for o200k) instead of at the first count; False: they cannot be read."""
        if self._encoding is None and not self.degraded:
            with self._lock:
                if self._encoding is None and not self.degraded:
                    try:
                        self._encoding = _encoding(self.name, self._read())
                    except (OSError, EOFError, zlib.error, ValueError):
                        self.degraded = True
        return not self.degraded

    def knows(self, text: str) -> bool:
        """Whether counting this string again would cost nothing."""
        return text in self._known

    def count(self, text: str) -> int:
        """Tokens of a string, special tokens read as the plain words that a user pasted."""
        if not text:
            return 0
        tokens = self._known.get(text)
        if tokens is None:
            tokens = self._count(text)
            self._known.put(text, tokens, text.__sizeof__())
        return tokens

    def _count(self, text: str) -> int:
        if not self.load() or self._encoding is None:
            return estimate(text)
        if len(text) <= SLICE:
            return _encoded(self._encoding, text)
        total = start = 0
        while start < len(text):
            stop = _cut(text, start)
            total += _encoded(self._encoding, text[start:stop])
            start = stop
        return total


def estimate(text: str) -> int:
    """Tokens when no vocabulary can tell: a third of the UTF-8 bytes, which seldom is too few."""
    return -(-utf8_size(text) // 3)


def utf8_size(text: str) -> int:
    """Bytes of the text in UTF-8, lone surrogates included."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _encoded(encoding: tiktoken.Encoding, text: str) -> int:
    try:
        return len(encoding.encode_ordinary(text))
    except BaseException as error:
        # The Rust side's panics derive from BaseException and have no importable class.
        if type(error).__name__ != "PanicException":
            raise
        return estimate(text)


def _cut(text: str, start: int) -> int:
    """Where the slice from `start` ends: before the space of a word, which is where the tokenizer itself would split."""
    stop = start + SLICE
    if stop >= len(text):
        return len(text)
    boundaries = [found.start() + 1 for found in _BOUNDARY.finditer(text, stop - SEARCH, stop)]
    return boundaries[-1] if boundaries else stop


def _packaged(name: str) -> bytes:
    return files(__package__).joinpath(f"{name}.ranks.gz").read_bytes()


def _encoding(name: str, packed: bytes) -> tiktoken.Encoding:
    ranks = unpack(packed)
    encoding = tiktoken.Encoding(name, pat_str=PATTERNS[name], mergeable_ranks=ranks, special_tokens=SPECIAL[name])
    # The encoding copies them; keeping ours as well would cost 24 MB for o200k.
    ranks.clear()
    return encoding


def unpack(packed: bytes) -> dict[bytes, int]:
    """The ranks of a rank file. Raises OSError, EOFError, zlib.error or ValueError when it is not one."""
    data = decompress(packed)
    count = int.from_bytes(data[:4], "big")
    at = 4 + count
    ranks = {}
    for rank, length in enumerate(data[4:at]):
        ranks[data[at : at + length]] = rank
        at += length
    if not count or at != len(data) or len(ranks) != count:
        raise ValueError("not a rank file")
    return ranks


_VOCABULARIES = {name: Vocabulary(name) for name in (O200K, CL100K)}


def vocabulary(encoding: str) -> Vocabulary:
    """The one shared vocabulary that counts for this encoding; that of o200k_base for a name that we do not have."""
    return _VOCABULARIES.get(encoding) or _VOCABULARIES[O200K]


def load(name: str = O200K) -> bool:
    """Read an encoding's ranks now, in some 200 ms, instead of at the first count; False: they cannot be read."""
    return vocabulary(name).load()


def degraded() -> Mapping[str, bool]:
    """Encoding → its ranks could not be read, so that its counts are estimates. False as well when it was not needed yet."""
    return {name: each.degraded for name, each in _VOCABULARIES.items()}
