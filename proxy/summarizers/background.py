"""Summaries beside the straight line: asked for in the background of one request, adopted at the event of a later one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.compaction import entities
from proxy.conversation import Conversation
from proxy.errors import SummaryFailed
from proxy.summarizers import Headers, Summarizer
from proxy.summarizers.plans import Plan, adopt, missing_names, plan, plan_kimi
from proxy.summarizers.preparation import Preparations
from proxy.summarizers.record import message_of, request_of
from proxy.windows import Budget

PINNED = 2_000
"""Tokens up to which the first task stays in its place."""

LONGEST_SHARE = 8
"""A summary is taken to need one part in so many of what is usable: the rest of the target is for newest steps."""

LEAST_KEPT = 20
"""One part in so many of what is usable stays as it is, however near the target is."""

AGAIN_AFTER = 25
"""After a failure another summary is tried when the request has grown by one part in so many of what is usable."""

MOST_NAMES = 40
"""Names that newer messages use and the summary lacks: so many are put beside it."""

FAILURES = 4_096
"""Histories whose last failure is remembered."""


@dataclass(frozen=True, slots=True)
class Terms:
    """When a summary is asked for, and how it is used.

    way: `anchored` folds all but the newest steps that fit; `kimi` all but the last `max_preserved` user and assistant messages.
    prefetch: fill of usable from which one is prepared. wait: seconds that an event may wait for one. role: it speaks in.
    max_output: tokens that it may have.
    """

    way: Literal["kimi", "anchored"] = "anchored"
    prefetch: float = 0.68
    wait: float = 0.0
    role: str = "user"
    max_preserved: int = 2
    max_output: int = 4_096


@dataclass(frozen=True, slots=True)
class Prepared:
    """An accepted summary. made: what it replaces; of: the conversation that this was planned for."""

    made: Plan
    of: Conversation
    text: str


@dataclass(frozen=True, slots=True)
class Adoption:
    """A prepared summary as a layer, so that it is checked and repaired like the work of any other."""

    prepared: Prepared
    role: str = "user"
    name: str = "summary"

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        made, text = self.prepared.made, self.prepared.text
        arrived = conversation.messages[made.stop :]
        names = missing_names(text, made.folded, arrived, lambda words: entities.scan(words).distinct)
        message = message_of(text, self.prepared.of, made, budget.ruler, names=names[:MOST_NAMES], role=self.role)
        return adopt(conversation, made, message) or conversation


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a request stands in its history. keys: of the history behind the checkpoint in force, shortest first; base: the key
    of that checkpoint, or of the history's beginning; owner: whose history it is."""

    keys: Sequence[bytes]
    base: bytes
    owner: bytes

    def name(self, key: bytes) -> bytes:
        """A summary fits the checkpoint that it was planned upon and no other."""
        return self.base[:16] + key[:16]


class Background:
    """One summarizer, and what it has prepared. window: tokens that the model of this name can hold, None when unknown."""

    def __init__(
        self,
        summarizer: Summarizer,
        terms: Terms,
        *,
        window: Callable[[str], int | None] = lambda _: None,
        ready: Preparations[Prepared] | None = None,
    ) -> None:
        self.terms = terms
        self._summarizer, self._window = summarizer, window
        self._ready = ready if ready is not None else Preparations[Prepared]()
        self._failed: OrderedDict[bytes, int] = OrderedDict()

    def is_due(self, size: int, budget: Budget) -> bool:
        """Whether a request of so many tokens is full enough for a summary to be prepared."""
        return size >= self.terms.prefetch * budget.usable

    async def take(self, standing: Standing) -> Adoption | None:
        """The summary for an event of this request; waits for one that is under way as long as the terms say."""
        taken = await self._ready.take([standing.name(key) for key in standing.keys], self.terms.wait)
        return None if taken is None else Adoption(taken[1], self.terms.role)

    def prepare(
        self, standing: Standing, came: Conversation, forwarded: Conversation, budget: Budget, model: str, headers: Headers
    ) -> bool:
        """Asks for a summary of the older part of what is forwarded; False when there is one, or nothing to sum up.

        came: the history as the client sent it. headers: the client's credentials, for a summarizer that may have them.
        """
        names = [standing.name(key) for key in standing.keys]
        size = budget.ruler.total(forwarded.messages)
        if not names or self._ready.has(names) or size < self._failed.get(standing.base, 0):
            return False
        made = self._plan(forwarded, budget)
        if made is None:
            return False

        async def work() -> Prepared:
            try:
                request = await asyncio.to_thread(
                    request_of, forwarded, made, budget.ruler, model=model, headers=headers, window=self._window(model)
                )
                text = (await self._summarizer.summarize(request)).text
            except SummaryFailed:
                self._note_failure(standing.base, size + budget.usable // AGAIN_AFTER)
                raise
            return Prepared(made, forwarded, text)

        held = sum(len(message.raw or b"") for message in forwarded.messages)
        return self._ready.start(names[-1], work, standing.owner, held)

    async def aclose(self) -> None:
        """Ends what is under way."""
        await self._ready.aclose()

    def _plan(self, forwarded: Conversation, budget: Budget) -> Plan | None:
        ruler, terms = budget.ruler, self.terms
        if terms.way == "kimi":
            return plan_kimi(forwarded, ruler, max_preserved=terms.max_preserved, least=1)
        # until the event the conversation grows from here to the trigger: after it the target should be met all the same
        growth = max(0, budget.trigger - int(terms.prefetch * budget.usable))
        around = ruler.total(forwarded.preamble) + min(terms.max_output, budget.usable // LONGEST_SHARE)
        keep = max(budget.usable // LEAST_KEPT, budget.target - growth - around)
        return plan(forwarded, ruler, keep_tokens=keep, pin=min(PINNED, budget.usable // LEAST_KEPT))

    def _note_failure(self, base: bytes, again: int) -> None:
        self._failed[base] = again
        self._failed.move_to_end(base)
        while len(self._failed) > FAILURES:
            self._failed.popitem(last=False)
