"""Compiles a request, or a training step, and reads its costs from the program."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered
from jax.typing import DTypeLike

from benchmarks.compiled.devices import Device
from benchmarks.compiled.program import DRAFT, Cost, Program, host_synchronisations
from benchmarks.gpu.methods import PAPER_METHODS, Made
from benchmarks.harness import SIZES
from specjax import (
    Drafter,
    Engine,
    LoadedTarget,
    Params,
    Prompt,
    Sampling,
    Transformer,
    TransformerConfig,
    speculative_generate,
)
from specjax.bench.measure import PLAIN
from specjax.core.compilation import BEFORE_AMPERE, COMPILER_OPTIONS
from specjax.core.memory import device_bytes
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.models.heads.layered import with_draft_tokens
from specjax.models.quantize import quantize_params
from specjax.models.sharding import DATA, Placement, make_mesh, place, shard_batch
from specjax.training.loop import train_step
from specjax.training.objectives.hass import HassTraining
from specjax.training.optimizer import optimizer_of

REDUCED, DRAFT_VOCABULARY = "eagle2-16k", 2**14  # EAGLE-2 that drafts 16k tokens only
METHODS = (PLAIN, REDUCED, *PAPER_METHODS)
TRAINING, STEPS = "train-hass", 1000  # the steps of the run decide the learning rate alone
TOP_P = 0.95  # above temperature 0
NONE = "none"  # weights in the device's dtype
# Whether partial sums of a product pay is found out by timing it, on the device. Without that XLA
# splits most of them, so that partial sums would be counted which no tuned program need have.
UNTUNED: dict[str, Any] = {"xla_gpu_experimental_force_split_k": 1}
THUNKS = "*thunk_sequence_after_thunk_passes.txt"
Row = dict[str, Any]
Place = Placement | SingleDeviceSharding


class Case(NamedTuple):
    """One request: a method on a target of some size. Or one training step, without new tokens."""

    device: str
    size: str
    quantize: str  # of the target's weights
    temperature: float
    method: str
    prompt: int
    new: int
    batch: int = 1
    mesh: str = ""  # of several devices
    padded_width: int = 0  # of the target


class Request(NamedTuple):
    """A request that exists in shapes only."""

    case: Case
    target: LoadedTarget
    drafter: Drafter
    params: Params
    on: Place

    @property
    def cache(self) -> Any:
        """Its KV cache."""
        model, case = self.target.model, self.case
        engine = Engine(model, self.drafter, max_new_tokens=case.new)
        num_slots = engine.num_slots(case.prompt)
        new = partial(model.new_cache, batch=case.batch, num_slots=num_slots)
        mesh = self.on.mesh if isinstance(self.on, Placement) else None
        return shard_batch(jax.eval_shape(new, self.target.params), mesh, case.batch)

    @property
    def floor(self) -> float:
        """The bytes that a device must read in a target pass: its part of all weights but the
        embedding, and of the cache."""
        params, cache = self.target.params, self.cache
        table = jax.eval_shape(self.target.model.lm_head, params)  # as large as the embedding
        is_tied = self.target.config.tie_word_embeddings
        skipped = 0 if is_tied else device_bytes(placed({"lm_head.weight": table}, self.on))
        return device_bytes(params) - skipped + device_bytes((cache.keys, cache.values))

    def lower(self) -> Lowered:
        """Lowers the program that serves it."""
        temperature = self.case.temperature
        generate = partial(
            speculative_generate,
            target=self.target.model,
            drafter=self.drafter,
            sampling=Sampling(temperature, top_p=TOP_P if temperature else 1.0),
            max_new_tokens=self.case.new,
        )
        shape = self.case.batch, self.case.prompt
        arguments = jax.eval_shape(
            lambda: (
                Prompt(jnp.zeros(shape, jnp.int32), jnp.full(shape[0], shape[1], jnp.int32)),
                jax.random.key(0),
            )
        )
        return jax.jit(generate).lower(self.params, *placed(arguments, self.on))

    def costs(self, program: Program, device: Device) -> Row:
        """Returns the costs of a round."""
        keys = self.cache.keys[0]
        shape = keys.shape if keys.sharding is None else keys.sharding.shard_shape(keys.shape)
        parts = program.costs(program.round_body(), shape)
        draft = parts.pop(DRAFT, Cost())
        widest = parts[max(parts, key=int)]
        layers = self.target.config.num_hidden_layers
        row: Row = {
            "widths": sorted(map(int, parts)),
            "floor": self.floor,
            "cache_copies": (draft.cache_copies + widest.cache_copies) / (2 * layers),
            **figures("draft", draft, device),
            **figures("pass", widest, device),
        }
        if device.bytes_per_second:
            row["floor_s"] = row["floor"] / device.bytes_per_second
        return row


class TrainingStep(NamedTuple):
    """A step of HASS that exists in shapes only; the target is split over `data` too."""

    case: Case
    target: LoadedTarget
    on: Placement
    training: HassTraining = HassTraining()

    def lower(self) -> Lowered:
        """Lowers the program of a step."""
        head, target, mesh = self._head, self.target, self.on.mesh
        params = placed(jax.eval_shape(head.initialise, jax.random.key(0)), self.on)
        optimizer = optimizer_of(self.training.optimizer, STEPS)
        moments = placed(jax.eval_shape(optimizer.init, params), self.on)
        state = {"params": params, "moments": moments}
        rows = partial(
            jax.ShapeDtypeStruct,
            (self.case.batch, self.case.prompt),
            sharding=NamedSharding(mesh, P(DATA)),
        )
        kinds = {"tokens": jnp.int32, "is_answer": bool, "segments": jnp.int32}
        batch = {name: rows(kind) for name, kind in (kinds | {"positions": jnp.int32}).items()}
        key = placed(jax.eval_shape(partial(jax.random.key, 0)), self.on)
        loss = self.training.loss(head, target.model)
        return train_step(loss, optimizer, state, mesh).lower(state, target.params, batch, key)

    def costs(self, program: Program, device: Device) -> Row:
        """Returns the costs of the step."""
        whole = Cost()
        for cost in program.costs(program.entry, (0,)).values():
            whole.add(cost)
        floor = self.products / self.on.mesh.size
        row: Row = {"floor": floor, **figures("step", whole, device)}
        return row | ({"floor_s": floor / device.flops} if device.flops else {})

    @property
    def products(self) -> float:
        """The least operations of a step: the target's pass and logits; and of each step of
        alignment the head, forward and backward, and its logits without the LM head's gradient."""
        model, params = self.target.model, self.target.params
        lm_head = _size(jax.eval_shape(model.lm_head, params))
        layers = _size(params) - lm_head * (1 if self.target.config.tie_word_embeddings else 2)
        head = _size(jax.eval_shape(self._head.initialise, jax.random.key(0)))
        each_token = 2 * (layers + lm_head) + self.training.align_steps * (6 * head + 4 * lm_head)
        return self.case.batch * self.case.prompt * each_token

    @property
    def _head(self) -> Any:
        return self.training.new_head(self.target.config)


