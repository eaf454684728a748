"""`specjax convert`: any target or drafter head, as a folder that other programs read as well."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from specjax.core.errors import SpecjaxError


@dataclass(frozen=True)
class Convert:
    """Write a target as a folder in Hugging Face format, which transformers reads as well.

    With --head-of TARGET, write a head of that target, in the layout that its authors' code or a
    server reads.
    """

    source: Annotated[Positional[str], arg(metavar="TARGET|HEAD")]
    """A target: pocket, a folder in Hugging Face format, or a hub id; with --head-of a head: a
    folder or a hub id."""
    directory: Annotated[Positional[Path], arg(metavar="DIR")]
    """The folder to write; it must not exist yet, or be empty."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """How weights are stored; float32 keeps every one exact."""
    head_of: Annotated[str | None, arg(metavar="TARGET")] = None
    """The target of the head: pocket, a folder in Hugging Face format, or a hub id."""
    layout: Annotated[
        Literal["specjax", "eagle", "medusa", "hydra", "vllm", "sglang"] | None,
        arg(metavar="specjax|eagle|medusa|hydra|vllm|sglang"),
    ] = None
    """Who is to read the head: specjax, the authors' code (eagle, medusa, hydra), vLLM (EAGLE's and
    Medusa's) or SGLang (EAGLE's); by default the authors' code, for ParallelSpec specjax."""

    def run(self) -> None:
        """Writes the whole folder, or nothing."""
        from specjax.models.io.checkpoint import vacant

        if self.layout is not None and self.head_of is None:
            raise SpecjaxError("--layout is for heads; name the target of yours: --head-of TARGET")
        directory = vacant(self.directory)  # before the load, which may take long
        if self.head_of is None:
            self._convert_target(directory)
        else:
            self._convert_head(directory, self.head_of)

    def _convert_target(self, directory: Path) -> None:
        from specjax.hub import load
        from specjax.models.io.checkpoint import new_folder
        from specjax.models.io.huggingface import save_transformer

        target = load(self.source, dtype=self.dtype)
        with new_folder(directory) as unfinished:
            save_transformer(unfinished, target.config, target.params, self.dtype)
            if target.tokenizer is not None:
                target.tokenizer.save_pretrained(unfinished)
        print(f"wrote {target.name} to {directory} in {self.dtype}")

    def _convert_head(self, directory: Path, head_of: str) -> None:
        from specjax.hub import load
        from specjax.loading import find_head, load_head
        from specjax.models.heads.kinds import KINDS
        from specjax.models.io.head_files import detect_format, read_about, save_head

        folder = find_head(self.source)
        format = detect_format(folder, KINDS.values())  # before the target, which may take long
        layouts, kind = tuple(format.layouts), format.kind
        layout = self.layout or (kind if kind in layouts else layouts[0])
        if layout not in layouts:
            raise SpecjaxError(
                f"layout {layout} is not one for {self.source}; choose {', '.join(layouts)}"
            )
        target = load(head_of, dtype=self.dtype)
        head, params = load_head(folder, target, kind=kind)
        save_head(
            directory,
            format,
            head,
            params,
            self.dtype,
            target=target.config,
            target_params=target.params,
            layout=layout,
            about=read_about(folder),
        )
        print(f"wrote head {self.source} to {directory} in {self.dtype}, in the layout of {layout}")
