"""A summary in sections: the history given in one piece or in several, each with the summary of what came before."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from proxy.errors import SummaryFailed
from proxy.summarizers import Summary, SummaryRequest, Usage
from proxy.summarizers.acceptance import accept
from proxy.summarizers.call import Caller
from proxy.summarizers.language import spoken
from proxy.summarizers.prompts import Prompt, prompt
from proxy.summarizers.transcript import blocks, chunks, neutral
from proxy.wire import slices

OUTPUT_SHARE = 0.2
"""Of what is folded: how long a summary may become."""

LEAST_OUTPUT = 256
"""Tokens: below that no model gets through its sections."""

OUTPUT_OF_WINDOW = 4
"""A summary takes at most one part in so many of the window: the history must fit beside it."""

LEAST_INPUT = 512
"""Tokens of history that a question must have room for."""

MARGIN = 0.1
"""Of the summarizer's window: its own way of counting may differ from ours."""


@dataclass(frozen=True, slots=True)
class Way:
    """prompt: its name. kinds: what its sections hold, in their order: a section that code can fill has a name of `Facts`.

    anchored: earlier summary and facts are given beside the history, between tags; else the history stands alone.
    """

    prompt: str
    kinds: tuple[str, ...]
    anchored: bool = False


def cap(tokens: int, largest: int) -> int:
    """How long a summary of so many tokens may become, in tokens."""
    return min(largest, max(LEAST_OUTPUT, int(tokens * OUTPUT_SHARE)))


async def summed_up(caller: Caller, way: Way, request: SummaryRequest) -> Summary:
    """The accepted summary of a request. Raises SummaryFailed; its outcome is recorded with the caller's circuit."""
    if not caller.circuit.admits():
        raise SummaryFailed("breaker")
    try:
        summary = await _asked(caller, way, request)
    except SummaryFailed as failure:
        caller.circuit.record(failure.outcome)
        raise
    caller.circuit.record("ok")
    return summary


async def _asked(caller: Caller, way: Way, request: SummaryRequest) -> Summary:
    # counting and searching a long history takes longer than other requests may wait
    asked = await asyncio.to_thread(lambda: prompt(way.prompt, spoken(request.folded, request.facts.goal)))
    model, window = caller.model(request.model), request.window or caller.settings.window
    largest = cap(request.tokens, min(caller.settings.max_output, window // OUTPUT_OF_WINDOW))
    frame = request.count(_content(way, asked, "", request.previous, request)) + request.count(asked.system)
    # in later pieces the summary so far takes the place of the previous one, and may be as long as the cap
    frame += max(0, largest - request.count(request.previous))
    room = int(window * (1 - MARGIN)) - largest - frame
    if room < LEAST_INPUT:
        raise SummaryFailed("too_large")
    so_far, usage, answer = request.previous, Usage(), None
    for piece in await asyncio.to_thread(lambda: chunks(blocks(request.folded), room, request.count)):
        if answer is not None:
            caller.tell(model, "ok", answer)
        content = slices.write_string(_content(way, asked, "\n\n".join(piece), so_far, request))
        answer = await caller.ask(asked.system, content, model=model, cap=largest, headers=request.headers)
        so_far, usage = answer.text, usage + answer.usage
    if answer is None:
        raise SummaryFailed("empty")
    try:
        accepted = await asyncio.to_thread(accept, answer.text, request, asked, way.kinds)
    except SummaryFailed as failure:
        caller.tell(model, failure.outcome, answer)
        raise
    caller.tell(model, "ok", answer)
    return Summary(accepted.text, answer.model or model, usage, accepted.repaired)


def _content(way: Way, asked: Prompt, history: str, so_far: str, request: SummaryRequest) -> str:
    """The one user message: material first, each kind between its tags, the instruction last."""
    pieces = []
    if so_far:
        pieces.append(_tagged("summary-so-far", so_far))
    if way.anchored:
        known = "\n".join(_facts(request))
        pieces.extend([_tagged("ledger", known)] if known else [])
        pieces.append(f"<transcript>\n{history}\n</transcript>")
    else:
        pieces.append(history)
    return "\n\n".join([*pieces, asked.instruction])


def _tagged(tag: str, text: str) -> str:
    return f"<{tag}>\n{neutral(text)}\n</{tag}>"


def _facts(request: SummaryRequest) -> list[str]:
    facts = request.facts
    named = (("goal", (facts.goal,) if facts.goal else ()), ("requests", facts.requests), ("constraints", facts.constraints))
    return [
        f"{name}:\n" + "\n".join(f"- {' '.join(line[:600].split())}" for line in lines)
        for name, lines in (*named, ("errors", facts.errors), ("files", facts.files))
        if lines
    ]
