"""Checkpoints in one file, shared by the workers of one machine and kept across restarts."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from proxy.checkpoints.checkpoint import Checkpoint, Codec
from proxy.errors import StoreUnavailable

T = TypeVar("T")

APPLICATION = 0x43504B31
"""SQLite's application_id of our files: a database that has another one is somebody else's and is left alone."""

BUSY_MS = 40
"""How long to wait for another worker's write: less than the budget of a request."""

OPEN_MS = 2_000
"""The same while opening: several workers start at once, and one of them makes the file."""

SWEEP = 60.0
"""Seconds between two looks for what has expired."""

VARIABLES = 500
"""Keys in one statement: old builds of SQLite take 999."""

SCHEMA = (
    "CREATE TABLE checkpoints (key BLOB NOT NULL UNIQUE, value BLOB NOT NULL, expires INTEGER NOT NULL)",
    "CREATE INDEX checkpoints_expire ON checkpoints (expires)",
)


class SqliteStore:
    """One connection in one thread of its own, so that the disk never holds up the event loop.

    WAL keeps every committed value through a kill. The file is readable by its owner only. A file that is damaged is moved
    aside (`PATH.corrupt`) and a new one begun.
    """

    def __init__(self, path: Path, codec: Codec, *, ttl: float, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._path, self._codec, self._ttl, self._limit, self._clock = path, codec, ttl, max_bytes, clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._swept = 0.0

    async def get_longest(self, keys: Sequence[bytes]) -> tuple[int, Checkpoint] | None:
        return await self._run(lambda connection: self._longest(connection, list(keys)))

    async def put_if_absent(self, key: bytes, value: Checkpoint) -> bool:
        return await self._run(lambda connection: self._add(connection, key, value))

    async def touch(self, key: bytes) -> None:
        """Says that a checkpoint is in use, although it was found elsewhere."""
        await self._run(lambda connection: self._touch(connection, key))

    async def aclose(self) -> None:
        with suppress(RuntimeError):  # closed before
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._do, work)
        except RuntimeError as error:
            raise StoreUnavailable("closed") from error

    def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return work(self._open())
        except sqlite3.Error as error:
            self._close()
            raise StoreUnavailable(self._reason(error)) from error
        except OSError as error:
            self._close()
            raise StoreUnavailable("unreachable") from error

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and self._file == _identity(self._path):
            return self._connection
        self._close()
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # made here and not by SQLite, so that it never exists with wider rights; -wal and -shm take after it
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self._path, timeout=OPEN_MS / 1000, isolation_level=None)
        try:
            _prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._path.chmod(0o600)
        self._connection, self._file = connection, _identity(self._path)
        return connection

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def _reason(self, error: sqlite3.Error) -> str:
        """The error in a word; a damaged file is out of the way afterwards."""
        match getattr(error, "sqlite_errorcode", 0) & 0xFF:
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                self._move_aside()
                return "corrupt"
            case sqlite3.SQLITE_FULL:
                return "full"
            case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
                return "read_only"
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return "locked"
            case _:
                return str(error) if isinstance(error, _Foreign) else "unreachable"

    def _move_aside(self) -> None:
        # kept, because what is no database may be a file that somebody else needs
        with suppress(OSError):
            os.replace(self._path, f"{self._path}.corrupt")
        for suffix in ("-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)

    def _longest(self, connection: sqlite3.Connection, keys: list[bytes]) -> tuple[int, Checkpoint] | None:
        for index in sorted(self._present(connection, keys), reverse=True):
            row = connection.execute("SELECT value FROM checkpoints WHERE key = ?", (keys[index],)).fetchone()
            found = self._codec.unpack(keys[index], row[0]) if row is not None and isinstance(row[0], bytes) else None
            if found is not None:
                self._touch(connection, keys[index])
                return index, found
            connection.execute("DELETE FROM checkpoints WHERE key = ?", (keys[index],))
        return None

    def _present(self, connection: sqlite3.Connection, keys: list[bytes]) -> list[int]:
        now, places = int(self._clock()), {key: index for index, key in enumerate(keys)}
        found: list[int] = []
        for start in range(0, len(keys), VARIABLES):
            some = keys[start : start + VARIABLES]
            marks = ",".join("?" * len(some))
            rows = connection.execute(f"SELECT key FROM checkpoints WHERE expires > ? AND key IN ({marks})", (now, *some))
            found.extend(places[bytes(row[0])] for row in rows)
        return found

    def _add(self, connection: sqlite3.Connection, key: bytes, value: Checkpoint) -> bool:
        packed, now = self._codec.pack(key, value), int(self._clock())
        cursor = connection.execute(
            "INSERT INTO checkpoints (key, value, expires) VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE "
            "SET value = excluded.value, expires = excluded.expires WHERE checkpoints.expires <= ?",
            (key, packed, now + int(self._ttl), now),
        )
        added = cursor.rowcount > 0
        self._make_room(connection)
        return added

    def _touch(self, connection: sqlite3.Connection, key: bytes) -> None:
        expires = int(self._clock() + self._ttl)
        # most reads write nothing: an eighth of the time to live is fresh enough
        connection.execute(
            "UPDATE checkpoints SET expires = ? WHERE key = ? AND expires < ?", (expires, key, expires - int(self._ttl / 8))
        )

    def _make_room(self, connection: sqlite3.Connection) -> None:
        now = self._clock()
        if abs(now - self._swept) > SWEEP:
            self._swept = now
            connection.execute("DELETE FROM checkpoints WHERE expires <= ?", (int(now),))
        used, count = _used(connection), _count(connection)
        while used > self._limit and count > 0:
            # `expires` is the last use plus a constant: its order is the order of use
            connection.execute(
                "DELETE FROM checkpoints WHERE rowid IN (SELECT rowid FROM checkpoints ORDER BY expires, rowid LIMIT ?)",
                (max(1, count // 10),),
            )
            used, count = _used(connection), _count(connection)


class _Foreign(sqlite3.Error):
    """A database of somebody else."""


def _prepare(connection: sqlite3.Connection) -> None:
    _switch_to_wal(connection)
    connection.execute("PRAGMA synchronous = NORMAL")  # a power cut may lose the newest values, a kill loses none
    connection.execute("BEGIN IMMEDIATE")
    if _application(connection) != APPLICATION:
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        for statement in SCHEMA:
            connection.execute(statement)
    connection.execute("COMMIT")
    connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    until = time.monotonic() + OPEN_MS / 1000
    while True:
        if _application(connection) not in (0, APPLICATION):
            raise _Foreign("not_a_checkpoint_store")
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            # for this one statement SQLite does not wait for others by itself
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.01)


def _application(connection: sqlite3.Connection) -> int:
    """Whose database it is: APPLICATION ours, 0 nobody's yet, any other somebody's."""
    # in this order: whoever made the tables a moment ago has set the id with them
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    return int(application) or (-1 if tables else 0)


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file the path names now: the one that we opened may have been deleted or replaced."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _used(connection: sqlite3.Connection) -> int:
    (pages,), (free,), (size,) = (
        connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def _count(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT count(*) FROM checkpoints").fetchone()[0])
