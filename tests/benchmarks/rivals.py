"""Other ways of making a conversation shorter, to compare with: `(conversation, tokens) -> messages`.

Two are libraries; each runs in an environment of its own, made in a temporary folder, so that nothing of theirs is mixed with
ours. The others are written out here.
"""

from __future__ import annotations

import atexit
import json
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from recorded import Messages, counter, plain

from proxy.compaction.outputs import outputs, with_text
from proxy.conversation import Conversation, Message, said

Way = Callable[[Conversation, int], Messages]

HEAD, TAIL = 1_200, 600
"""Characters that head+tail leaves of each result."""
UNMASKED = 10
"""Results that masking leaves."""


def head_tail(conversation: Conversation, tokens: int) -> Messages:
    """Each result's head and tail, then the first user message and the newest steps that fit."""
    messages = list(conversation.messages)
    for output in outputs(conversation):
        text = output.text
        if len(text) > HEAD + TAIL + 40:
            messages[output.index] = with_text(output.message, f"{text[:HEAD]}\n[...]\n{text[-TAIL:]}")
    return plain(first_and_last(Conversation(tuple(messages)), tokens))


def masking(conversation: Conversation, tokens: int) -> Messages:
    """Results but the newest ten become a placeholder, then the first user message and the newest steps that fit."""
    messages = list(conversation.messages)
    for output in outputs(conversation)[:-UNMASKED]:
        messages[output.index] = with_text(output.message, "[Old tool result removed]")
    return plain(first_and_last(Conversation(tuple(messages)), tokens))


def first_and_last(conversation: Conversation, tokens: int) -> Conversation:
    first = conversation.first_user
    kept = [] if first is None else list(conversation.steps[first].messages)
    room = tokens - counter().total([*conversation.preamble, *kept])
    newest: list[Message] = []
    for number in range(len(conversation.steps) - 1, -1, -1):
        step = conversation.steps[number]
        cost = sum(map(counter().message, step.messages))
        if number == first or cost > room:
            break
        room -= cost
        newest[:0] = step.messages
    return Conversation((*conversation.preamble, *kept, *newest))


def keep_two(conversation: Conversation, tokens: int) -> Messages:
    """The newest two messages of user and assistant, and before them one summary: the first words of every older message."""
    border, spoken = len(conversation.steps), 0
    while border > 0 and spoken < 2:
        border -= 1
        spoken += conversation.steps[border].head.role in ("user", "assistant")
    newest = [message for step in conversation.steps[border:] for message in step.messages]
    old = [message for step in conversation.steps[:border] for message in step.messages if message.text.strip()]
    room = tokens - counter().total([*conversation.preamble, *newest]) - 40
    share = max(20, int(room * 3.2 / max(1, len(old))))
    while True:
        summary = "\n".join(f"{message.role}: {message.text.strip()[:share]}" for message in old)
        made = [*conversation.preamble, *([said("user", f"[Previous context]\n{summary}")] if old else []), *newest]
        if share <= 20 or counter().total(made) <= tokens:
            return plain(Conversation(tuple(made)))
        share = share * 9 // 10


LIBRARIES = {
    "litellm.trim_messages": (
        "litellm",
        """
import json, sys
from litellm.utils import trim_messages
for line in sys.stdin:
    job = json.loads(line)
    try:
        made = trim_messages(job["messages"], model="gpt-4o", max_tokens=job["tokens"], trim_ratio=1.0)
        made = made[0] if isinstance(made, tuple) else made
    except Exception as failure:
        made = str(failure)
    print(json.dumps(made), flush=True)
""",
    ),
    "langchain trim_messages": (
        "langchain-core",
        """
import json, sys
from langchain_core.messages import convert_to_messages, convert_to_openai_messages, trim_messages
for line in sys.stdin:
    job = json.loads(line)
    try:
        def count(messages):
            return int(len(json.dumps(convert_to_openai_messages(messages), ensure_ascii=False)) * job["rate"])
        found = convert_to_messages(job["messages"])
        made = trim_messages(found, max_tokens=job["tokens"], token_counter=count, strategy="last", include_system=True,
                             start_on=["human", "ai"])
        made = convert_to_openai_messages(made)
    except Exception as failure:
        made = str(failure)
    print(json.dumps(made), flush=True)
""",
    ),
}


@cache
def environment(package: str) -> Path | None:
    """The interpreter of a fresh environment with this package, gone when the benchmark ends; None when it cannot be installed."""
    folder = Path(tempfile.mkdtemp(prefix="compaction-peer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    made = subprocess.run([python, "-m", "pip", "install", "-q", package], capture_output=True, check=False)
    return python if made.returncode == 0 else None


def library(name: str, jobs: Sequence[tuple[Messages, int, float]]) -> list[Messages | None] | None:
    """What the library makes of each (messages, tokens, tokens a character); None where it raises; None at all when missing."""
    package, code = LIBRARIES[name]
    python = environment(package)
    if python is None:
        return None
    lines = "\n".join(json.dumps({"messages": m, "tokens": t, "rate": r}) for m, t, r in jobs)
    ran = subprocess.run([python, "-c", code], input=lines, capture_output=True, text=True, check=False)
    made = [json.loads(line) for line in ran.stdout.splitlines()]
    if len(made) != len(jobs):
        return None
    return [found if isinstance(found, list) and found else None for found in made]


WAYS: dict[str, Way] = {
    "head+tail, first user + last k": head_tail,
    "masking, last k": masking,
    "keep two + extractive summary": keep_two,
}
