"""`specjax train`: a subcommand for each method that has a head, and disco."""

EXAMPLE = "specjax train {0} --data chats.jsonl --out runs/{0}"


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
