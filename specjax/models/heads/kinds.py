"""The formats of drafter heads, by kind."""

from specjax.models.io.formats.eagle import EAGLE
from specjax.models.io.formats.hydra import HYDRA
from specjax.models.io.formats.medusa import MEDUSA
from specjax.models.io.formats.parallel import PARALLEL

KINDS = {format.kind: format for format in (EAGLE, MEDUSA, HYDRA, PARALLEL)}
