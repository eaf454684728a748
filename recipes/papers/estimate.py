"""Estimates the cost of a recipe on a GPU: hours, and gigabytes of memory.

Decoding is bound by memory: plain decoding reads all weights for each token at `DECODING` of the
bandwidth, and a method is as much faster as the recipe's table says, else twice as fast. Training
is bound by arithmetic, at `TRAINING` of the peak: a pass of the target forward, and of the head (a
layer and the LM head) forward and back, for each step that it unrolls. Texts have about 4 tokens
in 3 words. Tuning and compiling are left out.
"""

import re
from statistics import fmean
from typing import NamedTuple

from .recipe import (
    ALL,
    Model,
    OwnHead,
    Part,
    Recipe,
    read_recipe,
    recipe_names,
    shared_data,
    shared_models,
)

TOKENS_PER_WORD = 4 / 3
DECODING, TRAINING = 0.6, 0.4
BYTES = 2  # of a weight
OTHER_SPEED = 2.0  # of a method that the table does not have
EPOCHS = {"parallel-medusa": 20, "parallel-eagle": 40}  # else 10
PROMPTS_PER_CLASSIFIER = 500


class Device(NamedTuple):
    """The peak rates of a device."""

    bytes_per_second: float
    operations_per_second: float  # in bfloat16


class Cost(NamedTuple):
    """The hours and gigabytes that a recipe takes."""

    hours: float
    gigabytes: float


DEVICES = {"A100": Device(2.0e12, 312e12), "H100": Device(3.35e12, 989e12)}


def estimate(recipe: Recipe, device: Device) -> Cost:
    """Returns the cost of a recipe; nothing for one that runs no model."""
    hours = gigabytes = 0.0
    for part in recipe.parts:
        if part.model == ALL:
            continue
        model = shared_models()[part.model]
        hours += _bench_hours(recipe, part, model, device)
        hours += sum(_training_hours(head, model, device) for head in recipe.heads.values())
        gigabytes = max(gigabytes, _gigabytes(recipe, part, model))
    return Cost(hours, gigabytes)


def summary(recipe: Recipe) -> str:
    """Returns the costs of a recipe with the paper's models, in words."""
    costs = {name: estimate(recipe, device) for name, device in DEVICES.items()}
    if not costs["A100"].hours:
        return "no model runs"
    hours = " or ".join(f"{in_hours(c.hours)} hours on one {name}" for name, c in costs.items())
    return f"with the paper's models about {hours}, and {costs['A100'].gigabytes:.0f} GB"


def rows() -> list[list[str]]:
    """Returns a line per recipe: name, title, hours per device, and gigabytes."""
    table = [["recipe", "table or figure", *(f"hours, {name}" for name in DEVICES), "GB"]]
    for name in recipe_names():
        recipe = read_recipe(name)
        costs = [estimate(recipe, device) for device in DEVICES.values()]
        sizes = f"{costs[0].gigabytes:.0f}" if costs[0].hours else "-"
        table.append([name, recipe.title, *(in_hours(cost.hours) for cost in costs), sizes])
    return table


def in_hours(hours: float) -> str:
    """Returns a time in full hours, or tenths below one; a dash for none."""
    if not hours:
        return "-"
    return f"{hours:.0f}" if hours >= 0.95 else f"{max(hours, 0.1):.1f}"


def _bench_hours(recipe: Recipe, part: Part, model: Model, device: Device) -> float:
    tokens = 0.0
    for title in part.data:
        data = shared_data()[recipe.data[title]]
        answer = min(data.words[1] * TOKENS_PER_WORD, recipe.max_new_tokens)
        tokens += data.num_questions * data.turns * answer
    if recipe.training:
        tokens += PROMPTS_PER_CLASSIFIER * recipe.max_new_tokens / 4  # in batches
    per_second = DECODING * device.bytes_per_second / (BYTES * model.billions * 1e9)
    variants = [
        1 / _speed(recipe, title)
        for title, variant in recipe.methods.items()
        for _ in range(model.cache[0] if variant.each else 1)
    ]
    runs = recipe.runs * len(recipe.temperatures) * (1 + sum(variants))
    return tokens * runs / per_second / 3600


def _speed(recipe: Recipe, method: str) -> float:
    speeds = [
        figure.value
        for cell, figure in recipe.published.items()
        if cell.method == method and recipe.columns[cell.column].metric == "speedup"
    ]
    return fmean(speeds) if speeds else OTHER_SPEED


def _training_hours(head: OwnHead, model: Model, device: Device) -> float:
    data = shared_data()[head.data]
    tokens = (data.sample or 0) * min(data.words[1] * TOKENS_PER_WORD, 2048)
    options = dict(re.findall(r"--(\S+) (\S+)", head.options))
    epochs = float(options.get("epochs", EPOCHS.get(head.method, 10)))
    steps = int(options.get("align-steps", 3 if head.method == "hass" else 1))
    if head.method.startswith("parallel"):
        steps = 1 + int(options.get("num-masks", 4))
    layers, width = model.cache
    of_head = model.billions * 1e9 / layers + 32000 * max(width, 4096)
    operations = tokens * epochs * (2 * model.billions * 1e9 + 6 * of_head * steps)
    written = tokens * 2e9 * model.billions if "--distill" in head.options else 0
    return (operations / TRAINING + written / 0.1) / device.operations_per_second / 3600


def _gigabytes(recipe: Recipe, part: Part, model: Model) -> float:
    """Returns weights, heads at a tenth of them, and a cache; training adds optimizer and texts."""
    layers, width = model.cache
    words = (sum(shared_data()[recipe.data[title]].words) for title in part.data)
    longest = recipe.max_new_tokens + max(words, default=0) * TOKENS_PER_WORD
    cache = 2 * layers * width * BYTES * longest
    weights = BYTES * model.billions * 1e9
    head = model.billions * 1e9 / layers
    training = 16 * head + 8e9 if recipe.heads else 0
    return (1.1 * weights + cache + training) / 1e9
