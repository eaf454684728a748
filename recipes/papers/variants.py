"""Turns the methods of a recipe into variants of a benchmark, for a target."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specjax import TransformerConfig
from specjax.decoding.drafters.prompt_lookup_plus import PromptLookupPlusAttention
from specjax.tuning.induction_heads import all_heads

from .recipe import RecipeMethod

TUNED = "tuned"
ORACLE = "oracle"  # a rule that only recipes know


def needs_ranking(variants: Mapping[str, RecipeMethod]) -> bool:
    """Whether a variant asks for the heads that copy most."""
    return any(
        str(variant.settings.get("heads", "")).startswith("top") for variant in variants.values()
    )


def needs_tuning(variants: Mapping[str, RecipeMethod]) -> bool:
    """Whether a variant of a length rule has settings that are tuned."""
    return any(TUNED in variant.settings.values() for variant in variants.values())


def resolved(
    variants: Mapping[str, RecipeMethod],
    config: TransformerConfig,
    ranked: Sequence[tuple[int, int, int]] = (),
    tuned: Mapping[str, Mapping[str, Any]] = {},  # never written
    is_published: bool = True,
) -> Iterator[tuple[str, RecipeMethod]]:
    """Yields the variants by title, with all settings as the methods take them.

    `ranked` holds layer, head and count of the heads that copy, best first; `tuned` the settings by
    rule. A target other than the published one takes its own tuned or default layer.
    """
    for title, variant in variants.items():
        for number in range(1, config.num_hidden_layers + 1) if variant.each else (0,):
            settings = {
                name: value.format(number) if variant.each and isinstance(value, str) else value
                for name, value in variant.settings.items()
            }
            if not (is_published or variant.each):
                settings.pop("layer", None)
            if "layer" in settings:
                settings["layer"] = int(settings["layer"])
            if "heads" in settings:
                settings["heads"] = _heads(settings["heads"], config, ranked)
            tuned_settings = tuned.get(str(settings.get("rule")), {})
            settings |= {name: tuned_settings[name] for name in settings if settings[name] == TUNED}
            yield title.format(number), replace(variant, settings=settings)


def alias(title: str) -> str:
    """Returns the name of a variant in a benchmark: commas, dots and signs would end it."""
    return re.sub(r"[,.=]", "·", title).strip()


def _heads(
    heads: str, config: TransformerConfig, ranked: Sequence[tuple[int, int, int]]
) -> tuple[tuple[int, int], ...]:
    kind, _, number = heads.partition(" ")
    if kind == "top":
        return tuple((layer, head) for layer, head, _ in ranked[: int(number)])
    if kind == "layer":
        return PromptLookupPlusAttention.heads_for(config, int(number) - 1)
    return all_heads(config)
