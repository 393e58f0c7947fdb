"""One question to a model: what is sent, how long it may take, when it is asked again, and when not at all."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from proxy.errors import SummaryFailed, UpstreamError
from proxy.summarizers import Completer, Headers, Observe, ignore
from proxy.summarizers.answers import Answer, read_answer
from proxy.summarizers.redaction import redacted

RETRIED = frozenset({"timeout", "unreachable", "http_429", "http_5xx", "not_json", "no_answer", "empty"})
"""What may be better a moment later. A model that calls a tool or writes too much will do so again."""

CALLERS_FAULT = frozenset({"http_4xx", "breaker", "too_large"})
"""Failures that say nothing about the summarizer: one client's wrong key must not close it for all."""

_NEW_STYLE = re.compile(r"(?:^|/)(?:o\d|gpt-5)", re.I)


@dataclass(frozen=True, slots=True)
class Settings:
    """How the model is asked.

    model: None asks the conversation's own. window: tokens that it can hold. timeout: seconds for one try. max_output: cap of
    its words in tokens. foreign: it belongs to somebody else than the upstream, so secrets are taken out and no credentials of
    clients are sent. headers: sent with each call (a key of its own). pause: seconds before the second try.
    """

    model: str | None = None
    window: int = 32_000
    timeout: float = 60.0
    max_output: int = 4_096
    foreign: bool = False
    headers: Headers = ()
    pause: float = 1.0


class Circuit:
    """Nobody is asked for a while after three failures in a row; then one question finds out. clock: monotonic seconds."""

    def __init__(self, failures: int = 3, pause: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._pause, self._clock = failures, pause, clock
        self._failures = 0
        self._closed_until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether questions are held back."""
        return self._failures >= self._limit

    def admits(self) -> bool:
        if not self.is_open:
            return True
        if self._clock() < self._closed_until:
            return False
        self._closed_until = self._clock() + self._pause
        return True

    def record(self, outcome: str) -> None:
        """What came of a summary: `ok`, or why there is none."""
        if outcome == "ok":
            self._failures = 0
        elif outcome not in CALLERS_FAULT:
            self._failures += 1
            if self.is_open:
                self._closed_until = self._clock() + self._pause


class Caller:
    """Asks one model. completer: who carries the question. observe: told of every try and its price."""

    def __init__(
        self, completer: Completer, settings: Settings | None = None, *, observe: Observe = ignore, circuit: Circuit | None = None
    ) -> None:
        self.settings = settings or Settings()
        self.circuit = circuit or Circuit()
        self._completer, self._observe = completer, observe

    def model(self, conversation_model: str) -> str:
        """Who is asked."""
        return self.settings.model or conversation_model

    async def ask(self, system: str, content: bytes, *, model: str, cap: int, headers: Headers = ()) -> Answer:
        """The model's words. content: the user message's content as JSON (a string or a list of parts). cap: tokens.

        At most two tries; failed ones are told to `observe` here, the answer by whoever judges it (`tell`). Raises SummaryFailed.
        """
        if self.settings.foreign:
            content = await asyncio.to_thread(_redacted_json, content)
        sent = (*self.settings.headers, *(() if self.settings.foreign else headers))
        field = "max_completion_tokens" if _NEW_STYLE.search(model) else "max_tokens"
        for attempt in (1, 2):
            try:
                answer = await self._try(_body(system, content, model, cap, field), sent, model)
            except SummaryFailed as failure:
                other = _other_field(field, failure)
                if attempt == 2 or (failure.outcome not in RETRIED and other is None):
                    raise
                if other is None:
                    await asyncio.sleep(self.settings.pause)
                field = other or field
                continue
            text = redacted(answer.text) if self.settings.foreign else answer.text
            return replace(answer, text=text)
        raise AssertionError("the second try returns or raises")

    def tell(self, model: str, outcome: str, answer: Answer) -> None:
        """What became of an answer, once that is known: it may be refused although it came."""
        usage = answer.usage
        self._observe(model, outcome, seconds=answer.seconds, tokens_in=usage.input, tokens_out=usage.output)

    async def _try(self, body: bytes, headers: Headers, model: str) -> Answer:
        """One try; a failed one is told here."""
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self.settings.timeout):
                status, answered = await self._completer.complete(body, headers, timeout=self.settings.timeout)
            return replace(read_answer(status, answered), seconds=time.perf_counter() - start)
        except TimeoutError:
            failure = SummaryFailed("timeout")
        except UpstreamError as error:
            failure = SummaryFailed("timeout" if error.reason == "timeout" else "unreachable")
        except SummaryFailed as refused:
            failure = refused
        self._observe(model, failure.outcome, seconds=time.perf_counter() - start, tokens_in=0, tokens_out=0)
        raise failure


def _body(system: str, content: bytes, model: str, cap: int, field: str) -> bytes:
    """No tools, no stream options, and no field that any upstream refuses."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": msgspec.Raw(content)}]
    return msgspec.json.encode({"model": model, "messages": messages, field: cap})


def _other_field(field: str, failure: SummaryFailed) -> str | None:
    """The other name of the output's cap, when the upstream says that it does not know this one."""
    if failure.outcome != "http_4xx" or "max_" not in str(failure):
        return None
    return "max_tokens" if field == "max_completion_tokens" else "max_completion_tokens"


def _redacted_json(content: bytes) -> bytes:
    """The content with secrets taken out of its texts; of media nothing is read."""
    value = msgspec.json.decode(content)
    if isinstance(value, str):
        return msgspec.json.encode(redacted(value))
    return msgspec.json.encode([{**part, "text": redacted(part["text"])} if "text" in part else part for part in value])
