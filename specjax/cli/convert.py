"""`specjax convert`: converts a target or a drafter head to a folder that other programs read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from specjax.cli.environment import use_compilation_cache
from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, new_folder, vacant


@dataclass(frozen=True)
class Convert:
    """Convert a target to Hugging Face format, or a head for other programs.

    With --head-of TARGET, converts a head of that target for its authors' code, vLLM or SGLang.

      specjax convert pocket exported
      specjax convert runs/eagle exported --head-of pocket --layout vllm
    """

    source: Annotated[Positional[str], arg(metavar="TARGET|HEAD")]
    """The target: pocket, a folder in Hugging Face format, a GGUF file, or a hub id. With
    --head-of, the head: its folder, that of its run, or a hub id."""
    directory: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """The folder to write; it must be empty or not exist."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype of the written weights; by default that of the source, or float32 if the source has
    several or is quantised."""
    head_of: Annotated[str | None, arg(metavar="TARGET")] = None
    """The target of the head: pocket, a folder, a GGUF file, or a hub id."""
    layout: Annotated[str | None, arg(metavar="LAYOUT")] = None
    """The program that will read the head: eagle, eagle3, medusa, hydra, specjax, vllm or sglang,
    if it supports such heads. By default the authors' code, or specjax if there is none."""
    embedding: bool = False
    """For vllm: also write the target's embedding, which only pipeline parallelism needs."""

    def run(self) -> None:
        for name in ("layout", "embedding"):
            if self.head_of is None and getattr(self, name) != getattr(Convert, name):
                raise SpecjaxError(
                    f"--{name} applies to heads only; name the target of the head: --head-of TARGET"
                )
        directory = vacant(self.directory)  # before the slow load
        use_compilation_cache()
        if self.head_of is None:
            self._convert_target(directory)
        else:
            self._convert_head(directory, self.head_of)

    def _convert_target(self, directory: Path) -> None:
        from specjax.loading.hub import target_folder
        from specjax.loading.targets import copy_tokenizer, load
        from specjax.models.io.huggingface import save_transformer, write_index
        from specjax.models.io.weights import stored_dtype

        dtype = self.dtype or stored_dtype(target_folder(self.source))
        target = load(self.source, dtype=dtype)
        with new_folder(directory) as unfinished:
            save_transformer(unfinished, target.config, target.params, dtype)
            write_index(unfinished)
            copy_tokenizer(target, unfinished)
        print(f"wrote {target.name} to {directory} in {dtype}")

    def _convert_head(self, directory: Path, head_of: str) -> None:
        from specjax.loading.hub import POCKET, find_head, pocket_folder
        from specjax.loading.methods import METHODS
        from specjax.loading.parts import load_head
        from specjax.loading.targets import load
        from specjax.models.io.head_files import detect_format, read_about, save_head
        from specjax.models.io.weights import stored_dtype

        formats = METHODS.head_formats
        folder = find_head(self.source, formats)
        format = detect_format(folder, formats)  # before the slow load
        layouts = list(format.layouts)
        layout = self.layout or (format.kind if format.kind in layouts else layouts[0])
        if layout not in layouts:
            raise SpecjaxError(
                f"--layout {layout} is not available for {self.source}; use {', '.join(layouts)}"
            )
        dtype = self.dtype or stored_dtype(folder, tuple(format.files))
        target = load(head_of, dtype=dtype)
        target_path = pocket_folder() if head_of == POCKET else expand_user(head_of)
        head, params = load_head(folder, target, formats, format)
        save_head(
            directory,
            format,
            head,
            params,
            dtype,
            target=target.config,
            target_params=target.params,
            target_name=str(target_path.resolve()) if target_path.exists() else head_of,
            layout=layout,
            about=read_about(folder),
            with_embedding=self.embedding,
        )
        print(f"wrote head {self.source} to {directory} in {dtype}, layout {layout}")
        if format.embedding and not (format.layouts[layout].has_embedding or self.embedding):
            print("without the target's embedding, which the server shares; --embedding adds it")
