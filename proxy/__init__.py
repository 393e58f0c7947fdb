"""compaction-proxy: a transparent, OpenAI-compatible proxy that makes long conversations fit the model's context window."""

__version__ = "0.1.0"
