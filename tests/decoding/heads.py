"""Random EAGLE heads for the tiny targets, their drafters, and what they say without a tree."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key
from specjax.decoding.drafters._trees import Choices

from specjax.decoding.drafter import Context, Params
from specjax.decoding.drafters._heads import HeadDrafter
from specjax.decoding.drafters.eagle import Eagle, EagleSettings
from specjax.decoding.drafters.eagle2 import Eagle2, Eagle2Settings
from specjax.decoding.generate import start_loop
from specjax.decoding.prompt import Prompt
from specjax.decoding.sampling import Draw, Sampling
from specjax.decoding.tree import DraftTree
from specjax.models.cache import KVCache
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.target import Taps, causal_rows
from tests.decoding.tiny import target

LONGEST = 96  # tokens of a text, for `features_of` and `predicted`


@cache
def head(vocab_size: int = 40, layers: int = 2, seed: int = 7):
    """A random head for `target(vocab_size, layers)`, large enough for its context to matter."""
    module = EagleHead(EagleConfig.for_target(target(vocab_size, layers)[0].config, fc_bias=True))
    params = module.initialise(jax.random.key(seed))

    def larger(path, leaf):
        is_attention = path[1].key == "self_attn" and path[2].key != "v_proj"
        return leaf * (20 if is_attention else 8) if leaf.ndim == 2 else leaf

    return module, jax.tree_util.tree_map_with_path(larger, params)


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


TREE: Choices = (  # with every kind of node
    *((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (2, 1)),
    *((0, 1, 0), (2, 0, 0), (2, 0, 1), (2, 0, 2), (2, 0, 1, 0)),
)
EAGLE = Eagle(head()[0], target()[0], EagleSettings(TREE))
EAGLE2 = Eagle2(head()[0], target()[0], Eagle2Settings(top_k=3, depth=3, num_tokens=12))


def first_trees(
    own: HeadDrafter, sampling: Sampling, params: Params, given: Prompt, key: Key[Array, ""]
) -> DraftTree:
    """What is proposed at the start of a generation."""
    settings = {"target": own.target, "drafter": own, "max_new_tokens": 8}
    state = start_loop(params, given, key, **settings)
    draw = Draw(state.row_keys, state.length, sampling)
    context = Context(state.tokens, state.length)
    return jax.device_get(jax.jit(own.propose)(params, state.drafter, context, draw)[0].tree)


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
