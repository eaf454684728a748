"""Trains a drafter head for a target, from examples to a folder that can be loaded and shared."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import __version__
from specjax.core.errors import SpecjaxError, check_ids
from specjax.core.files import expand_user
from specjax.core.memory import check_fits, device_bytes
from specjax.models.fingerprint import FrozenModel
from specjax.models.heads.layered import DRAFT_TOKENS
from specjax.models.io.head_files import HEAD, save_head
from specjax.models.io.head_format import HeadFormat
from specjax.models.quantize import dequantized, dtype_name
from specjax.models.sharding import Placement, place
from specjax.training.checkpoints import checksum
from specjax.training.data import DataOptions, batches
from specjax.training.examples import Example, frequent_tokens
from specjax.training.loop import Evaluation, LoopOptions, Trained, train
from specjax.training.objectives.base import HeadTraining
from specjax.training.optimizer import OptimizerOptions, optimizer_of

TARGET_FIELDS = ("layers", "hidden_size", "vocab_size")  # of a head's config: set by the target
MEMORY_ADVICE = (
    "lower --batch-size (and raise --accumulate to make up for it) or --longest, keep less with "
    "--remat, or take --dtype bfloat16 or --quantize int8"
)


@dataclass(frozen=True)
class HeadSettings:
    """Everything that decides a head except the target, the texts and the params to start from."""

    method: str
    training: HeadTraining
    optimizer: OptimizerOptions
    loop: LoopOptions = field(default_factory=LoopOptions)
    data: DataOptions = field(default_factory=DataOptions)
    remat: bool = False


def train_head(
    head: Any,
    format: HeadFormat,
    target: FrozenModel,
    examples: Sequence[Example],
    settings: HeadSettings,
    out: str | Path,
    *,
    start: Any = None,
    evaluation: Evaluation | None = None,
    resume: bool = False,
) -> Trained:
    """Trains a head in the run folder `out`, and writes its best params to `out/head`.

    It starts from the params `start`, by default new ones. The best params have the highest score
    of the `evaluation`; without one they are the last.
    """
    check_trainable(head, target)
    out = expand_user(out)
    for number, example in enumerate(examples, start=1):
        check_ids(f"example {number}", example.tokens, head.config.vocab_size)
    # The draft vocabulary is fixed during training.
    fixed = draft_tokens(head, start or {}, examples)
    params = new_params(head, target, settings.loop.seed, fixed) if start is None else start
    params = {name: leaf for name, leaf in params.items() if name not in fixed}
    loss = settings.training.loss(head, target.model, settings.remat)
    if fixed and evaluation is not None:
        measure = evaluation.measure
        evaluation = replace(evaluation, measure=lambda params: measure(params | fixed))
    config = asdict(settings) | {
        "kind": format.kind,
        "shape": shape_of(head),
        "target": target.fingerprint,
        "dtype": dtype_name(target.model.dtype(target.params), target.params),
        "texts": checksum([(example.tokens, example.is_answer) for example in examples]),
        "start": None if start is None else checksum(start),
    }
    if evaluation is not None and evaluation.about:
        config["evaluation"] = evaluation.about  # scores of other measurements cannot be compared
    if examples and examples[0].hidden is not None:
        config["hidden_states"] = "kept"  # read in other batches, which changes last bits
    trained = train(
        lambda params, *others: loss(params | fixed, *others),
        params,
        batches(examples, settings.data, settings.loop.seed),
        optimizer_of(settings.optimizer, settings.loop.total_steps),
        settings.loop,
        out,
        config,
        frozen=target.params,
        placement=_placement(target),
        accumulate=settings.optimizer.accumulate,
        evaluation=evaluation,
        resume=resume,
        title=f"training {settings.method}",
        advice=MEMORY_ADVICE,
    )
    best = trained.best_params | fixed
    if not (out / HEAD).exists():
        about = {
            "method": settings.method,
            "target": target.fingerprint,
            "step": trained.best_step,
            "score": trained.best_score,
            "recipe": config,
            "specjax_version": __version__,
        }
        models = {"target": target.model.config, "target_params": target.params}
        save_head(out / HEAD, format, head, best, "float32", **models, about=about)
    return replace(trained, params=trained.params | fixed, best_params=best)


def check_trainable(head: Any, target: FrozenModel) -> None:
    """Raises SpecjaxError for a target in float16, or if its weights and the head's do not fit."""
    if target.model.dtype(target.params) == jnp.float16:
        raise SpecjaxError(
            "training in float16 loses small gradients; load the target in bfloat16 or float32"
        )
    params = place(jax.eval_shape(head.initialise, jax.random.key(0)), _placement(target))
    trained = 4 * device_bytes(params)
    needs = {"target": device_bytes(target.params), "head, gradients and moments": trained}
    check_fits("the training", needs, target.params, MEMORY_ADVICE)


def _placement(target: FrozenModel) -> Placement | None:
    """Returns the devices of a head's params and of its optimizer's state; None: the default."""
    mesh = target.model.mesh
    return mesh and Placement(mesh, target.model.config.head_dim, fsdp=True)


def draft_tokens(
    head: Any, params: Mapping[str, Any], examples: Sequence[Example]
) -> dict[str, Any]:
    """Returns the param of a draft vocabulary, if the head has one.

    New ones hold the tokens that are most frequent in the answers.
    """
    count = getattr(head.config, "draft_vocab_size", 0)
    if not count or DRAFT_TOKENS in params:
        return {name: leaf for name, leaf in params.items() if name == DRAFT_TOKENS}
    tokens, share = frequent_tokens(examples, head.config.vocab_size, count)
    print(f"the {count} tokens to draft make up {share:.1%} of the answers")
    return {DRAFT_TOKENS: jnp.asarray(tokens)}


def new_params(
    head: Any, target: FrozenModel, seed: int, fixed: Mapping[str, Any]
) -> dict[str, Any]:
    """Draws random params; the LM heads of a head start as copies of the target's."""
    options = {}
    if getattr(head.config, "has_lm_heads", False):
        table = target.model.lm_head(target.params)
        options = {"lm_head": dequantized(table[fixed[DRAFT_TOKENS]] if fixed else table)}
    return head.initialise(jax.random.key(seed), **options)


def shape_of(head: Any) -> dict[str, Any]:
    """Returns the fields in which heads for the same target may differ."""
    shape = {name: value for name, value in vars(head.config).items() if name not in TARGET_FIELDS}
    if not shape.get("draft_vocab_size", True):
        del shape["draft_vocab_size"]
    layers = getattr(head.config, "layers", None)
    return shape if layers is None else shape | {"num_hidden_layers": layers.num_hidden_layers}
