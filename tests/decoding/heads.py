"""Random heads of every kind for the tiny targets, their drafters, and literal readings of them."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.decoding import Drafter, Engine, Params
from specjax.decoding.drafters._trees import Choices
from specjax.decoding.drafters.eagle import Eagle
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.decoding.drafters.hydra import Hydra
from specjax.decoding.drafters.medusa import Medusa
from specjax.decoding.drafters.parallel_spec import ParallelSpec
from specjax.models.cache import KVCache
from specjax.models.heads import HeadWeights
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.heads.eagle3 import Eagle3Config, Eagle3Head
from specjax.models.heads.hydra import HydraConfig, HydraHeads
from specjax.models.heads.layered import with_draft_tokens
from specjax.models.heads.medusa import MedusaConfig, MedusaHeads
from specjax.models.heads.parallel import ParallelConfig, ParallelHead
from specjax.models.target import Taps, causal_rows
from tests.decoding.rounds import Round, rounds_of, some_path
from tests.decoding.tiny import plain_pass, target

LONGEST = 96  # tokens of most texts in the literal readings, so that one program reads them
MASKS = 3
Path = tuple[int, ...]

# ---- Heads, each a module and its params -------------------------------------------------------


@cache
def eagle_head(vocab_size: int = 40, layers: int = 2) -> tuple[EagleHead, Any]:
    config = EagleConfig.for_target(target(vocab_size, layers)[0].config, fc_bias=True)
    return _wide(EagleHead(config))


@cache
def parallel_head(
    reads_features: bool = True, vocab_size: int = 40, layers: int = 2
) -> tuple[ParallelHead, Any]:
    config = target(vocab_size, layers)[0].config
    return _wide(ParallelHead(ParallelConfig.for_target(config, MASKS, reads_features)))


@cache
def eagle3_head(
    vocab_size: int = 40, layers: int = 2, drafted: tuple[int, ...] = (), **norms: Any
) -> tuple[Eagle3Head, Any]:
    config = target(vocab_size, layers)[0].config
    module, params = _wide(Eagle3Head(Eagle3Config.for_target(config, len(drafted), **norms)))
    return module, params | ({"draft_tokens": jnp.asarray(drafted)} if drafted else {})


def narrowed(head: tuple[Any, Any], tokens: Any = range(3, 40, 2)) -> tuple[Any, Any]:
    """The head with a draft vocabulary."""
    return with_draft_tokens(*head, np.asarray(tokens))


def _wide(module: Any) -> tuple[Any, Any]:
    """A head with weights large enough for its context to matter."""

    def larger(path, leaf):
        if path[0].key.startswith("mask"):
            factor = 50
        elif leaf.ndim < 2:
            factor = 1
        else:
            factor = 20 if path[-2].key in ("q_proj", "k_proj", "o_proj") else 8
        return jnp.asarray(np.asarray(leaf) * factor)

    params = module.initialise(jax.random.key(7))
    return module, jax.tree_util.tree_map_with_path(larger, params)


@cache
def medusa_head(
    vocab_size: int = 40, layers: int = 2, num_heads: int = 4, has_lm_heads: bool = True
) -> tuple[MedusaHeads, Any]:
    config = target(vocab_size, layers)[0].config
    module = MedusaHeads(MedusaConfig.for_target(config, num_heads, 2, has_lm_heads))
    return module, noisy(module.initialise(jax.random.key(7)))


@cache
def hydra_head(
    has_prefix: bool = False,
    vocab_size: int = 40,
    layers: int = 2,
    num_heads: int = 4,
    has_lm_heads: bool = True,
) -> tuple[HydraHeads, Any]:
    """Heads of three blocks; tokens weigh about as much as features."""
    config = target(vocab_size, layers)[0].config
    module = HydraHeads(HydraConfig.for_target(config, has_prefix, num_heads, 3, has_lm_heads))
    params = noisy(module.initialise(jax.random.key(7)))
    for number in range(num_heads):
        for layer in params[f"first_blocks_{number}"].values():
            weight = np.array(layer["weight"])
            weight[:, module.config.hidden_size :] *= 6
            layer["weight"] = jnp.asarray(weight)
    return module, params


def noisy(params: Any) -> Any:
    """Params none of which is without effect."""
    numbers = np.random.default_rng(7)  # drawing them with JAX would compile a program per shape
    noise = lambda leaf: np.float32(0.3 * numbers.standard_normal(leaf.shape))  # noqa: E731
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf) + noise(leaf)), params)


# ---- Drafters ----------------------------------------------------------------------------------

TREE: Choices = (  # with every kind of node
    *((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (2, 1)),
    *((0, 1, 0), (2, 0, 0), (2, 0, 1), (2, 0, 2), (2, 0, 1, 0)),
)
CHOICES: Choices = (  # one depth less than the heads below predict
    *((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0)),
    *((0, 0, 0), (0, 0, 1), (2, 0, 0)),
)
SMALL_DYNAMIC = {"tree": "dynamic", "top_k": 3, "num_tokens": 12, "depth": 3}


class Headed:
    """A drafter with a head, and the head's params; made when they are first used."""

    def __init__(self, kind: type, head: Callable, target_params: Any = None, **settings: Any):
        self.kind, self.head, self.settings = kind, head, settings
        self.target_params = target_params  # None: those of `target()`

    @property
    def drafter(self) -> Drafter:
        return self.kind(self.head()[0], **self.settings)

    @property
    def params(self) -> Any:
        return self.head()[1]

    @property
    def pair(self) -> tuple[Drafter, Any]:
        return self.drafter, self.params

    @property
    def request(self) -> Params:
        return Params(self.target_params or target()[1], self.params)


