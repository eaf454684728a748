"""Training a drafter head for a target, from texts to a folder that can be loaded and shared."""

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from errno import EACCES, ENOTDIR
from pathlib import Path
from typing import Any, NamedTuple

import jax

from specjax import __version__
from specjax.core.errors import SpecjaxError
from specjax.core.files import writable
from specjax.models.heads.kinds import KINDS
from specjax.models.io.head_files import HEAD, save_head
from specjax.training.checkpoints import checksum
from specjax.training.config import HeadSettings
from specjax.training.data import batches
from specjax.training.draft_reading import FrozenModel
from specjax.training.examples import Example
from specjax.training.loop import Evaluation, LossFn, Trained, train
from specjax.training.objectives.eagle import eagle_loss
from specjax.training.objectives.hass import hass_loss
from specjax.training.objectives.hydra import hydra_loss
from specjax.training.objectives.medusa import medusa_loss
from specjax.training.objectives.parallel_spec import parallel_eagle_loss, parallel_medusa_loss
from specjax.training.optimizer import optimizer_of
from specjax.training.run_folder import CONFIG, check_vacant

OF_THE_TARGET = ("layers", "hidden_size", "vocab_size")  # in the config of a head
MEMORY_ADVICE = (
    "lower --batch-size (and raise --accumulate to make up for it) or --longest, keep less with "
    "--remat, or take --dtype bfloat16"
)


class Trainable(NamedTuple):
    """How the head of a method is trained."""

    kind: str  # of `models.heads.kinds.KINDS`
    loss: Callable[..., LossFn]  # (head, target, objective, remat); see `eagle_loss`


TRAINABLE = {
    "eagle": Trainable("eagle", eagle_loss),
    "hass": Trainable("eagle", hass_loss),
    "medusa": Trainable("medusa", medusa_loss),
    "hydra": Trainable("hydra", hydra_loss),
    "parallel-medusa": Trainable("parallel", parallel_medusa_loss),
    "parallel-eagle": Trainable("parallel", parallel_eagle_loss),
}


def train_head(
    head: Any,
    target: FrozenModel,
    examples: Sequence[Example],
    settings: HeadSettings,
    out: Path,
    *,
    start: Any = None,
    evaluation: Evaluation | None = None,
    resume: bool = False,
) -> Trained:
    """Trains a head in the run folder `out`, and writes its best params to `out/head`.

    Args:
        head: its shape; of the kind that `settings.method` trains, such as `EagleHead`.
        target: with the fingerprint that the head is to carry.
        examples: texts with their answers marked.
        settings: see there.
        out: the run folder.
        start: params to go on from; by default new ones.
        evaluation: a measurement of params by decoding; the best params are those with the highest
            score, and without one the last.
        resume: go on with the run in `out`.

    Raises:
        SpecjaxError: as `training.loop.train` and `training.data.batches` do, for a top loss that
            is not possible, or if the head cannot be written.
    """
    params = new_params(head, target, settings.loop.seed) if start is None else start
    config = asdict(settings) | {
        "method": settings.method,
        "shape": shape_of(head),
        "target": target.fingerprint,
        "dtype": str(target.model.dtype(target.params)),
        "texts": _checksum(examples),
        "start": None if start is None else checksum(start),
    }
    loss = TRAINABLE[settings.method].loss
    trained = train(
        loss(head, target.model, settings.objective, settings.remat),
        params,
        batches(examples, settings.data, settings.loop.seed),
        optimizer_of(settings.optimizer, settings.loop.total_steps),
        settings.loop,
        out,
        config,
        frozen=target.params,
        accumulate=settings.optimizer.accumulate,
        evaluation=evaluation,
        resume=resume,
        title=f"training {settings.method}",
        advice=MEMORY_ADVICE,
    )
    if not (out / HEAD).exists():
        _save(out / HEAD, head, target, trained, config)
    return trained


def new_params(head: Any, target: FrozenModel, seed: int) -> Any:
    """Random params; LM heads of a head's own begin as the target's."""
    key = jax.random.key(seed)
    if not getattr(head.config, "has_lm_heads", False):
        return head.initialise(key)
    return head.initialise(key, lm_head=target.model.lm_head(target.params))


def shape_of(head: Any) -> dict[str, Any]:
    """What tells a head from others for the same target."""
    own = {name: value for name, value in vars(head.config).items() if name not in OF_THE_TARGET}
    layers = getattr(head.config, "layers", None)
    return own if layers is None else own | {"num_hidden_layers": layers.num_hidden_layers}


def _save(
    folder: Path, head: Any, target: FrozenModel, trained: Trained, config: dict[str, Any]
) -> None:
    """Writes the best head, and what made it."""
    about = {
        "method": config["method"],
        "target": target.fingerprint,
        "step": trained.best_step,
        "score": trained.best_score,
        "recipe": config,
        "specjax_version": __version__,
    }
    save_head(
        folder,
        KINDS[TRAINABLE[config["method"]].kind],
        head,
        trained.best_params,
        "float32",
        target=target.model.config,
        target_params=target.params,
        about=about,
    )


def check_out(out: Path, resume: bool) -> None:
    """Raises SpecjaxError if no run can begin in `out`: before anything that takes long."""
    with writable(out):
        has_run, has_head = (out / CONFIG).exists(), (out / HEAD).exists()
        base = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
        if not base.is_dir():
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR))
        if not os.access(base, os.W_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
    if has_head and not has_run:
        raise SpecjaxError(f"{out / HEAD} is there already, without a run; give another folder")
    if not resume:
        check_vacant(out)


def _checksum(examples: Sequence[Example]) -> int:
    total = 0
    for example in examples:
        total = zlib.crc32(example.tokens.tobytes() + example.is_answer.tobytes(), total)
    return total
