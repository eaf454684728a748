"""`specjax reproduce`: runs a table or figure of a paper, and shows our figures beside theirs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tyro.conf import Positional, UseAppendAction, arg

from specjax.cli.help import listing


@dataclass(frozen=True)
class Reproduce:
    """Run a table or figure of a paper, and show our figures beside the published ones.

    Without a name it lists the recipes, with what they cost. What is trained, tuned and measured is
    kept in the folder of --out, where recipes share it, and the same command goes on after a stop.
    """

    sections: ClassVar[dict[str, str]] = {
        "name": "arguments",
        "target": "models",
        "data": "data",
        "limit": "size",
        "train": "run",
    }
    examples: ClassVar[tuple[str, ...]] = (
        "specjax reproduce",
        "specjax reproduce hass-table-1 --model llama2-7b",
        "specjax reproduce pld-plus-table-1 --target pocket --data questions --limit 2",
    )
    if_stopped: ClassVar[str] = "the same command goes on"

    name: Annotated[Positional[str], arg(metavar="NAME")] = ""
    """The recipe, such as pld-plus-table-1."""
    target: str | None = None
    """A target in place of the paper's: pocket, a folder, a GGUF file, or a hub id. It
    replaces one model, and what is tuned for it replaces the published layer and draft length."""
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
    limit: int | None = None
    """Questions of each data set at most. Each head then trains for only 2 x LIMIT steps: enough to
    try a recipe, not for its figures."""
    max_new_tokens: int | None = None
    """New tokens per question at most; by default the recipe's."""
    runs: int | None = None
    """Runs of each question; by default the recipe's."""
    train: Annotated[str, arg(metavar="FLAGS")] = ""
    """More options of `specjax train` for the heads, in one argument: --train="--batch-size 8"."""
    seed: int = 0
    """The seed for the samples of questions, and for sampling."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype for weights and compute; by default the one that is fastest on this machine."""
    quantize: Annotated[str | None, arg(metavar="int8|int4")] = None
    """Quantise the target's weights on loading. That may change its text; drafting does not."""
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("runs/papers")
    """The folder for all recipes."""

    def run(self) -> None:
        """Runs the recipe, or lists all."""
        from specjax.cli.environment import use_compilation_cache
        from specjax.cli.options import check_seed
        from specjax.cli.reproduction import Reproduction
        from specjax.core.errors import check_at_least
        from specjax.core.files import writable_folder
        from specjax.core.folder import RunFolder
        from specjax.reproduce.estimate import rows
        from specjax.reproduce.recipe import read_recipe

        if not self.name:
            print(listing("recipes", list(map(_costs, rows()[1:]))))
            print("\n`specjax reproduce NAME` runs one. Hours on one GPU, and GB, are estimates.")
            return
        recipe = read_recipe(self.name)
        check_seed(self.seed)
        for name in ("limit", "max_new_tokens", "runs"):
            value = getattr(self, name)
            check_at_least(name, 1 if value is None else value, 1, "nothing would be measured")
        out = writable_folder(self.out)
        use_compilation_cache()
        changes = {
            name: value
            for name in ("max_new_tokens", "runs")
            if (value := getattr(self, name)) is not None
        }
        with RunFolder(out).lock():
            Reproduction(replace(recipe, **changes), self, out).run()


def _costs(row: Sequence[str]) -> tuple[str, str]:
    """Returns the line of a recipe: its name, and what it shows and costs."""
    name, title, a100, h100, gigabytes = row
    costs = f" A100: {a100} h, H100: {h100} h, {gigabytes} GB." if gigabytes != "-" else ""
    return name, f"{title}.{costs}"
