"""What a compacted request may and may not do to the request that came, judged from the bytes alone.

Owes nothing to the product: it parses with Python's own decoder and finds steps, pairs and turns in its own way.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

INSTRUCTIONS = ("system", "developer")
TURNS = ("same role twice in a row", "conversation that starts with an assistant")
"""Rules of some templates only: the proxy keeps them where it is told that they hold."""
_decoder = json.JSONDecoder()


def worse(came: bytes, went: bytes, *, turns: bool = False, resumed: bool = False) -> list[str]:
    """Everything that is wrong with `went` as a compaction of `came`.

    turns: the upstream's template wants turns. resumed: an earlier request's history was taken up, in that one's spelling.
    """
    before, after = parsed(came), parsed(went)
    old, new = before["messages"], after["messages"]
    broken = violations(new) - violations(old)
    faults = [f"violates {rule} {count} times more" for rule, count in broken.items() if turns or rule not in TURNS]
    if [m for m in new if _role(m) in INSTRUCTIONS] != [m for m in old if _role(m) in INSTRUCTIONS]:
        faults.append("system or developer messages changed")
    if _users(old) and (not _users(new) or _users(new)[-1] != _users(old)[-1]):
        faults.append("the last user message changed")
    if old and new and not _same_end(old[-1], new[-1]):
        faults.append("ends with another message")
    if not _live_turn_kept(old, new):
        faults.append("the turn since the last user message lost or gained something other than older whole steps")
    if _without_messages(came) != _without_messages(went) or list(before) != list(after):
        faults.append("a field other than messages changed, or their order did")
    known = Counter(json.dumps(m, sort_keys=True) for m in old)
    kept = [raw for raw, m in zip(message_slices(went), new, strict=True) if known[json.dumps(m, sort_keys=True)]]
    slices = set(message_slices(came))
    if not resumed and any(raw not in slices for raw in kept):
        faults.append("a message that was kept is not the slice that came")
    if len(went) > len(came):
        faults.append("more bytes than came")
    ids = {call.get("id") for m in old for call in _calls(m)}
    if any(call.get("id") not in ids for m in new for call in _calls(m)):
        faults.append("an id that the client never used")
    kinds = {
        m["tool_call_id"]: type(m.get("content")) for m in old if _role(m) == "tool" and isinstance(m.get("tool_call_id"), str)
    }
    if any(_role(m) == "tool" and type(m["content"]) is not kinds.get(m["tool_call_id"], type(m["content"])) for m in new):
        faults.append("content of another type")
    if any(not text.strip() for text in _new_texts(old, new)):
        faults.append("a stub that says nothing")
    faults += _order(old, new)
    return faults


def violations(messages: list[Any]) -> Counter[str]:
    """How often each rule of some upstream is broken."""
    found: Counter[str] = Counter()
    waiting: Counter[Any] = Counter()
    turns: list[str] = []
    for index, m in enumerate(messages):
        if not isinstance(m, dict):
            continue
        role = _role(m)
        if role == "tool":
            call_id = m.get("tool_call_id")
            if waiting[call_id] > 0:
                waiting[call_id] -= 1
            else:
                found["tool message without its call"] += 1
            continue
        found["call without its result"] += sum((+waiting).values())
        waiting = Counter(call.get("id") for call in _calls(m))
        found["arguments that are no object"] += sum(not _is_object(call) for call in _calls(m))
        found["empty content"] += m.get("content") in ("", [], None) and not _calls(m) and "function_call" not in m
        found["instruction after the start"] += role in INSTRUCTIONS and index > 0
        if role in ("user", "assistant") and not _calls(m):
            turns.append(role)
    found["call without its result"] += sum((+waiting).values())
    found["same role twice in a row"] = sum(a == b for a, b in itertools.pairwise(turns))
    found["conversation that starts with an assistant"] = int(turns[:1] == ["assistant"])
    reasoning = ["reasoning_content" in m for m in messages if _role(m) == "assistant"]
    found["reasoning on some messages only"] = int(any(reasoning) and not all(reasoning))
    found["reasoning emptied"] = sum(m.get("reasoning_content") == "" for m in messages if isinstance(m, dict))
    return +found


def parsed(body: bytes) -> Any:
    return json.loads(body)


def message_slices(body: bytes) -> list[str]:
    """Each message's exact text."""
    text = body.decode()
    at = _messages_at(text)
    slices, at = [], _skip(text, at + 1)
    while text[at] != "]":
        _, stop = _decoder.raw_decode(text, at)
        slices.append(text[at:stop])
        at = _skip(text, stop)
        at = _skip(text, at + 1) if text[at] == "," else at
    return slices


