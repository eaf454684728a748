"""Random Hydra heads for the tiny targets, their drafters, and what they say by the formula."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from specjax.decoding.drafters._trees import Choices

from specjax.decoding.drafter import Params
from specjax.decoding.drafters.hydra import Hydra, HydraSettings
from specjax.models.cache import KVCache
from specjax.models.heads.hydra import HydraConfig, HydraHeads
from specjax.models.target import causal_rows
from tests.decoding.heads import LONGEST, Literal, features_of
from tests.decoding.tiny import target


def drawn(module: HydraHeads, seed: int = 7) -> Any:
    """Random params, none of which is without effect; tokens weigh about as much as features."""
    leaves, tree = jax.tree.flatten(module.initialise(jax.random.key(seed)))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = [
        0.3 * jax.random.normal(key, each.shape) for key, each in zip(keys, leaves, strict=True)
    ]
    params = jax.tree.unflatten(
        tree, [leaf + each for leaf, each in zip(leaves, noise, strict=True)]
    )
    for number in range(module.config.num_heads):
        for each in params[f"first_blocks_{number}"].values():
            each["weight"] = each["weight"].at[:, module.config.hidden_size :].multiply(6)
    return params


@cache
def hydra_head(
    has_prefix: bool = False,
    vocab_size: int = 40,
    layers: int = 2,
    num_heads: int = 4,
    has_lm_heads: bool = True,
) -> tuple[HydraHeads, Any]:
    """Random heads of three blocks for `target(vocab_size, layers)`."""
    config = target(vocab_size, layers)[0].config
    module = HydraHeads(HydraConfig.for_target(config, has_prefix, num_heads, 3, has_lm_heads))
    return module, drawn(module)


def hydra_params(has_prefix: bool = False, **of_head) -> Params:
    sizes = {name: of_head[name] for name in ("vocab_size", "layers") if name in of_head}
    return Params(target(**sizes)[1], hydra_head(has_prefix, **of_head)[1])


CHOICES: Choices = (  # one head fewer deep than there are heads
    *((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0)),
    *((0, 0, 0), (0, 0, 1), (2, 0, 0)),
)
HYDRA = Hydra(hydra_head()[0], target()[0], HydraSettings(CHOICES))
HYDRA_PREFIX = Hydra(hydra_head(has_prefix=True)[0], target()[0], HydraSettings(CHOICES))


@jax.jit(static_argnums=2)
def from_scratch(params: Params, tokens, own: Hydra):
    """What the heads read at every token, and the prefix layer's cache, from one pass each."""
    features = features_of(params, tokens, own.target)
    cache = KVCache.create(own.head.config.layers, *tokens.shape)
    rows = causal_rows(tokens, jnp.zeros(len(tokens), jnp.int32))
    return own.head.run(params.drafter, params.target, rows, features, cache)


def said(
    module: HydraHeads,
    params: Any,
    feature: np.ndarray,
    embedded: np.ndarray,
    lm_head: np.ndarray,
) -> Float[np.ndarray, " V"]:
    """The logits after the tokens `embedded [K, D]`, in float64; `lm_head` is the target's."""
    number = len(embedded) - 1
    own = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = np.concatenate([feature, *embedded]).astype(np.float64)

    def linear(weights, x):
        return weights["weight"] @ x + weights["bias"]

    def silu(x):
        return x / (1 + np.exp(-x))

    first = own[f"first_blocks_{number}"]
    x = linear(first["res_connection"], x) + silu(linear(first["linear"], x))
    for _ in range(module.config.num_layers - 1):
        x = x + silu(linear(own[f"later_blocks_{number}"], x))
    if module.config.has_lm_heads:
        return linear(own[f"lm_heads_{number}"], x)
    return np.asarray(lm_head, np.float64) @ x


class HydraLiteral(Literal):
    """What the heads say below a text: each path by itself, by the formula."""

    def __init__(self, params: Params, own: Hydra, text: list[int]):
        super().__init__(params, own.head, own.target, text)
        tokens = np.zeros((1, LONGEST), np.int32)
        tokens[0, : len(text)] = text
        features, _ = from_scratch(params, jnp.asarray(tokens), own)
        self.read = np.asarray(features[0, len(text) - 2])

    def logits(self, path: tuple[int, ...]) -> Float[Array, " V"]:
        """For the token after `path`; () is the root."""
        table, lm_head = (
            np.asarray(self.params.target[name]["weight"]) for name in ("embed_tokens", "lm_head")
        )
        embedded = table[[self.text[-1], *path]]
        own = said(self.module, self.params.drafter, self.read, embedded, lm_head)
        return jnp.asarray(own, jnp.float32)
