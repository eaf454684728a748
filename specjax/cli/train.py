"""`specjax train`: a subcommand for each method that has a head, and disco."""

from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from tyro.conf import arg

Subcommand = TypeVar("Subcommand")
EXAMPLE = "specjax train {0} --data chats.jsonl --out runs/{0}"


@dataclass(frozen=True)
class Train(Generic[Subcommand]):
    """Train a drafter for a target, in one process that can be stopped and resumed."""

    subcommand: Annotated[Subcommand, arg(name="")]

    @property
    def if_stopped(self) -> str:
        """Says how an interrupted training goes on; empty if it cannot."""
        return getattr(self.subcommand, "if_stopped", "")

    def run(self) -> None:
        """Trains."""
        chosen: Any = self.subcommand
        chosen.run()


def train_commands() -> dict[str, type]:
    """Returns the subcommands by name, read off the registry; imports JAX."""
    from specjax.cli.train_disco import TrainDisco
    from specjax.cli.train_heads import train_command
    from specjax.loading.methods import METHODS

    commands = {}
    for name, row in METHODS.items():
        if row.training:
            commands[name] = train_command(name, row.training, EXAMPLE.format(name))
        example = EXAMPLE.format(f"{name}-stage-1")
        for number, stage in enumerate(row.stages, 1):
            command = f"{name}-stage-{number}"
            commands[command] = train_command(name, stage, example)
            example = (
                f"specjax train {name}-stage-{number + 1} --start runs/{command} --out runs/{name}"
            )
    return {**commands, "disco": TrainDisco}
