"""The table of the kinds of heads: how each is loaded and saved."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.models.checkpoint import CONFIG
from specjax.models.heads.eagle_files import load_eagle, save_eagle
from specjax.models.heads.files import read_values
from specjax.models.heads.hydra_files import load_hydra, save_hydra
from specjax.models.heads.medusa_files import load_medusa, save_medusa
from specjax.models.heads.other_heads import TITLES, kind_of_config, refuse_other_configs
from specjax.models.heads.parallel_files import load_parallel, save_parallel


@dataclass(frozen=True)
class HeadKind:
    """One row of the table."""

    load: Callable[..., tuple[Any, Any]]  # (folder, target config, dtype, progress) -> head, params
    save: Callable[..., None]  # see `save_eagle`
    layouts: tuple[str, ...]  # that `save` writes; the first is what training writes


KINDS = {
    "eagle": HeadKind(load_eagle, save_eagle, ("eagle", "vllm", "sglang")),
    "medusa": HeadKind(load_medusa, save_medusa, ("specjax", "medusa", "vllm")),
    "hydra": HeadKind(load_hydra, save_hydra, ("specjax", "hydra")),
    "parallel": HeadKind(load_parallel, save_parallel, ("specjax",)),
}


def judge(folder: Path, kind: str) -> None:
    """Raises SpecjaxError if a folder's config is missing or describes a head of another kind."""
    refuse_other_configs(folder / CONFIG, read_values(folder, TITLES[kind]), kind)


def kind_in(folder: Path) -> str:
    """The kind of the head in a folder; what its config does not tell is taken for EAGLE's.

    Raises:
        SpecjaxError: if there is no config, it is damaged, or describes a head that none can load.
    """
    kind = kind_of_config(read_values(folder))
    kind = kind if kind in KINDS else "eagle"
    judge(folder, kind)
    return kind
