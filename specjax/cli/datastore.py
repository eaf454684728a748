"""`specjax datastore`: what REST retrieves from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from specjax.core.errors import SpecjaxError


@dataclass(frozen=True)
class DatastoreCommand:
    """Build a datastore for --method rest: the tokens of many documents, sorted for retrieval.

    Sources are text files (a document each), .jsonl files (a document per line, under "text" or
    "content"), folders of such files, or hub ids of datasets (their train split).
    """

    action: Annotated[Positional[Literal["build"]], arg(metavar="build")]
    """build."""
    sources: Annotated[Positional[tuple[str, ...]], arg(metavar="SOURCE")]
    """Files, folders, or hub ids of datasets."""
    out: Annotated[Path, arg(metavar="FOLDER")]
    """A new folder for the datastore."""
    target: str = "pocket"
    """The model whose tokenizer makes the tokens: pocket, a folder, or a hub id."""

    def run(self) -> None:
        """Tokenizes, sorts and writes."""
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        from specjax import datastore
        from specjax.core.files import expand_user
        from specjax.documents import read_documents
        from specjax.hub import load_tokenizer
        from specjax.models.io.checkpoint import vacant

        if not self.sources:
            raise SpecjaxError("no sources are given; name files, folders or hub ids")
        folder = vacant(expand_user(self.out))
        tokenizer = load_tokenizer(self.target)
        documents = read_documents(self.sources, tokenizer)
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("reading")

            def show(stage: str, done: int, in_all: int | None) -> None:
                amount = f"{done:,} tokens" if in_all is None else f"{done} of {in_all}"
                bar.update(task, description=f"{stage}: {amount}")

            made = datastore.build(
                documents,
                vocab_size=len(tokenizer),
                fingerprint=datastore.tokenizer_fingerprint(tokenizer),
                sources=self.sources,
                progress=show,
            )
        datastore.save(made, folder)
        print(f"{made.num_tokens:,} tokens of {made.num_documents:,} documents in {folder}")
