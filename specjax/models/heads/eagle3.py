"""The EAGLE-3 head: one layer over features of several depths, with a vocabulary of its own.

Slot t reads the *feature* of token t and the embedding of token t + 1, and predicts token t + 2.
The feature is the target's hidden states after three of its layers, mapped to the hidden size by
`fc`; while drafting it is the head's own output, which no loss asks to resemble the target's. The
LM head is the head's own. The embedding is the target's, frozen. RoPE positions are slots. Li et
al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test".
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Key

from specjax.core.errors import SpecjaxError
from specjax.models.cache import KVCache, write_slots
from specjax.models.config import TransformerConfig
from specjax.models.heads.layered import LayeredConfig, LayeredHead, Stream, layers_like
from specjax.models.heads.training_attention import training_attention
from specjax.models.layers import DecoderLayer, Linear, LMHead, RMSNorm, Rotation, rotation_of
from specjax.models.target import QueryRows, Target

OWN_LOGITS = ("norm", "lm_head")  # the params that turn the layer's output into logits


@dataclass(frozen=True)
class Eagle3Config(LayeredConfig):
    """The shape of a head.

    Raises:
        SpecjaxError: if it has more than one layer, or taps one layer only or one twice.
    """

    tapped: tuple[int, ...] = ()  # layers of the target, as numbered by `Taps`
    has_lm_heads: ClassVar[bool] = True

    def __post_init__(self):
        if self.layers.num_hidden_layers != 1:
            raise SpecjaxError(
                f"an EAGLE-3 head of {self.layers.num_hidden_layers} layers is not supported; "
                "give one of 1 layer"
            )
        if len(set(self.tapped)) != len(self.tapped) or len(self.tapped) < 2:
            raise SpecjaxError(
                f"an EAGLE-3 head cannot read the target's layers {self.tapped}: it needs several "
                "different ones"
            )

    @property
    def taps(self) -> tuple[int, ...]:
        return self.tapped

    @classmethod
    def for_target(cls, target: TransformerConfig, draft_vocab_size: int = 0) -> "Eagle3Config":
        """Returns the published shape: one layer with the sizes of the target's."""
        tapped = default_taps(target)
        return cls(layers_like(target, 1), tapped, draft_vocab_size=draft_vocab_size)


def default_taps(target: TransformerConfig) -> tuple[int, ...]:
    """Returns the layers that the published heads read: low, middle and high.

    In targets of fewer than 7 layers these would coincide; there, others stand in.
    """
    count = target.num_hidden_layers
    if count >= 7:
        return 2, count // 2, count - 3
    return (1, count // 2, count - 1) if count >= 4 else tuple(range(min(3, count + 1)))


class Eagle3Layer(DecoderLayer):
    """A layer whose attention reads embedding and feature side by side, each with its norm."""

    def setup(self):
        super().setup()
        self.hidden_norm = RMSNorm(self.config.rms_norm_eps)

    def joined(
        self, embedded: Float[Array, "B Q D"], features: Float[Array, "B Q D"]
    ) -> Float[Array, "B Q E"]:
        """Returns what the attention reads; E is twice D."""
        parts = [self.input_layernorm(embedded), self.hidden_norm(features)]
        return jnp.concatenate(parts, axis=-1)


class Eagle3Head(LayeredHead):
    """The head; `fc` maps the target's features, and only these, to the hidden size.

    What `run` returns is the feature to draft below as well as what `logits` reads. Drafting uses
    `run`, a pass with a cache, training `step`, a pass over whole texts.
    """

    config: Eagle3Config

    def setup(self):
        self.add_draft_tokens()
        config = self.config.layers
        self.fc = Linear(config.hidden_size)
        self.layer = Eagle3Layer(config)
        self.norm = RMSNorm(config.rms_norm_eps)
        self.lm_head = LMHead(self.config.num_drafted)

    def narrow(self, features: Float[Array, "B Q F"], dtype: Any) -> Float[Array, "B Q D"]:
        """Maps features of the target to the hidden size; the head's own stay as they are."""
        features = features.astype(dtype)
        is_own = features.shape[-1] == self.config.hidden_size
        return features if is_own else self.fc(features)

    def __call__(
        self,
        rows: QueryRows,
        embedded: Float[Array, "B Q D"],
        features: Float[Array, "B Q F"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B Q D"], KVCache]:
        features, layer = self.narrow(features, embedded.dtype), self.layer
        start = cache.length + (rows.visible.shape[2] - rows.tokens.shape[1])
        rotation = rotation_of(rows.positions, self.config.layers, cache.prompt_length)
        mixed, _, keys, values = layer.self_attn(
            layer.joined(embedded, features),
            rotation,
            cache.keys[0],
            cache.values[0],
            start,
            cache.visible_slots(rows.visible),
        )
        positions = write_slots(cache.positions, rows.positions, start, axis=1)
        cache = replace(cache, keys=(keys,), values=(values,), positions=positions)
        x = layer.after_attention(features, mixed)
        if self.is_initializing():
            self.to_logits(x)
        return x, cache

    def to_logits(self, x: Float[Array, "... D"]) -> Float[Array, "... R"]:
        """See `logits`."""
        return self.lm_head(self.norm(x))

    def one_step(
        self,
        embedded: Float[Array, "B T D"],
        features: Float[Array, "B T F"],
        streams: tuple[Stream, ...],
        rotation: Rotation,
        is_far: Bool[Array, "B T T"],
    ) -> tuple[Float[Array, "B T D"], Stream]:
        """Runs one step of training-time test; see `step`.

        A slot sees the slots of its text up to itself as computed at step 1, and itself as computed
        at later steps. From step 2 on `features` are what the step before returned.
        """
        features, layer = self.narrow(features, embedded.dtype), self.layer
        query, key, value = layer.self_attn.query_key_value(
            layer.joined(embedded, features), rotation
        )
        is_near = jnp.ones(features.shape[:2], bool)
        far, *own = (*(stream[0] for stream in streams), (key, value))
        mixed = training_attention(query, far, is_far, [(each, is_near) for each in own])
        return layer.after_attention(features, layer.self_attn.merge(mixed)), ((key, value),)

    @nn.nowrap
    def logits(
        self,
        params: Any,
        target: Target,
        target_params: Any,
        hidden: Float[Array, "... D"],
        lm_head: Float[Array, "R D"] | None,
    ) -> Float[Array, "... R"]:
        """Returns the float32 logits of the head's own LM head."""
        own = {name: params[name] for name in OWN_LOGITS}
        return cast(Array, self.apply({"params": own}, hidden, method=self.to_logits))

    @nn.nowrap
    def lm_head_rows(self, params: Any, target: Target, target_params: Any) -> None:
        """Returns None: the LM head is the head's own."""

    @nn.nowrap
    def initialise(
        self,
        key: Key[Array, ""],
        dtype: DTypeLike = jnp.float32,
        lm_head: Float[Array, "R D"] | None = None,
    ) -> dict[str, Any]:
        """Returns random params, with `lm_head`, rows of the target's, as the head's own."""
        params = super().initialise(key, dtype)
        own = {} if lm_head is None else {"lm_head": {"weight": jnp.array(lm_head, dtype)}}
        return params | own
