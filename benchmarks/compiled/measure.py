"""Compiles one request for a device and reads the costs of a round from the program."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks.compiled.devices import Device
from benchmarks.compiled.program import DRAFT, Cost, Program, host_synchronisations
from benchmarks.gpu.methods import PAPER_METHODS, Made
from benchmarks.harness import Shape
from specjax import (
    Engine,
    LoadedTarget,
    Params,
    Prompt,
    Sampling,
    Transformer,
    speculative_generate,
)
from specjax.core.compilation import BEFORE_AMPERE, COMPILER_OPTIONS
from specjax.core.memory import num_bytes
from specjax.decoding.drafter import Drafter
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.models.heads.layered import with_draft_tokens
from specjax.models.quantize import quantize_params

PLAIN = "plain"
REDUCED, DRAFT_VOCABULARY = "eagle2-16k", 2**14  # EAGLE-2 that drafts 16k tokens only
METHODS = (PLAIN, REDUCED, *PAPER_METHODS)
TOP_P = 0.95  # above temperature 0
NONE = "none"  # weights in the device's dtype
# Whether partial sums of a product pay is found out by timing it, on the device. Without that XLA
# splits most of them, so that partial sums would be counted which no tuned program need have.
UNTUNED: dict[str, Any] = {"xla_gpu_experimental_force_split_k": 1}
THUNKS = "*thunk_sequence_after_thunk_passes.txt"
Row = dict[str, Any]


class Case(NamedTuple):
    """One request: a method on a target of some size."""

    device: str
    size: str
    method: str
    temperature: float
    quantize: str = NONE  # of the target's weights


class Request(NamedTuple):
    """A request that exists in shapes only."""

    target: LoadedTarget
    drafter: Drafter
    params: Params
    sampling: Sampling
    prompt_length: int
    max_new_tokens: int

    @property
    def num_slots(self) -> int:
        """The slots of its KV cache."""
        engine = Engine(self.target.model, self.drafter, max_new_tokens=self.max_new_tokens)
        return engine.num_slots(self.prompt_length)

    @property
    def cache(self) -> Any:
        """Its KV cache."""
        new = partial(self.target.model.new_cache, batch=1, num_slots=self.num_slots)
        return jax.eval_shape(new, self.target.params)

    @property
    def floor(self) -> float:
        """The bytes that a target pass must read: all weights but the embedding, and the cache."""
        params, model = self.target.params, self.target.model
        is_tied = self.target.config.tie_word_embeddings
        skipped = 0 if is_tied else num_bytes(jax.eval_shape(model.lm_head, params))
        cache = self.cache
        return num_bytes(params) - skipped + num_bytes((cache.keys, cache.values))


def request_of(
    case: Case, device: Device, shape: Shape, prompt_length: int, max_new_tokens: int
) -> Request:
    """Returns a request for a target of this shape."""
    config = shape.config(prompt_length + max_new_tokens)
    cache_dtype = jnp.float32 if case.device == "cpu" else None
    model = Transformer(config, cache_dtype)
    key = jax.eval_shape(partial(jax.random.key, 0))
    params = jax.eval_shape(partial(model.initialise, dtype=device.dtype), key)
    if case.quantize != NONE:
        params = jax.eval_shape(partial(quantize_params, kind=case.quantize), params)
    target = LoadedTarget(model, params, None, config, case.size)
    drafters = []

    def make(params: Any) -> Any:
        made = _made(case.method, replace(target, params=params))
        drafters.append(made.drafter)
        return made.params

    own = jax.eval_shape(make, params)
    sampling = Sampling(case.temperature, top_p=TOP_P if case.temperature else 1.0)
    return Request(
        target, drafters[0], Params(params, own), sampling, prompt_length, max_new_tokens
    )


def _made(method: str, target: LoadedTarget) -> Made:
    if method == PLAIN:
        return Made(Autoregressive())
    if method != REDUCED:
        return PAPER_METHODS[method].make(target)
    whole = PAPER_METHODS["eagle2"].make(target)
    assert isinstance(whole.drafter, Eagle2)
    tokens = jnp.arange(min(DRAFT_VOCABULARY, target.config.vocab_size))
    head, params = with_draft_tokens(whole.drafter.head, whole.params, tokens)
    return Made(replace(whole.drafter, head=head), params)


def measure(request: Request, device: Device, on: Any) -> Row:
    """Compiles a request for the device `on` and returns its costs."""
    generate = partial(
        speculative_generate,
        target=request.target.model,
        drafter=request.drafter,
        sampling=request.sampling,
        max_new_tokens=request.max_new_tokens,
    )
    prompt = jax.eval_shape(
        lambda: Prompt(
            jnp.zeros((1, request.prompt_length), jnp.int32), jnp.full(1, request.prompt_length)
        )
    )
    key = jax.eval_shape(partial(jax.random.key, 0))
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(on)
        ),
        (request.params, prompt, key),
    )
    started = time.perf_counter()
    lowered = jax.jit(generate).lower(*placed)
    traced = time.perf_counter()
    is_cuda = on.platform == "gpu"
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = COMPILER_OPTIONS | UNTUNED
        options |= BEFORE_AMPERE if device.dtype == "float16" else {}
        options |= {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(options if is_cuda else {})
        done = time.perf_counter()
        syncs = sum(host_synchronisations(each.read_text()) for each in Path(folder).glob(THUNKS))
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    row: Row = {"trace_s": traced - started, "compile_s": done - traced}
    row["temporary"] = memory.temp_size_in_bytes
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    row["held"] = held - memory.alias_size_in_bytes
    row["host_syncs"] = syncs if is_cuda else None
    row["floor"] = request.floor
    return row | _costs(Program(text), request, device)


def _costs(program: Program, request: Request, device: Device) -> Row:
    cache = request.cache.keys[0].shape
    parts = program.costs(program.round_body(), cache)
    draft = parts.pop(DRAFT, Cost())
    widest = parts[max(parts, key=int)]
    layers = request.target.config.num_hidden_layers
    row: Row = {
        "widths": sorted(map(int, parts)),
        "draft_read": draft.read,
        "pass_read": widest.read,
        "draft_kernels": draft.kernels,
        "pass_kernels": widest.kernels,
        "cache_copies": (draft.cache_copies + widest.cache_copies) / (2 * layers),
    }
    if device.clock:
        row["draft_s"] = draft.cycles / device.clock
        row["pass_s"] = widest.cycles / device.clock
    return row


WHOLE = ("widths", "host_syncs", "cache_copies", "trace_s", "compile_s")  # as in the deepest


def at_depth(rows: Sequence[Row], layers: Sequence[int], depth: int) -> Row:
    """Returns the costs of a model of `depth` layers from those of one or two less deep ones.

    Layers are alike, so costs are linear in their number. Seconds are those of the deepest.
    """
    last = rows[-1]
    if len(rows) == 1:
        return dict(last)
    share = (depth - layers[-1]) / (layers[-1] - layers[-2])
    return {
        name: value if name in WHOLE else value + share * (value - rows[-2][name])
        for name, value in last.items()
    }
