"""A store that is slow, down, full, read-only or damaged never harms a request, and nobody is told too often."""

import asyncio
import os
import sqlite3
import time

import pytest
import structlog
from structlog.testing import capture_logs

from proxy.checkpoints import open_store
from proxy.checkpoints.checkpoint import Codec
from proxy.checkpoints.guard import Guard
from proxy.checkpoints.memory import MemoryStore
from proxy.checkpoints.sqlite import SqliteStore
from proxy.errors import ConfigError, StoreUnavailable

pytestmark = pytest.mark.anyio

KEY = b"k" * 32


@pytest.fixture(autouse=True)
def fresh_loggers():
    structlog.reset_defaults()


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


class Shared(MemoryStore):
    """A shared store that does what it is told: `trouble` is raised, or waited for when it is a number of seconds."""

    def __init__(self):
        super().__init__(ttl=3600, max_bytes=1 << 20)
        self.trouble = {}
        self.calls = []

    async def _meet(self, operation):
        self.calls.append(operation)
        trouble = self.trouble.get(operation)
        if isinstance(trouble, Exception):
            raise trouble
        if trouble:
            await asyncio.sleep(trouble)

    async def get_longest(self, keys):
        await self._meet("get")
        return await super().get_longest(keys)

    async def put_if_absent(self, key, value):
        await self._meet("put")
        return await super().put_if_absent(key, value)

    async def touch(self, key):
        await self._meet("touch")


class Told(list):
    def __call__(self, store, operation, result, seconds):
        assert seconds >= 0
        self.append((store, operation, result))


def guard(shared, told=None, **settings):
    return Guard(shared, MemoryStore(ttl=3600, max_bytes=1 << 20), "redis", told if told is not None else Told(), **settings)


@pytest.mark.parametrize("trouble", [StoreUnavailable("full"), 30.0], ids=["failing", "slow"])
async def test_memory_serves_while_the_store_does_not(trouble, checkpoint):
    shared, told = Shared(), Told()
    shared.trouble = {"get": trouble, "put": trouble}
    store = guard(shared, told)
    start = time.perf_counter()

    assert await store.put_if_absent(KEY, checkpoint("mine")) is True
    assert await store.put_if_absent(KEY, checkpoint("other")) is False
    assert await store.get_longest([KEY]) == (0, checkpoint("mine"))
    assert await store.get_longest([b"x" * 32]) is None

    assert time.perf_counter() - start < 10
    assert told == [("redis", "put", "error"), ("redis", "get", "error")]
    assert store.is_healthy is False


async def test_a_store_that_failed_is_asked_again_only_after_a_pause_that_doubles():
    shared, clock = Shared(), Clock()
    shared.trouble = {"get": StoreUnavailable("unreachable")}
    store = guard(shared, clock=clock)
    asked = []
    for _ in range(700):
        before = len(shared.calls)
        await store.get_longest([KEY])
        if len(shared.calls) > before:
            asked.append(clock.now - 1000.0)
        clock.now += 0.1

    assert [round(at) for at in asked] == [0, 1, 3, 7, 15, 31, 61]


async def test_many_calls_that_fail_at_once_are_one_failure():
    shared, clock = Shared(), Clock()
    shared.trouble = {"get": 30.0}
    store = guard(shared, clock=clock)

    await asyncio.gather(*(store.get_longest([KEY]) for _ in range(50)))
    shared.trouble = {}
    clock.now += 1.1
    await store.get_longest([KEY])

    assert len(shared.calls) == 51
    assert store.is_healthy is True


async def test_it_heals_by_itself(checkpoint):
    shared, clock, told = Shared(), Clock(), Told()
    shared.trouble = {"get": StoreUnavailable("unreachable"), "put": StoreUnavailable("unreachable")}
    store = guard(shared, told, clock=clock)
    await store.put_if_absent(KEY, checkpoint())
    await store.get_longest([KEY, b"x" * 32])
    shared.trouble = {}
    clock.now += 1.5

    await store.get_longest([b"x" * 32])
    await store.put_if_absent(b"x" * 32, checkpoint("later"))

    assert store.is_healthy is True
    assert told[-2:] == [("redis", "get", "miss"), ("redis", "put", "stored")]
    assert await guard(shared).get_longest([b"x" * 32]) == (0, checkpoint("later"))


async def test_a_store_whose_first_connection_takes_longer_than_the_budget_is_used_all_the_same(checkpoint):
    class Connecting(Shared):
        connected = False

        async def get_longest(self, keys):
            if not self.connected:
                await asyncio.sleep(0.1)
                self.connected = True
            return await super().get_longest(keys)

    shared, clock, told = Connecting(), Clock(), Told()
    await shared.put_if_absent(KEY, checkpoint())
    store = guard(shared, told, clock=clock)
    assert await store.get_longest([KEY]) is None
    while not shared.connected:
        await asyncio.sleep(0.01)
    clock.now += 1.1

    assert await store.get_longest([KEY]) == (0, checkpoint())
    assert told == [("redis", "get", "error"), ("redis", "get", "hit")]


async def test_a_defect_of_a_store_is_not_hidden():
    shared = Shared()
    shared.trouble = {"get": ZeroDivisionError()}

    with pytest.raises(ZeroDivisionError):
        await guard(shared).get_longest([KEY])


async def test_closing_ends_what_still_waits():
    shared = Shared()
    shared.trouble = {"get": 3600.0}
    store = guard(shared, budget=0.01)
    await store.get_longest([KEY])

    await store.aclose()

    assert store._under_way == set()


