"""What identifies a history: digests of its messages, chained from the first one after the preamble.

Two histories share a key exactly as far as they say the same. What moves between turns without changing what was said
(cache marks, message ids, timestamps, the two ways to write one text) is left out; the preamble is, too, because many
clients put the time of day there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

import msgspec

from proxy.conversation import RESULT_ROLES, Conversation, Message, Messages
from proxy.wire.chat_completions import write_message

SIZE = 32
"""Bytes of a digest and of a key: long enough that nobody finds two histories with one key."""

MOVING = frozenset({"cache_control", "id", "timestamp", "ts", "created", "created_at", "createdAt", "updated_at", "updatedAt"})
"""Fields of a message that clients change, or send only at times, while it says the same."""

MARKS = frozenset({"cache_control"})
"""The same inside content parts and tool calls, whose ids do matter: results refer to them."""

# floats stay the characters that they were: two numbers that round to one float are still two messages
_decoder = msgspec.json.Decoder(float_hook=lambda text: "\x00float " + text)
_encoder = msgspec.json.Encoder(order="sorted")


@dataclass(frozen=True, slots=True)
class Chain:
    """Where a history may be cut, and its key there. cuts: messages after the preamble, ascending; keys: 32 bytes each."""

    cuts: tuple[int, ...]
    keys: tuple[bytes, ...]

    def key(self, cut: int) -> bytes | None:
        """The key at a cut; None where the history may not be cut."""
        return self.keys[self.cuts.index(cut)] if cut in self.cuts else None


class Digests:
    """Digests by the exact bytes of a message, bounded in bytes: agents send the same messages again with every turn.

    Two generations instead of a list of uses: what was not asked for during a whole generation goes.
    """

    def __init__(self, max_bytes: int = 32 * 1024 * 1024) -> None:
        self._limit = max_bytes // 2
        self._young: dict[bytes, tuple[bytes, int]] = {}
        self._old: dict[bytes, tuple[bytes, int]] = {}
        self._size = 0

    def get(self, message: Message) -> tuple[bytes, int]:
        """The digest of what a message says, and how many calls it makes."""
        raw = message.raw
        if raw is None:
            return digest(message), len(message.calls)
        found = self._young.get(raw)
        if found is None:
            found = self._old.get(raw) or (digest(message), len(message.calls))
            if self._size + len(raw) > self._limit:
                self._old, self._young, self._size = self._young, {}, 0
            self._young[raw] = found
            self._size += len(raw)
        return found


def namespace(secret: bytes, credential: bytes, *facts: str) -> bytes:
    """Where a caller's chains begin, so that callers never share.

    credential: what the caller authenticates with. facts: what changes the outcome of a compaction (fingerprint of the
    configuration, model, window). Keyed: without the secret nobody can tell from a store whose conversations it holds.
    """
    seed = blake2b(key=blake2b(secret).digest()[:64], digest_size=SIZE)
    for piece in (credential, *(fact.encode() for fact in facts)):
        seed.update(len(piece).to_bytes(8, "big") + piece)
    return seed.digest()


def chain(conversation: Conversation, seed: bytes, digests: Digests | None = None) -> Chain:
    """The keys of a history at every place where it may be cut: after whole steps, with no call pending."""
    get = (digests or Digests(0)).get
    messages, start = conversation.messages, len(conversation.preamble)
    name = ("chain", seed, start)
    noted: _Noted | None = None
    if isinstance(messages, Messages):
        if (whole := messages.note(name)) is not None:
            return cast(_Noted, whole).chain
        noted = messages.noted_of_base(name)
    total = len(messages)
    if noted is None:
        cuts, keys, key, at = [], [], seed, start
    else:
        # the last step of the earlier request may have got more results meanwhile
        cuts, keys, key, at = list(noted.chain.cuts), list(noted.chain.keys), noted.key, noted.at
        if cuts and cuts[-1] > at - start:
            del cuts[-1], keys[-1]
    begun = (at, key)
    # the steps of the conversation, walked by hand: this loop runs over what is new of every request
    while at < total:
        begun = (at, key)
        said, calls = get(messages[at])
        results = 0
        if calls:
            while at + results + 1 < total and messages[at + results + 1].role in RESULT_ROLES:
                results += 1
                said += get(messages[at + results])[0]
        at += results + 1
        key = blake2b(key + said, digest_size=SIZE).digest()
        if calls <= results and not (at < total and messages[at].role in RESULT_ROLES):
            cuts.append(at - start)
            keys.append(key)
    made = Chain(tuple(cuts), tuple(keys))
    if isinstance(messages, Messages):
        messages.keep(name, _Noted(made, *begun))
    return made


@dataclass(frozen=True, slots=True)
class _Noted:
    """A chain, and where its last step begins with which key, from which a longer history goes on."""

    chain: Chain
    at: int
    key: bytes


def edition(key: bytes, number: int) -> bytes:
    """The key of a later edition of what stands under a key; the key itself for the first, 0."""
    return blake2b(key + b"edition %d" % number, digest_size=SIZE).digest() if number else key


def claim(origin: bytes, parent: bytes | None, generation: int) -> bytes:
    """The key of one event, wherever it cuts: by the history that it decides on and what it starts from."""
    return blake2b(b"event %d" % generation + origin + (parent or b""), digest_size=SIZE).digest()


def keys(conversation: Conversation, seed: bytes, digests: Digests | None = None) -> list[bytes]:
    """The keys alone, shortest prefix first."""
    return list(chain(conversation, seed, digests).keys)


def digest(message: Message) -> bytes:
    """The digest of what one message says: 32 bytes, the same in every process."""
    return blake2b(canonical(write_message(message)), digest_size=SIZE).digest()


def canonical(raw: bytes) -> bytes:
    """A message's JSON in its one form: keys sorted, nulls and moving fields left out, a text always as one part."""
    try:
        return b"J" + _encoder.encode(_plain_message(_decoder.decode(raw)))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return _canonical_slowly(raw)


def _canonical_slowly(raw: bytes) -> bytes:
    """For what msgspec refuses and clients send all the same (lone surrogates, NaN); anything else is its own form."""
    try:
        value = _plain_message(json.loads(raw, parse_float=lambda text: "\x00float " + text))
        return b"S" + json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return b"R" + raw


def _plain_message(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    plain = _without(value, MOVING)
    if "content" in plain:
        plain["content"] = _plain_content(plain["content"])
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _plain_content(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return [_plain_part(part) for part in content]
    return content


def _plain_part(part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return _without(part, MARKS) if isinstance(part, dict) else part


def _plain_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    plain = _without(call, MARKS)
    if isinstance(plain.get("function"), dict):
        plain["function"] = _without(plain["function"], MARKS)
    return plain


def _without(value: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None and key not in names}
