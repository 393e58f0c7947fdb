"""Which rules a model goes by, from its name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from proxy.tokens import images
from proxy.tokens.vocabulary import CL100K, ENCODINGS, HARMONY, O200K

LONGEST_GIVEN, LONGEST_NAME = 512, 128
"""Characters of a name as clients write it, the end of which counts, and of what is left of it."""

_OPENAI = re.compile(r"gpt-|chatgpt|o[134](-|$)|codex")
_REASONING = re.compile(r"gpt-5|o[134](-|$)|codex")
_OLDER = re.compile(r"gpt-?(3\.?5|4(?![\w.]))")
_DATE = re.compile(r"[-@](20\d\d-\d\d-\d\d|20\d{6})$")


@dataclass(frozen=True, slots=True)
class Family:
    """The counting rules of a family of models. tag: tells families apart in caches.

    openai: by one of its own names. reasoning: the o-series and gpt-5. plain: the results of a batch keep what is not ASCII,
    which other models get as escapes. rate: what a picture costs.
    """

    encoding: str
    openai: bool
    reasoning: bool
    gpt5: bool
    plain: bool
    rate: images.Rate

    @property
    def priming(self) -> int:
        """What stands before the answer."""
        return 2 if self.reasoning else 3

    @property
    def tag(self) -> str:
        flags = (self.openai, self.reasoning, self.gpt5, self.plain)
        return f"{self.encoding}/{''.join(str(int(flag)) for flag in flags)}/{self.rate}"


def bare_name(model: str) -> str:
    """The model's own name in lower case: without provider prefixes, deployment paths, fine-tune suffixes and dates."""
    return _bare_name(model[-LONGEST_GIVEN:])


def encoding_name(model: str) -> str:
    """The encoding of a model, by its name; o200k_base where nothing better is known."""
    name = bare_name(model)
    if name.startswith("gpt-oss"):
        return HARMONY
    return CL100K if _OLDER.match(name) else O200K


def family(model: str, encoding: str | None = None) -> Family:
    """The rules that a model name gets, those of gpt-4o where nothing better is known. `encoding`: counted with instead."""
    return _family(bare_name(model), encoding if encoding in ENCODINGS else encoding_name(model))


@lru_cache(maxsize=1024)
def _bare_name(model: str) -> str:
    name = model.strip().lower().rstrip("/").rsplit("/", 1)[-1]
    name = name.removeprefix("ft:").removeprefix("openai.").removeprefix("azure.")
    if _OPENAI.match(name) and not name.startswith("gpt-oss"):
        name = name.split(":", 1)[0]
    return _DATE.sub("", name)[:LONGEST_NAME]


@lru_cache(maxsize=1024)
def _family(name: str, encoding: str) -> Family:
    reasoning = bool(_REASONING.match(name))
    return Family(
        encoding=encoding,
        openai=bool(_OPENAI.match(name)) and not name.startswith("gpt-oss"),
        reasoning=reasoning,
        gpt5=reasoning and "gpt-5" in name,
        plain=name == "gpt-4o",
        rate=images.rate(name),
    )
