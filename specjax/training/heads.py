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
from specjax.models.heads.eagle import EagleConfig, EagleHead
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


def train_head(
    target: FrozenModel,
    examples: Sequence[Example],
    settings: HeadSettings,
    out: Path,
    *,
    start: tuple[EagleHead, Any] | None = None,
    evaluation: Evaluation | None = None,
    resume: bool = False,
) -> Trained:
    """Trains a head in the run folder `out`, and writes its best params to `out/head`.

    Args:
        target: with the fingerprint that the head is to carry.
        examples: texts with their answers marked.
        settings: see there.
        out: the run folder.
        start: a head to go on from, with its params; by default a new one.
        evaluation: a measurement of params by decoding; the best params are those with the highest
            score, and without one the last.
        resume: go on with the run in `out`.

    Raises:
        SpecjaxError: as `training.loop.train` does, or if the head cannot be written.
    """
    head, params = start or _new_head(target, settings)
    if head.config.fc_bias != settings.fc_bias:
        raise SpecjaxError(
            f"the head to start from has {'a' if head.config.fc_bias else 'no'} bias in fc; "
            f"{'add' if head.config.fc_bias else 'leave out'} --fc-bias"
        )
    config = asdict(settings) | {
        "method": settings.method,
        "target": target.fingerprint,
        "texts": _checksum(examples),
        "start": None if start is None else checksum(params),
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
    )
    if not (out / HEAD).exists():
        about = {
            "method": settings.method,
            "target": target.fingerprint,
            "step": trained.best_step,
            "score": trained.best_score,
            "recipe": config,
            "specjax_version": __version__,
        }
        save_eagle(
            out / HEAD,
            head,
            trained.best_params,
            "float32",
            target=target.model.config,
            target_params=target.params,
            about=about,
        )
    return trained


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


def _new_head(target: FrozenModel, settings: HeadSettings) -> tuple[EagleHead, Any]:
    head = EagleHead(EagleConfig.for_target(target.model.config, settings.fc_bias))
    return head, head.initialise(jax.random.key(settings.loop.seed))


def _checksum(examples: Sequence[Example]) -> int:
    total = 0
    for example in examples:
        total = zlib.crc32(example.tokens.tobytes() + example.is_answer.tobytes(), total)
    return total
