"""What every store promises, whatever is behind it."""

import asyncio
import zlib

import pytest

from proxy.checkpoints import open_store
from proxy.checkpoints.checkpoint import Codec
from proxy.checkpoints.memory import MemoryStore
from proxy.checkpoints.redis import RedisStore
from proxy.checkpoints.sqlite import SqliteStore

pytestmark = pytest.mark.anyio

KINDS = ("memory", "sqlite", "redis", "sealed sqlite", "opened memory", "opened sqlite", "opened redis")
SHARED = ("sqlite", "redis", "sealed sqlite", "opened sqlite", "opened redis")


def key(name: str) -> bytes:
    return name.encode().ljust(32, b".")


@pytest.fixture
async def make(request, tmp_path):
    """Opens the store of a kind; called twice, it opens a second one on the same place."""
    opened = []

    def build(kind: str, **settings):
        settings = {"ttl": 3600, **settings}
        url = request.getfixturevalue("redis_url") if kind.endswith("redis") else ""
        path = tmp_path / "store.db"
        match kind:
            case "memory":
                store = MemoryStore(max_bytes=1 << 20, **settings)
            case "sqlite":
                store = SqliteStore(path, Codec(), max_bytes=1 << 24, **settings)
            case "sealed sqlite":
                store = SqliteStore(path, Codec("correct horse"), max_bytes=1 << 24, **settings)
            case "redis":
                store = RedisStore(url, Codec(), **settings)
            case "opened memory":
                store = open_store("memory://", **settings)
            case "opened sqlite":
                store = open_store(f"sqlite://{path}", budget=30, **settings)
            case "opened redis":
                store = open_store(url, budget=30, **settings)
        opened.append(store)
        return store

    yield build
    for store in opened:
        await store.aclose()


@pytest.fixture
def name(request):
    """Keys of one test only: the Redis is shared by them all."""
    return lambda text: key(f"{zlib.crc32(request.node.nodeid.encode())}-{text}")


@pytest.mark.parametrize("kind", KINDS)
async def test_the_longest_known_prefix_is_found(kind, make, name, checkpoint):
    store = make(kind)
    await store.put_if_absent(name("short"), checkpoint("short"))
    await store.put_if_absent(name("long"), checkpoint("long"))

    found = await store.get_longest([name("none"), name("short"), name("long"), name("longest")])

    assert found == (2, checkpoint("long"))


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_not_there_is_none(kind, make, name):
    store = make(kind)

    assert await store.get_longest([name("a"), name("b")]) is None
    assert await store.get_longest([]) is None


@pytest.mark.parametrize("kind", KINDS)
async def test_every_field_comes_back(kind, make, name, checkpoint):
    store = make(kind)
    value = checkpoint(
        "é \u2028",
        cut=31,
        seen=33,
        ledger=b"\x00\xff",
        generation=5,
        parent=name("parent"),
        tokens_before=80_000,
        tokens_after=45_000,
        layers=("snip", "microcompact"),
        calibration=(1.25, 340.0),
    )

    await store.put_if_absent(name("full"), value)

    assert await store.get_longest([name("full")]) == (0, value)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_first_writer_wins(kind, make, name, checkpoint):
    store = make(kind)

    assert await store.put_if_absent(name("k"), checkpoint("first")) is True
    assert await store.put_if_absent(name("k"), checkpoint("second")) is False
    assert await store.get_longest([name("k")]) == (0, checkpoint("first"))


@pytest.mark.parametrize("kind", KINDS)
async def test_of_many_writers_at_once_one_wins(kind, make, name, checkpoint):
    store = make(kind)

    won = await asyncio.gather(*(store.put_if_absent(name("k"), checkpoint(f"writer {i}")) for i in range(12)))

    assert sum(won) == 1
    assert await store.get_longest([name("k")]) == (0, checkpoint(f"writer {won.index(True)}"))


@pytest.mark.parametrize("kind", SHARED)
async def test_two_processes_worth_of_stores_agree_on_the_winner(kind, make, name, checkpoint):
    one, other = make(kind), make(kind)

    won = await asyncio.gather(
        one.put_if_absent(name("k"), checkpoint("one")), other.put_if_absent(name("k"), checkpoint("other"))
    )

    assert sorted(won) == [False, True]
    winner = checkpoint("one") if won[0] else checkpoint("other")
    assert await one.get_longest([name("k")]) == (0, winner)
    assert await other.get_longest([name("k")]) == (0, winner)


@pytest.mark.parametrize("kind", SHARED)
async def test_a_further_prefix_written_by_somebody_else_is_found(kind, make, name, checkpoint):
    one, other = make(kind), make(kind)
    await one.put_if_absent(name("a"), checkpoint("a"))
    await other.get_longest([name("a")])
    await one.put_if_absent(name("b"), checkpoint("b"))

    assert await other.get_longest([name("a"), name("b")]) == (1, checkpoint("b"))


@pytest.mark.parametrize("kind", SHARED)
async def test_a_restart_finds_what_was_stored(kind, make, name, checkpoint):
    before = make(kind)
    await before.put_if_absent(name("k"), checkpoint("kept"))
    await before.aclose()

    assert await make(kind).get_longest([name("k")]) == (0, checkpoint("kept"))


@pytest.mark.parametrize("kind", KINDS)
async def test_thousands_of_prefixes_are_one_question(kind, make, name, checkpoint):
    store = make(kind)
    many = [name(str(i)) for i in range(3000)]
    await store.put_if_absent(many[1234], checkpoint("middle"))

    assert await store.get_longest(many) == (1234, checkpoint("middle"))


@pytest.mark.parametrize("kind", KINDS)
async def test_closing_twice_is_harmless(kind, make):
    store = make(kind)
    await store.get_longest([key("x")])

    await store.aclose()
    await store.aclose()
