"""`specjax train`: what a drafter must learn."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from specjax.cli.train_disco import TrainDisco
from specjax.cli.train_methods import (
    TrainEagle,
    TrainHass,
    TrainHydra,
    TrainMedusa,
    TrainParallelEagle,
    TrainParallelMedusa,
)


@dataclass(frozen=True)
class Train:
    """Train a drafter for a target, in one process that can be stopped and resumed."""

    what: Annotated[
        Annotated[TrainEagle, tyro.conf.subcommand("eagle")]
        | Annotated[TrainHass, tyro.conf.subcommand("hass")]
        | Annotated[TrainMedusa, tyro.conf.subcommand("medusa")]
        | Annotated[TrainHydra, tyro.conf.subcommand("hydra")]
        | Annotated[TrainParallelMedusa, tyro.conf.subcommand("parallel-medusa")]
        | Annotated[TrainParallelEagle, tyro.conf.subcommand("parallel-eagle")]
        | Annotated[TrainDisco, tyro.conf.subcommand("disco")],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> None:
        """Trains what was chosen."""
        self.what.run()
