"""What keeps requests safe from their store: a time budget, a memory in front, and a pause after each failure."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import structlog

from proxy.checkpoints import Checkpoint, CheckpointStore, Observe
from proxy.checkpoints.memory import MemoryStore
from proxy.errors import StoreUnavailable

T = TypeVar("T")

BUDGET = 0.05
"""Seconds that a request waits for its store."""

PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds without asking after a failure, doubled by each further one: one request in a pause pays the budget, not all."""

WARN_EVERY = 60.0
"""Seconds between two warnings."""

TURNS = 4
"""Turns of a busy event loop that an answer which is already there takes to arrive: the loop was slow then, not the store."""

REMEMBERED = 65_536
"""Keys whose last touch is remembered: a few megabytes. Forgetting costs one touch more."""

_log = structlog.get_logger("proxy.checkpoints")


class SharedStore(CheckpointStore, Protocol):
    """A store outside of this process."""

    async def touch(self, key: bytes) -> None:
        """Says that a checkpoint is in use. Raises StoreUnavailable."""
        ...


class Observed:
    """A memory of this process alone, with its calls told."""

    is_healthy = True

    def __init__(self, store: MemoryStore, name: str, observe: Observe) -> None:
        self._store, self._name, self._observe = store, name, observe

    @property
    def size(self) -> int:
        """Bytes held, about."""
        return self._store.size

    async def get_longest(self, keys: Sequence[bytes]) -> tuple[int, Checkpoint] | None:
        start = time.perf_counter()
        found = await self._store.get_longest(keys)
        self._observe(self._name, "get", "miss" if found is None else "hit", time.perf_counter() - start)
        return found

    async def put_if_absent(self, key: bytes, value: Checkpoint) -> bool:
        start = time.perf_counter()
        stored = await self._store.put_if_absent(key, value)
        self._observe(self._name, "put", "stored" if stored else "kept", time.perf_counter() - start)
        return stored

    async def aclose(self) -> None:
        await self._store.aclose()


