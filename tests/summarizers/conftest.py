"""A session to sum up, and a model that answers what it is told to."""

import asyncio
import json

import pytest

from proxy.conversation import Conversation
from proxy.errors import UpstreamError
from proxy.summarizers import Facts, SummaryRequest
from proxy.summarizers.anchored import AnchoredSummarizer
from proxy.summarizers.call import Caller, Circuit, Settings
from proxy.summarizers.kimi import KimiSummarizer
from proxy.wire.chat_completions import read_message

ANCHORED = """## Objective
- Make the nightly import of app/loader.py work again.
## Standing instructions
- "Never touch the migrations."
## State
- Done: the path in app/loader.py was corrected, seen by 14 passed tests.
- In progress: the retry of the upload.
## Decisions
- Keep the old table because report.sql reads it.
## Working set
- app/loader.py, app/upload.py
## Open errors
- TimeoutError: upload took longer than 30 s
## Next action
- Raise the timeout in app/upload.py."""

KIMI = """## Goal
- Make the nightly import of app/loader.py work again.
## Constraints
- "Never touch the migrations."
## Done
- The path in app/loader.py was corrected.
## Open
- TimeoutError: upload took longer than 30 s
## Facts
- app/upload.py holds the upload."""


def completion(text, finish="stop", **message):
    """The body of a completion."""
    return json.dumps(
        {
            "object": "chat.completion",
            "model": "small-model",
            "choices": [{"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text, **message}}],
            "usage": {"prompt_tokens": 900, "completion_tokens": 120, "total_tokens": 1020},
        }
    ).encode()


class ScriptedModel:
    """Answers in turn with what it was given: (status, body), seconds to be silent, or an error to raise; the last one stays."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []
        self.headers = []

    async def complete(self, body, headers, *, timeout):
        self.asked.append(json.loads(body))
        self.headers.append(tuple(headers))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, UpstreamError):
            raise answer
        if isinstance(answer, (int, float)):
            await asyncio.sleep(answer)
            return 200, completion("too late")
        return answer


class Told(list):
    """What `observe` was told: (model, outcome, tokens in, tokens out)."""

    def __call__(self, model, outcome, *, seconds, tokens_in, tokens_out):
        assert seconds >= 0
        self.append((model, outcome, tokens_in, tokens_out))


@pytest.fixture
def conversation():
    """Builds a conversation from messages as a client would write them."""

    def build(*messages):
        return Conversation(tuple(read_message(json.dumps(message).encode()) for message in messages))

    return build


@pytest.fixture
def session(conversation):
    """A session of about 2,000 words with what the summaries above speak of."""
    call = {"id": "1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "app/loader.py"}'}}
    noise = "\n".join(f"row {i}: the loader read a line of the table and it was stored in the cache" for i in range(160))
    return conversation(
        {"role": "user", "content": "Make the nightly import of app/loader.py work again. Never touch the migrations."},
        {"role": "assistant", "content": "I look at the loader.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": noise},
        {"role": "assistant", "content": "The path was wrong; I have corrected it and 14 passed tests. Next is app/upload.py."},
        {"role": "user", "content": "Good. Keep the old table because report.sql reads it."},
        {
            "role": "assistant",
            "content": "It fails with TimeoutError: upload took longer than 30 s. See https://docs.example/upload",
        },
    )


@pytest.fixture
def request_for():
    """Builds the request to sum up a conversation; a token is a word here."""

    def build(conversation, **fields):
        count = lambda text: len(text.split())  # noqa: E731
        folded = conversation.messages
        tokens = sum(count(m.text) + sum(count(c.arguments) for c in m.calls) for m in folded)
        facts = Facts(goal="Make the nightly import of app/loader.py work again.", constraints=("Never touch the migrations.",))
        return SummaryRequest(**{"folded": folded, "tokens": tokens, "count": count, "model": "gpt-4o", "facts": facts, **fields})

    return build


@pytest.fixture
def scripted():
    """Builds a model that answers in turn with these answers."""
    return ScriptedModel


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def words():
    """Well-formed summaries by the name of the way, and how a completion is written."""
    return {"kimi": KIMI, "anchored": ANCHORED, "completion": completion}


@pytest.fixture
def make(told):
    """Builds a summarizer of a way that asks this model."""

    def build(way, completer, *, circuit=None, **settings):
        caller = Caller(
            completer, Settings(**{"pause": 0.0, "window": 30_000, **settings}), observe=told, circuit=circuit or Circuit()
        )
        return {"kimi": KimiSummarizer, "anchored": AnchoredSummarizer}[way](caller)

    return build