def figures(part: str, cost: Cost, device: Device) -> Row:
    """Returns the costs of a part under its name."""
    row = {
        f"{part}_read": cost.read,
        f"{part}_kernels": cost.kernels,
        f"{part}_collectives": cost.collectives,
        f"{part}_moved": cost.moved,
    }
    return row | ({f"{part}_s": cost.cycles / device.clock} if device.clock else {})


def program_of(
    case: Case, device: Device, devices: Sequence[Any], depth: int
) -> Request | TrainingStep:
    """Returns the program of a case for a target of `depth` layers."""
    sizes = {"num_hidden_layers": depth, "max_position_embeddings": case.prompt + case.new}
    config = replace(SIZES[case.size], **sizes)
    is_training = case.method == TRAINING
    mesh = make_mesh(case.mesh or "data=1", devices)
    spread = Placement(mesh, config.head_dim, fsdp=is_training)
    if is_training:
        target = abstract_target(case, device, config, spread)
        return TrainingStep(case, target, spread)
    on = spread if case.mesh else SingleDeviceSharding(devices[0])
    cache_dtype = jnp.float32 if case.device == "cpu" else None
    target = abstract_target(case, device, config, on, cache_dtype)
    drafters = []

    def make(params: Any) -> Any:
        made = _made(case.method, replace(target, params=params))
        drafters.append(made.drafter)
        return made.params

    drafter_params = placed(jax.eval_shape(make, target.params), on)
    return Request(case, target, drafters[0], Params(target.params, drafter_params), on)


def abstract_target(
    case: Case,
    device: Device,
    config: TransformerConfig,
    on: Place,
    cache_dtype: DTypeLike | None = None,
) -> LoadedTarget:
    """Returns a target that exists in shapes only."""
    mesh = on.mesh if isinstance(on, Placement) else None
    model = Transformer(config, cache_dtype, mesh, case.padded_width)
    key = jax.eval_shape(partial(jax.random.key, 0))
    params = jax.eval_shape(partial(model.initialise, dtype=device.dtype), key)
    if case.quantize != NONE:
        params = jax.eval_shape(partial(quantize_params, kind=case.quantize), params)
    return LoadedTarget(model, placed(params, on), None, config, case.size)


def placed(tree: Any, on: Place) -> Any:
    """Has shapes lie on a device, or on those of a mesh."""
    if isinstance(on, Placement):
        return place(tree, on)
    return jax.tree.map(lambda leaf: leaf.update(sharding=on), tree)


def _size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


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


def measure(case: Case, device: Device, devices: Sequence[Any], depth: int) -> Row:
    """Compiles a case at some depth and returns its costs on each of the devices."""
    program = program_of(case, device, devices, depth)
    lowered = program.lower()
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = COMPILER_OPTIONS | UNTUNED
        options |= BEFORE_AMPERE if device.dtype == "float16" else {}
        options |= {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(options if device.is_cuda else {})
        syncs = sum(host_synchronisations(each.read_text()) for each in Path(folder).glob(THUNKS))
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    row: Row = {"temporary": memory.temp_size_in_bytes}
    row["held"] = held - memory.alias_size_in_bytes
    row["host_syncs"] = syncs if device.is_cuda else None
    return row | program.costs(Program(text), device)


WHOLE = ("widths", "host_syncs", "cache_copies")  # as in the deepest


def at_depth(rows: Sequence[Row], layers: Sequence[int], depth: int) -> Row:
    """Returns the costs of a model of `depth` layers from those of one or two less deep ones.

    All layers cost the same, so costs are linear in their number.
    """
    last = rows[-1]
    if len(rows) == 1:
        return dict(last)
    share = (depth - layers[-1]) / (layers[-1] - layers[-2])
    return {
        name: value if name in WHOLE else value + share * (value - rows[-2][name])
        for name, value in last.items()
    }
