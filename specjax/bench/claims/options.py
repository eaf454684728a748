"""What `specjax bench claims` can be told; apart, so that the command line reads it at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg


@dataclass(frozen=True)
class ClaimsOptions:
    """How much is measured."""

    limit: int = 3
    """Prompts of each kind of edit, and twice as many pieces of code to be continued."""
    runs: int = 2
    """How often each method runs each prompt at temperature 0; when sampling it is once."""
    max_new_tokens: int = 96
    """Stop after so many new tokens, if the text has not ended before."""
    seed: int = 0
    """Decides which tasks pocket makes, what is drawn, and the bootstrap."""
    out: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Also write claims.json and claims.md into this folder."""
