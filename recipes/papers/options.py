"""The options of a run of a recipe."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from specjax.core.settings import setting


@dataclass(frozen=True)
class RecipeOptions:
    """Which recipe to run, on which target and data, and how much of it."""

    name: Annotated[Positional[str], arg(metavar="NAME")] = ""
    """The recipe, such as pld-plus-table-1."""
    target: str | None = None
    """A target in place of the paper's: pocket, a folder, a GGUF file, or a hub id. It
    replaces one model; its tuned or default layer replaces the published one."""
    model: str = ""
    """Run only this model of the recipe, such as vicuna-7b."""
    drafter: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="METHOD=FOLDER")] = ()
    """The folder or hub id that a method reads, in place of the recipe's. With --target, methods
    without one are left out."""
    data: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Read the questions from files in this folder instead of the hub; their names are in the
    guide."""
    chat_template: Annotated[str | None, arg(metavar="FILE|vicuna")] = None
    """The form of chats, as in `specjax bench`; by default the recipe's."""
    system: Annotated[str | None, arg(metavar="TEXT")] = None
    """A system message before every chat."""
    limit: int | None = setting(None, at_least=1)
    """Questions of each data set at most. Each head then trains for only 2 x LIMIT steps: enough to
    try a recipe, not for its figures."""
    max_new_tokens: int | None = setting(None, at_least=1)
    """New tokens per question at most; by default the recipe's."""
    runs: int | None = setting(None, at_least=1)
    """Runs of each question; by default the recipe's."""
    train: Annotated[str, arg(metavar="FLAGS")] = ""
    """More options of `specjax train` for the heads, in one argument: --train="--batch-size 8"."""
    seed: int = setting(0, at_least=0, below=2**32)
    """The seed for the samples of questions, and for sampling."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype for weights and compute; by default the one that is fastest on this machine."""
    quantize: Annotated[str | None, arg(metavar="int8|int4")] = None
    """Quantise the target's weights on loading. That may change its text; drafting does not."""
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("runs/papers")
    """The folder for all recipes."""
