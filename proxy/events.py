"""The events of histories that are too long: an earlier one taken up, a new one made where it is due, and left in the store.

What is decided on the way is `walk`'s; here is who makes an event when several come to it, and what everyone finds afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from proxy.checkpoints import CheckpointStore
from proxy.checkpoints.chain import Chain, Digests, chain, claim, edition, namespace
from proxy.checkpoints.checkpoint import Checkpoint
from proxy.checkpoints.resume import EDITIONS, Replayed
from proxy.checkpoints.resume import Decision as Event
from proxy.checkpoints.trail import Trail
from proxy.compaction import CompactionResult
from proxy.compaction.pipeline import compact
from proxy.conversation import Conversation
from proxy.decisions import Decision, Measured, Mode
from proxy.summarizers.background import Adoption, Background, Standing
from proxy.threads import Deadline, Threads
from proxy.walk import Policy, Walk, standing_at
from proxy.windows import Budget

REPLAY_SHARE = 0.6
"""Of the deadline: what going through a history again may take; one event from what came is left the rest."""
SIBLINGS = 8
"""Checkpoints of histories that share a beginning with this one: so many are passed over in search of its own."""
WRITERS = 3
"""Times that a history is gone through again because somebody else had written first."""

Found = tuple[int, Checkpoint]
"""A checkpoint as the store gives it: with the number of its key among those of the history."""

Stands = tuple[Conversation, Checkpoint | None]
"""What would be forwarded without another event, and the checkpoint behind it."""


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
        started, deadline = time.perf_counter(), Deadline(self.policy.marks.timeout)
        seed, linked = self._linked(measured, steady)
        own, others = await self._known(linked.keys)
        walk = Walk(self.policy, measured, steady, linked, own, mode, self._trail.take(linked.keys))
        looked = walk.looking()
        resumed = time.perf_counter() - started
        decision = await self._go_on(walk, looked, others, seed, aim, before, deadline)
        return decision.but(seconds={"resume": resumed, **decision.seconds})

    async def _go_on(
        self, walk: Walk, looked: Replayed, others: Found | None, seed: bytes, aim: Budget, before: int, deadline: Deadline
    ) -> Decision:
        """What becomes of a request whose earlier events have been looked for."""
        measured, steady, mode = walk.measured, walk.steady, walk.mode
        conversation = measured.request.conversation
        replayed: Replayed | None = looked
        if not looked.complete:
            due = looked.due
            replayed = None if others is None else await self._joined(walk, others)
            if replayed is None:
                walk, replayed = await self._event(walk if others is None else walk.from_here(others), due, seed, deadline)
        if replayed is None or not replayed.complete:
            found = walk.found[1] if walk.found is not None else None
            return await self._squeeze(walk, aim, before, (walk.before(), found), deadline, hurried=True)
        forwarded = replayed.conversation
        after = before if forwarded is conversation else await self._threads.total(measured.ruler, forwarded)
        decision = walk.decision(before, after, replayed)
        if after > aim.usable:
            squeezed = await self._squeeze(walk, aim, before, (forwarded, replayed.checkpoint), deadline)
            return decision.but(reason=squeezed.reason) if squeezed.after == before and after < before else squeezed
        if self._summaries is not None and mode == "auto":
            lasting = steady.ruler.total(forwarded.messages)
            if self._summaries.is_due(lasting, steady):
                self._prepare(measured, steady, walk.standing(seed, replayed.checkpoint), forwarded)
        return decision

    async def harder(self, measured: Measured, aim: Budget, steady: Budget, before: int) -> Decision | None:
        """What to try after the upstream refused what was forwarded; None when nothing helps.

        aim: what the refusal leaves. steady: as the next turn will have it, so that it finds what this one has forwarded.
        """
        decision = await self.fit(measured, aim, steady, before, "auto")
        if decision.body is None or decision.after is None or decision.after > aim.usable:
            return None
        return decision.but(prefix_break="event") if decision.is_event else decision

    async def _known(self, keys: Sequence[bytes]) -> tuple[Found | None, Found | None]:
        """The longest checkpoint whose event lies on the way of this history; and a longer one of another history that has only
        its beginning in common with this one, if there is one."""
        others, passed = None, frozenset(keys)
        for _ in range(SIBLINGS):
            found = await self._store.get_longest(keys)
            if found is None or not found[1].origin or found[1].origin in passed:
                return await self._latest(keys, found), others
            others, keys = others or found, keys[: found[0]]
        return None, others

    async def _latest(self, keys: Sequence[bytes], found: Found | None) -> Found | None:
        """The last edition of what was found. Only what an event left nothing behind of has any, so this seldom asks."""
        if found is None or found[1].cut < found[1].seen:
            return found
        later = await self._store.get_longest([edition(keys[found[0]], number) for number in range(1, EDITIONS + 1)])
        return found if later is None else (found[0], later[1])

    async def _joined(self, walk: Walk, others: Found) -> Replayed | None:
        """Where an event is due anyway, the one of a history with the same beginning will do (before an edit, in a branch): what
        it left is in the upstream's cache. None when that is not enough."""
        looked = walk.from_here(others).looking()
        if not looked.complete or not walk.chain.keys:
            return None
        key = walk.chain.keys[-1]
        checkpoint = replace(others[1], origin=key, seen=walk.chain.cuts[-1])
        await self._store.put_if_absent(key, checkpoint)
        return replace(looked, made=((key, checkpoint),))

    async def _event(self, walk: Walk, due: bytes | None, seed: bytes, deadline: Deadline) -> tuple[Walk, Replayed | None]:
        """Goes through a history where events are due, and leaves what became of them in the store.

        Parallel requests of one conversation come to the same event: one makes it, the others wait and take it up. Where
        somebody else wrote first, another process perhaps, what that one wrote is what counts.
        """
        if due is not None and due in self._under_way:
            await asyncio.wait([self._under_way[due]], timeout=deadline.left())
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
            return await self._written(walk, seed, deadline)
        finally:
            if due is not None and mine:
                self._under_way.pop(due).set_result(None)

    async def _written(self, walk: Walk, seed: bytes, deadline: Deadline) -> tuple[Walk, Replayed | None]:
        """The walk that stands in the end, after whoever wrote first."""
        replayed: Replayed | None = None
        for _ in range(WRITERS):
            if self._summaries is not None:
                started = time.monotonic()
                walk.summary = await self._taken(walk, seed)
                deadline.put_off(time.monotonic() - started)
            walk.stop = deadline.passed(REPLAY_SHARE)
            replayed = await self._threads.within(deadline.left(), walk.working)
            if replayed is None or not replayed.complete:
                return walk, replayed
            winner = await self._stored(walk, replayed)
            if winner is None:
                break
            walk = walk.from_here(winner)
            replayed = walk.looking()
            if replayed.complete:
                break
        return walk, replayed

    async def _stored(self, walk: Walk, replayed: Replayed) -> Found | None:
        """Puts what was made into the store; returns what stands there instead of it, if somebody else was first."""
        for key, checkpoint in replayed.made:
            live = replayed.live is not None and checkpoint is replayed.checkpoint
            if live and self._may_differ and (winner := await self._claimed(walk, checkpoint)) is not None:
                return winner
            if not await self._store.put_if_absent(key, checkpoint):
                own, others = await self._known(walk.chain.keys)
                winner = others or own
                if winner is not None and winner[1] not in [made for _, made in replayed.made]:
                    return winner
        return None

    @property
    def _may_differ(self) -> bool:
        """Whether two processes may come to different ends with one event: a model's words, or the age of messages."""
        return self._summaries is not None or self.policy.seen is not None

    async def _claimed(self, walk: Walk, made: Checkpoint) -> Found | None:
        """Claims an event that another process may make otherwise, at another cut; returns what that one made if it was first.

        Under their own keys both would stand, and the longer one would be found by the next turn, whoever forwarded which.
        """
        if not made.origin:
            return None
        event = claim(made.origin, made.parent, made.generation)
        if await self._store.put_if_absent(event, made):
            return None
        found = await self._store.get_longest([event])
        winner = None if found is None or found[1] == made else walk.found_as(found[1])
        if winner is not None and (key := walk.key(winner[1])) is not None:
            # who was first may have ended right after the claim
            await self._store.put_if_absent(key, winner[1])
        return winner

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
        self._summaries.prepare(standing, came, forwarded, steady, measured.model, measured.caller.headers)

    async def _squeeze(
        self, walk: Walk, aim: Budget, before: int, stands: Stands, deadline: Deadline, *, hurried: bool = False
    ) -> Decision:
        """An event for what does not fit by what answers have taught although the steady measure is content, and for a history
        that is too long to be gone through in time (hurried).

        First by the steady measure, which every process comes to; where that is not enough, with the last resort; and at last
        from what came in place of what would be forwarded. What comes of it is stored like any event, or the next request, which
        is as long, would break the prompt cache again.
        """
        measured, (forwarded, checkpoint) = walk.measured, stands
        came = measured.request.conversation
        tries = [] if hurried else [(forwarded, walk.steady, False)]
        tries.append((forwarded, aim, True))
        if forwarded is not came:
            tries.append((came, aim, True))
        result, after = None, before
        best: tuple[Conversation, CompactionResult, int] | None = None
        for began, budget, hard in tries:
            result = await self._compacted(began, budget, measured.model, deadline, hard=hard)
            after = before if result is None else await self._threads.total(measured.ruler, result.conversation)
            if result is not None and after <= aim.usable and after < before:
                best = began, result, after
                # what is not the last resort should leave room for some turns by this measure, too
                if hard or after <= aim.trigger:
                    break
        if best is not None:
            return await self._squeezed(walk, aim, before, checkpoint, best)
        if result is None or (result.reason == "deadline" and after > aim.usable):
            return measured.decided("none", "deadline", before)
        return measured.decided("none", "floor" if before > aim.usable else "no_gain", before).but(result=result)

    async def _squeezed(
        self,
        walk: Walk,
        aim: Budget,
        before: int,
        checkpoint: Checkpoint | None,
        best: tuple[Conversation, CompactionResult, int],
    ) -> Decision:
        """The decision for such an event; where somebody else was first and what that one made fits, for theirs."""
        began, result, after = best
        if walk.mode != "shadow" and (theirs := await self._kept(walk, began, checkpoint, result)) is not None:
            looked = walk.from_here(theirs).looking()
            size = await self._threads.total(walk.measured.ruler, looked.conversation)
            if looked.complete and size <= aim.usable:
                return walk.decision(before, size, looked)
        return walk.decision(before, after, Replayed(result.conversation, began, live=Event(result)))

    async def _kept(
        self, walk: Walk, began: Conversation, checkpoint: Checkpoint | None, result: CompactionResult
    ) -> Found | None:
        """Puts an event outside of the walk into the store; returns what stands there instead of it, if somebody else was first.

        What answers have taught differs from process to process, so it is claimed.
        """
        sizes = [await self._threads.total(walk.steady.ruler, each) for each in (began, result.conversation)]
        steadily = replace(result, tokens_before=sizes[0], tokens_after=sizes[1])
        frozen = walk.frozen(began, checkpoint, steadily)
        if frozen is None:
            return None
        winner = await self._claimed(walk, frozen[1])
        if winner is None:
            await self._store.put_if_absent(*frozen)
        return winner

    async def _compacted(
        self, conversation: Conversation, budget: Budget, model: str, deadline: Deadline, *, hard: bool
    ) -> CompactionResult | None:
        """One event; None when the time is over. hard: the last resort may run."""
        stop, rules = deadline.passed(), self.policy.rules_of(conversation, model)
        return await self._threads.within(
            deadline.left(), lambda: compact(conversation, budget, self.policy.layers, stop=stop, hard=hard, rules=rules)
        )

    def _linked(self, measured: Measured, steady: Budget) -> tuple[bytes, Chain]:
        """Whose history this is, and its keys."""
        seed = namespace(self._secret, measured.caller.credential, self._fingerprint, measured.model, str(steady.window))
        return seed, chain(measured.request.conversation, seed, self._digests)
