"""What the tests of counting share: the benchmark's reading of recorded pairs, and requests made short."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from proxy.conversation import Message
from proxy.tokens import ChatRuler, ruler
from proxy.wire.chat_completions import read

HERE = Path(__file__).parent


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="session")
def counting() -> ModuleType:
    """tests/benchmarks/counting.py: `load`, `ours`, `group`."""
    return module(HERE.parent / "benchmarks" / "counting.py")


@pytest.fixture(scope="session")
def packer() -> ModuleType:
    """tests/tokens/pack_ranks.py."""
    return module(HERE / "pack_ranks.py")


@pytest.fixture
def parsed() -> Callable[..., tuple[ChatRuler, Sequence[Message]]]:
    """(messages, model, other fields) → its ruler and its messages, read from bytes as in the product."""

    def parse(messages: list[Any], model: str = "gpt-4o", **fields: Any) -> tuple[ChatRuler, Sequence[Message]]:
        request = read(json.dumps({"model": model, "messages": messages, **fields}).encode())
        return ruler(model, request.fields), request.conversation.messages

    return parse


@pytest.fixture
def total(parsed: Callable[..., tuple[ChatRuler, Sequence[Message]]]) -> Callable[..., int]:
    """(messages, model, other fields) → tokens of the request."""

    def count(messages: list[Any], model: str = "gpt-4o", **fields: Any) -> int:
        rule, said = parsed(messages, model, **fields)
        return rule.total(said)

    return count
