"""The README says what is true: its commands exist, its settings load, its five lines run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from builders import agent_session
from fakes import ScriptedUpstream
from running import running_proxy

import proxy
from proxy.config import Config, load

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_five_lines_run_against_a_running_proxy(upstream: ScriptedUpstream) -> None:
    [code] = blocks("python")
    with running_proxy("--upstream", upstream.url) as running:
        script = code.replace("http://127.0.0.1:8080/v1", running.base_url)
        prelude = f"long_conversation = {agent_session(5)!r}\n"

        done = subprocess.run(
            [sys.executable, "-c", prelude + script],
            capture_output=True,
            text=True,
            timeout=60,
            env={"OPENAI_API_KEY": "sk-test-0000"},
        )

    assert done.stdout == "All done.\n"
    assert len([line for line in code.splitlines() if line.strip()]) <= 5


def test_the_settings_that_it_shows_are_taken(tmp_path: Path) -> None:
    shown = blocks("yaml")
    for number, text in enumerate(shown):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)

        load(environment={}, file=str(path))

    assert load(environment={}, file=str(tmp_path / "0.yaml")).models["gpt-4o"].reserve == 16384


@pytest.mark.parametrize("group", [field.encode_name for field in msgspec.structs.fields(Config)])
def test_every_group_of_settings_is_named(group: str) -> None:
    assert re.search(rf"^{group}:|`{group}`", README, re.M)


def test_every_make_target_that_it_names_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))

    named = set(re.findall(r"`?make ([a-z]+)", README))

    assert {"run", "test"} <= named <= targets


@pytest.mark.parametrize("command", ["serve", "compact", "replay", "count", "models", "check-config"])
def test_every_command_that_it_names_has_a_help(command: str) -> None:
    assert f"`compaction-proxy {command}" in README

    done = subprocess.run([sys.executable, "-m", "proxy", command, "--help"], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: compaction-proxy {command}")


def test_every_file_that_it_links_exists() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)

    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_version_has_an_entry_in_the_changelog() -> None:
    assert f"## {proxy.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
