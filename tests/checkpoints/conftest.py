"""What the tests of this folder share: histories, checkpoints, and a Redis of their own."""

import json
import shutil
import socket
import subprocess
import time

import pytest

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
    """A Redis of our own on a free loopback port, for the whole session."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait()
