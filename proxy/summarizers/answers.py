"""What a model answered to a question for a summary: its words, or why there are none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.errors import SummaryFailed
from proxy.summarizers import Usage

THINKING = re.compile(r"<(think|thinking|reasoning)>.*?(?:</\1>|\Z)", re.S | re.I)
"""Thinking that some models write among their words."""

LONGEST_ERROR = 600
"""Characters: what is longer and speaks of an error is a summary that tells of one."""

_ERROR_TEXT = re.compile(
    r"""^\W*(?:
        <!doctype|<html|\{\s*"(?:error|detail|message)"\s*:
        |(?:internal\ server\ |api\ |upstream\ |unexpected\ )?error\b\s*[:(\d]
        |an?\ (?:unexpected\ |internal\ )?error\ (?:has\ )?occurred
        |(?:rate\ limit|quota|context\ length|maximum\ context)\b.{0,40}(?:exceeded|reached)
        |(?:the\ )?(?:model|server|service)\ is\ (?:currently\ )?(?:overloaded|unavailable|busy)
        |(?:too\ many\ requests|service\ unavailable|bad\ gateway|gateway\ time-?out|request\ timed\ out)
        |(?:i['’]?m|i\ am)\ (?:sorry|unable|not\ able)\b|sorry,|i\ (?:cannot|can['’]t)\b|as\ an\ ai\b
        |抱歉|对不起|很抱歉|申し訳|すみません|es\ tut\ mir\ leid|je\ suis\ désolé|lo\ siento
    )""",
    re.I | re.X,
)
_FAILED_BY_STATUS = {429: "http_429"}


@dataclass(frozen=True, slots=True)
class Answer:
    """The words without thinking, and what they cost. model: who says that it wrote them. seconds: how long it took."""

    text: str
    usage: Usage
    model: str = ""
    seconds: float = 0.0


def read_answer(status: int, body: bytes) -> Answer:
    """The answer in the body of a completion. Raises SummaryFailed for everything but whole, plain words."""
    if status != 200:
        raise SummaryFailed(_FAILED_BY_STATUS.get(status) or ("http_5xx" if status >= 500 else "http_4xx"), _told(body))
    value = _decoded(body)
    choices = value.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
    message = choice.get("message") if choice is not None else None
    if choice is None or not isinstance(message, dict):
        raise SummaryFailed("no_answer", _told(body))
    _check_finish(choice.get("finish_reason"), message)
    text, thought = _words(message)
    if not text:
        raise SummaryFailed("reasoning_only" if thought else "empty")
    if is_error_text(text):
        raise SummaryFailed("error_text")
    model = value.get("model")
    return Answer(text, _usage(value.get("usage")), model if isinstance(model, str) else "")


def is_error_text(text: str) -> bool:
    """Whether these words are a failure told in place of an answer: an apology, an error page, a refusal."""
    return len(text) <= LONGEST_ERROR and _ERROR_TEXT.match(text) is not None


def without_thinking(text: str) -> str:
    """The words after the thinking; also when the opening of it was left to the template."""
    stripped = THINKING.sub("", text)
    for closing in ("</think>", "</thinking>", "</reasoning>"):
        stripped = stripped.rsplit(closing, 1)[-1]
    return stripped.strip()


def _decoded(body: bytes) -> Mapping[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise SummaryFailed("not_json") from None
    if not isinstance(value, dict):
        raise SummaryFailed("not_json")
    return value


def _check_finish(reason: object, message: Mapping[str, Any]) -> None:
    if message.get("tool_calls") or message.get("function_call") or reason in ("tool_calls", "function_call"):
        raise SummaryFailed("tool_call")
    if message.get("refusal"):
        raise SummaryFailed("refused")
    match reason:
        case "stop":
            return
        case "length" | "max_tokens":
            raise SummaryFailed("cut_off")
        case "content_filter":
            raise SummaryFailed("filtered")
        case _:
            raise SummaryFailed("unfinished")


def _words(message: Mapping[str, Any]) -> tuple[str, bool]:
    """The words, and whether there was thinking beside them."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if isinstance(part, dict) and _is_text(part))
    raw = content if isinstance(content, str) else ""
    text = without_thinking(raw)
    return text, bool(message.get("reasoning_content") or message.get("reasoning") or raw.strip())


def _is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type") in ("text", "output_text") and isinstance(part.get("text"), str)


def _usage(value: object) -> Usage:
    if not isinstance(value, dict):
        return Usage()
    read = [value.get(name) for name in ("prompt_tokens", "completion_tokens")]
    given, made = (number if isinstance(number, int) and number >= 0 else 0 for number in read)
    return Usage(given, made)


def _told(body: bytes) -> str:
    """The beginning of an error's body, to look for a parameter that it names. Never logged."""
    return body[:2000].decode("utf-8", "replace")
