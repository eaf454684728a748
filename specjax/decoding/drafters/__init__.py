"""The table of methods: name -> drafter class, what it needs, and where it comes from."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from specjax.decoding.drafter import Drafter
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.prompt_lookup_plus import (
    PromptLookupPlus,
    PromptLookupPlusAttention,
)
from specjax.errors import SpecjaxError
from specjax.models.config import LlamaConfig


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    drafter: type  # a frozen dataclass; its fields are the method's settings
    needs: str
    paper: str
    settings_for: Callable[[LlamaConfig], dict[str, Any]] = lambda config: {}  # that fit a target


METHODS: dict[str, Method] = {
    "plain": Method(Autoregressive, "nothing", "plain decoding, the baseline"),
    "pld": Method(PromptLookup, "nothing", "Prompt Lookup Decoding (Saxena, 2023)"),
    "pld-plus": Method(
        PromptLookupPlus,
        "hidden states of one target layer",
        "PLD+ (Somasundaram et al., 2024)",
        lambda config: {"layer": PromptLookupPlus.layer_for(config)},
    ),
    "pld-plus-attention": Method(
        PromptLookupPlusAttention,
        "attention of the target's induction heads",
        "PLD+ (Somasundaram et al., 2024)",
        lambda config: {"heads": PromptLookupPlusAttention.heads_for(config)},
    ),
}


def make_drafter(method: str, config: LlamaConfig, settings: dict[str, Any]) -> Drafter:
    """The drafter of a method with `settings` in place of its defaults.

    Raises:
        SpecjaxError: for an unknown method or setting, or a setting out of range.
    """
    check_settings(method, settings)
    row = METHODS[method]
    return row.drafter(**(row.settings_for(config) | settings))


def check_settings(method: str, settings: dict[str, Any]) -> None:
    """As `make_drafter`, before there is a target: raises what it would raise."""
    if method not in METHODS:
        raise SpecjaxError(f"method {method!r} is unknown; choose one of {', '.join(METHODS)}")
    row = METHODS[method]
    known = [field.name for field in fields(row.drafter)]
    for name in settings:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise SpecjaxError(f"method {method!r} has no setting {name!r}; {has}")
    row.drafter(**settings)
