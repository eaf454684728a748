"""Training steps that exist in shapes only."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered

from benchmarks.compiled.devices import Device
from benchmarks.compiled.measure import Case, Row, abstract_target, figures, placed
from benchmarks.compiled.program import Cost, Program
from specjax import LoadedTarget, TransformerConfig
from specjax.models.sharding import DATA, Placement
from specjax.training.loop import train_step
from specjax.training.objectives.hass import HassTraining
from specjax.training.optimizer import optimizer_of

TRAINING = "train-hass"
STEPS = 1000  # of the run, which decide the learning rate alone


class TrainingStep(NamedTuple):
    """A step of HASS; the target is split over `data` too."""

    target: LoadedTarget
    training: HassTraining
    on: Placement
    batch_size: int
    length: int

    def lower(self) -> Lowered:
        """Lowers the program of a step."""
        head, target, mesh = self._head, self.target, self.on.mesh
        params = placed(jax.eval_shape(head.initialise, jax.random.key(0)), self.on)
        optimizer = optimizer_of(self.training.optimizer, STEPS)
        moments = placed(jax.eval_shape(optimizer.init, params), self.on)
        state = {"params": params, "moments": moments}
        rows = partial(
            jax.ShapeDtypeStruct,
            (self.batch_size, self.length),
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
        return self.batch_size * self.length * each_token

    @property
    def _head(self) -> Any:
        return self.training.new_head(self.target.config)


def training_of(
    case: Case, device: Device, config: TransformerConfig, on: Placement
) -> TrainingStep:
    """Returns a step over texts of the case's prompt length."""
    target = abstract_target(case, device, config, on)
    return TrainingStep(target, HassTraining(), on, case.batch, case.prompt)


def _size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
