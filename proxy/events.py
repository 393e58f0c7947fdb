"""The events of histories that are too long: an earlier one taken up, a new one made where it is due, and left in the store.

What is decided on the way is `walk`'s; here is who makes an event when several come to it, and what everyone finds afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from proxy.checkpoints import CheckpointStore
from proxy.checkpoints.chain import Chain, Digests, chain, namespace
from proxy.checkpoints.checkpoint import Checkpoint
from proxy.checkpoints.resume import Replayed
from proxy.checkpoints.trail import Trail
from proxy.compaction import CompactionResult, CriticalItems, LayerReport
from proxy.compaction.pipeline import compact
from proxy.conversation import Conversation
from proxy.decisions import Decision, Measured, Mode, Outcome
from proxy.summarizers.background import Adoption, Background, Standing
from proxy.threads import Threads
from proxy.walk import Policy, Walk, standing_at
from proxy.windows import Budget
from proxy.wire import chat_completions

T = TypeVar("T")

REPLAY_SHARE = 0.6
"""Of the deadline: what going through a history again may take; one event from what came is left the rest."""
SIBLINGS = 8
"""Checkpoints of histories that share a beginning with this one: so many are passed over in search of its own."""
WRITERS = 3
"""Times that a history is gone through again because somebody else had written first."""


class Events:
    """What becomes of requests that do not fit; holds the store, and what is under way.

    secret: keys the names under which checkpoints are stored. fingerprint: of what changes the outcome of an event.
    """

    def __init__(
        self,
        policy: Policy,
        store: CheckpointStore,
        threads: Threads,
        digests: Digests,
        *,
        secret: bytes,
        fingerprint: str,
        summaries: Background | None = None,
    ) -> None:
        self.policy = policy
        self._store, self._threads, self._digests = store, threads, digests
        self._secret, self._fingerprint = secret, fingerprint
        self._summaries = summaries
        self._trail = Trail()
        self._under_way: dict[bytes, asyncio.Future[None]] = {}

    def earliest(self, steady: Budget, mode: Mode) -> int:
        """Tokens below which there is nothing to do: no event is due, no summary to be prepared."""
        if self._summaries is None or mode != "auto":
            return steady.trigger
        return min(steady.trigger, int(self._summaries.terms.prefetch * steady.usable))

    def foresee(self, measured: Measured, steady: Budget, size: int, mode: Mode) -> None:
        """Has a summary prepared for the event that a request of so many tokens, which fits as it came, is coming to."""
        if self._summaries is not None and mode == "auto" and self._summaries.is_due(size, steady):
            seed, linked = self._linked(measured, steady)
            self._prepare(measured, steady, standing_at(linked, None, seed), measured.request.conversation)

    async def aclose(self) -> None:
        """Ends summaries under way and lets go of the store."""
        if self._summaries is not None:
            await self._summaries.aclose()
        await self._store.aclose()

    async def fit(self, measured: Measured, aim: Budget, steady: Budget, before: int, mode: Mode) -> Decision:
        """Takes up where an earlier event left off, and makes a new one where that is due."""
        conversation = measured.request.conversation
        seed, linked = self._linked(measured, steady)
        own, others = await self._known(linked.keys)
        walk = Walk(self.policy, measured, steady, linked, own, mode, self._trail.take(linked.keys))
        replayed: Replayed | None = walk.looking()
        if replayed is not None and not replayed.complete:
            due = replayed.due
            replayed = None if others is None else await self._joined(walk, others)
            if replayed is None:
                walk, replayed = await self._event(walk if others is None else walk.from_here(others), due, seed)
        if replayed is None or not replayed.complete:
            return await self._squeeze(walk, aim, before, conversation)
        forwarded = replayed.conversation
        after = before if forwarded is conversation else await self._threads.total(measured.ruler, forwarded)
        decision = self._resumed(measured, before, after, replayed, walk, mode)
        if decision.outcome == "reused" and walk.move == "edited":
            decision = decision.but(prefix_break="edit")
        if after > aim.usable:
            squeezed = await self._squeeze(walk, aim, before, forwarded, replayed.checkpoint)
            return decision.but(reason=squeezed.reason) if squeezed.after == before and after < before else squeezed
        if self._summaries is not None and mode == "auto":
            lasting = steady.ruler.total(forwarded.messages)
            if self._summaries.is_due(lasting, steady):
                self._prepare(measured, steady, walk.standing(seed, replayed.checkpoint), forwarded)
        return decision

    async def harder(self, measured: Measured, aim: Budget, before: int, forwarded: int) -> Decision | None:
        """An event with the last resort, after the upstream refused what was forwarded (tokens); None when it helps nothing."""
        result = await self._within(self._last_resort(measured.request.conversation, aim, measured.model))
        if result is None or result.tokens_after > aim.usable or result.tokens_after >= forwarded:
            return None
        return self._applied(measured, before, result, "auto")

    async def _known(self, keys: Sequence[bytes]) -> tuple[tuple[int, Checkpoint] | None, tuple[int, Checkpoint] | None]:
        """The longest checkpoint whose event lies on the way of this history; and a longer one of another history that has only
        its beginning in common with this one, if there is one."""
        others, passed = None, frozenset(keys)
        for _ in range(SIBLINGS):
            found = await self._store.get_longest(keys)
            if found is None or not found[1].origin or found[1].origin in passed:
                return found, others
            others, keys = others or found, keys[: found[0]]
        return None, others

    async def _joined(self, walk: Walk, others: tuple[int, Checkpoint]) -> Replayed | None:
        """Where an event is due anyway, the one of a history with the same beginning will do (before an edit, in a branch): what
        it left is in the upstream's cache. None when that is not enough."""
        looked = walk.from_here(others).looking()
        if not looked.complete or not walk.chain.keys:
            return None
        key = walk.chain.keys[-1]
        checkpoint = replace(others[1], origin=key, seen=walk.chain.cuts[-1])
        await self._store.put_if_absent(key, checkpoint)
        return replace(looked, made=((key, checkpoint),))

    async def _event(self, walk: Walk, due: bytes | None, seed: bytes) -> tuple[Walk, Replayed | None]:
        """Goes through a history where events are due, and leaves what became of them in the store.

        Parallel requests of one conversation come to the same event: one makes it, the others wait and take it up. Where
        somebody else wrote first, another process perhaps, what that one wrote is what counts.
        """
        if due is not None and due in self._under_way:
            await asyncio.wait([self._under_way[due]], timeout=self.policy.marks.timeout)
            own, others = await self._known(walk.chain.keys)
            walk = walk.from_here(own or others)
            looked = walk.looking()
            if looked.complete:
                return walk, looked
            due = looked.due
        mine = due is not None and due not in self._under_way
        if due is not None and mine:
            self._under_way[due] = asyncio.get_running_loop().create_future()
        try:
            return await self._written(walk, seed)
        finally:
            if due is not None and mine:
                self._under_way.pop(due).set_result(None)

    async def _written(self, walk: Walk, seed: bytes) -> tuple[Walk, Replayed | None]:
        """The walk that stands in the end, after whoever wrote first."""
        replayed: Replayed | None = None
        for _ in range(WRITERS):
            if self._summaries is not None:
                walk.summary = await self._taken(walk, seed)
            walk.stop = self._stop(REPLAY_SHARE)
            replayed = await self._within(walk.working)
            if replayed is None or not replayed.complete:
                return walk, replayed
            winner = await self._stored(walk, replayed)
            if winner is None:
                break
            walk = walk.from_here(winner)
        return walk, replayed

    async def _stored(self, walk: Walk, replayed: Replayed) -> tuple[int, Checkpoint] | None:
        """Puts what was made into the store; returns what stands there instead of it, if somebody else was first."""
        for key, checkpoint in replayed.made:
            if not await self._store.put_if_absent(key, checkpoint):
                winner = await self._store.get_longest(walk.chain.keys)
                if winner is not None and winner[1] not in [made for _, made in replayed.made]:
                    return winner
        return None

    async def _taken(self, walk: Walk, seed: bytes) -> Adoption | None:
        """A prepared summary for the event of the request that waits. Whoever waits for summaries has one started at once."""
        assert self._summaries is not None
        standing = walk.standing(seed, walk.found[1] if walk.found is not None else None)
        if self._summaries.terms.wait > 0 and walk.mode == "auto":
            self._prepare(walk.measured, walk.steady, standing, walk.before())
        return await self._summaries.take(standing)

    def _prepare(self, measured: Measured, steady: Budget, standing: Standing, forwarded: Conversation) -> None:
        assert self._summaries is not None
        came = measured.request.conversation
        self._summaries.prepare(standing, came, forwarded, steady, measured.model, measured.headers)

    async def _squeeze(
        self, walk: Walk, aim: Budget, before: int, forwarded: Conversation, checkpoint: Checkpoint | None = None
    ) -> Decision:
        """One event with the last resort: for what does not fit by what answers have taught although the steady measure is
        content, and for a history that is too long to be gone through in time.

        It starts from what would be forwarded, or from what came where that is not enough. What comes of it is stored like any
        event, or the next request, which is as long, would break the prompt cache again.
        """
        measured = walk.measured
        came = measured.request.conversation
        result = await self._within(self._last_resort(forwarded, aim, measured.model))
        if forwarded is not came and (result is None or result.tokens_after > aim.usable):
            forwarded, checkpoint = came, None
            result = await self._within(self._last_resort(came, aim, measured.model))
        if result is None or (result.reason == "deadline" and result.tokens_after > aim.usable):
            return measured.decided("none", "deadline", before)
        if result.tokens_after > aim.usable or result.tokens_after >= before:
            return measured.decided("none", "floor" if before > aim.usable else "no_gain", before).but(result=result)
        if walk.mode != "shadow" and (frozen := walk.frozen(forwarded, checkpoint, result)) is not None:
            await self._store.put_if_absent(*frozen)
        if result.tokens_before < before:
            earlier = LayerReport("checkpoint", before, result.tokens_before)
            stages = (("checkpoint", forwarded), *result.stages)
            result = replace(result, tokens_before=before, reports=(earlier, *result.reports), stages=stages)
        return self._applied(measured, before, result, walk.mode).but(**walk.broken(result.conversation))

    def _resumed(self, measured: Measured, before: int, after: int, replayed: Replayed, walk: Walk, mode: Mode) -> Decision:
        """What was found or made on the way, as a decision."""
        if replayed.conversation is measured.request.conversation or after >= before:
            reason = walk.reason or ("breaker" if walk.tried is None and mode != "force" else "no_gain")
            return measured.decided("rejected" if reason == "no_gain" else "none", reason, before).but(result=walk.tried)
        resumed = measured.ruler.total(replayed.resumed.messages)
        reports = [LayerReport("checkpoint", before, resumed)] if resumed < before else []
        critical = CriticalItems()
        stages: tuple[tuple[str, Conversation], ...] = (("checkpoint", replayed.resumed),)
        if replayed.live is not None:
            reports += _rescaled(replayed.live.result.reports, resumed, after)
            critical, stages = replayed.live.result.critical, (*stages, *replayed.live.result.stages)
        result = CompactionResult(replayed.conversation, before, after, tuple(reports), critical, stages=stages)
        decision = self._applied(measured, before, result, mode)
        if replayed.live is not None or replayed.made:
            layers = result.layers if replayed.live is not None else _layers(replayed)
            return decision.but(layers=layers, **walk.broken(replayed.conversation, again=replayed.live is None))
        outcome: Outcome = "shadow" if mode == "shadow" else "reused"
        return decision.but(outcome=outcome, layers=_layers(replayed), is_event=False, prefix_break=None)

    def _applied(self, measured: Measured, before: int, result: CompactionResult, mode: Mode) -> Decision:
        body = chat_completions.write(measured.request, result.conversation) if mode != "shadow" else None
        return measured.decided("shadow" if mode == "shadow" else "applied", None, before).but(
            after=result.tokens_after,
            body=body,
            result=result,
            layers=result.layers,
            is_event=True,
            prefix_break="event" if body is not None else None,
        )

    def _last_resort(self, conversation: Conversation, aim: Budget, model: str) -> Callable[[], CompactionResult]:
        """An event for a request that must become smaller, whatever it costs."""
        stop = self._stop()
        rules = self.policy.rules_of(conversation, model)
        return lambda: compact(conversation, aim, self.policy.layers, stop=stop, hard=True, rules=rules)

    def _stop(self, share: float = 1.0) -> Callable[[], bool]:
        limit = time.monotonic() + self.policy.marks.timeout * share
        return lambda: time.monotonic() > limit

    async def _within(self, work: Callable[[], T]) -> T | None:
        """The work's result from a worker thread, None when the deadline passes first; the work asks for itself, too."""
        return await self._threads.within(self.policy.marks.timeout, work)

    def _linked(self, measured: Measured, steady: Budget) -> tuple[bytes, Chain]:
        """Whose history this is, and its keys."""
        seed = namespace(self._secret, measured.credential, self._fingerprint, measured.model, str(steady.window))
        return seed, chain(measured.request.conversation, seed, self._digests)


def _layers(replayed: Replayed) -> tuple[str, ...]:
    return replayed.checkpoint.layers if replayed.checkpoint is not None else ()


def _rescaled(reports: Sequence[LayerReport], before: int, after: int) -> list[LayerReport]:
    """The same work told in another ruler's tokens, so that it adds up to before − after."""
    worked = [report for report in reports if report.saved > 0 and report.refused is None]
    whole = sum(report.saved for report in worked)
    scaled: list[LayerReport] = []
    done, at = 0, before
    for report in reports:
        if report not in worked or whole == 0:
            scaled.append(replace(report, before=at, after=at))
            continue
        done += report.saved
        now = before - round((before - after) * done / whole)
        scaled.append(replace(report, before=at, after=now))
        at = now
    return scaled
