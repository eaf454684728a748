"""Measures what quantised weights cost: python -m benchmarks.quantized TARGET TEXT

For each dtype: the perplexity on a text, the bytes of the weights, and the processor time of one
step of plain decoding, over that of bfloat16 in the same turn. Processor time counts all threads of
this process alone, so that other work on the machine disturbs it less than a clock.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from benchmarks.harness import TARGET, at_least_1, main, option, table
from specjax import Engine, LoadedTarget, Params, from_ids, load
from specjax.core.errors import SpecjaxError
from specjax.core.memory import num_bytes
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.models.quantize import quantized_param
from specjax.models.target import causal_rows

BASE = "bfloat16"
KINDS = {  # the dtype of compute, and the quantisation
    "float32": ("float32", None),
    "int8 (float32)": ("float32", "int8"),
    BASE: (BASE, None),
    "int8 (bfloat16)": (BASE, "int8"),
    "int4 (bfloat16)": (BASE, "int4"),
}
HEADER = ("weights", "perplexity", "x float32", "MB", "ms of processor time a step", "x bfloat16")


@dataclass(frozen=True)
class QuantizedOptions:
    """The options of this benchmark."""

    target: str = option(TARGET, kind=str)
    text: Path = option("a file of UTF-8 text", kind=Path)
    windows: int = option("pieces of the text to measure perplexity on", 8)
    length: int = option("tokens of each", 256)
    steps: int = option("steps of plain decoding in a turn", 32)
    turns: int = option("turns, each with all dtypes; 0: no times", 5)
    weights: tuple[str, ...] = option(f"of {', '.join(KINDS)}", tuple(KINDS))


def with_weights(target: LoadedTarget, dtype: str, kind: str | None) -> LoadedTarget:
    """Returns the target as `load` would with this dtype and quantisation."""

    def converted(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return quantized_param(name, leaf, kind, dtype) if kind else leaf.astype(dtype)

    return replace(target, params=jax.tree_util.tree_map_with_path(converted, target.params))


def perplexity(target: LoadedTarget, windows: Int[np.ndarray, "N T"]) -> float:
    """Returns the perplexity of the target on windows of text, each read by itself."""

    @jax.jit
    def loss(params, tokens: Int[Array, "1 T"]):
        rows = causal_rows(tokens[:, :-1], jnp.zeros(1, int))
        cache = target.model.new_cache(params, 1, windows.shape[1])
        logits = target.model.run(params, rows, cache)[0].logits
        assert logits is not None
        log_probs = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1))

    return float(np.exp(np.mean([loss(target.params, window[None]) for window in windows])))


def step_seconds(target: LoadedTarget, prompt: list[int], steps: int) -> float:
    """Returns the processor time of one step of plain decoding."""
    engine = Engine(target.model, Autoregressive(), max_new_tokens=steps + 1)
    params = Params(target.params)
    state = jax.block_until_ready(engine.prefill(params, from_ids([prompt]), jax.random.key(0)))
    started = time.process_time()
    jax.block_until_ready(engine.run(params, state, steps))
    return (time.process_time() - started) / steps


def run(options: QuantizedOptions) -> None:
    """Measures and prints the table."""
    at_least_1(options, "windows", "steps")
    wide = load(options.target, "float32")
    targets = {name: with_weights(wide, *KINDS[name]) for name in options.weights}
    encode = wide.require_tokenizer().encode
    ids = encode(options.text.read_text(encoding="utf-8"), add_special_tokens=False)
    count = options.windows * options.length
    if len(ids) < count:
        raise SpecjaxError(f"{options.text} has {len(ids)} tokens; take fewer --windows")
    windows = np.asarray(ids[:count]).reshape(options.windows, options.length)
    found = {name: perplexity(target, windows) for name, target in targets.items()}
    seconds = {name: [] for name in targets}
    for turn in range(options.turns + 1 if options.turns else 0):
        for name, target in targets.items():
            taken = step_seconds(target, windows[0].tolist(), options.steps)
            if turn:  # the first one compiles
                seconds[name].append(taken)
    rows = []
    for name, target in targets.items():
        base = seconds.get(BASE, [])
        ratios = [own / other for own, other in zip(seconds[name], base, strict=False)]
        share = f"{found[name] / found['float32']:.4f}" if "float32" in found else "-"
        times = [f"{1e3 * median(seconds[name]):.1f}" if seconds[name] else "-"]
        times.append(f"{median(ratios):.2f}" if ratios else "-")
        size = f"{num_bytes(target.params) / 1e6:.0f}"
        rows.append((name, f"{found[name]:.3f}", share, size, *times))
    print(table(HEADER, rows))


if __name__ == "__main__":
    main(run, QuantizedOptions, __doc__)