async def test_a_store_that_cannot_be_written_is_still_read(checkpoint):
    shared = Shared()
    await shared.put_if_absent(KEY, checkpoint("of another replica"))
    shared.trouble = {"put": StoreUnavailable("read_only")}
    store = guard(shared)

    await store.put_if_absent(b"x" * 32, checkpoint())

    assert await store.get_longest([KEY]) == (0, checkpoint("of another replica"))


async def test_one_warning_a_minute_says_so_and_shows_no_address():
    shared, clock = Shared(), Clock()
    shared.trouble = {"get": StoreUnavailable("unreachable")}
    store = guard(shared, clock=clock)

    with capture_logs() as logs:
        for _ in range(1300):
            await store.get_longest([KEY])
            clock.now += 0.1

    assert [entry["log_level"] for entry in logs] == ["warning"] * 3
    assert logs[0] == {
        "event": "checkpoint store does not answer: memory only",
        "log_level": "warning",
        "reason": "unreachable",
        "store": "redis",
    }


async def test_what_another_writer_stored_first_is_what_is_used(checkpoint):
    shared = Shared()
    await shared.put_if_absent(KEY, checkpoint("first"))
    store = guard(shared)

    assert await store.put_if_absent(KEY, checkpoint("second")) is False
    shared.trouble = {"get": StoreUnavailable("unreachable")}

    assert await store.get_longest([KEY]) == (0, checkpoint("first"))


async def test_only_what_is_longer_than_the_known_prefix_travels(checkpoint):
    class Counting(Shared):
        async def get_longest(self, keys):
            self.calls.append(len(keys))
            return await super().get_longest(keys)

    shared = Counting()
    store = guard(shared)
    many = [bytes([i]) * 32 for i in range(100)]
    await store.put_if_absent(many[90], checkpoint())

    await store.get_longest(many)

    assert shared.calls[-2:] == [9, "get"]


async def test_a_checkpoint_in_use_is_kept_alive_now_and_then_for_others(checkpoint):
    shared, clock = Shared(), Clock()
    store = guard(shared, ttl=800, clock=clock)
    await store.put_if_absent(KEY, checkpoint())
    for _ in range(100):
        await store.get_longest([KEY])
        clock.now += 3.5

    assert shared.calls.count("touch") == 3


async def test_a_client_that_leaves_while_the_store_is_slow_is_no_failure_of_the_store():
    shared = Shared()
    shared.trouble = {"get": 30.0}
    store = guard(shared, budget=20)
    asking = asyncio.ensure_future(store.get_longest([KEY]))
    await asyncio.sleep(0.01)

    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

    assert store.is_healthy is True


async def test_a_read_only_file_is_memory_only_and_heals(tmp_path, checkpoint):
    path = tmp_path / "store.db"
    first = SqliteStore(path, Codec(), ttl=3600, max_bytes=1 << 24)
    await first.put_if_absent(b"old".ljust(32), checkpoint("old"))
    clock = Clock()
    told = Told()
    store = Guard(first, MemoryStore(ttl=3600, max_bytes=1 << 20), "sqlite", told, budget=30, clock=clock)
    await first._run(lambda connection: connection.execute("PRAGMA query_only = 1").fetchone())

    assert await store.put_if_absent(KEY, checkpoint("new")) is True
    assert told[-1] == ("sqlite", "put", "error")
    assert await store.get_longest([KEY]) == (0, checkpoint("new"))
    clock.now += 2
    # the connection that could not write was closed: the next call opens a new one
    assert await store.put_if_absent(b"x" * 32, checkpoint("healed")) is True
    assert told[-1] == ("sqlite", "put", "stored")
    await store.aclose()


async def test_a_damaged_file_costs_no_request(tmp_path, checkpoint):
    path = tmp_path / "store.db"
    path.write_bytes(os.urandom(50_000))
    store = open_store(f"sqlite://{path}", budget=30)

    with capture_logs() as logs:
        assert await store.put_if_absent(KEY, checkpoint()) is True
        assert await store.get_longest([KEY]) == (0, checkpoint())

    assert [entry["reason"] for entry in logs] == ["corrupt"]
    await store.aclose()


async def test_values_in_a_file_are_sealed_when_a_key_is_set(tmp_path, checkpoint):
    path = tmp_path / "store.db"
    store = open_store(f"sqlite://{path}", encrypt_key="correct horse", budget=30)
    await store.put_if_absent(KEY, checkpoint("the canary sings"))
    await store.aclose()
    with sqlite3.connect(path) as other:
        (value,) = other.execute("SELECT value FROM checkpoints").fetchone()
    other.close()

    assert value[:1] == b"\x02"
    assert Codec("correct horse").unpack(KEY, value) == checkpoint("the canary sings")


async def test_what_was_opened_says_how_it_is(tmp_path, checkpoint):
    memory, file = open_store("memory://"), open_store(f"sqlite://{tmp_path / 'store.db'}", budget=30)
    for store in (memory, file):
        assert (store.is_healthy, store.size) == (True, 0)
        await store.put_if_absent(KEY, checkpoint("x" * 1000))
        assert store.is_healthy is True
        assert 1000 < store.size < 3000
        await store.aclose()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgres://host/db", "takes memory://, sqlite:///PATH or redis://HOST:PORT/DB"),
        ("sqlite://host/store.db", "takes sqlite:///PATH"),
        ("sqlite://", "takes sqlite:///PATH"),
        ("sqlite:///", "takes sqlite:///PATH"),
        ("redis://host:port/0", "store.url"),
        ("nothing", "store.url"),
    ],
)
def test_a_wrong_url_is_said_at_the_start(url, said):
    with pytest.raises(ConfigError, match=said):
        open_store(url)
