"""What a benchmark can be told; apart from the rest, so that the command line reads it at once."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BenchOptions:
    """What is measured, and how often."""

    methods: str = "plain,pld,pld-plus"
    """Drafting methods, with commas between; plain decoding is always among them."""
    tasks: str = "pocket"
    """pocket for its held-out edit tasks, or a JSONL file with `prompt` or `turns` in each line."""
    limit: int = 4
    """Prompts of each kind of task."""
    max_new_tokens: int = 128
    """Stop after so many new tokens, if the text has not ended before."""
    temperature: float = 0.0
    """0 takes the most likely token; above, tokens are drawn, the same ones by every method."""
    runs: int = 3
    """How often each method runs each prompt."""
    seed: int = 0
    """Decides what is drawn, and which edit tasks pocket makes."""
    peers: str = ""
    """transformers: also measure its plain greedy decoding of the same weights (needs torch)."""
    out: Path | None = None
    """Also append the results to this file, one JSON object per line, as they come."""
