"""What a running proxy does beyond the messages, once it is told to."""

from __future__ import annotations

import gzip
import http.client
import json
from collections.abc import Iterator

import pytest
from builders import agent_session, chat, user
from fakes import Received, Reply, ScriptedUpstream, completion, event, stream
from running import RunningProxy, running_proxy, send

LONG = agent_session(30, 300)
USAGE = {"prompt_tokens": 4_000, "completion_tokens": 2, "total_tokens": 4_002}
ON = {
    "COMPACTION_COMPACTION__CLAMP_MAX_TOKENS": "true",
    "COMPACTION_COMPACTION__STREAM_USAGE": "inject",
    "COMPACTION_COMPACTION__USAGE_REPORT": "original",
}


@pytest.fixture(scope="module")
def plain(_scripted: ScriptedUpstream) -> Iterator[RunningProxy]:
    with running_proxy("--upstream", _scripted.url) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(_scripted: ScriptedUpstream) -> Iterator[RunningProxy]:
    with running_proxy("--upstream", _scripted.url, environment=ON) as running:
        yield running


def told(headers: http.client.HTTPMessage, what: str) -> int:
    return int(headers[f"x-compaction-tokens-{what}"])


def too_much_output(limit: int, prompt: int, output: int) -> Reply:
    message = (
        f"'max_tokens' or 'max_completion_tokens' is too large: {output}. This model's maximum context length is {limit} tokens "
        f"and your request has {prompt} input tokens ({output} > {limit} - {prompt})."
    )
    return Reply(status=400, chunks=[json.dumps({"object": "error", "message": message, "code": 400}).encode()])


