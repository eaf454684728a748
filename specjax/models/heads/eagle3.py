"""The EAGLE-3 head: one layer over features of several depths, with a draft vocabulary.

Slot t reads the *feature* of token t and the embedding of token t + 1, and predicts token t + 2.
The feature is the target's hidden states after three of its layers, mapped to the hidden size by
`fc`; while drafting it is the head's output, which no loss pulls towards the target's. The head has
an LM head; the embedding is the target's, frozen. RoPE positions are slots. Li et al. 2025,
"EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test".
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from specjax.core.errors import SpecjaxError
from specjax.models.config import TransformerConfig
from specjax.models.heads import HeadWeights
from specjax.models.heads.layered import LayeredConfig, LayeredHead
from specjax.models.layers import DecoderLayer, Linear, RMSNorm
from specjax.models.quantize import Weight

TapNorm = Literal["none", "each", "joined"]
LOGIT_PARAMS = ("norm", "lm_head")  # the params that turn the layer's output into logits


@dataclass(frozen=True)
class Eagle3Config(LayeredConfig):
    """The shape of a head of one layer."""

    taps: tuple[int, ...] = ()  # layers of the target, as numbered by `Taps`
    tap_norm: TapNorm = "none"  # of the target's features
    norm_output: bool = False  # the feature to draft below is normed
    has_lm_heads: ClassVar[bool] = True

    def __post_init__(self):
        if self.layers.num_hidden_layers != 1:
            raise SpecjaxError(
                f"an EAGLE-3 head of {self.layers.num_hidden_layers} layers is not supported; "
                "give one of 1 layer"
            )
        if len(set(self.taps)) != len(self.taps) or len(self.taps) < 2:
            raise SpecjaxError(
                f"an EAGLE-3 head cannot read the target's layers {self.taps}: it needs several "
                "different ones"
            )

    @classmethod
    def for_target(
        cls, target: TransformerConfig, draft_vocab_size: int = 0, **norms: Any
    ) -> "Eagle3Config":
        """Returns the published shape: one layer with the sizes of the target's."""
        named = {"draft_vocab_size": draft_vocab_size, **norms}
        return super().for_target(target, default_taps(target), **named)


def default_taps(target: TransformerConfig) -> tuple[int, ...]:
    """Returns the layers that the published heads read: low, middle and high.

    In targets of fewer than 7 layers these would coincide; there, others stand in.
    """
    count = target.num_hidden_layers
    if count >= 7:
        return 2, count // 2, count - 3
    return (1, count // 2, count - 1) if count >= 4 else tuple(range(min(3, count + 1)))


class Eagle3Layer(DecoderLayer):
    """A layer over embedding and feature side by side, each with its norm for the attention.

    Only the feature passes on through the residual connections.
    """

    is_plainly_normed = False

    def setup(self):
        super().setup()
        self.hidden_norm = RMSNorm(self.config.rms_norm_eps)

    def normed(self, x: Float[Array, "B Q E"]) -> Float[Array, "B Q E"]:
        embedded, features = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([self.input_layernorm(embedded), self.hidden_norm(features)], -1)

    def residual(self, x: Float[Array, "B Q E"]) -> Float[Array, "B Q D"]:
        return jnp.split(x, 2, axis=-1)[1]


class Eagle3Head(LayeredHead):
    """The head; `fc` maps the target's features, and only these, to the hidden size.

    The output of `run` is both the feature to draft below and the input of `logits`. EAGLE-3.1
    (arXiv 2605.09992) adds norms: of the target's features before `fc`, `each` layer's or all
    `joined`, and of the output.
    """

    config: Eagle3Config

    def setup(self):
        self.add_draft_tokens()
        config = self.config.layers
        if self.config.tap_norm == "each":
            self.fc_norm = [RMSNorm(config.rms_norm_eps) for _ in self.config.taps]
        elif self.config.tap_norm == "joined":
            self.input_norm = RMSNorm(config.rms_norm_eps)
        self.fc = Linear(config.hidden_size)
        self.layer = Eagle3Layer(config)
        self.norm = RMSNorm(config.rms_norm_eps)
        self.lm_head = Linear(self.config.num_drafted, dtype=jnp.float32)

    @property
    def layers(self) -> list[Eagle3Layer]:
        return [self.layer]

    def joined(
        self, embedded: Float[Array, "B Q D"], features: Float[Array, "B Q F"]
    ) -> Float[Array, "B Q E"]:
        features = features.astype(embedded.dtype)
        if features.shape[-1] != self.config.hidden_size:  # the target's, not the head's
            features = self.fc(self.normed_taps(features))
        return jnp.concatenate([embedded, features], axis=-1)

    def normed_taps(self, features: Float[Array, "B Q F"]) -> Float[Array, "B Q F"]:
        """Returns the target's features as `fc` reads them."""
        if self.config.tap_norm == "each":
            taps = jnp.split(features, len(self.config.taps), axis=-1)
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
            return jnp.concatenate(taps, axis=-1)
        return self.input_norm(features) if self.config.tap_norm == "joined" else features

    def finished(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        x = self.norm(x) if self.config.norm_output else x
        if self.is_initializing():
            self.to_logits(x)
        return x

    def to_logits(self, x: Float[Array, "... D"]) -> Float[Array, "... R"]:
        """See `logits`."""
        return self.lm_head(x if self.config.norm_output else self.norm(x))

    @nn.nowrap
    def logits(
        self, weights: HeadWeights, hidden: Float[Array, "... D"], lm_head: Weight | None
    ) -> Float[Array, "... R"]:
        """Returns the float32 logits of the head's LM head."""
        lm_head_params = {name: weights.params[name] for name in LOGIT_PARAMS}
        return cast(Array, self.apply({"params": lm_head_params}, hidden, method=self.to_logits))

    @nn.nowrap
    def lm_head_rows(self, weights: HeadWeights) -> None:
        """Returns None: the head does not use the target's LM head."""

    @nn.nowrap
    def initialise(
        self,
        key: Key[Array, ""],
        dtype: DTypeLike = jnp.float32,
        lm_head: Float[Array, "R D"] | None = None,
    ) -> dict[str, Any]:
        """Returns random params; `lm_head`, rows of the target's, becomes the head's."""
        params = super().initialise(key, dtype)
        copied = {} if lm_head is None else {"lm_head": {"weight": jnp.array(lm_head, dtype)}}
        return params | copied
