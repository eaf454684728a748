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
from specjax.core.settings import MAX_WHOLE, check_fields, check_setting, declared_fields, setting

CHECK = "check the config"
ORIGINAL_LENGTH = "original_max_position_embeddings"
ROPE_TYPES = {  # with the keys that each needs
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL_LENGTH),
    "longrope": ("short_factor", "long_factor", ORIGINAL_LENGTH, "attention_factor"),
}
SLIDING, FULL = "sliding_attention", "full_attention"  # values of layer_types in config.json
SIZES = ("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "head_dim")
SIZES += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")


def _size(default: Any = dataclasses.MISSING, at_most: int = MAX_WHOLE) -> Any:
    return setting(default, at_least=1, at_most=at_most, advice=CHECK)  # beyond: a damaged config


def _positive(default: Any, **bounds: Any) -> Any:
    return setting(default, above=0, advice=CHECK, **bounds)


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: its base, and how it is scaled to longer texts.

    The scaling `longrope` has one table of frequencies for texts up to the original length and one
    for longer ones. The prompt alone chooses, so that a text keeps its table: cached keys are not
    rotated again.
    """

    rope_type: str = "default"
    rope_theta: float = _positive(10000.0)
    factor: float = _positive(1.0)
    low_freq_factor: float = _positive(1.0)
    high_freq_factor: float = _positive(4.0)
    # llama3, longrope: the length before scaling
    original_max_position_embeddings: int = setting(0, at_least=0, advice=CHECK)
    short_factor: tuple[float, ...] = _positive(())  # longrope: frequency divisors of short prompts
    long_factor: tuple[float, ...] = _positive(())
    attention_factor: float = _positive(1.0)  # longrope: of cosine and sine
    partial_rotary_factor: float = _positive(1.0, at_most=1)  # the share of a head that is rotated

    def num_rotated(self, head_dim: int) -> int:
        """Returns how many numbers of a head are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    def inverse_frequencies(
        self, head_dim: int, max_position_embeddings: int, text_length: Int[Array, "B Q"]
    ) -> Float[Array, "#B #Q F"]:
        """Returns the radians per position of each rotary pair, float32; F pairs are rotated.

        `text_length` is the length of the text when a row is computed; with `longrope`, that of the
        prompt. The base of `dynamic` grows with the part beyond `max_position_embeddings`.
        """
        head_dim = self.num_rotated(head_dim)
        exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        if self.rope_type == "dynamic":
            length = jnp.maximum(text_length, max_position_embeddings).astype(jnp.float32)
            stretch = self.factor * length / max_position_embeddings - (self.factor - 1)
            growth = jnp.log(stretch)[..., None] * (head_dim / (head_dim - 2))
            exponent = exponent.astype(np.float32)[None, None]
            return jnp.exp(-(math.log(self.rope_theta) + growth) * exponent)
        frequencies = self.rope_theta**-exponent
        if self.rope_type == "linear":
            frequencies = frequencies / self.factor
        elif self.rope_type == "llama3":
            frequencies = self._llama3(frequencies)
        elif self.rope_type == "longrope":
            short, long = (
                jnp.asarray(frequencies / np.asarray(factors), jnp.float32)
                for factors in (self.short_factor, self.long_factor)
            )
            is_long = text_length > self.original_max_position_embeddings
            return jnp.where(is_long[..., None], long, short)
        return jnp.asarray(frequencies[None, None], jnp.float32)

    def _llama3(self, frequencies: np.ndarray) -> np.ndarray:
        # Keep fast pairs, slow down slow pairs by `factor`, blend those in between.
        turns = self.original_max_position_embeddings * frequencies / (2 * np.pi)
        span = self.high_freq_factor - self.low_freq_factor
        keep = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return keep * frequencies + (1 - keep) * frequencies / self.factor

    @classmethod
    def from_huggingface(cls, values: Mapping[str, Any], can_be_partial: bool = False) -> "Rope":
        """Reads the new key `rope_parameters`, or the old `rope_theta` and `rope_scaling`.

        `can_be_partial`: the family's models may rotate a part of each head.
        """
        scaling = json_object(values, "rope_scaling") | json_object(values, "rope_parameters")
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in ROPE_TYPES:
            raise SpecjaxError(
                f"RoPE type {kind!r} is not supported; specjax supports {', '.join(ROPE_TYPES)}"
            )
        share = values.get("partial_rotary_factor") or scaling.get("partial_rotary_factor") or 1.0
        if share != 1.0 and not can_be_partial:
            raise SpecjaxError(
                "partial_rotary_factor is not supported; use a checkpoint with full rotary heads"
            )
        theta = scaling.get("rope_theta") or values.get("rope_theta") or 10000.0
        if kind == "longrope":
            scaling |= _longrope(values, scaling)
        names = ROPE_TYPES[kind]
        extras = {name: scaling[name] for name in names if scaling.get(name) is not None}
        if missing := [name for name in names if name not in extras]:
            raise SpecjaxError(
                f"RoPE type {kind!r} needs {missing[0]!r} in rope_scaling; add it to config.json"
            )
        fields = {"rope_theta": theta, "partial_rotary_factor": share} | extras
        return cls(rope_type=kind, **declared_fields(cls, fields))

    def to_huggingface(self) -> dict[str, Any]:
        """Returns both the new and the old keys, for new and old readers."""
        parameters: dict[str, Any] = {"rope_type": self.rope_type}
        for name in ROPE_TYPES[self.rope_type]:
            value = getattr(self, name)
            parameters[name] = list(value) if isinstance(value, tuple) else value
        scaling = None if self.rope_type == "default" else dict(parameters)
        parameters["rope_theta"] = self.rope_theta
        values = {"rope_theta": self.rope_theta, "rope_scaling": scaling}
        if self.partial_rotary_factor != 1.0:
            share = {"partial_rotary_factor": self.partial_rotary_factor}
            values, parameters = values | share, parameters | share
        return values | {"rope_parameters": parameters}


def _longrope(values: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the original length and the factor of cosine and sine, given or derived."""
    max_length = values["max_position_embeddings"]
    original = values.get(ORIGINAL_LENGTH) or scaling.get(ORIGINAL_LENGTH) or max_length
    stretch = scaling.get("factor") or max_length / original
    derived = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    factor = scaling.get("attention_factor") or derived
    return {ORIGINAL_LENGTH: original, "attention_factor": factor}


@dataclass(frozen=True)
class Variant:
    """The ways in which a family differs from Llama; the defaults are Llama's."""

    hidden_act: str = "silu"  # a key of `layers.ACTIVATIONS`
    has_gate: bool = True  # False: `down(act(up(x)))`
    norm: str = "rms"  # a key of `layers.NORMS`
    has_qk_norm: bool = False  # of each head's query and key, before they are rotated
    has_post_norms: bool = False  # also after attention and feed-forward, before the residual
    has_output_bias: bool = True  # `attention_bias` is also that of o_proj
    has_learned_positions: bool = False  # added to the embeddings, in place of RoPE
    has_scaled_embeddings: bool = False  # by the root of hidden_size
    query_pre_attn_scalar: float | None = _positive(None)  # scores are divided by its root
    attn_logit_softcapping: float | None = _positive(None)  # see `attention.soft_cap`
    final_logit_softcapping: float | None = _positive(None)
    sliding_rope: Rope | None = None  # of the layers with a sliding window; None: as the others
    layers_without_rope: tuple[int, ...] = ()


@dataclass(frozen=True)
class TransformerConfig:
    """The shapes and the arithmetic of one model."""

    vocab_size: int = _size()
    hidden_size: int = _size()
    intermediate_size: int = _size()
    num_hidden_layers: int = setting(at_least=0, at_most=10_000, advice=CHECK)
    num_attention_heads: int = _size(at_most=2**20)
    num_key_value_heads: int = _size(at_most=2**20)
    head_dim: int = _size(at_most=2**20)
    max_position_embeddings: int = _size(2048)
    rms_norm_eps: float = _positive(1e-6)  # of norms of any kind
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = _size(None)
    # One per layer; empty: all the same.
    layer_types: tuple[str, ...] = setting((), choices=(SLIDING, FULL), advice=CHECK)
    rope: Rope = field(default_factory=Rope)
    model_type: str = "llama"
    bos_token_id: int | None = setting(None, at_least=0, advice=CHECK)
    eos_token_id: tuple[int, ...] = setting((), at_least=0, advice=CHECK)
    variant: Variant = field(default_factory=Variant)

    def __post_init__(self):
        check_fields(self)
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
        num_rotated = self.rope.num_rotated(self.head_dim)
        pairs = (num_rotated + 1) // 2
        if self.rope.rope_type == "dynamic" and pairs < 2:
            raise SpecjaxError(
                f"RoPE type 'dynamic' needs at least 2 rotated pairs per head, got {pairs}; {CHECK}"
            )
        for factors in (self.rope.short_factor, self.rope.long_factor):
            if len(factors) not in (0, pairs):
                raise SpecjaxError(
                    f"a factor of LongRoPE has {len(factors)} entries for {pairs} rotated pairs; "
                    f"{CHECK}"
                )

    @property
    def longest_text(self) -> int:
        """The number of positions the model supports; prompt and new tokens must fit in it."""
        is_scaled = self.variant.sliding_rope is not None  # Gemma 3's field includes the factor
        if self.rope.rope_type in ("linear", "dynamic") and not is_scaled:
            return int(min(self.max_position_embeddings * self.rope.factor, MAX_WHOLE))
        return self.max_position_embeddings

    def longest_from(self, prompt_length: Any) -> Any:
        """Returns the longest text that a prompt of this length, or of each of these, may become.

        LongRoPE has two tables, and a text keeps the one that it began with.
        """
        if self.rope.rope_type != "longrope":
            return self.longest_text
        switch = self.rope.original_max_position_embeddings
        return self.longest_text - (prompt_length <= switch) * (self.longest_text - switch)

    def window_of(self, layer: int) -> int | None:
        """Returns how many positions a layer sees, its own included; None: all."""
        if self.layer_types and self.layer_types[layer] != SLIDING:
            return None
        return self.sliding_window

    def rope_of(self, layer: int) -> Rope | None:
        """Returns the rotary embedding of a layer; None: it does not rotate."""
        if self.variant.has_learned_positions or layer in self.variant.layers_without_rope:
            return None
        if self.variant.sliding_rope is not None and self.window_of(layer) is not None:
            return self.variant.sliding_rope
        return self.rope


def eos_tokens(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the EOS tokens of a `config.json` or `generation_config.json`."""
    tokens = values.get("eos_token_id")
    tokens = tuple(tokens) if isinstance(tokens, list) else () if tokens is None else (tokens,)
    check_setting(TransformerConfig, "eos_token_id", tokens)
    return tokens


def check_sizes(values: Mapping[str, Any]) -> None:
    """Raises SettingError for an invalid size, before anything is made of it."""
    for name in SIZES:
        if values.get(name) is not None:
            check_setting(TransformerConfig, name, values[name])


def json_object(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the object of this name, {} if it is absent; raises SpecjaxError if it is none."""
    value = values.get(name) or {}
    if not isinstance(value, Mapping):
        raise SpecjaxError(f"{name} {value!r} is not an object; {CHECK}")
    return dict(value)
