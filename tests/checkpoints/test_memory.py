"""The memory of one process: bounded, and fair to what is used."""

import pytest

from proxy.checkpoints.memory import MemoryStore

pytestmark = pytest.mark.anyio


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


async def test_it_stays_below_its_bound_and_drops_what_was_used_longest_ago(checkpoint):
    store = MemoryStore(ttl=3600, max_bytes=10_000)
    text = "x" * 2_000
    for name in (b"a", b"b", b"c"):
        await store.put_if_absent(name, checkpoint(text))
    await store.get_longest([b"a"])

    await store.put_if_absent(b"d", checkpoint(text))

    assert store.size <= 10_000
    assert await store.get_longest([b"b"]) is None
    assert await store.get_longest([b"a"]) is not None


async def test_what_is_larger_than_everything_is_not_kept(checkpoint):
    store = MemoryStore(ttl=3600, max_bytes=1_000)

    assert await store.put_if_absent(b"a", checkpoint("x" * 5_000)) is True
    assert await store.get_longest([b"a"]) is None
    assert store.size == 0


async def test_what_nobody_uses_goes_after_its_time(checkpoint):
    clock = Clock()
    store = MemoryStore(ttl=100, max_bytes=10_000, clock=clock)
    await store.put_if_absent(b"a", checkpoint())
    clock.now += 90
    assert await store.get_longest([b"a"]) is not None

    clock.now += 90
    assert await store.get_longest([b"a"]) is not None
    clock.now += 101
    assert await store.get_longest([b"a"]) is None
    assert store.size == 0
    assert await store.put_if_absent(b"a", checkpoint("new")) is True
