"""What the tests of this folder share: histories, checkpoints, and a Redis of their own."""

import json

import pytest
from redis_server import MISSING, PROGRAM, running_redis

from proxy.checkpoints import Checkpoint
from proxy.conversation import Conversation
from proxy.wire.chat_completions import read_message


@pytest.fixture
def history():
    """Builds a conversation from messages as a client would write them."""

    def build(*messages: dict) -> Conversation:
        return Conversation(tuple(read_message(json.dumps(message).encode()) for message in messages))

    return build


@pytest.fixture
def checkpoint():
    """Builds a checkpoint; the text tells one from another."""

    def build(text: str = "what was said", **fields) -> Checkpoint:
        message = json.dumps({"role": "user", "content": text}).encode()
        return Checkpoint(**{"cut": 4, "replacement": (message,), "layers": ("snip",), "model": "gpt-4o", **fields})

    return build


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory):
    """A Redis of our own for the whole session."""
    if PROGRAM is None:
        pytest.skip(MISSING)
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url
