"""`specjax methods`: the drafting methods, and the settings of each."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from specjax.cli.environment import use_compilation_cache
from specjax.cli.output import print_rows, short
from specjax.core.settings import field_texts
from specjax.core.text import safe_console

if TYPE_CHECKING:
    from specjax.loading.method import Method
    from specjax.models.config import TransformerConfig


@dataclass(frozen=True)
class Methods:
    """List the drafting methods; with METHOD, show its needs and settings.

    Defaults are those of this machine.

      specjax methods
      specjax methods eagle2 --target FOLDER
    """

    method: Annotated[Positional[str | None], arg(metavar="METHOD")] = None
    """The method whose settings to show, with their meanings, ranges and defaults."""
    target: str | None = None
    """Show the needs and default settings of each method for this target: pocket, a folder in
    Hugging Face format, a GGUF file, or a hub id."""
    json: bool = False
    """Print JSON."""

    def run(self) -> None:
        from specjax.loading.methods import METHODS

        use_compilation_cache()
        if self.method is not None:
            METHODS.check(self.method, {})
        config = None if self.target is None else _config_of(self.target)
        methods = METHODS if self.method is None else {self.method: METHODS[self.method]}
        rows = {name: self._describe(name, method, config) for name, method in methods.items()}
        if self.json:
            print(json.dumps(rows if self.method is None else rows[self.method]))
            return
        texts = {
            name: f"Drafts {row['drafts']}. Needs {row['needs']}." for name, row in rows.items()
        }
        if config is not None:
            print(
                f"{self.target}: {config.model_type}, {config.num_hidden_layers} layers, texts of "
                f"up to {config.longest_text} tokens\n"
            )
        if self.method is None:
            print_rows("methods", texts)
            print("\n`specjax methods METHOD` shows the settings of METHOD.")
            return
        row, settings = rows[self.method], {}
        safe_console().print(f"{self.method}: {row['paper']}.\n\n{texts[self.method]}")
        for setting, values in row["settings"].items():
            default = short(values["default"])
            if values["depends_on_target"] and config is None:
                default += " with 32 layers; depends on the target"
            settings[setting] = values["meaning"] + (f" (default: {default})" if default else "")
        if settings:
            print()
            print_rows("settings (--set NAME=VALUE)", settings)

    def _describe(
        self, name: str, method: "Method", config: "TransformerConfig | None"
    ) -> dict[str, Any]:
        shown = config or _llama_2_7b()
        fitted, on_cpu = method.fitted(shown, {}), method.on_cpu(2)
        meanings = field_texts(method.drafter)
        needs = method.needs
        if method.part and self.target == "pocket":
            needs += " (part of pocket)"
        elif method.part and self.target is not None:
            advice = f"; train it: specjax train {name}" if method.training else ""
            needs = f"--drafter: {needs}{advice}"
        return {
            "paper": method.paper,
            "drafts": method.drafts,
            "needs": needs,
            "settings": {
                setting: {
                    "default": fitted.get(setting, default),
                    "meaning": meanings[setting],
                    "depends_on_target": setting in fitted and setting not in on_cpu,
                }
                for setting, default in method.settings.items()
            },
        }


def _llama_2_7b() -> "TransformerConfig":
    from specjax.models.config import TransformerConfig

    return TransformerConfig(32000, 4096, 11008, 32, 32, 32, 128, 4096)


def _config_of(target: str) -> "TransformerConfig":
    """Returns the config of a target, without its weights unless it is a GGUF file."""
    from specjax.loading.hub import target_folder
    from specjax.loading.targets import load
    from specjax.models.families import read_config

    folder = target_folder(target, with_weights=False)
    return read_config(folder) if folder.is_dir() else load(target).config
