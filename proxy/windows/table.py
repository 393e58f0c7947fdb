"""The table in this package: what is known of models before anyone was asked."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from urllib.parse import urlsplit

from proxy.windows.names import spellings
from proxy.windows.sizes import Price


@dataclass(frozen=True, slots=True)
class Limits:
    """One row of the table."""

    window: int
    max_output: int | None
    max_input: int | None
    price: Price | None


@dataclass(frozen=True, slots=True)
class Table:
    """The limits of known models: `models[""]` for a name wherever it is served, `models[provider]` where that differs.

    made: the day of the snapshot. hosts: upstream host, or its end when it starts with a dot or a hyphen, to provider.
    """

    made: str
    origin: Mapping[str, str]
    hosts: Mapping[str, str]
    models: Mapping[str, Mapping[str, Limits]]

    def provider(self, upstream: str) -> str | None:
        """The provider behind a base URL, None when it is not a public one that we know."""
        host = (urlsplit(upstream).hostname or "") if "://" in upstream else upstream.lower()
        if host in self.hosts:
            return self.hosts[host]
        return next((name for end, name in self.hosts.items() if end.startswith((".", "-")) and host.endswith(end)), None)

    def find(self, model: str, provider: str | None = None) -> Limits | None:
        """What is known of a model: as this provider serves it, as the provider in its name does, as its maker says."""
        names = spellings(model)
        for rows, name in self._places(names, provider):
            if name in rows:
                return rows[name]
        return None

    def _places(self, names: tuple[str, ...], provider: str | None) -> Iterator[tuple[Mapping[str, Limits], str]]:
        nothing: Mapping[str, Limits] = {}
        for name in names:
            yield self.models.get(provider or "", nothing), name.rpartition("/")[2]
        for name in names:
            if "/" in name:
                yield self.models.get(name.partition("/")[0], nothing), name.rpartition("/")[2]
        for name in names:
            yield self.models[""], name


def read_table(packed: bytes) -> Table:
    """The table from the form in which the snapshot command packs it: gzipped JSON that states each set of limits once."""
    data = json.loads(gzip.decompress(packed))
    rows = []
    for window, max_output, max_input, *price in data["limits"]:
        rows.append(Limits(window, max_output, max_input, Price(*map(float, price)) if price else None))
    models = {provider: {name: rows[row] for name, row in named.items()} for provider, named in data["models"].items()}
    return Table(data["made"], data["from"], data["hosts"], models)


@cache
def built_in() -> Table:
    """The table of this package, read at first use."""
    return read_table(files("proxy").joinpath("windows_table.json.gz").read_bytes())
