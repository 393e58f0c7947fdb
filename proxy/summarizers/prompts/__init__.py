"""What is said to the model that writes a summary: one Markdown file for each way and language, ours word by word.

Above the rule stands the system prompt, below it the instruction; its `##` lines are the sections that an answer must have.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

LANGUAGES = ("en", "de", "es", "fr", "ja", "zh")
"""Languages with prompts of their own; others get the English one, which asks for the language of the users."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """sections: titles that the answer must have, in their order."""

    system: str
    instruction: str
    sections: tuple[str, ...]


@lru_cache(maxsize=32)
def prompt(name: str, language: str | None = None) -> Prompt:
    """The prompt of this name (`kimi`, `anchored`) in a language, or in English."""
    chosen = language if language in LANGUAGES else "en"
    text = files(__name__).joinpath(f"{name}.{chosen}.md").read_text(encoding="utf-8")
    system, _, instruction = text.partition("\n---\n")
    titles = tuple(line[3:].strip() for line in instruction.splitlines() if line.startswith("## "))
    return Prompt(system.strip(), instruction.strip(), titles)
