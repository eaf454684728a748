"""The tiny random target of the tests of decoding, as loading gives it."""

from specjax.loading.targets import LoadedTarget
from tests.decoding.tiny import target


def tiny(name: str = "tiny", **shape: int) -> LoadedTarget:
    """Its name may be a folder, whose files are then tried as tuned for it."""
    model, params = target(**shape)
    return LoadedTarget(model, params, None, model.config, name)
