"""The ParallelSpec head: k trainable mask tokens draft k + 1 tokens in one pass.

As in an EAGLE head, slot t holds token t + 1 at RoPE position t and predicts token t + 2, the first
of a draft. Its *group* is the slot and k masks: mask i (from 1) is at position t + i, sees the real
slots of its text up to t and masks 1 to i of that group, and predicts token t + 2 + i. Real
slots never see masks, so drafting and training have the same contexts.

There are two kinds of head. One reads the target's features and is otherwise an EAGLE head; a mask
has no feature, so one learned vector takes its place (the paper leaves that open). The other reads
tokens alone and is a plain Llama with both norms; it replaces Medusa's heads. The embedding and the
LM head are the target's, frozen. Xiao et al. 2024, "ParallelSpec: Parallel Drafter
for Efficient Speculative Decoding", sections 4.1 and 4.3.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from specjax.core.errors import SpecjaxError
from specjax.models.cache import KVCache
from specjax.models.heads.eagle import EagleHead
from specjax.models.heads.layered import LayeredConfig, LayeredHead
from specjax.models.layers import DecoderLayer, Embedding, Linear, RMSNorm
from specjax.models.products import lookup
from specjax.models.target import QueryRows


@dataclass(frozen=True)
class ParallelConfig(LayeredConfig):
    """The shape of a head.

    The paper has one layer. The masks are the same at every slot, so in the first layer they attend
    by position, and only from the second layer on by content.
    """

    num_masks: int = 4
    reads_features: bool = True
    fc_bias: bool = False

    def __post_init__(self):
        if self.num_masks < 1:
            raise SpecjaxError(f"num_masks {self.num_masks} must be at least 1; the paper uses 4")
        if self.layers.num_hidden_layers < 1:
            raise SpecjaxError("a ParallelSpec head needs at least 1 layer; the paper uses 1")
        if self.fc_bias and not self.reads_features:
            raise SpecjaxError("a head that reads no features has no fc; leave fc_bias out")

    @property
    def taps(self) -> tuple[int, ...]:
        return (-1,) if self.reads_features else ()

    @property
    def num_depths(self) -> int:
        """The number of tokens that one pass drafts: one for the real slot, one per mask."""
        return self.num_masks + 1


class ParallelHead(LayeredHead):
    """A head of either kind; its output goes to `target.logits`. See the module.

    Training computes one depth of all groups per step: the real slots first, then the i-th masks.
    Its T tokens see T real slots and i masks, so all depths cost k + 1 times causal attention.
    """

    config: ParallelConfig

    def setup(self):
        self.add_draft_tokens()
        layers, reads_features = self.config.layers, self.config.reads_features
        self.mask_embeddings = Embedding(replace(layers, vocab_size=self.config.num_masks))
        if reads_features:
            self.mask_hidden = self.param(
                "mask_hidden", nn.initializers.normal(0.02), (layers.hidden_size,)
            )
            self.fc = Linear(layers.hidden_size, self.config.fc_bias)
        else:
            self.norm = RMSNorm(layers.rms_norm_eps)
        self.layers = [
            DecoderLayer(layers, has_input_norm=number > 0 or not reads_features)
            for number in range(layers.num_hidden_layers)
        ]

    def joined(
        self, embedded: Float[Array, "B Q D"], features: Float[Array, "B Q F"]
    ) -> Float[Array, "B Q D"]:
        return super().joined(embedded, features) if self.config.reads_features else embedded

    def finished(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        return x if self.config.reads_features else self.norm(x)

    def __call__(
        self,
        rows: QueryRows,
        embedded: Float[Array, "B Q D"],
        features: Float[Array, "B Q F"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B Q D"], KVCache]:
        """See `run`; `embedded` and `features` are ignored at masks."""
        is_mask = (rows.tokens >= self.config.vocab_size)[..., None]
        masks = jnp.clip(rows.tokens - self.config.vocab_size, 0, self.config.num_masks - 1)
        masked = lookup(self.mask_embeddings(), masks).astype(embedded.dtype)
        if self.config.reads_features:
            unknown = jnp.broadcast_to(self.mask_hidden.astype(features.dtype), features.shape)
            features = jnp.where(is_mask, unknown, features)
        return super().__call__(rows, jnp.where(is_mask, masked, embedded), features, cache)

    def training_input(
        self, embedded: Float[Array, "B T D"], features: Float[Array, "B T F"], num_streams: int
    ) -> Float[Array, "B T D"]:
        """Returns the input of the first layer; at masks, the arguments are ignored."""
        if num_streams == 0:
            return self.joined(embedded, features)
        mask = self.mask_embeddings()[None, None, num_streams - 1].astype(embedded.dtype)
        reads_features = self.config.reads_features
        unknown = self.mask_hidden[None, None] if reads_features else jnp.zeros((1, 1, 0))
        return jnp.broadcast_to(self.joined(mask, unknown), embedded.shape)  # masks differ in place


def from_eagle(
    head: EagleHead, params: Mapping[str, Any], num_masks: int, key: Key[Array, ""]
) -> tuple[ParallelHead, dict[str, Any]]:
    """Returns a head that predicts the first token like this EAGLE head; its masks are untrained.

    The masks' embeddings are small and random, as in a new head, so that a mask starts as little
    more than what its attention gathers from the text. The embedding of a real token would come
    with a continuation to unlearn.
    """
    config = ParallelConfig(head.config.layers, num_masks, fc_bias=head.config.fc_bias)
    parallel = ParallelHead(config)
    dtype = params["fc"]["weight"].dtype
    return parallel, parallel.initialise(key, dtype) | dict(params)
