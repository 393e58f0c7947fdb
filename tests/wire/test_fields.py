"""Single fields changed in place: every other byte stays."""

from __future__ import annotations

import pytest

from proxy.wire import slices
from proxy.wire.fields import with_less_output, with_usage_asked


def asked(body: bytes) -> bytes | None:
    return with_usage_asked(body, slices.split_object(body))


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (
            b'{ "messages":[], "stream":true }\n',
            b'{ "messages":[], "stream":true ,"stream_options":{"include_usage":true}}\n',
        ),
        (
            b'{"stream_options" : {"x":[1, 2]} ,"stream":true}',
            b'{"stream_options" : {"x":[1, 2],"include_usage":true} ,"stream":true}',
        ),
        (b'{"stream":true,"stream_options":{}}', b'{"stream":true,"stream_options":{"include_usage":true}}'),
        (b'{"stream":true,"stream_options":null}', b'{"stream":true,"stream_options":{"include_usage":true}}'),
        (
            b'{"stream":true,"a":{"stream_options":{}},"b":"\\"stream_options\\":{","stream_options":{"include_usage" : false}}',
            b'{"stream":true,"a":{"stream_options":{}},"b":"\\"stream_options\\":{","stream_options":{"include_usage" : true}}',
        ),
        (b'{"stream":true,"stream_options":{"include_usage":true}}', None),
        (b'{"stream":true,"stream_options":[]}', None),
        (b'{"stream":false}', None),
        (b"{}", None),
    ],
)
def test_usage_is_asked_for_where_the_client_did_not(body: bytes, changed: bytes | None) -> None:
    assert asked(body) == changed


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (b'{"max_tokens": 9000 ,"n":1}', b'{"max_tokens": 700 ,"n":1}'),
        (b'{"max_tokens":9000,"max_completion_tokens":600}', b'{"max_tokens":700,"max_completion_tokens":600}'),
        (b'{"max_tokens":9000,"max_completion_tokens":8000}', b'{"max_tokens":700,"max_completion_tokens":700}'),
        (b'{"max_tokens":700}', None),
        (b'{"max_tokens":"9000"}', None),
        (b'{"messages":[]}', None),
    ],
)
def test_only_what_asks_for_more_is_lowered(body: bytes, changed: bytes | None) -> None:
    assert with_less_output(body, slices.split_object(body), 700) == changed


def test_there_is_no_lowering_to_nothing() -> None:
    assert with_less_output(b'{"max_tokens":5}', {"max_tokens": b"5"}, 0) is None


def test_spans_are_where_the_values_stand() -> None:
    body = '{"ü" : "a\\"b,}" , "n":[1,{"x":2}],"k":{"n":3}, "e":1e3 }'.encode()

    found = {key: body[start:end] for key, (start, end) in slices.spans(body).items()}

    assert found == {"ü": b'"a\\"b,}"', "n": b'[1,{"x":2}]', "k": b'{"n":3}', "e": b"1e3"}


def test_of_a_repeated_key_the_last_span_counts() -> None:
    assert slices.spans(b'{"a":1,"a":22}') == {"a": (11, 13)}


def test_an_unfinished_string_takes_linear_time() -> None:
    assert slices.spans(b'{"a":"' + b"x" * 1_000_000 + b"\\") == {}