STATIC = {  # whose trees have a fixed shape
    "eagle": Headed(Eagle, eagle_head, choices=TREE),
    "hydra": Headed(Hydra, hydra_head, choices=CHOICES),
    "hydra with prefix": Headed(Hydra, partial(hydra_head, True), choices=CHOICES),
    "medusa": Headed(Medusa, medusa_head, choices=CHOICES),
    "parallel": Headed(ParallelSpec, parallel_head, choices=CHOICES),
    "parallel of tokens": Headed(ParallelSpec, partial(parallel_head, False), choices=CHOICES),
}
DYNAMIC = {  # whose trees grow where the head is confident
    "eagle2": Headed(Eagle2, eagle_head, top_k=3, depth=3, num_tokens=12),
    "medusa dynamic": Headed(Medusa, medusa_head, **SMALL_DYNAMIC),
    "parallel dynamic": Headed(ParallelSpec, parallel_head, **SMALL_DYNAMIC),
}
EAGLE, EAGLE2, MEDUSA = STATIC["eagle"], DYNAMIC["eagle2"], STATIC["medusa"]
END = (27, 32)  # end some rows in the middle of a path


@cache
def played_by(name: str) -> list[Round]:
    """All rounds of a greedy generation in which paths of all lengths are accepted."""
    headed = (STATIC | DYNAMIC)[name]
    engine = Engine(target()[0], headed.drafter, max_new_tokens=60, eos=END)
    return rounds_of(engine, headed.request, verify=some_path)


# ---- Whole texts, in one pass ------------------------------------------------------------------


def features_of(params, tokens: Int[Array, "B S"], model) -> Float[Array, "B S H"]:
    """The target's feature of every token."""
    taps = Taps(hidden_layers=(-1,), logits=False)
    return plain_pass(params.target, tokens, model, taps)[0].hidden[:, :, 0]


def features_for(module: Any, features: Array) -> Array:
    """Returns the part of the target's features that the head reads: all, or nothing."""
    reads_features = getattr(module.config, "reads_features", True)
    return features if reads_features else jnp.zeros((*features.shape[:2], 0))


@partial(jax.jit, static_argnums=3)
def predicted(
    params, tokens: Int[Array, "B S"], features: Float[Array, "B S H"], module
) -> tuple[Float[Array, "B S D"], KVCache]:
    """The head's outputs at slots of `features[:, t]` and `tokens[:, t + 1]`, and its cache."""
    behind = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    cache = KVCache.create(module.config.layers, tokens.shape[0], tokens.shape[1])
    rows = causal_rows(behind, jnp.zeros(len(tokens), jnp.int32))
    return module.run(
        HeadWeights(params.drafter, target()[0], params.target), rows, features, cache
    )


def padded(texts: list[list[int]]) -> Int[Array, "B S"]:
    """The tokens of each text, then zeros."""
    size = max(LONGEST, *map(len, texts))
    return jnp.asarray([text + [0] * (size - len(text)) for text in texts], jnp.int32)


