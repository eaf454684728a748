"""The table of methods: name -> drafter class, what it needs, and where it comes from."""

from dataclasses import dataclass
from typing import Any

from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.prompt_lookup import PromptLookup, PromptLookupPlus


@dataclass(frozen=True)
class Method:
    """One row of `specjax methods`."""

    drafter: Any  # the class; its fields are the method's settings
    needs: str
    paper: str


METHODS: dict[str, Method] = {
    "plain": Method(Autoregressive, "nothing", "plain decoding, the baseline"),
    "pld": Method(PromptLookup, "nothing", "Prompt Lookup Decoding (Saxena 2023)"),
    "pld-plus": Method(
        PromptLookupPlus,
        "hidden states of one target layer",
        "PLD+ (Somasundaram et al. 2024, arXiv 2412.01447)",
    ),
}
