"""Training a drafter head for a target, from texts to a folder that can be loaded and shared."""

import os
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from errno import EACCES, ENOTDIR
from pathlib import Path
from typing import Any

import jax

from specjax import __version__
from specjax.errors import SpecjaxError
from specjax.files import writable
from specjax.models.heads.eagle import EagleHead
from specjax.models.heads.eagle_files import HEAD, save_eagle
from specjax.training.checkpoints import checksum
from specjax.training.config import HassObjective, HeadSettings
from specjax.training.data import batches
from specjax.training.draft_reading import FrozenModel
from specjax.training.examples import Example
from specjax.training.loop import Evaluation, LossFn, Trained, train
from specjax.training.objectives.eagle import eagle_loss
from specjax.training.objectives.hass import hass_loss
from specjax.training.optimizer import optimizer_of
from specjax.training.run_folder import CONFIG, check_vacant

MEMORY_ADVICE = (
    "lower --batch-size (and raise --accumulate to make up for it) or --longest, keep less with "
    "--remat, or take --dtype bfloat16"
)


def train_head(
    head: EagleHead,
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
        head: its shape.
        target: with the fingerprint that the head is to carry.
        examples: texts with their answers marked.
        settings: see there.
        out: the run folder.
        start: params to go on from; by default random ones.
        evaluation: a measurement of params by decoding; the best params are those with the highest
            score, and without one the last.
        resume: go on with the run in `out`.

    Raises:
        SpecjaxError: as `training.loop.train` and `training.data.batches` do, for a top loss that
            is not possible, or if the head cannot be written.
    """
    params = head.initialise(jax.random.key(settings.loop.seed)) if start is None else start
    config = asdict(settings) | {
        "method": settings.method,
        "target": target.fingerprint,
        "dtype": str(target.params["embed_tokens"]["weight"].dtype),
        "texts": _checksum(examples),
        "start": None if start is None else checksum(start),
    }
    trained = train(
        _loss_of(settings, head, target),
        params,
        batches(examples, settings.data, settings.loop.seed),
        optimizer_of(settings.optimizer, settings.loop.num_steps),
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


def _save(
    folder: Path, head: EagleHead, target: FrozenModel, trained: Trained, config: dict[str, Any]
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
    save_eagle(
        folder,
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


def _loss_of(settings: HeadSettings, head: EagleHead, target: FrozenModel) -> LossFn:
    if isinstance(settings.objective, HassObjective):
        return hass_loss(head, target.model, settings.objective, settings.remat)
    return eagle_loss(head, target.model, settings.objective, settings.remat)


def _checksum(examples: Sequence[Example]) -> int:
    total = 0
    for example in examples:
        total = zlib.crc32(example.tokens.tobytes() + example.is_answer.tobytes(), total)
    return total