class Breaker:
    """Whether to ask again: not for a while after a failure, then one call to find out. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause = 0.0
        self._closed_until = 0.0
        self._probing = False

    @property
    def is_healthy(self) -> bool:
        return self._pause == 0.0

    def admits(self) -> bool:
        """True when a call may be made. After a failure one caller gets True when the pause is over, the others wait on."""
        now = self._clock()
        if now < self._closed_until:
            return False
        if self._pause:
            self._closed_until, self._probing = now + self._pause, True
        return True

    def succeeded(self) -> None:
        self._pause = self._closed_until = 0.0
        self._probing = False

    def failed(self) -> None:
        if self._pause and not self._probing:
            return  # one of many that were under way when the first failed: it says nothing new
        self._pause = min(LONGEST_PAUSE, self._pause * 2 or PAUSE)
        self._closed_until, self._probing = self._clock() + self._pause, False


class Guard:
    """A shared store behind a memory of this process. Never raises StoreUnavailable, never waits longer than the budget.

    While the store is slow, down, full, read-only or damaged, the memory serves alone; one warning a minute says so, and the
    first success ends it. Reads and writes fail apart: a full store still answers.
    """

    def __init__(
        self,
        store: SharedStore,
        memory: MemoryStore,
        name: str,
        observe: Observe,
        *,
        ttl: float = 86_400,
        budget: float = BUDGET,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._memory, self._name, self._observe = store, memory, name, observe
        self._budget, self._clock, self._touch_after = budget, clock, ttl / 8
        self._breakers = {"get": Breaker(clock), "put": Breaker(clock)}
        self._touched: dict[bytes, float] = {}
        self._warned: float | None = None
        self._under_way: set[asyncio.Task[Any]] = set()

    @property
    def is_healthy(self) -> bool:
        """Whether the shared store took part in the last reads and writes: for readiness and stats."""
        return all(breaker.is_healthy for breaker in self._breakers.values())

    @property
    def size(self) -> int:
        """Bytes held in memory, about."""
        return self._memory.size

    async def get_longest(self, keys: Sequence[bytes]) -> tuple[int, Checkpoint] | None:
        known = await self._memory.get_longest(keys)
        # somebody else may have gone further than we remember; what is shorter need not travel
        start = 0 if known is None else known[0] + 1
        found = await self._attempt("get", lambda: self._store.get_longest(keys[start:]), _hit_or_miss) if keys[start:] else None
        if found is None:
            if known is not None:
                await self._keep_alive(keys[known[0]])
            return known
        index = start + found[0]
        self._remember(keys[index])
        await self._memory.put_if_absent(keys[index], found[1])
        return index, found[1]

    async def put_if_absent(self, key: bytes, value: Checkpoint) -> bool:
        stored = await self._attempt("put", lambda: self._put(key, value), _stored_or_kept)
        if stored is None:
            return await self._memory.put_if_absent(key, value)
        self._remember(key)
        if stored:
            await self._memory.put_if_absent(key, value)
        return stored

    async def aclose(self) -> None:
        under_way = list(self._under_way)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self._store.aclose()
        await self._memory.aclose()

    async def _put(self, key: bytes, value: Checkpoint) -> bool:
        if await self._store.put_if_absent(key, value):
            return True
        winner = await self._store.get_longest([key])
        if winner is not None:
            await self._memory.put_if_absent(key, winner[1])
            return False
        # what stood there was no checkpoint, and reading it has removed it
        return await self._store.put_if_absent(key, value)

    async def _keep_alive(self, key: bytes) -> None:
        """A checkpoint that is found in memory must not expire in the store that others look into."""
        if self._clock() - self._touched.get(key, -math.inf) < self._touch_after or not self._breakers["put"].is_healthy:
            return
        self._remember(key)
        await self._attempt("put", lambda: self._store.touch(key), lambda _: "kept")

    def _remember(self, key: bytes) -> None:
        if len(self._touched) >= REMEMBERED:
            self._touched.clear()
        self._touched[key] = self._clock()

    async def _attempt(self, operation: str, call: Callable[[], Awaitable[T]], result: Callable[[T], str]) -> T | None:
        """What the store says, or None when it says nothing in time."""
        breaker = self._breakers[operation]
        if not breaker.admits():
            return None
        start = time.perf_counter()
        value, failure = await self._in_time(call)
        seconds = time.perf_counter() - start
        if failure is not None:
            breaker.failed()
            self._observe(self._name, operation, "error", seconds)
            self._warn(failure)
            return None
        breaker.succeeded()
        assert value is not None
        self._observe(self._name, operation, result(value[0]), seconds)
        return value[0]

    async def _in_time(self, call: Callable[[], Awaitable[T]]) -> tuple[tuple[T] | None, str | None]:
        """The value, or why there is none.

        A call that takes too long is left to end by itself: it may be making the connection that the next one needs.
        """
        task = asyncio.ensure_future(_called(call))
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        await asyncio.wait({task}, timeout=self._budget)
        for _ in range(TURNS):
            if not task.done():
                await asyncio.sleep(0)
        if not task.done():
            return None, "slow"
        error = task.exception()
        if isinstance(error, StoreUnavailable):
            return None, str(error)
        return (task.result(),), None

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # seen: what came too late is nobody's business

    def _warn(self, reason: str) -> None:
        now = self._clock()
        if self._warned is None or now - self._warned >= WARN_EVERY:
            self._warned = now
            _log.warning("checkpoint store does not answer: memory only", store=self._name, reason=reason)


async def _called(call: Callable[[], Awaitable[T]]) -> T:
    return await call()


def _hit_or_miss(found: tuple[int, Checkpoint] | None) -> str:
    return "miss" if found is None else "hit"


def _stored_or_kept(stored: bool) -> str:
    return "stored" if stored else "kept"
