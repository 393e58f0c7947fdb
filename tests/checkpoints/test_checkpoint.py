"""Bytes of a checkpoint: whole, under their own key and of our own making, or not used."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.checkpoints.checkpoint import Checkpoint, Codec

KEY, OTHER = b"k" * 32, b"o" * 32
FULL = Checkpoint(
    cut=7,
    replacement=(b'{"role":"user","content":"caf\xc3\xa9 \\ud800"}', b'{"role":"assistant","content":null}'),
    seen=9,
    ledger=b"\x00opaque\xff",
    generation=3,
    parent=OTHER,
    tokens_before=90_000,
    tokens_after=44_000,
    layers=("snip", "context_collapse"),
    model="gpt-4o",
    calibration=(1.25, 340.0),
)
PLAIN, SEALED = Codec(), Codec("correct horse")


@pytest.mark.parametrize("codec", [PLAIN, SEALED], ids=["plain", "sealed"])
def test_a_checkpoint_comes_back_as_it_was(codec):
    assert codec.unpack(KEY, codec.pack(KEY, FULL)) == FULL


@pytest.mark.parametrize("codec", [PLAIN, SEALED], ids=["plain", "sealed"])
def test_a_value_torn_at_any_place_is_not_used(codec):
    packed = codec.pack(KEY, FULL)

    assert [codec.unpack(KEY, packed[:stop]) for stop in range(len(packed))] == [None] * len(packed)
    assert codec.unpack(KEY, packed + b"\0") is None


@pytest.mark.parametrize("codec", [PLAIN, SEALED], ids=["plain", "sealed"])
def test_a_value_with_any_byte_changed_is_not_used(codec):
    packed = codec.pack(KEY, FULL)

    for at in range(len(packed)):
        changed = bytearray(packed)
        changed[at] ^= 0x41
        assert codec.unpack(KEY, bytes(changed)) is None


@pytest.mark.parametrize("codec", [PLAIN, SEALED], ids=["plain", "sealed"])
def test_a_value_found_under_another_key_is_not_used(codec):
    assert codec.unpack(OTHER, codec.pack(KEY, FULL)) is None


@given(st.binary(max_size=200))
def test_foreign_bytes_are_not_used(value):
    assert PLAIN.unpack(KEY, value) is None
    assert PLAIN.unpack(KEY, b"\x01" + value) is None


def test_a_sealed_value_shows_nothing_of_the_conversation():
    secret = Checkpoint(cut=1, replacement=(b'{"role":"user","content":"the canary sings"}',))

    assert b"canary" not in SEALED.pack(KEY, secret)
    assert SEALED.pack(KEY, secret) != SEALED.pack(KEY, secret)


def test_another_passphrase_reads_nothing_and_does_not_fail():
    assert Codec("wrong horse").unpack(KEY, SEALED.pack(KEY, FULL)) is None


def test_what_was_stored_in_the_open_is_not_used_once_values_are_sealed():
    assert SEALED.unpack(KEY, PLAIN.pack(KEY, FULL)) is None
    assert PLAIN.unpack(KEY, SEALED.pack(KEY, FULL)) is None


def test_every_process_comes_to_the_same_sealing_key():
    assert Codec("correct horse").unpack(KEY, SEALED.pack(KEY, FULL)) == FULL


def test_a_conversation_takes_less_room_than_its_text():
    text = b'{"role":"user","content":"' + b"the same words again and again " * 4000 + b'"}'

    assert len(PLAIN.pack(KEY, Checkpoint(cut=1, replacement=(text,)))) < len(text) // 20
