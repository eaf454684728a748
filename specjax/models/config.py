"""The configuration of a model: its shape, its rotary embedding, and checks of both.

Fields have the same names as in `config.json`.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.core.errors import SpecjaxError

CHECK = "check the config"
ROPE_TYPES = ("default", "linear", "dynamic", "llama3")
SLIDING, FULL = "sliding_attention", "full_attention"  # values of layer_types in config.json


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: its base, and how it is scaled to longer texts."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0  # llama3: the length before scaling

    def inverse_frequencies(
        self, head_dim: int, max_position_embeddings: int, text_length: Int[Array, "B Q"]
    ) -> Float[Array, "#B #Q F"]:
        """Returns the radians per position of each rotary pair, float32; F = head_dim / 2.

        `text_length` is the length of the text when a row is computed. Only `dynamic` reads it: its
        base grows with the part beyond `max_position_embeddings`.
        """
        exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        if self.rope_type == "dynamic":
            length = jnp.maximum(text_length, max_position_embeddings).astype(jnp.float32)
            stretch = self.factor * length / max_position_embeddings - (self.factor - 1)
            growth = jnp.log(stretch)[..., None] * (head_dim / (head_dim - 2))
            exponent = exponent.astype(np.float32)[None, None]
            return jnp.exp(-(np.log(self.rope_theta) + growth) * exponent)
        frequencies = self.rope_theta**-exponent
        if self.rope_type == "linear":
            frequencies = frequencies / self.factor
        elif self.rope_type == "llama3":
            frequencies = self._llama3(frequencies)
        return jnp.asarray(frequencies[None, None], jnp.float32)

    def _llama3(self, frequencies: np.ndarray) -> np.ndarray:
        # Keep fast pairs, slow down slow pairs by `factor`, blend those in between.
        turns = self.original_max_position_embeddings * frequencies / (2 * np.pi)
        span = self.high_freq_factor - self.low_freq_factor
        keep = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return keep * frequencies + (1 - keep) * frequencies / self.factor

    @classmethod
    def from_huggingface(cls, values: Mapping[str, Any]) -> "Rope":
        """Reads the new key `rope_parameters`, or the old `rope_theta` and `rope_scaling`."""
        scaling = _object(values, "rope_scaling") | _object(values, "rope_parameters")
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in ROPE_TYPES:
            raise SpecjaxError(
                f"RoPE type {kind!r} is not supported; specjax supports {', '.join(ROPE_TYPES)}"
            )
        if values.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0)) != 1.0:
            raise SpecjaxError(
                "partial_rotary_factor is not supported; use a checkpoint with full rotary heads"
            )
        theta = scaling.get("rope_theta") or values.get("rope_theta") or 10000.0
        names = [each.name for each in dataclasses.fields(cls)[2:]]
        needed = {"default": [], "llama3": names}.get(kind, ["factor"])
        extras = {name: scaling[name] for name in names if scaling.get(name) is not None}
        if missing := [name for name in needed if name not in extras]:
            raise SpecjaxError(
                f"RoPE type {kind!r} needs {missing[0]!r} in rope_scaling; add it to config.json"
            )
        return cls(rope_type=kind, **declared_fields(cls, {"rope_theta": theta} | extras))

    def to_huggingface(self) -> dict[str, Any]:
        """Returns both the new and the old keys, for new and old readers."""
        if self.rope_type == "default":
            parameters: dict[str, Any] = {"rope_type": "default"}
        else:
            parameters = {"rope_type": self.rope_type, "factor": self.factor}
        if self.rope_type == "llama3":
            for each in dataclasses.fields(self)[3:]:
                parameters[each.name] = getattr(self, each.name)
        scaling = None if self.rope_type == "default" else dict(parameters)
        parameters["rope_theta"] = self.rope_theta
        return {
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": parameters,
        }


@dataclass(frozen=True)
class TransformerConfig:
    """The shapes and the arithmetic of one Llama-family model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()  # one per layer; empty: all alike
    rope: Rope = field(default_factory=Rope)
    model_type: str = "llama"
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()

    def __post_init__(self):
        if self.head_dim % 2:
            raise SpecjaxError(f"head_dim {self.head_dim} is odd, but RoPE rotates pairs; {CHECK}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise SpecjaxError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}; {CHECK}"
            )
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise SpecjaxError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} "
                f"layers; {CHECK}"
            )
        if unknown := set(self.layer_types) - {SLIDING, FULL}:
            raise SpecjaxError(
                f"layer_types has {sorted(unknown)[0]!r}; specjax supports {SLIDING!r} and {FULL!r}"
            )

    @property
    def longest_text(self) -> int:
        """The number of positions the model supports; prompt and new tokens must fit in it."""
        if self.rope.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        return self.max_position_embeddings

    def window_of(self, layer: int) -> int | None:
        """Returns how many positions a layer sees, its own included; None: all."""
        if self.layer_types and self.layer_types[layer] != SLIDING:
            return None
        return self.sliding_window


def eos_tokens(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the EOS tokens in the content of a `config.json` or `generation_config.json`.

    Raises:
        SpecjaxError: if `eos_token_id` does not hold token ids.
    """
    value = values.get("eos_token_id")
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(whole_number("eos_token_id", token, minimum=0) for token in tokens)


def _object(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = values.get(name) or {}
    if not isinstance(value, Mapping):
        raise SpecjaxError(f"{name} {value!r} is not an object; {CHECK}")
    return dict(value)


def declared_fields(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Checks and converts `values` to the types that the fields of the dataclass `cls` declare."""
    kinds = {each.name: each.type for each in dataclasses.fields(cls)}
    return {name: _field(name, value, kinds[name]) for name, value in values.items()}


def _field(name: str, value: Any, kind: Any) -> Any:
    if kind is int or (kind == int | None and value is not None):
        return whole_number(name, value, minimum=0 if name == "bos_token_id" else 1)
    if kind is float:
        return _positive(name, value)
    if kind is bool and not isinstance(value, bool):
        raise SpecjaxError(f"{name} {value!r} is not true or false; {CHECK}")
    return value


def whole_number(name: str, value: Any, minimum: int = 1) -> int:
    """Returns `value`; raises SpecjaxError unless it is a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise SpecjaxError(f"{name} {value!r} is not a whole number of at least {minimum}; {CHECK}")
    return value


def _positive(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and value > 0):
        raise SpecjaxError(f"{name} {value!r} is not a number above 0; {CHECK}")
    return float(value)
