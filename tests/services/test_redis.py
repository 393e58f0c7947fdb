"""A real Redis, stopped, paused, flushed, full and read-only under load: no request fails and nothing is mixed up."""

import asyncio
import signal
import time

import pytest
import structlog

from proxy.checkpoints import Checkpoint, open_store
from proxy.checkpoints.checkpoint import Codec
from proxy.checkpoints.guard import Guard
from proxy.checkpoints.memory import MemoryStore
from proxy.checkpoints.redis import RedisStore
from proxy.errors import StoreUnavailable

pytestmark = [pytest.mark.anyio, pytest.mark.service]


@pytest.fixture(autouse=True)
def fresh_loggers():
    structlog.reset_defaults()


def key(number):
    return number.to_bytes(32, "big")


def value(number):
    return Checkpoint(cut=number + 1, replacement=(b'{"role":"user","content":"%d"}' % number,))


class Load:
    """Conversations that go on all the while: each stores its own checkpoint and must always get it back."""

    def __init__(self, store, count=20):
        self.store, self.count = store, count
        self.answered = 0
        self.wrong = []
        self.slowest = 0.0
        self.going = True

    async def talk(self, number):
        while self.going:
            start = time.perf_counter()
            found = await self.store.get_longest([key(number), key(number + 10_000)])
            if found is None:
                await self.store.put_if_absent(key(number), value(number))
            elif found != (0, value(number)):
                self.wrong.append((number, found))
            self.slowest = max(self.slowest, time.perf_counter() - start)
            self.answered += 1
            await asyncio.sleep(0.01)

    async def __aenter__(self):
        self.tasks = [asyncio.ensure_future(self.talk(number)) for number in range(self.count)]
        await self.some(100)
        return self

    async def some(self, count):
        """Goes on until so many more requests were answered."""
        goal = self.answered + count
        while self.answered < goal:
            for task in self.tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)

    async def __aexit__(self, *_):
        self.going = False
        await asyncio.gather(*self.tasks)
        await self.store.aclose()


def told():
    results = []
    return results, lambda store, operation, result, seconds: results.append(f"{operation} {result}")


async def test_a_redis_that_is_stopped_and_started_again_costs_no_request(redis):
    results, observe = told()
    async with Load(open_store(redis.url, observe=observe)) as load:
        redis.stop()
        await load.some(600)
        assert "get error" in results
        redis.start()
        before = len(results)
        while "get miss" not in results[before:] and "get hit" not in results[before:]:
            await load.some(50)

    assert load.wrong == []


async def test_a_redis_that_is_paused_costs_its_budget_once_in_a_while_and_mixes_up_no_answers(redis):
    results, observe = told()
    async with Load(open_store(redis.url, observe=observe)) as load:
        redis.signal(signal.SIGSTOP)
        await load.some(600)
        errors = results.count("get error") + results.count("put error")
        redis.signal(signal.SIGCONT)
        before = len(results)
        while "get miss" not in results[before:] and "get hit" not in results[before:]:
            await load.some(50)
        await load.some(200)

    assert load.wrong == []
    # every request that was under way may have failed, and then one at the end of each pause
    assert 1 <= errors <= 60


async def test_answers_that_come_after_their_caller_left_reach_nobody_else(redis):
    store = RedisStore(redis.url, Codec(), ttl=60)
    for number in range(50):
        await store.put_if_absent(key(number), value(number))
    redis.signal(signal.SIGSTOP)
    asking = [asyncio.ensure_future(store.get_longest([key(number)])) for number in range(25)]
    await asyncio.sleep(0.05)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    redis.signal(signal.SIGCONT)

    found = await asyncio.gather(*(store.get_longest([key(number)]) for number in range(25, 50)))

    assert found == [(0, value(number)) for number in range(25, 50)]
    await store.aclose()


async def test_a_redis_that_is_flushed_costs_no_request_and_is_filled_again(redis):
    async with Load(open_store(redis.url, budget=30)) as load:
        store = RedisStore(redis.url, Codec(), ttl=60)
        await store._ask("FLUSHALL")
        await load.some(200)
        # what this process remembers still stands; what is new is stored for all
        await load.store.put_if_absent(key(77), value(77))
        assert await store.get_longest([key(77)]) == (0, value(77))
        await store.aclose()

    assert load.wrong == []


async def test_a_redis_that_is_full_is_read_and_memory_takes_the_rest(redis):
    writer = RedisStore(redis.url, Codec(), ttl=60)
    await writer.put_if_absent(key(1), value(1))
    await writer._ask("CONFIG", "SET", "maxmemory", "1")

    with pytest.raises(StoreUnavailable, match="full"):
        await writer.put_if_absent(key(2), value(2))

    store = open_store(redis.url, budget=30)
    assert await store.put_if_absent(key(2), value(2)) is True
    assert await store.get_longest([key(1)]) == (0, value(1))
    assert await store.get_longest([key(2)]) == (0, value(2))
    await store.aclose()
    await writer.aclose()


async def test_a_read_only_replica_is_read_and_memory_takes_the_rest(redis):
    writer = RedisStore(redis.url, Codec(), ttl=60)
    await writer.put_if_absent(key(1), value(1))
    await writer._ask("REPLICAOF", "127.0.0.1", str(redis.port))

    with pytest.raises(StoreUnavailable, match="read_only"):
        await writer.put_if_absent(key(2), value(2))
    await writer._ask("REPLICAOF", "NO", "ONE")
    await writer.aclose()


async def test_a_value_that_is_not_ours_is_removed_and_a_whole_one_takes_its_place(redis):
    store = RedisStore(redis.url, Codec(), ttl=60)
    await store.put_if_absent(key(1), value(1))
    names = await store._ask("KEYS", "*")
    await store._ask("SET", names[0], b"\x01torn")
    guarded = Guard(store, MemoryStore(ttl=60, max_bytes=1 << 20), "redis", lambda *_: None, budget=30)

    assert await guarded.put_if_absent(key(1), value(1)) is True
    assert await store.get_longest([key(1)]) == (0, value(1))
    await guarded.aclose()


async def test_a_key_that_holds_another_type_costs_no_request(redis):
    store = RedisStore(redis.url, Codec(), ttl=60)
    await store.put_if_absent(key(1), value(1))
    names = await store._ask("KEYS", "*")
    await store._ask("DEL", names[0])
    await store._ask("LPUSH", names[0], "somebody else's")

    assert await store.get_longest([key(1)]) is None
    assert await store.put_if_absent(key(1), value(1)) is False
    await store.aclose()


async def test_one_lookup_is_one_command_and_what_is_unused_expires(redis):
    store = RedisStore(redis.url, Codec(), ttl=1)
    await store.put_if_absent(key(1), value(1))
    before = (await store._ask("INFO", "commandstats")).copy()
    await store.get_longest([key(number) for number in range(2000)])
    after = await store._ask("INFO", "commandstats")

    assert after["cmdstat_mget"]["calls"] - before.get("cmdstat_mget", {"calls": 0})["calls"] == 1
    assert {name for name in after if after[name] != before.get(name)} == {"cmdstat_mget", "cmdstat_info"}
    while await store.get_longest([key(1)]) is not None:
        await asyncio.sleep(0.1)
    await store.aclose()
