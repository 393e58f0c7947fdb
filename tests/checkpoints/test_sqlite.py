"""One file: private, bounded, and whole after whatever happens to it."""

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys

import pytest

from proxy.checkpoints.checkpoint import Codec
from proxy.checkpoints.sqlite import SqliteStore
from proxy.errors import StoreUnavailable

pytestmark = pytest.mark.anyio

KEY = b"k" * 32


@pytest.fixture
async def open_file(tmp_path):
    """Opens a store in the test's folder; closes them all at the end."""
    stores = []

    def build(path=None, **settings):
        store = SqliteStore(path or tmp_path / "store.db", Codec(), **{"ttl": 3600, "max_bytes": 1 << 24, **settings})
        stores.append(store)
        return store

    yield build
    for store in stores:
        await store.aclose()


async def read_all(store):
    for i in range(40):
        await store.get_longest([bytes([i]) * 32])


async def fill(store, checkpoint):
    for i in range(100):
        await store.put_if_absent(bytes([i]) * 32, checkpoint(os.urandom(20_000).hex()))


async def test_only_its_owner_can_read_it(open_file, tmp_path, checkpoint):
    before = os.umask(0)
    try:
        await open_file(tmp_path / "state" / "store.db").put_if_absent(KEY, checkpoint())
    finally:
        os.umask(before)

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "state").iterdir()}
    assert modes == {"store.db": 0o600, "store.db-wal": 0o600, "store.db-shm": 0o600}
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


async def test_a_file_with_wider_rights_is_narrowed(open_file, tmp_path, checkpoint):
    (tmp_path / "store.db").touch(mode=0o644)

    await open_file().put_if_absent(KEY, checkpoint())

    assert stat.S_IMODE((tmp_path / "store.db").stat().st_mode) == 0o600


async def test_what_nobody_uses_goes_after_its_time(open_file, checkpoint):
    now = [1_000_000.0]
    store = open_file(ttl=100, clock=lambda: now[0])
    await store.put_if_absent(KEY, checkpoint("old"))
    now[0] += 90
    assert await store.get_longest([KEY]) == (0, checkpoint("old"))
    now[0] += 90
    assert await store.get_longest([KEY]) == (0, checkpoint("old"))

    now[0] += 101

    assert await store.get_longest([KEY]) is None
    assert await store.put_if_absent(KEY, checkpoint("new")) is True
    assert await store.get_longest([KEY]) == (0, checkpoint("new"))


async def test_it_stays_below_its_size_and_drops_what_was_used_longest_ago(open_file, tmp_path, checkpoint):
    now = [1_000_000.0]
    store = open_file(max_bytes=600_000, clock=lambda: now[0])
    keys = [bytes([i]) * 32 for i in range(60)]
    for key in keys:
        now[0] += 1
        await store.put_if_absent(key, checkpoint(os.urandom(20_000).hex()))

    assert (tmp_path / "store.db").stat().st_size <= 700_000
    assert await store.get_longest(keys[:1]) is None
    assert await store.get_longest(keys[-1:]) is not None


async def test_a_value_that_is_torn_is_not_used_and_makes_room_for_a_whole_one(open_file, tmp_path, checkpoint):
    store = open_file()
    await store.put_if_absent(b"s" * 32, checkpoint("shorter"))
    await store.put_if_absent(KEY, checkpoint("whole"))
    with sqlite3.connect(tmp_path / "store.db") as other:
        other.execute("UPDATE checkpoints SET value = substr(value, 1, 40) WHERE key = ?", (KEY,))
    other.close()

    assert await store.get_longest([b"s" * 32, KEY]) == (0, checkpoint("shorter"))
    assert await store.put_if_absent(KEY, checkpoint("again")) is True


async def test_a_damaged_file_is_moved_aside_and_a_new_one_begun(open_file, tmp_path, checkpoint):
    path = tmp_path / "store.db"
    path.write_bytes(b"this is no database at all, but it may be dear to somebody " * 100)
    store = open_file()

    with pytest.raises(StoreUnavailable, match="corrupt"):
        await store.get_longest([KEY])

    assert (tmp_path / "store.db.corrupt").read_bytes().startswith(b"this is no database")
    assert await store.put_if_absent(KEY, checkpoint()) is True
    assert await store.get_longest([KEY]) == (0, checkpoint())


async def test_a_file_that_is_damaged_while_open_heals(open_file, tmp_path, checkpoint):
    store = open_file()
    for i in range(40):
        await store.put_if_absent(bytes([i]) * 32, checkpoint(os.urandom(8_000).hex()))
    await store.aclose()
    path = tmp_path / "store.db"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    again = open_file()

    with pytest.raises(StoreUnavailable, match="corrupt"):
        await read_all(again)

    assert await again.put_if_absent(KEY, checkpoint()) is True


