"""Settings: where they come from, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.config import Config, load, masked
from proxy.errors import ConfigError

CONTRACT = """
upstream: https://api.example.com/v1
default_window: null
models:
  gpt-4o: {window: 128000, reserve: 16384, encoding: o200k_base}
  "qwen*": {window: 32768, price: {input: 0.2, cached_input: 0.05, output: 0.6}}
compaction:
  enabled: true
  strategy: ladder
  trigger: 0.80
  target: 0.45
  layers: {tool_result_budget: {per_result: 8000}, microcompact: {keep_recent: 10}}
contextCollapse: {enabled: true, keepRecent: 10, triggerThreshold: 150000, summaryStyle: detailed}
autoCompact: {enabled: true, triggerThreshold: 180000, aggressiveThreshold: 190000, keepRecent: 10, preserveErrors: true, preserveUserRequests: true}
summarizer: {mode: "off", model: null, base_url: null, api_key: null, wait_ms: 0}
store: memory://
explain: {enabled: false, full_text: false}
"""


def file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "proxy.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_nothing_given_gives_the_defaults() -> None:
    config = load(environment={})

    assert config == Config()
    assert config.upstream.url == "https://api.openai.com/v1"
    assert (config.server.host, config.server.port, config.server.admin_port) == ("127.0.0.1", 8080, 9464)


def test_the_documented_file_is_read_as_it_stands(tmp_path: Path) -> None:
    config = load(environment={}, file=file(tmp_path, CONTRACT))

    assert config.upstream.url == "https://api.example.com/v1"
    assert config.models["gpt-4o"].reserve == 16384
    assert config.models["qwen*"].price is not None
    assert config.models["qwen*"].price.cached_input == 0.05
    assert config.compaction.layers["tool_result_budget"] == {"per_result": 8000}
    assert config.context_collapse is not None
    assert config.context_collapse.trigger_threshold == 150_000
    assert config.auto_compact is not None
    assert config.auto_compact.aggressive_threshold == 190_000


def test_json_is_yaml(tmp_path: Path) -> None:
    config = load(environment={}, file=file(tmp_path, '{"contextCollapse": {"keepRecent": 4, "summaryStyle": "brief"}}'))

    assert config.context_collapse is not None
    assert (config.context_collapse.keep_recent, config.context_collapse.summary_style) == (4, "brief")


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = file(tmp_path, "upstream: {url: http://file/v1, connect_timeout: 9}\nserver: {port: 1, admin_port: 2}")
    environment = {"COMPACTION_UPSTREAM": "http://env/v1", "COMPACTION_SERVER__PORT": "3"}

    config = load({"server": {"port": 4, "host": None}}, environment, path)

    assert (config.upstream.url, config.upstream.connect_timeout) == ("http://env/v1", 9.0)
    assert (config.server.port, config.server.admin_port, config.server.host) == (4, 2, "127.0.0.1")


def test_the_environment_names_the_file_too(tmp_path: Path) -> None:
    assert load(environment={"COMPACTION_CONFIG": file(tmp_path, "default_window: 5000")}).default_window == 5000


def test_client_keys_are_a_list_separated_by_commas() -> None:
    assert load(environment={"COMPACTION_CLIENT_KEYS": "one, two"}).client_keys == ("one", "two")


def test_the_environment_takes_mappings_as_json(tmp_path: Path) -> None:
    path = file(tmp_path, "models: {a: {window: 1000}, b: {window: 2000}}")
    environment = {
        "COMPACTION_MODELS": '{"b": {"window": 3000}, "qwen*": {"window": 32768, "price": {"input": 1, "output": 2}}}',
        "COMPACTION_COMPACTION__LAYERS": '{"microcompact": {"keep_recent": 4}}',
        "COMPACTION_SERVER": '{"port": 1, "admin_port": 2}',
        "COMPACTION_SERVER__PORT": "3",
        "COMPACTION_UPSTREAM__API_KEY": "{no JSON",
    }

    config = load(environment=environment, file=path)

    assert {name: model.window for name, model in config.models.items()} == {"a": 1000, "b": 3000, "qwen*": 32768}
    assert config.compaction.layers == {"microcompact": {"keep_recent": 4}}
    assert (config.server.port, config.server.admin_port) == (3, 2)
    assert config.upstream.api_key == "{no JSON"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("COMPACTION_MODELS", '{"m": ', """wrong value for `models`: got '{"m": '; it takes a mapping of settings"""),
        ("COMPACTION_MODELS", '{"m": {"windw": 1}}', "unknown setting `models.m.windw`; did you mean `window`?"),
        (
            "COMPACTION_MODELS__QWEN__WINDOW",
            "5",
            """COMPACTION_MODELS__QWEN__WINDOW: takes JSON, COMPACTION_MODELS={"NAME": {"window": 32768}}""",
        ),
    ],
)
def test_a_wrong_mapping_of_the_environment_is_named(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(environment={name: value})

    assert str(raised.value) == said


def test_allowed_hosts_are_a_list_separated_by_commas_too() -> None:
    config = load(environment={"COMPACTION_SERVER__ALLOWED_HOSTS": "llm.example.com, *.example.org,fd00::1"})

    assert config.server.allowed_hosts == ("llm.example.com", "*.example.org", "fd00::1")
    assert load(environment={}).server.allowed_hosts == ()


@pytest.mark.parametrize("name", ["https://llm.example.com", "llm.example.com:8443", "llm.example.com/v1", "a*.example.com", ""])
def test_an_allowed_host_is_a_name_and_nothing_more(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"wrong value for `server\.allowed_hosts`.*takes host names without scheme, port and path"
    ):
        load({"server": {"allowed_hosts": [name]}}, {})


def test_off_needs_no_quotes(tmp_path: Path) -> None:
    assert load(environment={}, file=file(tmp_path, "summarizer: {mode: off}")).summarizer.mode == "off"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("compaction: {triger: 0.8}", "unknown setting `compaction.triger`; did you mean `trigger`?"),
        ("upstrem: http://x", "unknown setting `upstrem`; did you mean `upstream`?"),
        ("models: {m: {windw: 5}}", "unknown setting `models.m.windw`; did you mean `window`?"),
        ("compaction: {trigger: high}", "wrong value for `compaction.trigger`: got 'high'; it takes a number"),
        ("summarizer: {mode: kimmi}", "wrong value for `summarizer.mode`: got 'kimmi'; it takes off or kimi or anchored"),
        ("upstream: ftp://x", "wrong value for `upstream.url`: got 'ftp://x'; takes an http:// or https:// URL"),
        (
            "compaction: {trigger: 0.5, target: 0.6}",
            "wrong value for `compaction.target`: got 0.6; takes less than the trigger (0.5)",
        ),
        ("server: {port: 70000}", "wrong value for `server.port`: got 70000; takes a port, 0 to 65535 (0: any free one)"),
        ("models: {m: {window: 0}}", "wrong value for `models.m.window`: got 0; takes a number above 0"),
        ("models: {m: {reserve: -1}}", "wrong value for `models.m.reserve`: got -1; takes 0 or more"),
        ("models: {m: {price: {input: -1, output: 0}}}", "wrong value for `models.m.price.input`: got -1.0; takes 0 or more"),
        ("models: {a: {window: 5}, b: {window: big}}", "wrong value for `models.b.window`: got 'big'; it takes a whole number"),
        ("models: {m: 5}", "wrong value for `models.m`: got 5; it takes a mapping of settings"),
        ("models: 5", "wrong value for `models`: got 5; it takes a mapping of settings"),
        (
            "models: {m: {encoding: gpt2}}",
            "wrong value for `models.m.encoding`: got 'gpt2'; it takes o200k_base or cl100k_base or o200k_harmony",
        ),
        ("compaction: {layers: {snip: 3}}", "wrong value for `compaction.layers.snip`: got 3; it takes a mapping of names"),
        ("compaction: {templates: [foo]}", "wrong value for `compaction.templates`: got ['foo']; it takes a list of: openai or"),
        ("compaction: {timeout_ms: 0}", "wrong value for `compaction.timeout_ms`: got 0; takes a number above 0"),
        ("compaction: {min_gain: -1}", "wrong value for `compaction.min_gain`: got -1; takes 0 or more"),
        ("upstream: {connect_timeout: 0}", "wrong value for `upstream.connect_timeout`: got 0.0; takes a number above 0"),
        ("upstream: {read_timeout: .nan}", "wrong value for `upstream.read_timeout`: got nan; takes a number above 0"),
        ("server: {drain_timeout: -1}", "wrong value for `server.drain_timeout`: got -1.0; takes 0 or more"),
        ("server: 7", "wrong value for `server`: got 7; it takes a mapping of settings"),
        ("max_body_bytes: -1", "wrong value for `max_body_bytes`: got -1; takes 0 or more"),
        ("store: {max_bytes: 0}", "wrong value for `store.max_bytes`: got 0; takes a number above 0"),
        ("autoCompact: {triggerThreshold: 0}", "wrong value for `autoCompact.triggerThreshold`: got 0; takes a number above 0"),
        (
            "store: mysql://x",
            "wrong value for `store.url`: got 'mysql://x'; takes memory://, sqlite:///PATH or redis://HOST:PORT/DB",
        ),
        ("[1, 2]", "must hold a mapping of settings, not list"),
        ("a: [", "is not valid YAML, line 1"),
        ("a: !!python/object:os.system {}", "is not valid YAML"),
    ],
)
def test_a_wrong_setting_is_named_with_what_it_takes(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(environment={}, file=file(tmp_path, text))

    assert said in str(raised.value)


def test_an_unknown_environment_variable_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as raised:
        load(environment={"COMPACTION_SUMMARIZER__MOD": "kimi"})

    assert str(raised.value) == "unknown environment variable COMPACTION_SUMMARIZER__MOD; did you mean `mode`?"


@pytest.mark.parametrize(
    "flags",
    [
        {"upstream": {"api_key": ["sk-secret"]}},
        {"client_keys": [["sk-secret"]]},
        {"explain": {"token": ["sk-secret"]}},
        {"upstream": "ftp://me:sk-secret@example.com"},
        {"summarizer": {"base_url": ["https://me:sk-secret@example.com"]}},
    ],
)
def test_a_wrong_secret_is_not_repeated(flags: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="wrong value for") as raised:
        load(flags, {})

    assert "sk-secret" not in str(raised.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*none\.yaml: No such file"):
        load(environment={}, file="none.yaml")


def test_secrets_are_masked() -> None:
    config = load({"upstream": {"api_key": "sk-1"}, "store": "redis://me:secret@h:1/0", "client_keys": "a,b"}, {})

    shown = str(masked(config))

    assert "sk-1" not in shown
    assert "secret" not in shown
    assert masked(config)["client_keys"] == ["***", "***"]


@pytest.mark.parametrize(
    ("flags", "environment", "url"),
    [
        ({}, {"HOME": "/home/u"}, "memory://"),
        ({"server": {"workers": 2}}, {"HOME": "/home/u"}, "sqlite:////home/u/.local/state/compaction-proxy/checkpoints.db"),
        ({"server": {"workers": 2}}, {"XDG_STATE_HOME": "/var/s t"}, "sqlite:////var/s%20t/compaction-proxy/checkpoints.db"),
        (
            {"server": {"workers": 2}},
            {"HOME": "/home/u", "XDG_STATE_HOME": "relative"},
            "sqlite:////home/u/.local/state/compaction-proxy/checkpoints.db",
        ),
        ({"server": {"workers": 2}, "store": "redis://127.0.0.1:1/0"}, {"HOME": "/home/u"}, "redis://127.0.0.1:1/0"),
        ({"server": {"workers": 2}, "store": "memory://"}, {"HOME": "/home/u"}, "memory://"),
        (
            {"server": {"workers": 2}, "store": {"ttl_s": 60}},
            {"HOME": "/home/u"},
            "sqlite:////home/u/.local/state/compaction-proxy/checkpoints.db",
        ),
    ],
)
def test_several_workers_share_a_file_in_the_state_directory_unless_a_store_is_set(flags, environment, url):
    assert load(flags, environment).store.url == url


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prefetch", 0.0),
        ("prefetch", 1.5),
        ("wait_ms", -1),
        ("timeout_s", 0.0),
        ("max_output_tokens", 0),
        ("max_preserved_messages", 0),
    ],
)
def test_a_summarizer_setting_that_makes_no_sense_is_named(key, value):
    with pytest.raises(ConfigError, match=f"summarizer.{key}"):
        load({"summarizer": {key: value}}, {})
