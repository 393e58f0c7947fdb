"""The commands, as a shell runs them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from builders import agent_session, chat, user
from running import running_proxy

LONG = agent_session(20, 400)


def run(*arguments: str, stdin: bytes = b"", environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("COMPACTION_")}
    return subprocess.run(
        [sys.executable, "-m", "proxy", *arguments],
        input=stdin,
        capture_output=True,
        env={**clean, **(environment or {})},
        timeout=60,
    )


def test_help_names_every_command() -> None:
    told = run("--help").stdout.decode()

    assert all(command in told for command in ("serve", "compact", "replay", "count", "models", "check-config"))


def test_compact_writes_one_body_a_line_within_the_budget(tmp_path: Path) -> None:
    path = tmp_path / "bodies.jsonl"
    path.write_bytes(chat(LONG, temperature=0.5) + b"\n" + chat([user("hi")]) + b"\n")

    done = run("compact", str(path), "--budget", "3000")

    assert done.returncode == 0
    first, second = [json.loads(line) for line in done.stdout.splitlines()]
    assert first["temperature"] == 0.5
    assert first["messages"][0] == LONG[0]
    assert first["messages"][-1] == LONG[-1]
    assert tokens(json.dumps(first).encode()) <= 3000
    assert second["messages"] == [user("hi")]


def test_compact_takes_a_share_and_a_bare_array_from_stdin() -> None:
    raw = json.dumps(LONG).encode()

    done = run("compact", "-", "--model", "gpt-4o", "--budget", "25%", stdin=raw)

    messages = json.loads(done.stdout)
    assert isinstance(messages, list)
    assert tokens(json.dumps({"model": "gpt-4o", "messages": messages}).encode()) <= tokens(chat(LONG)) // 4


def test_compact_uses_the_window_and_leaves_what_fits() -> None:
    body = chat(LONG)

    assert run("compact", "-", "--window", "200000", stdin=body).stdout.strip() == body
    assert len(run("compact", "-", "--window", "8000", stdin=body).stdout) < len(body) / 2


def test_explain_prints_a_table_of_the_layers() -> None:
    told = run("compact", "-", "--budget", "3000", "--explain", stdin=chat(LONG)).stderr.decode()

    head = told.splitlines()[0].split()
    assert head == ["layer", "before", "after", "saved", "touched", "skipped"]
    assert "tokens (" in told
    assert "saved)" in told


def test_an_unknown_window_is_said() -> None:
    done = run("compact", "-", stdin=chat([user("hi")], model="house-model"))

    assert done.stdout.strip() == chat([user("hi")], model="house-model")
    assert b"window of house-model is unknown" in done.stderr


def test_count_counts_by_message_and_part() -> None:
    counted = json.loads(
        run("count", "-", "--json", stdin=chat([{"role": "system", "content": "Be brief."}, user("hello world")])).stdout
    )

    assert (counted["model"], counted["encoding"], counted["tokens"]) == ("gpt-4o", "o200k_base", 16)
    assert [message["tokens"] for message in counted["messages"]] == [7, 6]
    assert counted["tools"] == 0


def test_a_file_as_windows_writes_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bodies.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([chat([user("hi")]), chat([user("hi there")])]) + b"\r\n")

    done = run("count", str(path), "--json")

    assert [json.loads(line)["tokens"] for line in done.stdout.splitlines()] == [8, 9]


def test_count_prints_a_table_for_people() -> None:
    told = run("count", "-", stdin=chat([user("hello world")])).stdout.decode()

    assert "gpt-4o  o200k_base" in told
    assert told.splitlines()[-1].split() == ["total", "9"]


def test_models_says_value_and_source() -> None:
    told = run("models", "gpt-4o", environment={"COMPACTION_DEFAULT_WINDOW": "9999"}).stdout.decode()
    unknown = run("models", "house-model", environment={"COMPACTION_DEFAULT_WINDOW": "9999"}).stdout.decode()

    assert told.splitlines()[1].split() == ["window", "128000", "tokens", "built", "in"]
    assert unknown.splitlines()[1].split() == ["window", "9999", "tokens", "default"]


def test_check_config_prints_the_effective_configuration(tmp_path: Path) -> None:
    path = tmp_path / "proxy.yaml"
    path.write_text("upstream: {url: http://h/v1, api_key: sk-secret}\n")

    done = run("check-config", str(path))

    assert done.returncode == 0
    assert b"sk-secret" not in done.stdout
    assert b"url: http://h/v1" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["count", "none.json"], "cannot read none.json: No such file or directory"),
        (["compact", "-", "--budget", "x"], "takes a number of tokens (20000) or a share of the input's (25%)"),
        (["compact", "-"], "stdin: not a chat-completions body"),
        (["check-config", "none.yaml"], "cannot read the configuration file none.yaml"),
        (["serve", "--upstream", "nowhere"], "wrong value for `upstream.url`: got 'nowhere'"),
        (["serve", "--port", "99999"], "wrong value for `server.port`"),
        (["serve", "--config", "none.yaml"], "cannot read the configuration file none.yaml"),
        (["frobnicate"], "invalid choice"),
    ],
)
def test_a_wrong_call_ends_with_2_and_one_readable_message(arguments: list[str], said: str) -> None:
    done = run(*arguments, stdin=b"[1,")

    assert done.returncode == 2
    assert said in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
    assert done.stdout == b""


def test_a_wrong_layer_setting_ends_with_2(tmp_path: Path) -> None:
    path = tmp_path / "proxy.yaml"
    path.write_text("compaction: {layers: {microcompact: {keep_recnt: 3}}}\n")

    done = run("check-config", str(path))

    assert done.returncode == 2
    assert b"keep_recent" in done.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_our_own_key_is_not_served_to_whoever_reaches_the_port(workers: str) -> None:
    environment = {"COMPACTION_UPSTREAM__API_KEY": "sk-secret", "COMPACTION_SERVER__HOST": "0.0.0.0"}

    done = run("serve", "--workers", workers, environment=environment)

    assert done.returncode == 2
    assert done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    assert line == (
        "compaction-proxy: upstream.api_key with server.host '0.0.0.0' would serve whoever reaches the port: "
        "set client_keys (COMPACTION_CLIENT_KEYS) or listen on 127.0.0.1"
    )


def test_several_workers_do_not_start_with_a_setting_that_one_would_not_start_with(tmp_path: Path) -> None:
    path = tmp_path / "proxy.yaml"
    path.write_text("compaction: {layers: {microcompact: {keep_recnt: 3}}}\n")

    done = run("serve", "--workers", "2", "--config", str(path))

    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert "there is no 'keep_recnt'; the nearest is 'keep_recent'" in line


@pytest.mark.parametrize(
    ("flags", "host", "further"), [((), "127.0.0.1", 0), (("--host", "0.0.0.0"), "127.0.0.1", 1), (("--host", "::1"), "[::1]", 0)]
)
def test_the_banner_names_a_url_that_can_be_pasted(flags: tuple[str, ...], host: str, further: int) -> None:
    with running_proxy("--upstream", "http://127.0.0.1:9/v1", *flags) as started:
        answer = urllib.request.urlopen(f"{started.admin}/healthz").read()
        with socket.create_connection((host.strip("[]"), urlsplit(started.url).port)):
            pass

    assert answer == b'{"status":"ok"}'
    assert started.base_url.startswith(f"http://{host}:")
    assert sum("listening  on every address of this machine (0.0.0.0)" in line for line in started.lines) == further


def tokens(body: bytes) -> int:
    return int(json.loads(run("count", "-", "--json", stdin=body).stdout)["tokens"])
