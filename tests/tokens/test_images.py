from __future__ import annotations

import json
import struct
from base64 import b64encode

import pytest

from proxy.tokens.images import UNSEEN, Patches, Tiles, document, image_size, image_tokens, picture, rate, recording


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, height) + b"\x08\x02\0\0\0"


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\xf7\0\0"


def jpeg(width: int, height: int, *, before: bytes = b"", start: int = 0xC0) -> bytes:
    frame = b"\xff" + bytes([start]) + struct.pack(">HBHHB", 17, 8, height, width, 3) + b"\1\x22\0\2\x11\1\3\x11\1"
    return b"\xff\xd8" + before + frame + b"\xff\xda"


def segment(marker: int, size: int) -> bytes:
    return b"\xff" + bytes([marker]) + struct.pack(">H", size + 2) + bytes(size)


def webp(kind: bytes, body: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", 4 + 8 + len(body)) + b"WEBP" + kind + struct.pack("<I", len(body)) + body


def lossy(width: int, height: int) -> bytes:
    return webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height) + bytes(8))


def lossless(width: int, height: int) -> bytes:
    return webp(b"VP8L", b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + bytes(8))


def extended(width: int, height: int) -> bytes:
    return webp(b"VP8X", b"\x10\0\0\0" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little") + bytes(8))


def part(data: bytes, mime: str = "image/png", detail: str | None = None) -> bytes:
    url = {"url": f"data:{mime};base64,{b64encode(data).decode()}"}
    return json.dumps({"type": "image_url", "image_url": {**url, "detail": detail} if detail else url}).encode()


@pytest.mark.parametrize(
    "data",
    [
        png(640, 480),
        gif(640, 480),
        jpeg(640, 480),
        jpeg(640, 480, start=0xC2),
        jpeg(640, 480, before=segment(0xE1, 60_000) + segment(0xE2, 60_000) + segment(0xC4, 300)),
        jpeg(640, 480, before=b"\xff\xff" + segment(0xE0, 14)[1:]),
        lossy(640, 480),
        lossless(640, 480),
        extended(640, 480),
    ],
    ids=["png", "gif", "jpeg", "progressive", "behind a profile", "fill bytes", "webp lossy", "webp lossless", "webp extended"],
)
def test_the_size_is_read_from_the_first_bytes(data: bytes) -> None:
    assert image_size(part(data)) == (640, 480)


def test_megabytes_behind_the_header_are_not_looked_at() -> None:
    raw = part(png(640, 480) + bytes(3_000_000))[:-40] + b'!!! not base64 !!!"}}'

    assert image_size(raw) == (640, 480)


def test_escaped_slashes_are_part_of_base64() -> None:
    raw = part(jpeg(640, 480, before=segment(0xE1, 500).replace(b"\0\0\0", b"\xff\xff\xff")))
    assert b"/" in raw.split(b"base64,")[1]

    assert image_size(raw.replace(b"/", b"\\/")) == (640, 480)


def test_other_ways_to_send_a_picture_are_read() -> None:
    data = b64encode(png(640, 480)).decode()

    assert image_size(json.dumps({"type": "image", "source": {"type": "base64", "data": data}}).encode()) == (640, 480)
    assert image_size(json.dumps({"type": "input_image", "image_url": f"data:image/png;base64,{data}"}).encode()) == (640, 480)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"null",
        b'{"image_url":{"url":"https://example.com/a.png"}}',
        b'{"image_url":{"url":"data:image/png;base64,"}}',
        b'{"image_url":{"url":"data:image/png;base64,====="}}',
        b'{"image_url":{"url":"data:image/png;base64,iVBORw0KGgo"}}',
        part(b"\xff\xd8\xff"),
        part(b"\xff\xd8" + segment(0xE1, 60_000)),
        part(jpeg(640, 480, before=b"\0\0")),
        part(b"RIFF\0\0\0\0WEBPVP9 " + bytes(30)),
        part(png(0, 0)),
        part(png(4_000_000_000, 4_000_000_000)),
        part(b"BM" + bytes(100)),
    ],
    ids=range(14),
)
def test_a_picture_that_cannot_be_seen_has_no_size_and_a_usual_price(raw: bytes) -> None:
    assert image_size(raw) is None
    assert picture(Tiles(85, 170), raw) == 765
    assert UNSEEN == (1024, 1024)


