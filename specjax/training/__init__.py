"""Training of drafters: one loop for all, one objective per kind.

Names are imported when they are first used: loading a drafter does not import what trains one.
"""

from importlib import import_module

_NAMES = {
    "specjax.data.conversations": ("Conversation", "Turn", "read_conversations"),
    "specjax.models.fingerprint": ("FrozenModel",),
    "specjax.training.data": ("DataOptions", "batches"),
    "specjax.training.examples": ("Example", "tokenize_all"),
    "specjax.training.heads": ("HeadSettings", "train_head"),
    "specjax.training.loop": ("LoopOptions", "Trained", "train"),
    "specjax.training.objectives.base": ("HeadTraining", "Step"),
    "specjax.training.optimizer": ("OptimizerOptions",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
