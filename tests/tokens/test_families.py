from __future__ import annotations

import pytest

from proxy.tokens.families import bare_name, encoding_name, family


@pytest.mark.parametrize(
    ("model", "encoding"),
    [
        ("gpt-4o", "o200k_base"),
        ("gpt-4o-mini-2024-07-18", "o200k_base"),
        ("chatgpt-4o-latest", "o200k_base"),
        ("gpt-4.1-nano", "o200k_base"),
        ("gpt-4.5-preview", "o200k_base"),
        ("gpt-5", "o200k_base"),
        ("gpt-5.2-chat-latest", "o200k_base"),
        ("o1", "o200k_base"),
        ("o3-mini", "o200k_base"),
        ("o4-mini-2025-04-16", "o200k_base"),
        ("codex-mini-latest", "o200k_base"),
        ("gpt-4", "cl100k_base"),
        ("gpt-4-0613", "cl100k_base"),
        ("gpt-4-turbo-2024-04-09", "cl100k_base"),
        ("gpt-4-1106-vision-preview", "cl100k_base"),
        ("gpt-4-32k", "cl100k_base"),
        ("gpt-3.5-turbo", "cl100k_base"),
        ("gpt-35-turbo", "cl100k_base"),
        ("gpt-35-turbo-16k", "cl100k_base"),
        ("openai/gpt-4", "cl100k_base"),
        ("openrouter/openai/gpt-4o", "o200k_base"),
        ("azure/gpt-35-turbo", "cl100k_base"),
        ("ft:gpt-3.5-turbo-0125:acme::abc123", "cl100k_base"),
        ("ft:gpt-4o-mini-2024-07-18:acme:suffix:id", "o200k_base"),
        ("gpt-oss:120b", "o200k_harmony"),
        ("openai/gpt-oss-20b", "o200k_harmony"),
        ("claude-sonnet-4-5", "o200k_base"),
        ("qwen3:32b", "o200k_base"),
        ("", "o200k_base"),
        ("GPT-4", "cl100k_base"),
    ],
)
def test_every_model_name_gets_an_encoding(model: str, encoding: str) -> None:
    assert encoding_name(model) == encoding


@pytest.mark.parametrize(
    ("model", "bare"),
    [
        ("gpt-4o-2024-08-06", "gpt-4o"),
        ("openai/gpt-4o", "gpt-4o"),
        ("ft:gpt-4o-mini-2024-07-18:acme::id", "gpt-4o-mini"),
        ("anthropic/claude-sonnet-4-20250514", "claude-sonnet-4"),
        ("claude-3-5-haiku@20241022", "claude-3-5-haiku"),
        ("openai/deployments/my-gpt/", "my-gpt"),
        ("gpt-4-0613", "gpt-4-0613"),
        ("qwen3:4b", "qwen3:4b"),
        ("gpt-oss:120b", "gpt-oss:120b"),
        ("openai/gpt-4o:extended", "gpt-4o"),
        ("  GPT-4o ", "gpt-4o"),
        ("x" * 1_000, "x" * 128),
    ],
)
def test_prefixes_suffixes_and_dates_are_no_part_of_a_name(model: str, bare: str) -> None:
    assert bare_name(model) == bare


def test_an_encoding_from_the_configuration_goes_before_the_name() -> None:
    assert family("my-own-model", "cl100k_base").encoding == "cl100k_base"
    assert family("gpt-4", "o200k_base").encoding == "o200k_base"


def test_an_encoding_that_we_do_not_have_is_passed_over() -> None:
    assert family("gpt-4", "p50k_base").encoding == "cl100k_base"


def test_families_tell_reasoning_models_and_others_apart() -> None:
    assert [family(name).reasoning for name in ("gpt-5-mini", "o3", "o4-mini", "gpt-4o", "gpt-oss:20b", "olmo", "claude")] == [
        *(True, True, True),
        *(False, False, False, False),
    ]
    assert [family(name).openai for name in ("gpt-5", "gpt-oss-20b", "olmo-2", "o1")] == [True, False, False, True]
