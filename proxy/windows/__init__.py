"""How much may it be?  The context window of each model, and the budget within it.

What is known of a model comes from five places, the surest first: the configuration, a limit that the upstream stated
when it refused a request (learned), what the upstream says of its models (discovered), the table in this package
(built in), and `default_window`. The table is believed for every upstream, because its errors mend themselves: where
it says too much, the upstream's refusal teaches the limit and the request is retried; where it says too little (a local
server that gave its model a famous name), discovery outranks it as soon as the server was asked.

Nothing here does I/O or reads a clock: `now` is monotonic seconds, and discovery is a list of paths with their readers.
"""

from __future__ import annotations

from proxy.windows.budgets import Budget, budget, output_reserve
from proxy.windows.configured import Configured, ConfiguredPrice
from proxy.windows.discovery import DISCOVERY, Probe, read_gateway, read_info, read_models, read_props, read_running
from proxy.windows.names import fold, kept_as, requested_model, spellings, undated
from proxy.windows.registry import Description, Fact, Windows
from proxy.windows.sizes import Price, Source, Window
from proxy.windows.table import Limits, Table, built_in, read_table

__all__ = [
    "DISCOVERY",
    "Budget",
    "Configured",
    "ConfiguredPrice",
    "Description",
    "Fact",
    "Limits",
    "Price",
    "Probe",
    "Source",
    "Table",
    "Window",
    "Windows",
    "budget",
    "built_in",
    "fold",
    "kept_as",
    "output_reserve",
    "read_gateway",
    "read_info",
    "read_models",
    "read_props",
    "read_running",
    "read_table",
    "requested_model",
    "spellings",
    "undated",
]
