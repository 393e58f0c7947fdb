from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ALONE = """
import socket, sys

def refuse(*arguments, **named):
    raise AssertionError("a socket was asked for")

socket.socket = socket.create_connection = socket.getaddrinfo = refuse
import json
from proxy import tokens
from proxy.wire.chat_completions import read

request = read(json.dumps({"model": "gpt-4o", "messages": [{"role": "user", "content": "hello world"}]}).encode())
counts = [tokens.ruler(model, request.fields).total(request.conversation.messages) for model in ("gpt-4o", "gpt-4", "gpt-oss-120b")]
print(json.dumps([counts, dict(tokens.degraded())]))
"""


def test_counts_are_exact_without_network_home_or_a_place_to_write(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    work.chmod(0o555)
    home.chmod(0o555)
    environment = {"HOME": str(home), "TMPDIR": str(work), "PYTHONDONTWRITEBYTECODE": "1", "TIKTOKEN_CACHE_DIR": str(home)}

    done = subprocess.run([sys.executable, "-c", ALONE], cwd=work, env=environment, capture_output=True, text=True, check=False)

    assert done.stderr == ""
    # three around the message, one for its speaker, two for its words, three before the answer
    assert json.loads(done.stdout) == [[9, 9, 9], {"o200k_base": False, "cl100k_base": False}]
    assert [*home.iterdir(), *work.iterdir()] == []


def test_importing_the_room_reads_no_ranks() -> None:
    script = "import proxy.tokens, proxy.tokens.vocabulary as v; print(any(each._encoding for each in v._VOCABULARIES.values()))"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"
