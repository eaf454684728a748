"""Random EAGLE heads for the tiny targets, and what a head says without cache and tree."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.decoding.drafter import Params
from specjax.models.cache import KVCache
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.outputs import Taps
from specjax.models.rows import causal_rows
from tests.decoding.tiny import target

LONGEST = 96  # tokens of a text, for `features_of` and `predicted`


@cache
def head(vocab_size: int = 40, layers: int = 2, seed: int = 7):
    """A random head for `target(vocab_size, layers)`, large enough for its context to matter."""
    module = EagleHead(EagleConfig.for_target(target(vocab_size, layers)[0].config, fc_bias=True))
    params = module.initialise(jax.random.key(seed))
    return module, jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params)


@cache
def params_of(vocab_size: int = 40, layers: int = 2, seed: int = 7, **of_target) -> Params:
    return Params(target(vocab_size, layers, **of_target)[1], head(vocab_size, layers, seed)[1])


@partial(jax.jit, static_argnums=2)
def features_of(params, tokens: Int[Array, "B S"], model) -> Float[Array, "B S H"]:
    """The target's feature of every token, from one pass."""
    taps = Taps(hidden_layers=(model.config.num_hidden_layers,), logits=False)
    cache = KVCache.create(model.config, tokens.shape[0], tokens.shape[1])
    rows = causal_rows(tokens, jnp.zeros(len(tokens), jnp.int32))
    return model.run(params.target, rows, cache, taps)[0].hidden[:, :, 0]


@partial(jax.jit, static_argnums=3)
def predicted(
    params, tokens: Int[Array, "B S"], features: Float[Array, "B S H"], module
) -> tuple[Float[Array, "B S H"], KVCache]:
    """The head's outputs at slots of `features[:, t]` and `tokens[:, t + 1]`, and its cache."""
    behind = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    cache = KVCache.create(module.config.layers, tokens.shape[0], tokens.shape[1])
    rows = causal_rows(behind, jnp.zeros(len(tokens), jnp.int32))
    return module.run(params.drafter, params.target, rows, features, cache)


class Literal:
    """What a head says below a text: each path by itself, in a pass over text and path."""

    def __init__(self, params: Params, module, model, text: list[int]):
        self.params, self.module, self.model = params, module, model
        self.text = text
        padded = np.zeros((1, LONGEST), np.int32)
        padded[0, : len(text)] = text
        self.known = np.asarray(features_of(params, jnp.asarray(padded), model))
        self.features: dict[tuple[int, ...], np.ndarray] = {}

    def feature(self, path: tuple[int, ...]) -> np.ndarray:
        """Predicted at the last token of `path`; () is the root."""
        if path not in self.features:
            tokens = np.zeros((1, LONGEST), np.int32)
            whole = [*self.text, *path]
            tokens[0, : len(whole)] = whole
            features, root = self.known.copy(), len(self.text) - 1
            for steps in range(len(path)):
                features[0, root + steps] = self.feature(path[:steps])
            output, _ = predicted(
                self.params, jnp.asarray(tokens), jnp.asarray(features), self.module
            )
            self.features[path] = np.asarray(output[0, root + len(path) - 1])
        return self.features[path]

    def logits(self, path: tuple[int, ...]) -> Float[Array, " V"]:
        """For the token after `path`."""
        return self.model.logits(self.params.target, jnp.asarray(self.feature(path)))
