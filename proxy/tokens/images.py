"""What a picture, a recording or a file weighs: from its first bytes, never from its base64 as if it were text."""

from __future__ import annotations

import math
import re
from base64 import b64decode
from binascii import Error as NotBase64
from dataclasses import dataclass

HEADER = 256 * 1024
"""Base64 characters looked at: a JPEG's size stands behind its EXIF and color profile, which seldom exceed 64 KiB each."""

UNSEEN = (1024, 1024)
"""Pixels assumed for a picture that we cannot see: the usual export size, and 765 tokens by the tile rule."""

AUDIO_TOKENS_A_SECOND = 10
MP3_BYTES_A_SECOND = 16_000
"""128 kbit/s, the usual."""

LARGEST_AUDIO = 3_600 * AUDIO_TOKENS_A_SECOND
UNSEEN_FILE = 1_000
LARGEST_FILE = 50_000
FILE_BYTES_A_TOKEN = 60
"""Recorded PDFs: 13 KB ≈ 220 tokens, 19 KB ≈ 950, 0.6 KB ≈ 220; a page costs its text and a picture of it."""

SMALLEST_FILE = 220

_DETAIL = re.compile(rb'"detail"\s*:\s*"(low|high|auto|original)"')
_DATA = re.compile(rb'base64,|"(?:data|file_data|bytes)"\s*:\s*"')
_JPEG_SIZE = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


@dataclass(frozen=True, slots=True)
class Tiles:
    """512-pixel tiles after fitting into 2048² and a short side of 768: base + tile for each; `low` detail costs the base."""

    base: int
    tile: int


@dataclass(frozen=True, slots=True)
class Patches:
    """32-pixel patches, at most 1536, times a factor."""

    factor: float


Rate = Tiles | Patches

_RATES: tuple[tuple[str, Rate], ...] = (
    ("gpt-4o-mini", Tiles(2833, 5667)),
    ("gpt-4.1-mini", Patches(1.62)),
    ("gpt-4.1-nano", Patches(2.46)),
    ("o4-mini", Patches(1.72)),
    ("gpt-5-mini", Patches(1.2)),
    ("gpt-5-nano", Patches(1.5)),
    ("gpt-5.", Patches(1.2)),
    ("gpt-5", Tiles(70, 140)),
    ("o1", Tiles(75, 150)),
    ("o3", Tiles(75, 150)),
)
_DEFAULT = Tiles(85, 170)


def rate(name: str) -> Rate:
    """The rule of a model, by its bare name."""
    return next((found for prefix, found in _RATES if name.startswith(prefix)), _DEFAULT)


def image_tokens(rule: Rate, size: tuple[int, int], detail: str = "auto") -> int:
    """Tokens of a picture of (width, height) pixels."""
    width, height = max(1, size[0]), max(1, size[1])
    if isinstance(rule, Patches):
        return math.ceil(_patches(width, height) * rule.factor) + 1
    if detail == "low":
        return rule.base
    scale = min(1.0, 2048 / max(width, height))
    scale *= min(1.0, 768 / (min(width, height) * scale))
    across, down = (math.ceil(round(side * scale, 3) / 512) for side in (width, height))
    return rule.base + rule.tile * max(1, across) * max(1, down)


def _patches(width: int, height: int) -> int:
    count = math.ceil(width / 32) * math.ceil(height / 32)
    if count <= 1536:
        return count
    scale = math.sqrt(32 * 32 * 1536 / (width * height))
    across, down = width * scale / 32, height * scale / 32
    scale *= min(math.floor(across) / across, math.floor(down) / down)
    return max(1, min(1536, math.ceil(math.floor(width * scale) / 32) * math.ceil(math.floor(height * scale) / 32)))


def picture(rule: Rate, raw: bytes) -> int:
    """Tokens of a content part that is a picture, from its JSON."""
    detail = _DETAIL.search(raw[:512]) or _DETAIL.search(raw[-512:])
    return image_tokens(rule, image_size(raw) or UNSEEN, detail[1].decode() if detail else "auto")


def image_size(raw: bytes) -> tuple[int, int] | None:
    """(width, height) in pixels, read from the first bytes of the data URL within a content part's JSON; None: not told."""
    head = _head(raw, HEADER)
    if head[:8] == b"\x89PNG\r\n\x1a\n":
        size = head[16:20], head[20:24]
        return _sane(*(int.from_bytes(side, "big") for side in size))
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return _sane(int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little"))
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return _webp(head)
    return _jpeg(head) if head[:2] == b"\xff\xd8" else None


def recording(raw: bytes) -> int:
    """Tokens of a content part that is a recording, from its JSON."""
    head = _head(raw, 64)
    size = len(raw) * 3 // 4
    rate = int.from_bytes(head[28:32], "little") if head[:4] == b"RIFF" and len(head) >= 32 else MP3_BYTES_A_SECOND
    return min(LARGEST_AUDIO, math.ceil(size / max(rate, 1_000) * AUDIO_TOKENS_A_SECOND))


def document(raw: bytes) -> int:
    """Tokens of a content part that is a file, from its JSON: a bounded guess, learned by calibration."""
    if not _DATA.search(raw[:4096]):
        return UNSEEN_FILE
    return max(SMALLEST_FILE, min(LARGEST_FILE, len(raw) * 3 // 4 // FILE_BYTES_A_TOKEN))


def carries_data(raw: bytes) -> bool:
    """Whether a content part of a kind that we do not know carries a file within it."""
    return bool(_DATA.search(raw[:4096])) and len(raw) > 1024


def _head(raw: bytes, limit: int) -> bytes:
    """The first bytes of what is carried in base64, without decoding the rest."""
    found = _DATA.search(raw[:4096])
    if not found:
        return b""
    start = found.end()
    # Some clients escape every slash, also within base64.
    text = raw[start : start + limit].split(b'"', 1)[0].replace(b"\\/", b"/")
    try:
        return b64decode(text[: len(text) // 4 * 4])
    except NotBase64:
        return b""


def _sane(width: int, height: int) -> tuple[int, int] | None:
    return (width, height) if 0 < width <= 1_000_000 and 0 < height <= 1_000_000 else None


def _webp(head: bytes) -> tuple[int, int] | None:
    kind = head[12:16]
    if kind == b"VP8X" and len(head) >= 30:
        return _sane(1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little"))
    if kind == b"VP8L" and len(head) >= 25:
        bits = int.from_bytes(head[21:25], "little")
        return _sane(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if kind == b"VP8 " and len(head) >= 30:
        sides = head[26:28], head[28:30]
        return _sane(*(int.from_bytes(side, "little") & 0x3FFF for side in sides))
    return None


def _jpeg(head: bytes) -> tuple[int, int] | None:
    at = 2
    while at + 9 <= len(head):
        if head[at] != 0xFF:
            return None
        marker = head[at + 1]
        if marker == 0xFF:
            at += 1
        elif marker in _JPEG_SIZE:
            return _sane(int.from_bytes(head[at + 7 : at + 9], "big"), int.from_bytes(head[at + 5 : at + 7], "big"))
        else:
            at += 2 + int.from_bytes(head[at + 2 : at + 4], "big")
    return None
