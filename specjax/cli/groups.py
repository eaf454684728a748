"""The commands of `specjax train` and `specjax tune`; importing them imports JAX."""

from specjax.cli.parser import Group

EXAMPLE = "specjax train {0} --data chats.jsonl --out runs/{0}"


def _train_commands() -> dict[str, type]:
    """Returns a command for every method with a head, and one for disco."""
    from specjax.cli.train_disco import TrainDisco
    from specjax.cli.train_heads import train_command
    from specjax.loading.methods import METHODS

    commands = {}
    for name, method in METHODS.items():
        if method.training:
            commands[name] = train_command(name, method.training, EXAMPLE.format(name))
        example = EXAMPLE.format(f"{name}-stage-1")
        for number, stage in enumerate(method.stages, 1):
            command = f"{name}-stage-{number}"
            commands[command] = train_command(name, stage, example)
            example = (
                f"specjax train {name}-stage-{number + 1} --start runs/{command} --out runs/{name}"
            )
    return {**commands, "disco": TrainDisco}


def _tune_commands() -> dict[str, type]:
    from specjax.cli.tune import TUNE_COMMANDS

    return TUNE_COMMANDS


TRAIN = Group("Train a drafter for a target; a stopped run can be resumed.", _train_commands)
TUNE = Group(
    "Find the best settings for a target; `generate` and `bench` then use them.", _tune_commands
)
