"""`specjax reproduce`: runs a table or figure of a paper and compares our figures with it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from .options import RecipeOptions


@dataclass(frozen=True)
class Reproduce(RecipeOptions):
    """Run a table or figure of a paper, and show our figures beside the published ones.

    Without a name it lists the recipes, with what they cost. What is trained, tuned and measured is
    kept in the folder of --out, where recipes share it, and the same command goes on after a stop.

      specjax reproduce
      specjax reproduce hass-table-1 --model llama2-7b
      specjax reproduce pld-plus-table-1 --target pocket --limit 2
    """

    if_stopped: ClassVar[str] = "the same command goes on"

    def run(self) -> None:
        """Runs the recipe, or lists all."""
        from specjax.bench.options import sources_in
        from specjax.cli.environment import use_compilation_cache
        from specjax.cli.output import print_rows
        from specjax.core.files import writable_folder
        from specjax.core.folder import RunFolder
        from specjax.loading.methods import METHODS

        from .estimate import rows
        from .recipe import read_recipe
        from .run import Reproduction

        if not self.name:
            print_rows("recipes", dict(map(_costs, rows()[1:])))
            print("\n`specjax reproduce NAME` runs one. Hours on one GPU, and GB, are estimates.")
            return
        recipe = read_recipe(self.name)
        for method in sources_in(self.drafter):
            METHODS.check(method, {})
        out = writable_folder(self.out)
        use_compilation_cache()
        given = {"max_new_tokens": self.max_new_tokens, "runs": self.runs}
        changes = {name: value for name, value in given.items() if value is not None}
        with RunFolder(out).lock():
            Reproduction(replace(recipe, **changes), self, out).run()


def _costs(row: Sequence[str]) -> tuple[str, str]:
    """Returns the line of a recipe: its name, title and cost."""
    name, title, a100, h100, gigabytes = row
    costs = f" A100: {a100} h, H100: {h100} h, {gigabytes} GB." if gigabytes != "-" else ""
    return name, f"{title}.{costs}"
