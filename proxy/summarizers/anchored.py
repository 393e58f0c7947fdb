"""A running summary: the one before, the facts that code has read, and what happened since become the next one."""

from __future__ import annotations

from proxy.summarizers import Summary, SummaryRequest
from proxy.summarizers.call import Caller
from proxy.summarizers.sections import Way, summed_up

WAY = Way("anchored", ("goal", "constraints", "state", "decisions", "files", "errors", "next"), anchored=True)


class AnchoredSummarizer:
    """Carries a summary forward instead of writing it anew: what is settled stays settled from event to event."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def summarize(self, request: SummaryRequest) -> Summary:
        """The accepted summary. Raises SummaryFailed."""
        return await summed_up(self._caller, WAY, request)
