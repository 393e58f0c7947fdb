"""What a history became: the frozen replacement of its beginning, and the bytes that carry it to a store and back."""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b, scrypt

import msgspec
import zstandard

from proxy.errors import ConfigError

PLAIN, SEALED = b"\x01", b"\x02"
"""First byte of a stored value: its layout. Values of any other layout are not used."""

CHECKSUM = 16
NONCE = 12
MAX_SIZE = 256 * 1024 * 1024
"""Bytes that a value may unpack to: four bodies of the default size limit. A store is not trusted with our memory."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Immutable: what an event made of the first `cut` messages after the preamble.

    replacement: the JSON of the messages that stand in their place, exactly as they were forwarded.
    seen: how many messages after the preamble the event knew. generation: how many events led here; parent: the key of
    the one before. tokens_before, tokens_after: of the whole request at that event, tools and preamble included.
    calibration: (slope, offset) of the ruler that measured, so that a later measure agrees with it. ledger: opaque here.
    origin: the key of the history that the event decided on; empty where that could not be cut. edition: above 0 where it stands
    in place of another one with the same cut, whose event had left nothing behind it.
    """

    cut: int
    replacement: tuple[bytes, ...]
    seen: int = 0
    ledger: bytes = b""
    generation: int = 1
    parent: bytes | None = None
    tokens_before: int = 0
    tokens_after: int = 0
    layers: tuple[str, ...] = ()
    model: str = ""
    calibration: tuple[float, float] = (1.0, 0.0)
    origin: bytes = b""
    edition: int = 0

    @property
    def size(self) -> int:
        """Bytes that it takes in memory, about."""
        return sum(map(len, self.replacement)) + len(self.ledger) + 64 * len(self.replacement) + 512


_decoder = msgspec.msgpack.Decoder(Checkpoint)


class Codec:
    """Checkpoint ↔ bytes. A value that is torn, foreign, of another key or sealed with another secret is no checkpoint.

    encrypt_key: any passphrase; values are then sealed with AES-GCM. Raises ConfigError where `cryptography` is missing.
    """

    def __init__(self, encrypt_key: str | None = None) -> None:
        self._sealer = Sealer(encrypt_key) if encrypt_key else None

    def pack(self, key: bytes, checkpoint: Checkpoint) -> bytes:
        """The bytes to store under this key, and under no other."""
        # level 1: three quarters of a conversation's bytes go for about a millisecond
        body = zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(checkpoint))
        return PLAIN + _checksum(key, body) + body if self._sealer is None else SEALED + self._sealer.seal(key, body)

    def unpack(self, key: bytes, value: bytes) -> Checkpoint | None:
        """The checkpoint that was stored under this key; None for anything else."""
        body = self._body(key, value)
        if body is None:
            return None
        try:
            if not 0 < zstandard.frame_content_size(body) <= MAX_SIZE:
                return None
            return _decoder.decode(zstandard.ZstdDecompressor().decompress(body))
        except (zstandard.ZstdError, msgspec.MsgspecError, UnicodeError):
            return None

    def _body(self, key: bytes, value: bytes) -> bytes | None:
        if self._sealer is not None:
            return self._sealer.open(key, value[1:]) if value[:1] == SEALED else None
        body = value[1 + CHECKSUM :]
        whole = value[:1] == PLAIN and hmac.compare_digest(value[1 : 1 + CHECKSUM], _checksum(key, body))
        return body if whole else None


class Sealer:
    """Values that only the holder of the passphrase can read or make."""

    def __init__(self, passphrase: str) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigError("store.encrypt_key needs the package `cryptography`: install compaction-proxy[encrypt]") from error
        # a fixed salt: every replica must come to the same key, and scrypt makes guessing a short passphrase slow
        aes = AESGCM(scrypt(passphrase.encode(), salt=b"compaction-proxy store", n=2**14, r=8, p=1, dklen=32))
        self._encrypt: Callable[[bytes, bytes, bytes], bytes] = aes.encrypt
        self._decrypt: Callable[[bytes, bytes, bytes], bytes] = aes.decrypt
        self._refused = (InvalidTag, ValueError)

    def seal(self, key: bytes, body: bytes) -> bytes:
        """nonce ‖ ciphertext, bound to the key that it is stored under."""
        nonce = os.urandom(NONCE)
        return nonce + self._encrypt(nonce, body, key)

    def open(self, key: bytes, sealed: bytes) -> bytes | None:
        """What was sealed under this key; None when it was not, or was changed."""
        try:
            return self._decrypt(sealed[:NONCE], sealed[NONCE:], key)
        except self._refused:
            return None


def _checksum(key: bytes, body: bytes) -> bytes:
    return blake2b(body, key=key[:64], digest_size=CHECKSUM).digest()