async def test_a_database_of_somebody_else_is_left_alone(open_file, tmp_path, checkpoint):
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as theirs:
        theirs.execute("CREATE TABLE letters (text)")
        theirs.execute("INSERT INTO letters VALUES ('dear')")
    theirs.close()
    content = path.read_bytes()

    with pytest.raises(StoreUnavailable, match="not_a_checkpoint_store"):
        await open_file(path).put_if_absent(KEY, checkpoint())

    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["theirs.db"]


async def test_a_file_that_is_deleted_while_open_is_begun_anew(open_file, tmp_path, checkpoint):
    store = open_file()
    await store.put_if_absent(KEY, checkpoint())
    for path in tmp_path.iterdir():
        path.unlink()

    assert await store.get_longest([KEY]) is None
    assert await store.put_if_absent(KEY, checkpoint()) is True
    assert (tmp_path / "store.db").exists()


async def test_many_workers_that_start_at_once_make_one_store(open_file, tmp_path, checkpoint):
    for number in range(15):
        path = tmp_path / f"{number}.db"
        stores = [open_file(path) for _ in range(4)]

        won = await asyncio.gather(*(store.put_if_absent(KEY, checkpoint(f"{i}")) for i, store in enumerate(stores)))

        assert sorted(won) == [False, False, False, True]
        assert not path.with_suffix(".db.corrupt").exists()


async def test_a_full_disk_is_said_in_a_word(open_file, tmp_path, checkpoint):
    store = open_file()
    await store.put_if_absent(KEY, checkpoint())
    await store._run(lambda connection: connection.execute("PRAGMA max_page_count = 1").fetchone())

    with pytest.raises(StoreUnavailable, match="full"):
        await fill(store, checkpoint)


async def test_a_file_that_another_process_has_locked_is_said_in_a_word(open_file, tmp_path, checkpoint):
    store = open_file()
    await store.put_if_absent(KEY, checkpoint())
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")

    with pytest.raises(StoreUnavailable, match="locked"):
        await store.put_if_absent(b"other".ljust(32), checkpoint())

    other.close()
    assert await store.put_if_absent(b"other".ljust(32), checkpoint()) is True


async def test_a_folder_that_cannot_be_made_is_said_in_a_word(open_file, tmp_path, checkpoint):
    (tmp_path / "file").touch()

    with pytest.raises(StoreUnavailable, match="unreachable"):
        await open_file(tmp_path / "file" / "store.db").put_if_absent(KEY, checkpoint())


async def test_the_event_loop_goes_on_while_the_disk_is_busy(open_file, tmp_path, checkpoint):
    store = open_file()
    await store.put_if_absent(KEY, checkpoint())
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    turns = 0

    waiting = asyncio.ensure_future(store.put_if_absent(b"other".ljust(32), checkpoint()))
    while not waiting.done():
        turns += 1
        await asyncio.sleep(0)

    other.close()
    assert isinstance(waiting.exception(), StoreUnavailable)
    assert turns > 20


WRITERS = """
import asyncio, os, random, signal, sqlite3, sys, time
from pathlib import Path
from proxy.checkpoints.checkpoint import Checkpoint, Codec
from proxy.checkpoints.sqlite import SqliteStore

path, rounds = Path(sys.argv[1]), int(sys.argv[2])
rng = random.Random(7)

def value(number):
    return Checkpoint(cut=number, replacement=(b'"%d"' % number * 4000,), ledger=b"%d" % number * 500)

async def write(store, first):
    number = first
    while True:
        await store.put_if_absent(number.to_bytes(32, "big"), value(number))
        number += 1

async def check(after):
    store, codec, good = SqliteStore(path, Codec(), ttl=3600, max_bytes=4_000_000), Codec(), 0
    await store.get_longest([b"open" * 8])
    await store.aclose()
    connection = sqlite3.connect(path)
    if after % 20 == 0:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    since = 0 if after % 20 == 0 else after * 1_000_000
    for key, packed in connection.execute("SELECT key, value FROM checkpoints WHERE key >= ?", (since.to_bytes(32, "big"),)):
        found = codec.unpack(bytes(key), packed)
        assert found == value(int.from_bytes(key, "big")), "a torn value"
        good += 1
    connection.close()
    return good

seen = 0
for number in range(rounds):
    child = os.fork()
    if child == 0:
        asyncio.run(write(SqliteStore(path, Codec(), ttl=3600, max_bytes=4_000_000), number * 1_000_000))
    time.sleep(rng.uniform(0.003, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    seen = max(seen, asyncio.run(check(number)))
print(rounds, "kills,", seen, "values at most")
assert seen > 20
"""


def test_two_hundred_kills_during_writes_leave_a_store_that_opens_and_no_torn_value(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WRITERS, str(tmp_path / "store.db"), "200"], capture_output=True, text=True, check=False
    )

    assert done.stderr == ""
    assert done.stdout.startswith("200 kills")
    assert not (tmp_path / "store.db.corrupt").exists()
