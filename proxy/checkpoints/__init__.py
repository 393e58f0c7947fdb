"""What was already compacted, found again: checkpoints by the history that they stand for.

A store is a cache. Losing it costs the time to replay the history, never a request; so whatever goes wrong with it, the
memory of this process goes on alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from proxy.checkpoints.checkpoint import Checkpoint, Codec
from proxy.errors import ConfigError

__all__ = ["Checkpoint", "CheckpointStore", "Observe", "OpenedStore", "ignore", "open_store"]

MEMORY_IN_FRONT = 64 * 1024 * 1024
"""Bytes of the memory in front of a shared store: the conversations of the last minutes; older ones are found in the store."""

Observe = Callable[[str, str, str, float], None]
"""Told of every call: store (its scheme), operation (get, put), result (hit, miss, stored, kept, error), seconds."""


class CheckpointStore(Protocol):
    """Checkpoints by key (see `chain`). Immutable: the first writer wins, also among several processes."""

    async def get_longest(self, keys: Sequence[bytes]) -> tuple[int, Checkpoint] | None:
        """The last of `keys` (shortest prefix first) that has a checkpoint, with its index; None when none has.

        One round trip. Raises StoreUnavailable.
        """
        ...

    async def put_if_absent(self, key: bytes, value: Checkpoint) -> bool:
        """True when this value now stands under the key, False when another one already did. Raises StoreUnavailable."""
        ...

    async def aclose(self) -> None:
        """Lets go of files and connections; harmless twice."""
        ...


class OpenedStore(CheckpointStore, Protocol):
    """What `open_store` gives: a store that raises nothing."""

    @property
    def is_healthy(self) -> bool:
        """False while a shared store does not answer and memory serves alone."""
        ...

    @property
    def size(self) -> int:
        """Bytes that it holds in this process, about."""
        ...


def ignore(store: str, operation: str, result: str, seconds: float) -> None:
    """An `Observe` that nobody listens to."""


def open_store(
    url: str,
    *,
    ttl: float = 86_400,
    max_bytes: int = 256 * 1024 * 1024,
    encrypt_key: str | None = None,
    observe: Observe = ignore,
    budget: float = 0.05,
) -> OpenedStore:
    """The store at `memory://`, `sqlite:///PATH` or `redis://HOST:PORT/DB` (also `rediss://`, `unix://PATH`).

    Nothing is opened or contacted before the first call, and no call raises or takes longer than `budget` (seconds).
    ttl: seconds without use after which a checkpoint goes. max_bytes: of the memory, and of the SQLite file; Redis has its
    own `maxmemory`. encrypt_key: seals the values in a file or a Redis. Raises ConfigError.
    """
    from proxy.checkpoints.guard import Guard, Observed
    from proxy.checkpoints.memory import MemoryStore

    parts = urlsplit(url)
    memory = MemoryStore(ttl=ttl, max_bytes=min(max_bytes, MEMORY_IN_FRONT))
    match parts.scheme:
        case "memory":
            return Observed(MemoryStore(ttl=ttl, max_bytes=max_bytes), "memory", observe)
        case "sqlite":
            from proxy.checkpoints.sqlite import SqliteStore

            path = Path(unquote(parts.path[1:] if parts.path.startswith("//") else parts.path))
            if parts.netloc or path.name == "":
                raise ConfigError(f"store.url: got {url!r}, takes sqlite:///PATH (three slashes, then the path)")
            file = SqliteStore(path, Codec(encrypt_key), ttl=ttl, max_bytes=max_bytes)
            return Guard(file, memory, "sqlite", observe, ttl=ttl, budget=budget)
        case "redis" | "rediss" | "unix":
            from proxy.checkpoints.redis import RedisStore

            return Guard(RedisStore(url, Codec(encrypt_key), ttl=ttl), memory, "redis", observe, ttl=ttl, budget=budget)
        case _:
            raise ConfigError(f"store.url: got {parts.scheme!r}, takes memory://, sqlite:///PATH or redis://HOST:PORT/DB")
