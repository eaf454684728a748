"""Recipes: a table or figure of a paper as data, with the published figures.

Each is a TOML file in this folder; `models.toml` and `data.toml` hold their models and data sets.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from specjax import SpecjaxError

FOLDER = Path(__file__).parent
SHARED = ("models", "data")  # files beside the recipes
FIGURE = re.compile(r"(-?[\d.]+)(?:±([\d.]+))?")
ALL = ""  # the title of a column over all data, or of a row for all of a kind


@dataclass(frozen=True)
class Model:
    """A target, and where its published drafters are."""

    target: str
    billions: float  # of weights
    cache: tuple[int, int]  # layers, and the width of keys or values in one
    drafters: Mapping[str, str] = field(default_factory=dict)  # by method
    chat_template: str | None = None  # as `specjax bench` takes it


@dataclass(frozen=True)
class DataSet:
    """Questions or texts: where they are, and which of them a recipe takes."""

    title: str
    license: str
    page: str
    sources: tuple[str, ...]  # as `specjax bench --tasks` takes them; none: only local files
    files: tuple[str, ...]  # the names of local files that may take their place
    words: tuple[int, int]  # of a prompt and of its answer, about; for estimates
    kinds: tuple[str, ...] = ()  # of questions, if not all
    sample: int | None = None  # of each source, or of each kind; None: all
    per_kind: bool = False
    skip: int = 0  # shuffled questions before the sample
    first: int | None = None  # questions that are read of a source
    is_chat: bool = False  # texts become a user's message
    turns: int = 1

    @property
    def num_questions(self) -> int:
        """The number of questions, as far as it is known."""
        groups = max(len(self.sources or self.files), 9 if self.per_kind else 1)
        return (self.sample or 80) * groups


@dataclass(frozen=True)
class RecipeMethod:
    """A method with settings; some values are found at run time.

    `heads` may be "top N" (of those that copy), "all" or "layer N"; a length rule's settings may be
    "tuned"; `each = "layer"` makes a variant per layer, whose number takes the place of {}.
    """

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    head: str | None = None  # of the recipe's own; else the published one
    each: str = ""


@dataclass(frozen=True)
class OwnHead:
    """A head that a recipe trains: one `specjax train` command."""

    method: str
    data: str  # a data set
    options: str = ""
    start: str | None = None  # the method whose published head it starts from


class Cell(NamedTuple):
    """The place of a figure; ALL where the table names none."""

    temperature: float
    model: str
    data: str
    method: str
    column: str


class Figure(NamedTuple):
    """A value and its standard deviation over runs, if that is known."""

    value: float
    spread: float | None = None

    def __str__(self) -> str:
        digits = 1 if abs(self.value) >= 100 else 2
        spread = "" if self.spread is None else f"±{self.spread:.{digits}f}"
        return f"{self.value:.{digits}f}{spread}"


class RecipeColumn(NamedTuple):
    """A figure of each row: its metric, over one data set or the mean over all."""

    metric: str
    data: str = ALL


class Part(NamedTuple):
    """One model and the data sets that it is measured on together."""

    model: str
    data: tuple[str, ...]  # titles


@dataclass(frozen=True)
class Recipe:
    """One table or figure; see `recipes/papers` for examples."""

    name: str
    title: str
    device: str  # of the paper
    models: tuple[str, ...]
    columns: Mapping[str, RecipeColumn]
    measure: str = "bench"  # or classifier, attribution, words, equation
    data: Mapping[str, str] = field(default_factory=dict)  # titles, and names of data sets
    model_of: Mapping[str, str] = field(default_factory=dict)  # data with one model each
    training: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # of a classifier
    methods: Mapping[str, RecipeMethod] = field(default_factory=dict)
    heads: Mapping[str, OwnHead] = field(default_factory=dict)
    temperatures: tuple[float, ...] = (0.0,)
    runs: int = 3
    max_new_tokens: int = 1024
    note: str = ""
    published: Mapping[Cell, Figure] = field(default_factory=dict)

    @property
    def parts(self) -> list[Part]:
        """The benchmarks: each model with all data, or each data set with its own model."""
        if self.model_of:
            return [Part(self.model_of[title], (title,)) for title in self.data]
        return [Part(model, tuple(self.data)) for model in self.models or (ALL,)]


def recipe_names() -> list[str]:
    """Returns the names of all recipes: by paper, tables before figures."""

    def order(name: str) -> tuple:
        paper, kind, number = name.rsplit("-", 2)
        return paper, kind != "table", int(number)

    names = [path.stem for path in FOLDER.glob("*.toml") if path.stem not in SHARED]
    return sorted(names, key=order)


def read_recipe(name: str) -> Recipe:
    """Reads a recipe."""
    names = recipe_names()
    if name not in names:
        raise SpecjaxError(f"recipe {name!r} is unknown; choose one of {', '.join(names)}")
    values = _values(name)
    models, model_of = values.pop("models"), {}
    if isinstance(models, dict):
        models, model_of = list(dict.fromkeys(models.values())), models
    metric, titles = values.pop("metric", ""), values.pop("columns", {})
    data = values.get("data", {})
    model_of = {title: model_of[title] for title in data} if model_of else {}
    is_crossed = metric and (len(data) > 1 or not titles)
    columns = {title: RecipeColumn(metric, title) for title in data if is_crossed}
    columns |= {title: _column(value) for title, value in titles.items()}
    text = values.pop("published", "")
    recipe = Recipe(
        name=name,
        models=tuple(models),
        columns=columns,
        model_of=model_of,
        methods={title: RecipeMethod(**each) for title, each in values.pop("methods", {}).items()},
        heads={title: OwnHead(**each) for title, each in values.pop("heads", {}).items()},
        training={data: tuple(pair) for data, pair in values.pop("training", {}).items()},
        **{key: _tuples(value) for key, value in values.items()},
    )
    return replace(recipe, published=dict(_published(recipe, text)))


@cache
def shared_models() -> dict[str, Model]:
    """Returns the models of all recipes by name."""
    return {name: Model(**_tuples(each)) for name, each in _toml("models").items()}


@cache
def shared_data() -> dict[str, DataSet]:
    """Returns the data sets of all recipes by name."""
    return {name: DataSet(**_tuples(each)) for name, each in _toml("data").items()}


def _toml(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def _values(name: str) -> dict[str, Any]:
    """Returns the values of a recipe, over those of the one that it is `like`."""
    values = _toml(name)
    like = values.pop("like", None)
    return {**_values(like), **values} if like else values


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _column(value: str | dict[str, str]) -> RecipeColumn:
    return RecipeColumn(value) if isinstance(value, str) else RecipeColumn(**value)


def _published(recipe: Recipe, text: str) -> Iterator[tuple[Cell, Figure]]:
    """Yields the figures of a table with cells between bars; a dash marks an empty cell.

    The columns T, model, data and method name the row; the others are those of the recipe.
    """
    lines = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    for line in lines[1:]:
        row = dict(zip(lines[0], line, strict=True))
        temperature = float(row.pop("T", recipe.temperatures[0]))
        data, method = row.pop("data", ALL), row.pop("method", ALL)
        only = recipe.models[0] if len(recipe.models) == 1 else ALL
        model = row.pop("model", recipe.model_of.get(data, only))
        for column, cell in row.items():
            if column not in recipe.columns:
                raise SpecjaxError(f"{recipe.name}: column {column!r} of its figures is unknown")
            if match := FIGURE.fullmatch(cell):
                spread = None if match[2] is None else float(match[2])
                place = Cell(temperature, model, data, method, column)
                yield place, Figure(float(match[1]), spread)
            elif cell != "-":
                raise SpecjaxError(f"{recipe.name}: {cell!r} is not a figure")
