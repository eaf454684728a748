"""Training of drafters: one loop for all, one objective per kind.

Names are imported when they are first used: loading a drafter does not import what trains one.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specjax.data.conversations import Conversation, Turn, read_conversations
    from specjax.models.fingerprint import FrozenModel
    from specjax.training.data import DataOptions, batches
    from specjax.training.examples import Example, tokenize_all
    from specjax.training.heads import HeadSettings, train_head
    from specjax.training.loop import LoopOptions, Trained, train
    from specjax.training.objectives.base import HeadTraining, Step
    from specjax.training.optimizer import OptimizerOptions

_HOMES = {
    "Conversation": "specjax.data.conversations",
    "Turn": "specjax.data.conversations",
    "read_conversations": "specjax.data.conversations",
    "DataOptions": "specjax.training.data",
    "batches": "specjax.training.data",
    "Example": "specjax.training.examples",
    "tokenize_all": "specjax.training.examples",
    "HeadSettings": "specjax.training.heads",
    "train_head": "specjax.training.heads",
    "LoopOptions": "specjax.training.loop",
    "Trained": "specjax.training.loop",
    "train": "specjax.training.loop",
    "FrozenModel": "specjax.models.fingerprint",
    "HeadTraining": "specjax.training.objectives.base",
    "Step": "specjax.training.objectives.base",
    "OptimizerOptions": "specjax.training.optimizer",
}
__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
