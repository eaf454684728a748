"""The description of a model family, and the reading that all families share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specjax.core.errors import SpecjaxError
from specjax.core.settings import declared_fields
from specjax.models.config import FULL, SLIDING, Rope, TransformerConfig, Variant, eos_tokens
from specjax.models.layers import ACTIVATIONS

Names = tuple[tuple[str, str], ...]
LLAMA_NAMES: Names = (
    ("embed_tokens.", "model.embed_tokens."),
    ("layers_{}.", "model.layers.{}."),
    ("norm.", "model.norm."),
    ("lm_head.", "lm_head."),
)


@dataclass(frozen=True, eq=False)
class Family:
    """One model family.

    Attributes:
        model_type: in `config.json`, as is `architecture`.
        architecture: the class of `transformers`.
        read: reads the content of a `config.json`, with `defaults` filled in and `keys` renamed;
            raises SpecjaxError for what is not supported and KeyError for a missing field.
        names: beginnings of our weights' paths with Hugging Face's names; {} is the layer, and the
            first that fits counts. Weights of the same name are stored as one: their rows follow
            one another in the order of the table.
        defaults: of `transformers`, for absent keys.
        keys: fields of `TransformerConfig` or keys of Llama with the family's own names for them.
        written: returns what `config.json` holds beside the common fields.
    """

    model_type: str
    architecture: str
    read: Callable[[Mapping[str, Any]], TransformerConfig]
    names: Names = LLAMA_NAMES
    defaults: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    written: Callable[[TransformerConfig], dict[str, Any]] = lambda config: {}


def read_common(
    values: Mapping[str, Any],
    variant: Mapping[str, Any] | None = None,
    can_be_partial: bool = False,
    **others: Any,
) -> TransformerConfig:
    """Reads the fields that all families have from a `config.json` with Llama's keys.

    `variant` are fields of `Variant` besides the activation, and `others` are fields of
    `TransformerConfig`, new ones or in place of those read.
    """
    activation, heads = values.get("hidden_act", "silu"), values["num_attention_heads"]
    if activation not in tuple(ACTIVATIONS):
        raise SpecjaxError(
            f"hidden_act {activation!r} is not supported; specjax supports {', '.join(ACTIVATIONS)}"
        )
    fields = {
        "vocab_size": values["vocab_size"],
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["intermediate_size"],
        "num_hidden_layers": values["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or values["hidden_size"] // heads,
        "max_position_embeddings": values["max_position_embeddings"],
        "rms_norm_eps": values.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": values.get("tie_word_embeddings") or False,
        "attention_bias": values.get("attention_bias") or False,
        "mlp_bias": values.get("mlp_bias") or False,
        "model_type": values["model_type"],
        "bos_token_id": values.get("bos_token_id"),
        "eos_token_id": eos_tokens(values),
    } | others
    if "rope" not in fields:
        fields["rope"] = Rope.from_huggingface(values, can_be_partial)
    named = declared_fields(Variant, {"hidden_act": activation, **(variant or {})})
    return TransformerConfig(**declared_fields(TransformerConfig, fields), variant=Variant(**named))


def windows(
    values: Mapping[str, Any], is_sliding: Callable[[int], bool], window: Any
) -> dict[str, Any]:
    """Returns the sliding window and which layers have it; `is_sliding` if `values` do not say."""
    if window is None:
        return {"sliding_window": None}
    layers = range(values["num_hidden_layers"])
    types = values.get("layer_types") or [SLIDING if is_sliding(at) else FULL for at in layers]
    return {"sliding_window": window, "layer_types": tuple(types)}
