"""Conversations for tests, without thirty lines of JSON each."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

from proxy.windows import Window

WORDS = tuple(
    """the parser reads each line and splits it into fields before the loader stores them in a table of results that the
    report prints with totals while the cache keeps recent rows and the index answers lookups by name or by date""".split()
)


def window(tokens: int, **more: Any) -> Window:
    """A window of which nothing else is known."""
    return dataclasses.replace(Window(tokens, None, None, "config", None, None, None), **more)


def prose(words: int, seed: int = 0) -> str:
    """Plain English that repeats no sentence."""
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) + ("." if i % 12 == 11 else "") for i in range(words))


def written_summary(objective: str) -> str:
    """What a model writes that keeps to the form."""
    return f"""## Objective
- {objective}
## Standing instructions
- "Never touch the migrations."
## State
- Done: looked at the parts.
## Decisions
- –
## Working set
- app/loader.py
## Open errors
- ModuleNotFoundError: No module named 'loader_core'
## Next action
- Look at the next part."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None = None, *calls: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = list(calls)
    return message


def call(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def tool(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def agent_session(
    steps: int, words: int = 300, *, system: str = "You are a careful engineer.", module: str = "loader"
) -> list[dict[str, Any]]:
    """A coding agent at work: a task, then calls with long results, one of them an error, and a request at the end."""
    task = f"Fix the failing import in app/{module}.py. Never touch the migrations."
    messages = [{"role": "system", "content": system}, user(task)]
    for n in range(steps):
        messages.append(assistant(f"Looking at part {n}.", call(f"call_{n}", "read_file", path=f"app/part_{n}.py")))
        text = prose(words, n)
        if n == 1:
            text += "\nModuleNotFoundError: No module named 'loader_core'"
        messages.append(tool(f"call_{n}", text))
    messages.append(user("What is left to do?"))
    return messages


def chat(messages: list[dict[str, Any]], model: str = "gpt-4o", **fields: Any) -> bytes:
    """A chat-completions body."""
    return json.dumps({"model": model, "messages": messages, **fields}, ensure_ascii=False).encode()
