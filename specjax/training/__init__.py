"""Training of drafters: one loop for all, one objective per kind.

Names are imported when they are first used.
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

_NAMES = {
    "data.conversations": ("Conversation", "Turn", "read_conversations"),
    "training.data": ("DataOptions", "batches"),
    "training.examples": ("Example", "tokenize_all"),
    "training.heads": ("HeadSettings", "train_head"),
    "training.loop": ("LoopOptions", "Trained", "train"),
    "models.fingerprint": ("FrozenModel",),
    "training.objectives.base": ("HeadTraining", "Step"),
    "training.optimizer": ("OptimizerOptions",),
}
_HOMES = {name: f"specjax.{module}" for module, names in _NAMES.items() for name in names}
__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