# ---- Literal readings: the logits below a text, each path by itself ----------------------------


@partial(jax.jit, static_argnums=3)
def trained(params: Params, tokens, features, module: ParallelHead) -> Float[Array, "K B S D"]:
    """Returns the predictions of the training pass at every slot of whole texts, by depth."""
    embedded = target()[0].embed(params.target, jnp.roll(tokens, -1, axis=1))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    streams, predictions = (), []
    for _ in range(module.config.num_depths):
        prediction, stream = module.step(
            params.drafter, embedded, features, streams, positions, jnp.ones_like(positions)
        )
        predictions.append(prediction)
        streams = (*streams, stream)
    return jnp.stack(predictions)


def literal(headed: Headed, text: list[int]) -> Callable[[Path], Float[Array, " V"]]:
    """Returns the logits of the token after the text and a path, which () leaves at its root.

    The heads of Medusa and ParallelSpec do not know the path, only its length.
    """
    params, module, model = headed.request, headed.drafter.head, target()[0]
    features = features_for(module, features_of(params, padded([text]), model))
    known, lm_head = np.asarray(features), np.asarray(model.lm_head(params.target))
    root = len(text) - 1
    if isinstance(module, EagleHead):
        return _eagle_logits(params, module, text, known)
    if isinstance(module, HydraHeads):
        read = predicted(params, padded([text]), features, module)[0][0, root - 1]

        def logits(path: Path) -> Float[Array, " V"]:
            embedded = model.embed(params.target, jnp.array([text[-1], *path]))
            given = np.asarray(read), np.asarray(embedded), lm_head
            return jnp.asarray(hydra_logits(module, params.drafter, *given), jnp.float32)

        return logits
    if isinstance(module, MedusaHeads):
        by_depth = medusa_logits(module, params.drafter, known[0, root - 1], lm_head)
        by_depth = jnp.asarray(by_depth, jnp.float32)
    else:
        predictions = trained(params, padded([text]), features, module)
        by_depth = model.logits(params.target, predictions[:, 0, root - 1])
    return lambda path: by_depth[len(path)]


def _eagle_logits(params: Params, module: EagleHead, text: list[int], known: np.ndarray):
    """Reads a path in one pass over text and path for each of its tokens."""
    model, root = target()[0], len(text) - 1

    @cache
    def feature(path: Path) -> np.ndarray:
        features = known.copy()
        for steps in range(len(path)):
            features[0, root + steps] = feature(path[:steps])
        output, _ = predicted(params, padded([[*text, *path]]), jnp.asarray(features), module)
        return np.asarray(output[0, root + len(path) - 1])

    return lambda path: model.logits(params.target, jnp.asarray(feature(path)))


# ---- Formulas, in float64 ----------------------------------------------------------------------


def medusa_logits(
    module: MedusaHeads, params: Any, feature: np.ndarray, lm_head: np.ndarray
) -> Float[np.ndarray, "K V"]:
    """The logits of all heads at one feature; `lm_head` is the target's."""
    found = []
    for number in range(module.config.num_heads):
        block = _float64(params[f"blocks_{number}"])
        x = np.asarray(feature, np.float64)
        for _ in range(module.config.num_layers):
            x = x + _silu(_linear(block, x))
        own = params[f"lm_heads_{number}"]["weight"] if module.config.has_lm_heads else lm_head
        found.append(np.asarray(own, np.float64) @ x)
    return np.stack(found)


def hydra_logits(
    module: HydraHeads, params: Any, feature: np.ndarray, embedded: np.ndarray, lm_head: np.ndarray
) -> Float[np.ndarray, " V"]:
    """The logits after the tokens `embedded [K, D]`; `lm_head` is the target's."""
    number, own = len(embedded) - 1, _float64(params)
    x = np.concatenate([feature, *embedded]).astype(np.float64)
    first = own[f"first_blocks_{number}"]
    x = _linear(first["res_connection"], x) + _silu(_linear(first["linear"], x))
    for _ in range(module.config.num_layers - 1):
        x = x + _silu(_linear(own[f"later_blocks_{number}"], x))
    if module.config.has_lm_heads:
        return _linear(own[f"lm_heads_{number}"], x)
    return np.asarray(lm_head, np.float64) @ x


def _float64(params: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def _linear(weights: Any, x: np.ndarray) -> np.ndarray:
    return weights["weight"] @ x + weights["bias"]


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))
