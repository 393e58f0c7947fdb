from __future__ import annotations

import json

from builders import assistant, call, chat, tool, user

from proxy.tokens import breakdown
from proxy.tokens.breakdown import MessageShare, PartShare
from proxy.wire.chat_completions import read

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAoAAAAHgCAYAAAA10dzk"}}


def test_a_request_is_taken_apart_by_message_and_part() -> None:
    content = [{"type": "text", "text": "hello world"}, PICTURE]
    asked = assistant(None, call("1", "get_weather", city="Paris"))
    request = read(chat([{"role": "user", "content": content}, asked, tool("1", "sunny")]))

    found = breakdown("gpt-4o", request.fields, request.conversation.messages)

    assert found.messages == (
        MessageShare("user", 431, (PartShare("text", 2), PartShare("image", 425))),
        MessageShare("assistant", 16, (PartShare("call", 14),)),
        MessageShare("tool", 8, (PartShare("result", 2),)),
    )
    assert (found.model, found.encoding, found.tokens, found.tools, found.other) == ("gpt-4o", "o200k_base", 458, 0, 3)


def test_the_parts_of_the_whole_add_up() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "Does it.", "parameters": {}}}]
    system = {"role": "system", "content": "Be brief"}
    batch = [assistant("Now.", call("1", "f", a=1), call("2", "f", a=2)), tool("1", '{"x": 1}'), tool("2", "two")]
    request = read(chat([system, user("go"), *batch], "gpt-4", tools=tools))

    found = breakdown("gpt-4", request.fields, request.conversation.messages)

    assert found.encoding == "cl100k_base"
    assert found.tokens == found.tools + found.other + sum(message.tokens for message in found.messages)
    assert found.tools > 15
    assert all(message.tokens > 0 for message in found.messages)


def test_a_request_of_nothing_is_taken_apart_as_well() -> None:
    found = breakdown("", {"model": json.dumps("").encode()}, ())

    assert (found.tokens, found.messages) == (3, ())
