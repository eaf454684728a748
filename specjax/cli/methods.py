"""`specjax methods`: prints the table of methods."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.methods import Method
    from specjax.models.config import TransformerConfig

MAX_ITEMS = 4  # shown of a tuple


@dataclass(frozen=True)
class Methods:
    """List the drafting methods with their requirements, papers and settings."""

    target: str | None = None
    """Say what each method needs for this target, and show the settings that fit it: pocket, a
    folder in Hugging Face format, a GGUF file, or a hub id. A target that is not supported is
    refused."""

    def run(self) -> None:
        """Prints the table."""
        from rich.console import Console
        from rich.table import Table

        from specjax.methods import METHODS

        console, config = Console(markup=False, highlight=False), None
        if self.target is not None:
            config = _config_of(self.target)
            print(
                f"{self.target}: {config.model_type}, {config.num_hidden_layers} layers, texts of "
                f"up to {config.longest_text} tokens; all methods work with it"
            )
        table = Table("method", "needs", "paper", "settings (--set)", show_lines=True)
        for name, method in METHODS.items():
            settings = "\n".join(describe_settings(method, config))
            table.add_row(name, self._needs(name, method), method.paper, settings)
        console.print(table)

    def _needs(self, name: str, method: "Method") -> str:
        if self.target is None or not method.part:
            return method.needs
        if self.target == "pocket":
            return f"{method.needs} (pocket has one)"
        how = f"; train it: specjax train {name}" if method.training else ""
        return f"--drafter: {method.needs}{how}"


def _config_of(target: str) -> "TransformerConfig":
    """Returns the config of a target, without its weights unless it is a GGUF file."""
    from specjax.hub import load, target_folder
    from specjax.models.families import read_config

    folder = target_folder(target, with_weights=False)
    return read_config(folder) if folder.is_dir() else load(target).config


def describe_settings(method: "Method", target: "TransformerConfig | None" = None) -> list[str]:
    """Returns `name=default` for each setting; without a target, marks those that depend on it."""
    from specjax.models.config import TransformerConfig

    llama_2_7b = TransformerConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=4096,
    )
    fitted = method.settings_for(target or llama_2_7b)
    note = "" if target else " for 32 layers, adapted to each target"
    return [
        f"{name}={_short(fitted[name])}{note}" if name in fitted else f"{name}={_short(default)}"
        for name, default in method.settings.items()
    ]


def _short(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > MAX_ITEMS:
        shown = ", ".join(map(str, value[:MAX_ITEMS]))
        return f"({shown}, ... {len(value)} in total)"
    return str(value)