class TestTheAnswersLength:
    @staticmethod
    def narrow(one: Received) -> Reply:
        asked = one.json.get("max_tokens") or one.json.get("max_completion_tokens")
        return too_much_output(4096, 96, asked) if asked > 4_000 else completion()

    def test_it_is_lowered_to_what_is_left_and_nothing_else_changes(
        self, proxy: RunningProxy, upstream: ScriptedUpstream
    ) -> None:
        upstream.script = self.narrow
        body = b'{ "model":"served-here", "max_tokens" : 9000, "messages":[{"role":"user","content":"\\u0068i"}],"seed":1.0 }'

        status, headers, _ = send(proxy, body)

        assert (status, headers["x-compaction"]) == (200, "none")
        assert [one.body for one in upstream.chats] == [body, body.replace(b"9000", b"4000")]

    def test_a_second_refusal_is_not_tried_again_and_the_first_is_answered(
        self, proxy: RunningProxy, upstream: ScriptedUpstream
    ) -> None:
        upstream.script = lambda one: too_much_output(4096, 96, one.json["max_tokens"])

        status, _, body = send(proxy, chat([user("hi")], model="served-there", max_tokens=9_000))

        assert status == 400
        assert "too large: 9000." in json.loads(body)["message"]
        assert len(upstream.chats) == 2

    def test_what_does_not_say_how_much_is_left_is_passed_on(self, proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
        message = "max_tokens is too large: 9000. This model supports at most 4096 completion tokens, whereas you provided 9000."
        upstream.script = lambda _: Reply(status=400, chunks=[json.dumps({"error": {"message": message}}).encode()])

        status, _, _ = send(proxy, chat([user("hi")], model="served-there", max_tokens=9_000))

        assert (status, len(upstream.chats)) == (400, 1)

    def test_without_the_option_the_refusal_is_passed_on(self, plain: RunningProxy, upstream: ScriptedUpstream) -> None:
        upstream.script = self.narrow

        status, _, _ = send(plain, chat([user("hi")], model="served-here", max_tokens=9_000))

        assert (status, len(upstream.chats)) == (400, 1)


class TestUsageOfStreams:
    BODY = b'{ "model":"gpt-4", "messages":[{"role":"user","content":"\\u0068i"}], "stream":true,"seed":1.0 }'
    ASKED = BODY[:-1] + b',"stream_options":{"include_usage":true}}'
    WORDS = event({"content": "All done."}, usage=None)
    DONE = b"data: [DONE]\n\n"

    @classmethod
    def answering(cls, one: Received) -> Reply:
        asks = (one.json.get("stream_options") or {}).get("include_usage")
        told = [event({}, choices=[], usage=USAGE)] if asks else []
        return Reply(headers=(("content-type", "text/event-stream"),), chunks=[cls.WORDS, *told, cls.DONE])

    def test_it_is_asked_for_and_taken_out_again(self, proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
        upstream.script = self.answering

        _, _, body = send(proxy, self.BODY, accept_encoding="gzip")

        assert upstream.chats[0].body == self.ASKED
        assert upstream.chats[0].header("accept-encoding") is None
        assert body == self.WORDS + self.DONE

    @pytest.mark.parametrize("size", [1, 3, 50])
    def test_it_is_taken_out_however_the_stream_is_cut(self, proxy: RunningProxy, upstream: ScriptedUpstream, size: int) -> None:
        whole = (self.WORDS + event({}, choices=[], usage=USAGE) + self.DONE).replace(b"\n", b"\r\n")
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        upstream.script = lambda _: Reply(headers=(("content-type", "text/event-stream"),), chunks=pieces)

        _, _, body = send(proxy, self.BODY)

        assert body == (self.WORDS + self.DONE).replace(b"\n", b"\r\n")

    def test_a_stream_with_a_length_gets_no_wrong_one(self, proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
        whole = self.WORDS + event({}, choices=[], usage=USAGE) + self.DONE
        upstream.script = lambda _: Reply(headers=(("content-type", "text/event-stream"),), chunks=[whole])

        _, headers, body = send(proxy, self.BODY)

        assert headers["content-length"] is None
        assert body == self.WORDS + self.DONE

    def test_who_asked_gets_it(self, proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
        upstream.script = self.answering

        _, _, body = send(proxy, self.ASKED)

        assert upstream.chats[0].body == self.ASKED
        assert body == self.WORDS + event({}, choices=[], usage=USAGE) + self.DONE

    def test_other_stream_options_are_kept(self, proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
        upstream.script = self.answering

        send(proxy, self.BODY[:-1] + b',"stream_options":{"include_obfuscation":false}}')

        assert upstream.chats[0].json["stream_options"] == {"include_obfuscation": False, "include_usage": True}

    def test_a_compacted_stream_asks_too(self, proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
        upstream.script = self.answering

        _, headers, body = send(proxy, chat(agent_session(29, 300, module="asks"), model="gpt-4", stream=True))

        assert headers["x-compaction"] == "applied"
        assert upstream.chats[0].json["stream_options"] == {"include_usage": True}
        assert body == self.WORDS + self.DONE

    def test_a_compressed_request_leaves_uncompressed_when_it_asks(self, proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
        upstream.script = self.answering

        _, _, body = send(proxy, gzip.compress(self.BODY), content_encoding="gzip")

        assert upstream.chats[0].body == self.ASKED
        assert upstream.chats[0].header("content-encoding") is None
        assert body == self.WORDS + self.DONE

    def test_a_plain_request_is_not_touched(self, proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
        body = chat([user("hi")], model="gpt-4")

        send(proxy, body)

        assert upstream.chats[0].body == body

    @pytest.mark.parametrize("mode", ["off", "shadow"])
    def test_what_is_to_pass_untouched_does(self, proxy: RunningProxy, upstream: ScriptedUpstream, mode: str) -> None:
        body = chat(agent_session(30, 300, module=mode), model="gpt-4", stream=True)

        send(proxy, body, x_compaction=mode)

        assert upstream.chats[0].body == body

    def test_a_model_that_refuses_the_question_is_asked_once(self, proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
        def refusing(one: Received) -> Reply:
            if "stream_options" not in one.json:
                return self.answering(one)
            message = "Unrecognized request argument supplied: stream_options"
            return Reply(status=400, chunks=[json.dumps({"error": {"message": message}}).encode()])

        upstream.script = refusing
        body = self.BODY.replace(b"gpt-4", b"strict-model")

        answers = [send(proxy, body) for _ in range(2)]

        assert [status for status, _, _ in answers] == [200, 200]
        assert answers[0][2] == self.WORDS + self.DONE
        asked = body[:-1] + b',"stream_options":{"include_usage":true}}'
        assert [one.body for one in upstream.chats] == [asked, body, body]

    def test_another_refusal_is_passed_on(self, proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
        refusal = b'{"error":{"message":"temperature must be at most 2"}}'
        upstream.script = lambda _: Reply(status=400, chunks=[refusal])

        status, _, body = send(proxy, self.BODY)

        assert (status, body, len(upstream.chats)) == (400, refusal, 1)

    def test_a_stream_that_breaks_off_is_passed_on_as_far_as_it_came(
        self, proxy: RunningProxy, upstream: ScriptedUpstream
    ) -> None:
        upstream.script = lambda _: Reply(
            headers=(("content-type", "text/event-stream"),), chunks=[self.WORDS, self.WORDS[:30]], cut=True
        )

        with pytest.raises(http.client.IncompleteRead) as broken:
            send(proxy, self.BODY)

        assert broken.value.partial.startswith(self.WORDS + self.WORDS[:30] + b"\n\ndata: " + b'{"error"')

    def test_without_the_option_nothing_is_added(self, plain: RunningProxy, upstream: ScriptedUpstream) -> None:
        upstream.script = self.answering

        send(plain, self.BODY, accept_encoding="gzip")

        assert upstream.chats[0].body == self.BODY
        assert upstream.chats[0].header("accept-encoding") == "gzip"


class TestUsageAsTheClientSentIt:
    def test_a_plain_answer_counts_what_came(self, proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
        upstream.script = lambda _: completion("a \u00e9", prompt_tokens=4_000)

        _, headers, body = send(proxy, chat(LONG, model="gpt-4"))

        saved = told(headers, "before") - told(headers, "after")
        assert saved > 3_000
        expected = completion("a \u00e9", prompt_tokens=4_000 + saved).chunks[0]
        assert body == expected
        assert headers["content-length"] == str(len(expected))
        assert headers["x-compaction-usage"] == "original"

    def test_a_stream_counts_what_came(self, proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
        upstream.script = lambda _: stream({"content": "done"}, usage=USAGE)
        body = chat(LONG, model="gpt-4", stream=True, stream_options={"include_usage": True})

        _, headers, answer = send(proxy, body)

        saved = told(headers, "before") - told(headers, "after")
        usage = {**USAGE, "prompt_tokens": 4_000 + saved, "total_tokens": 4_002 + saved}
        assert answer == b"".join(stream({"content": "done"}, usage=usage).chunks)

    def test_a_compressed_answer_is_left_alone_and_said_to_be(self, proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
        compressed = gzip.compress(completion(prompt_tokens=4_000).chunks[0])
        sent = (("content-type", "application/json"), ("content-encoding", "gzip"))
        upstream.script = lambda _: Reply(headers=sent, chunks=[compressed])

        _, headers, body = send(proxy, chat(LONG, model="gpt-4"))

        assert body == compressed
        assert headers["x-compaction-usage"] == "upstream"

    def test_what_was_not_compacted_is_left_alone(self, proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
        upstream.script = lambda _: completion(prompt_tokens=9)

        _, headers, body = send(proxy, chat([user("hi")], model="gpt-4"))

        assert body == completion(prompt_tokens=9).chunks[0]
        assert "x-compaction-usage" not in headers

    def test_an_answer_in_pieces_is_put_together(self, proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
        whole = completion(prompt_tokens=4_000).chunks[0]
        upstream.script = lambda _: Reply(chunks=[whole[:150], whole[150:]])

        _, headers, body = send(proxy, chat(LONG, model="gpt-4"))

        saved = told(headers, "before") - told(headers, "after")
        assert json.loads(body)["usage"] == {
            "prompt_tokens": 4_000 + saved,
            "completion_tokens": 3,
            "total_tokens": 4_003 + saved,
        }

    def test_without_the_option_usage_is_the_upstreams(self, plain: RunningProxy, upstream: ScriptedUpstream) -> None:
        upstream.script = lambda _: completion(prompt_tokens=4_000)

        _, headers, body = send(plain, chat(LONG, model="gpt-4"))

        assert headers["x-compaction"] in ("applied", "reused")
        assert body == completion(prompt_tokens=4_000).chunks[0]
        assert "x-compaction-usage" not in headers
