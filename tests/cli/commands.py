"""Every command of the command line by its words, such as "tune machine"."""

from specjax.cli import COMMANDS
from specjax.cli.parser import Group

COMMAND_CLASSES: dict[str, type] = {}
for name, command in COMMANDS.items():
    if isinstance(command, Group):
        COMMAND_CLASSES |= {f"{name} {word}": kind for word, kind in command.load().items()}
    else:
        COMMAND_CLASSES[name] = command
