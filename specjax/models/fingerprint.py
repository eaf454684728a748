"""Checksums that identify a model or a head by its weights, independent of their dtype."""

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.config import TransformerConfig
from specjax.models.native import unpack_params
from specjax.models.quantize import dequantized, is_stored, sign_checksum
from specjax.models.sharding import on_host
from specjax.models.target import Target

NUM_WHOLE = 4096  # values of an array of whole numbers in a checksum, at most


def fingerprint(config: TransformerConfig, params: Mapping[str, Any]) -> str:
    """Returns the sizes of a model and a checksum of the signs of some of its embeddings.

    Rounding does not change signs, so the dtype of `params` does not matter; quantised params
    carry the checksum of the floats.
    """
    sizes = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
    return f"{'x'.join(map(str, sizes))}-{sign_checksum(params['embed_tokens']['weight']):08x}"


class FrozenModel(NamedTuple):
    """A model that is only read; heads and classifiers trained for it record its fingerprint."""

    model: Target
    params: Any
    fingerprint: str = ""

    @classmethod
    def of(cls, loaded: Any) -> "FrozenModel":
        """Takes a model that `specjax.load` returned."""
        params = unpack_params(loaded.params)  # packed weights have no gradients
        return cls(loaded.model, params, fingerprint(loaded.config, params))


def params_fingerprint(params: Any) -> str:
    """Returns a checksum of a head: the signs of some weights, and some whole numbers.

    An array of whole numbers, such as a datastore's, adds its shape and evenly spaced values.
    """
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_stored):
        if not is_stored(leaf) and jnp.issubdtype(leaf.dtype, jnp.integer):
            some = leaf.ravel()[:: -(-leaf.size // NUM_WHOLE) or 1]
            part = repr((leaf.shape, on_host(some).tolist())).encode()
        else:
            if is_stored(leaf):
                leaf = dequantized(leaf[jnp.arange(min(64, leaf.shape[0]))])
            corner = on_host(leaf[tuple(slice(64) for _ in leaf.shape)]).astype(np.float32)
            part = np.packbits(np.signbit(corner)).tobytes()
        total = zlib.crc32(part, total)
        total = zlib.crc32(jax.tree_util.keystr(path).encode(), total)
    return f"{total:08x}"
