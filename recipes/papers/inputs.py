"""Questions, models and drafters of a run of a recipe: the recipe's, or those named instead."""

import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from specjax import LoadedTarget, SpecjaxError, load
from specjax.bench.options import sources_in
from specjax.data.task_files import Question
from specjax.loading.hub import POCKET, pocket_part
from specjax.loading.methods import METHODS

from .options import RecipeOptions
from .questions import draw, is_there, sources_of, write_tasks
from .recipe import DataSet, Model, Part, Recipe, shared_data, shared_models
from .variants import needs_tuning

TRIAL = 10  # conversations that a head learns, and training prompts, for each of --limit


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run: a recipe, options, and a folder."""

    recipe: Recipe
    options: RecipeOptions
    out: Path

    @cached_property
    def parts(self) -> list[Part]:
        """The parts to run, without columns whose data is missing.

        With another target it is one model's part, unless each data set has its own model.
        """
        parts = self.recipe.parts
        if self.options.model:
            parts = [part for part in parts if part.model == self.options.model]
        elif self.options.target is not None and not self.recipe.model_of:
            parts = parts[:1]
        if not parts:
            names = ", ".join(self.recipe.models)
            raise SpecjaxError(
                f"{self.recipe.name} has no model {self.options.model!r}, but {names}"
            )
        titles = list(dict.fromkeys(title for part in parts for title in part.data))
        missing = {title: data for title in titles if (data := self.missing(title))}
        for title, data in missing.items():
            self.say(f"{title} is left out: it needs {', '.join(data.files)}; see {data.page}")
        if titles and len(missing) == len(titles):
            sources_of(missing[titles[0]], self.options.data)  # the error names its page
        parts = [
            part._replace(data=tuple(title for title in part.data if title not in missing))
            for part in parts
        ]
        return [part for part in parts if part.data or not titles]

    def missing(self, title: str) -> DataSet | None:
        """Returns data that a column needs and that cannot be read; None if all is there."""
        trains = self.recipe.measure == "classifier" or needs_tuning(self.recipe.methods)
        training = self.recipe.training.get(title, ()) if trains else ()
        names = self.recipe.data[title], *training
        needed = map(shared_data().__getitem__, names)
        return next((data for data in needed if not is_there(data, self.options.data)), None)

    def say(self, text: str) -> None:
        """Prints a line of progress."""
        print(f"{self.recipe.name}: {text}", file=sys.stderr)

    def tasks_of(self, part: Part, which: int) -> Path:
        """Returns the file of the training (0) or the validation (1) questions.

        Parts with the same questions and the same model share what is made of them.
        """
        name = self.recipe.training[part.data[0]][which]
        questions = self.drawn(name, (TRIAL, 1)[which])
        return write_tasks({shared_data()[name].title: questions}, self.out)

    def questions(self, part: Part) -> dict[str, list[Question]]:
        """Draws the questions of all columns."""
        return {title: self.drawn(self.recipe.data[title]) for title in part.data}

    def drawn(self, name: str, times: int = 1) -> list[Question]:
        """Draws questions of a data set, at most `times` the limit."""
        limit = None if self.options.limit is None else times * self.options.limit
        return draw(shared_data()[name], self.options.data, limit, self.options.seed)

    def source_of(self, method: str, part: Part) -> str | None:
        """Returns the source of a method's drafter; None if it has none."""
        sources = {} if self.options.target else dict(self.model_of(part).drafters)
        sources |= sources_in(self.options.drafter)
        if method == "eagle2" and method not in sources:
            method = "eagle"
        if self.options.target == POCKET and METHODS[method].part:
            sources = {method: str(pocket_part(METHODS[method].part))} | sources
        return sources.get(method)

    def model_of(self, part: Part) -> Model:
        """Returns the model of a part; with another target, that one, without its template."""
        model = shared_models()[part.model]
        if self.options.target is None:
            return model
        return replace(model, target=self.options.target, drafters={}, chat_template=None)

    def target_flags(self, part: Part) -> list[str]:
        """Returns the flags of a command that name the target."""
        flags = ["--target", self.model_of(part).target]
        for name in ("dtype", "quantize"):
            if (value := getattr(self.options, name)) is not None:
                flags += [f"--{name}", value]
        return flags

    def load(self, part: Part) -> LoadedTarget:
        """Loads the target of a part."""
        target = self.model_of(part).target
        return load(target, dtype=self.options.dtype, quantize=self.options.quantize)