@pytest.mark.parametrize(
    ("model", "size", "tokens"),
    [
        ("gpt-4o", (640, 480), 425),
        ("gpt-4o", (128, 128), 255),
        ("gpt-4o", (1, 1), 255),
        ("gpt-4o", (3008, 2000), 1105),
        ("gpt-4o", (2560, 1669), 1105),
        ("gpt-4o", (20_000, 10), 765),
        ("gpt-4.1", (1024, 1024), 765),
        ("gpt-4.5-preview", (512, 512), 255),
        ("gpt-4o-mini", (640, 480), 14167),
        ("gpt-4o-mini", (1, 1), 8500),
        ("gpt-5", (640, 480), 350),
        ("o1", (640, 480), 375),
        ("o3", (640, 480), 375),
        ("gpt-4.1-mini", (640, 480), 488),
        ("gpt-4.1-nano", (540, 360), 503),
        ("o4-mini", (640, 480), 517),
        ("gpt-5-mini", (640, 480), 361),
        ("gpt-5-mini", (597, 566), 412),
        ("gpt-5-mini", (400, 301), 157),
        ("gpt-5-nano", (640, 480), 451),
        ("gpt-4.1-mini", (4096, 4096), 2466),
        ("claude-sonnet-4-5", (1024, 1024), 765),
    ],
)
def test_each_family_has_its_price(model: str, size: tuple[int, int], tokens: int) -> None:
    assert image_tokens(rate(model), size) == tokens


def test_low_detail_costs_the_base_of_tile_models_only() -> None:
    assert picture(Tiles(85, 170), part(png(2000, 2000), detail="low")) == 85
    assert picture(Tiles(85, 170), part(png(2000, 2000), detail="high")) == 765
    assert picture(Patches(1.2), part(png(640, 480), detail="low")) == 361


def test_detail_is_found_before_and_after_the_picture() -> None:
    data = b64encode(png(2000, 2000) + bytes(5000)).decode()
    before = json.dumps({"type": "image_url", "image_url": {"detail": "low", "url": f"data:image/png;base64,{data}"}}).encode()
    after = json.dumps({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", "detail": "low"}}).encode()

    assert [picture(Tiles(85, 170), raw) for raw in (before, after)] == [85, 85]


@pytest.mark.parametrize("width", [1, 31, 32, 33, 500, 1_536, 5_000, 1_000_000])
@pytest.mark.parametrize("height", [1, 100, 4_000, 1_000_000])
def test_no_picture_costs_more_than_the_dearest(width: int, height: int) -> None:
    assert 85 <= image_tokens(Tiles(85, 170), (width, height)) <= 85 + 170 * 8
    assert 2 <= image_tokens(Patches(1.0), (width, height)) <= 1537


def test_a_recording_is_ten_tokens_a_second() -> None:
    rate_of_wav = struct.pack("<I", 32_000)
    wav = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x80\x3e\0\0" + rate_of_wav + bytes(320_000)
    sound = json.dumps({"type": "input_audio", "input_audio": {"data": b64encode(wav).decode(), "format": "wav"}}).encode()
    mp3 = json.dumps(
        {"type": "input_audio", "input_audio": {"data": b64encode(bytes(160_000)).decode(), "format": "mp3"}}
    ).encode()

    assert recording(sound) == 101
    assert recording(mp3) == 101


def test_a_recording_by_name_alone_costs_little() -> None:
    assert recording(b'{"id":"audio_abc"}') == 1


def test_a_file_is_guessed_from_its_size_within_bounds() -> None:
    def pdf(size: int) -> bytes:
        return json.dumps({"type": "file", "file": {"file_data": "data:application/pdf;base64," + "A" * size}}).encode()

    assert document(pdf(100)) == 220
    assert document(pdf(80_000)) == 1_000
    assert document(pdf(40_000_000)) == 50_000
    assert document(b'{"type":"file","file":{"file_id":"file-abc"}}') == 1_000
