"""`specjax convert`: any target, as a folder in Hugging Face format."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class Convert:
    """Write a target as a folder in Hugging Face format, which transformers reads as well."""

    target: Annotated[Positional[str], arg(metavar="TARGET")]
    """pocket, a folder in Hugging Face format, or a hub id."""
    directory: Annotated[Positional[Path], arg(metavar="DIR")]
    """The folder to write; it must not exist yet, or be empty."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """How weights are stored; float32 keeps every one exact."""

    def run(self) -> None:
        """Writes the whole folder, or nothing."""
        from specjax.hub import load
        from specjax.models.checkpoint import new_folder, vacant
        from specjax.models.convert import save_llama

        directory = vacant(self.directory)  # before the load, which may take long
        target = load(self.target, dtype=self.dtype)
        with new_folder(directory) as unfinished:
            save_llama(unfinished, target.config, target.params, self.dtype)
            if target.tokenizer is not None:
                target.tokenizer.save_pretrained(unfinished)
        print(f"wrote {target.name} to {directory} in {self.dtype}")