def _messages_at(text: str) -> int:
    """Where the array of messages starts: of repeated keys the last counts, as for everyone."""
    at, start = _skip(text, 0), 0
    at = _skip(text, at + 1)
    while text[at] != "}":
        key, at = _decoder.raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)
        if key == "messages":
            start = at
        _, at = _decoder.raw_decode(text, at)
        at = _skip(text, at)
        at = _skip(text, at + 1) if text[at] == "," else at
    return start


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\r", "\n"):
        at += 1
    return at


def _without_messages(body: bytes) -> list[tuple[str, Any]]:
    """Every other field in order, numbers as they are spelled."""
    top: list[Any] = []

    def pairs(found: list[tuple[str, Any]]) -> Any:
        top[:] = found
        return found

    json.loads(body, object_pairs_hook=pairs, parse_int=str, parse_float=str, parse_constant=str)
    return [(key, value) for key, value in dict(top).items() if key != "messages"]


def _role(m: Any) -> str:
    return m.get("role", "") if isinstance(m, dict) else ""


def _calls(m: Any) -> list[Any]:
    return [call for call in (m.get("tool_calls") or []) if isinstance(call, dict)] if isinstance(m, dict) else []


def _is_object(call: Any) -> bool:
    try:
        return isinstance(json.loads(call["function"]["arguments"]), dict)
    except (KeyError, TypeError, ValueError):
        return False


def _users(messages: list[Any]) -> list[Any]:
    return [m for m in messages if _role(m) == "user"]


def _same_end(old: Any, new: Any) -> bool:
    """The last message itself; of a result or reply at least whose it is, since it may be shortened as a last resort."""
    if _role(old) in ("tool", "assistant"):
        return _role(new) == _role(old) and new.get("tool_call_id") == old.get("tool_call_id")
    return bool(old == new)


def _live_turn_kept(old: list[Any], new: list[Any]) -> bool:
    """What follows the last user message: its newest step is there, whatever older ones were folded."""
    if not _users(old):
        return True
    tail, left = _after_last_user(old), _after_last_user(new)
    if not tail:
        return not left
    at = next((i for i in range(len(tail) - 1, -1, -1) if _role(tail[i]) != "tool"), None)
    newest = _calls(tail[at]) if at is not None else []
    return not newest or [c.get("id") for c in newest] in [[c.get("id") for c in _calls(m)] for m in left]


def _after_last_user(messages: list[Any]) -> list[Any]:
    last = max((i for i, m in enumerate(messages) if _role(m) == "user"), default=-1)
    return messages[last + 1 :] if last >= 0 else []


def _new_texts(old: list[Any], new: list[Any]) -> list[str]:
    known = {json.dumps(m, sort_keys=True) for m in old}
    return [
        m["content"]
        for m in new
        if isinstance(m, dict)
        and isinstance(m.get("content"), str)
        and json.dumps(m, sort_keys=True) not in known
        and not _calls(m)
    ]


def _order(old: list[Any], new: list[Any]) -> list[str]:
    """Kept messages stay in their order and none is said twice."""
    was = [json.dumps(m, sort_keys=True) for m in old]
    at = 0
    for m in new:
        text = json.dumps(m, sort_keys=True)
        if text not in was:
            continue
        if text not in was[at:]:
            return ["a kept message moved or came twice"]
        at = was.index(text, at) + 1
    return []
