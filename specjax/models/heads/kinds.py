"""The table of the kinds of heads: how each is loaded and saved."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.models.heads import eagle_files, hydra_files, medusa_files, parallel_files
from specjax.models.heads.files import read_values
from specjax.models.heads.other_heads import TITLES, kind_of_config, refuse_other_configs
from specjax.models.io.checkpoint import CONFIG


@dataclass(frozen=True)
class HeadKind:
    """One row of the table."""

    load: Callable[..., tuple[Any, Any]]  # (folder, target config, dtype, progress) -> head, params
    save: Callable[..., None]  # see `save_eagle`
    layouts: tuple[str, ...]  # that `save` writes; the first is what training writes


KINDS = {
    "eagle": HeadKind(eagle_files.load_eagle, eagle_files.save_eagle, eagle_files.LAYOUTS),
    "medusa": HeadKind(medusa_files.load_medusa, medusa_files.save_medusa, medusa_files.LAYOUTS),
    "hydra": HeadKind(hydra_files.load_hydra, hydra_files.save_hydra, hydra_files.LAYOUTS),
    "parallel": HeadKind(
        parallel_files.load_parallel, parallel_files.save_parallel, parallel_files.LAYOUTS
    ),
}


def refuse_other_kind(folder: Path, kind: str) -> None:
    """Raises SpecjaxError if a folder's config is missing or describes a head of another kind."""
    refuse_other_configs(folder / CONFIG, read_values(folder, TITLES[kind]), kind)


def kind_in(folder: Path) -> str:
    """The kind of the head in a folder; what its config does not tell is taken for EAGLE's.

    Raises:
        SpecjaxError: if there is no config, it is damaged, or describes a head that none can load.
    """
    kind = kind_of_config(read_values(folder))
    kind = kind if kind in KINDS else "eagle"
    refuse_other_kind(folder, kind)
    return kind
