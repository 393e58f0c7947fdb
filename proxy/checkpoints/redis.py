"""Checkpoints in a Redis or Valkey, shared by any number of proxies."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Sequence
from typing import Any

from proxy.checkpoints.checkpoint import Checkpoint, Codec
from proxy.errors import ConfigError, StoreUnavailable

PREFIX = "compaction:1:"
"""Before every key, so that one Redis can serve others too; the number is the layout of keys."""

PATIENCE = 2.0
"""Seconds after which a connection is given up, should nobody have canceled the call before."""


class RedisStore:
    """One command to look up, one to write. Connections are made at the first call and again whenever they are lost.

    Raises ConfigError where the package `redis` is missing or the URL is no Redis URL.
    """

    def __init__(self, url: str, codec: Codec, *, ttl: float) -> None:
        try:
            from redis.asyncio import Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
            from redis.exceptions import RedisError
        except ImportError as error:
            raise ConfigError("store.url: redis:// needs the package `redis`: install compaction-proxy[redis]") from error
        self._codec, self._ttl = codec, max(1, round(ttl))
        self._failures = (RedisError, OSError)
        try:
            # no retries: the guard decides when to ask again, and memory serves meanwhile
            self._redis: Any = Redis.from_url(
                url, socket_timeout=PATIENCE, socket_connect_timeout=PATIENCE, retry=Retry(NoBackoff(), 0), decode_responses=False
            )
        except ValueError as error:
            raise ConfigError(f"store.url: {error}") from error

    async def get_longest(self, keys: Sequence[bytes]) -> tuple[int, Checkpoint] | None:
        if not keys:
            return None
        values = await self._ask("MGET", *map(_name, keys))
        useless: list[str] = []
        found = None
        for index in range(len(keys) - 1, -1, -1):
            if values[index] is None:
                continue
            checkpoint = self._codec.unpack(keys[index], values[index])
            if checkpoint is not None:
                found = (index, checkpoint)
                break
            useless.append(_name(keys[index]))
        if useless:
            await self._ask("DEL", *useless)
        return found

    async def put_if_absent(self, key: bytes, value: Checkpoint) -> bool:
        return await self._ask("SET", _name(key), self._codec.pack(key, value), "NX", "EX", self._ttl) is not None

    async def touch(self, key: bytes) -> None:
        """Says that a checkpoint is in use, although it was found elsewhere."""
        await self._ask("EXPIRE", _name(key), self._ttl)

    async def aclose(self) -> None:
        try:
            await self._redis.aclose()
        except self._failures:
            return

    async def _ask(self, *command: Any) -> Any:
        try:
            return await self._redis.execute_command(*command)
        except self._failures as error:
            raise StoreUnavailable(_reason(error)) from error


def _name(key: bytes) -> str:
    return PREFIX + urlsafe_b64encode(key).decode().rstrip("=")


def _reason(error: Exception) -> str:
    """The error in a word."""
    text = str(error).upper()
    if text.startswith(("OOM", "MISCONF")) or "MAXMEMORY" in text or "USED MEMORY" in text:
        return "full"
    if "READONLY" in text or "READ ONLY" in text:
        return "read_only"
    return "unreachable"
