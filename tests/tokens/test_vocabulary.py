from __future__ import annotations

import gzip
import hashlib
from base64 import b64encode
from importlib.resources import files
from types import ModuleType
from typing import Any

import pytest
import tiktoken
import tiktoken_ext.openai_public as published

from proxy.tokens import vocabulary as room
from proxy.tokens.vocabulary import ENCODINGS, PATTERNS, SPECIAL, Vocabulary, degraded, estimate, unpack, vocabulary

SHA256 = {
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
}


def packed(name: str) -> bytes:
    return files("proxy.tokens").joinpath(f"{name}.ranks.gz").read_bytes()


@pytest.fixture
def definition(monkeypatch: pytest.MonkeyPatch) -> Any:
    """tiktoken's own definition of an encoding, without its download, and the hash that it would ask for."""
    asked: dict[str, str] = {}

    def instead_of_a_download(url: str, expected_hash: str) -> dict[bytes, int]:
        asked["hash"] = expected_hash
        return {}

    monkeypatch.setattr(published, "load_tiktoken_bpe", instead_of_a_download)
    return lambda name: {**published.ENCODING_CONSTRUCTORS[name](), **asked}


@pytest.mark.parametrize("name", SHA256)
def test_our_rank_files_are_the_original_ones_written_shorter(name: str, definition: Any) -> None:
    lines = (b64encode(token) + b" %d\n" % rank for token, rank in unpack(packed(name)).items())

    digest = hashlib.sha256(b"".join(lines)).hexdigest()

    assert digest == SHA256[name]
    assert digest == definition(name)["hash"]


@pytest.mark.parametrize("name", SHA256)
def test_pattern_and_special_tokens_are_those_that_tiktoken_defines(name: str, definition: Any) -> None:
    assert PATTERNS[name] == definition(name)["pat_str"]
    assert SPECIAL[name] == definition(name)["special_tokens"]


def test_harmony_splits_and_ranks_text_as_o200k_does(definition: Any) -> None:
    assert definition("o200k_harmony")["pat_str"] == PATTERNS["o200k_base"]
    assert definition("o200k_harmony")["hash"] == SHA256["o200k_base"]
    assert vocabulary("o200k_harmony") is vocabulary("o200k_base")


def test_the_packer_makes_the_same_bytes_again(packer: ModuleType) -> None:
    ranks = unpack(packed("cl100k_base"))
    text = b"".join(b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())

    again = packer.pack(packer.tokens(text))

    assert gzip.decompress(again) == gzip.decompress(packed("cl100k_base"))
    assert packer.pack(packer.tokens(text)) == again


@pytest.mark.parametrize(
    ("name", "text", "tokens"),
    [
        ("o200k_base", "hello world", 2),
        ("cl100k_base", "hello world", 2),
        ("o200k_base", "", 0),
        ("o200k_base", "The quick brown fox jumps over the lazy dog.", 10),
        ("cl100k_base", "antidisestablishmentarianism", 6),
        ("o200k_base", "antidisestablishmentarianism", 6),
        ("o200k_base", "你好，世界", 3),
        ("cl100k_base", "你好，世界", 6),
    ],
)
def test_known_texts_have_their_known_lengths(name: str, text: str, tokens: int) -> None:
    assert vocabulary(name).count(text) == tokens


def test_a_special_token_that_a_user_pastes_is_plain_text() -> None:
    assert vocabulary("o200k_base").count("<|endoftext|>") == 7


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\x00", "\U0010ffff", "\ufffe"])
def test_characters_that_are_none_are_counted(text: str) -> None:
    assert 1 <= vocabulary("o200k_base").count(text) <= 12


@pytest.mark.parametrize("character", [" ", "\n", "a", "=", "\u0301"], ids=["space", "newline", "letter", "sign", "accent"])
def test_a_run_of_a_million_characters_is_counted_in_slices(character: str) -> None:
    text = character * 1_100_000

    tokens = vocabulary("o200k_base").count(text)

    assert len(text) // 130 <= tokens <= len(text.encode())


def test_slices_end_where_the_tokenizer_would_split_anyway() -> None:
    sentence = "Every word of a long text is counted once, and only once. "

    assert vocabulary("o200k_base").count(sentence * 10_000) == 140_001


def test_what_makes_the_tokenizer_panic_is_estimated() -> None:
    whole = tiktoken.Encoding(
        "whole", pat_str=PATTERNS["o200k_base"], mergeable_ranks=unpack(packed("o200k_base")), special_tokens={}
    )

    # The tokenizer itself panics here, with an exception that is no Exception.
    assert room._encoded(whole, " " * 1_200_000) == 400_000


def test_an_interrupt_is_not_taken_for_a_panic() -> None:
    class Interrupted:
        def encode_ordinary(self, text: str) -> list[int]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        room._encoded(Interrupted(), "x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"no gzip",
        gzip.compress(b"", mtime=0),
        gzip.compress(b"\0\0\0\5\1\1", mtime=0),
        packed("cl100k_base")[:-40],
        packed("cl100k_base")[:5000],
    ],
)
def test_without_ranks_counts_are_estimates_and_it_says_so(broken: bytes) -> None:
    words = Vocabulary("cl100k_base", lambda: broken)

    assert words.count("twelve bytes") == 4
    assert words.count("漢字") == 2
    assert words.degraded
    assert not words.load()


def test_a_rank_file_that_is_missing_is_no_error() -> None:
    def missing() -> bytes:
        raise FileNotFoundError("o200k_base.ranks.gz")

    words = Vocabulary("o200k_base", missing)

    assert words.count("abc") == 1
    assert words.degraded


def test_the_vocabularies_of_the_package_are_whole() -> None:
    for name in ENCODINGS:
        vocabulary(name).count("x")

    assert degraded() == {"o200k_base": False, "cl100k_base": False}


def test_nothing_is_read_before_the_first_count() -> None:
    reads = []

    def reading() -> bytes:
        reads.append(1)
        return packed("cl100k_base")

    words = Vocabulary("cl100k_base", reading)
    assert not reads

    words.count("one")
    words.count("two")

    assert reads == [1]


def test_an_estimate_is_a_third_of_the_bytes_rounded_up() -> None:
    assert [estimate(text) for text in ("", "a", "abc", "abcd", "é", "漢")] == [0, 1, 1, 2, 1, 1]


def test_what_was_counted_is_known() -> None:
    words = vocabulary("o200k_base")
    text = "a sentence that no other test has counted before"
    assert not words.knows(text)

    words.count(text)

    assert words.knows(text)
