"""Conversations and budgets for the layers: what a client sends, read as the proxy reads it, and a real ruler."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from builders import chat

from proxy import tokens
from proxy.conversation import Conversation
from proxy.windows import Budget
from proxy.wire import Request, chat_completions

Talk = Callable[..., Conversation]
Room = Callable[..., Budget]
MODEL = "gpt-4o"


def _request(messages: Sequence[dict[str, Any]], **fields: Any) -> Request:
    return chat_completions.read(chat(list(messages), **fields))


@pytest.fixture(scope="session")
def request_of() -> Callable[..., Request]:
    """messages, fields → the request as it is read."""
    return _request


@pytest.fixture(scope="session")
def talk() -> Talk:
    """messages → Conversation."""
    return lambda messages: _request(messages).conversation


@pytest.fixture(scope="session")
def wire() -> Callable[[Conversation], list[dict[str, Any]]]:
    """Conversation → the messages as they go out."""

    def written(conversation: Conversation) -> list[dict[str, Any]]:
        return list(json.loads(chat_completions.write(_request([{"role": "user", "content": "x"}]), conversation))["messages"])

    return written


@pytest.fixture(scope="session")
def room() -> Room:
    """usable tokens → Budget; the target is the whole of it unless it is given."""

    def budget(
        usable: int, target: int | None = None, trigger: int | None = None, fields: dict[str, bytes] | None = None
    ) -> Budget:
        aim = usable if target is None else target
        return Budget(usable, 0, usable, usable if trigger is None else trigger, aim, tokens.ruler(MODEL, fields or {}))

    return budget


@pytest.fixture(scope="session")
def contract() -> Callable[[list[dict[str, Any]]], Counter[str]]:
    """How often each rule of the API's contract is broken: written for the tests, sharing nothing with the product."""

    def broken(messages: list[dict[str, Any]]) -> Counter[str]:
        found: Counter[str] = Counter()
        waiting: list[Any] = []
        for message in messages:
            role = message.get("role") if isinstance(message, dict) else None
            if role not in ("tool", "function"):
                found["unanswered"] += len(waiting)
                waiting = []
            if not isinstance(message, dict):
                found["shape"] += 1
                continue
            content = message.get("content")
            calls = message.get("tool_calls") or []
            if content in ("", []) and role != "tool" and not calls:
                found["empty"] += 1
            if role == "assistant":
                for item in calls if isinstance(calls, list) else []:
                    function = item.get("function") if isinstance(item, dict) else None
                    arguments = function.get("arguments") if isinstance(function, dict) else None
                    try:
                        legal = isinstance(json.loads(arguments), dict)
                    except (TypeError, ValueError):
                        legal = False
                    found["arguments"] += not legal
                    waiting.append(item.get("id") if isinstance(item, dict) else None)
            if role == "tool":
                if message.get("tool_call_id") in waiting:
                    waiting.remove(message.get("tool_call_id"))
                else:
                    found["orphan"] += 1
        found["unanswered"] += len(waiting)
        found["system"] = sum(1 for m in messages if isinstance(m, dict) and m.get("role") in ("system", "developer"))
        return +found

    return broken
