"""`specjax datastore`: builds a datastore for REST."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tyro.conf import Positional, arg

from specjax.core.errors import SpecjaxError


@dataclass(frozen=True)
class DatastoreCommand:
    """Build a datastore for --method rest from the text of many documents.

    Sources are text files (one document each), .jsonl files or their addresses (one document per
    line, with the key "text" or "content", or one chat with "messages"), folders of such files, or
    datasets of the hub as OWNER/NAME:CONFIGURATION:SPLIT.

      specjax datastore build src/ --out datastore
      specjax generate "import os" --method rest --drafter datastore
    """

    if_stopped: ClassVar[str] = "nothing is written; the same command starts again"

    action: Annotated[Positional[Literal["build"]], arg(metavar="build")]
    """The only action."""
    sources: Annotated[Positional[tuple[str, ...]], arg(metavar="SOURCE")]
    """Files, folders, addresses, or datasets of the hub."""
    out: Annotated[Path, arg(metavar="FOLDER")]
    """The folder to write; it must be empty or not exist."""
    target: str = "pocket"
    """The target whose tokenizer to use: pocket, a folder, a GGUF file, or a hub id."""

    def run(self) -> None:
        from specjax.bench.measure import with_progress
        from specjax.core.files import vacant
        from specjax.data import datastore
        from specjax.data.documents import read_documents
        from specjax.loading.targets import load_tokenizer

        if not self.sources:
            raise SpecjaxError("no sources; name files, folders, addresses or datasets of the hub")
        folder = vacant(self.out)
        tokenizer = load_tokenizer(self.target)
        made = datastore.build(
            read_documents(self.sources, tokenizer),
            vocab_size=len(tokenizer),
            fingerprint=datastore.tokenizer_fingerprint(tokenizer),
            sources=self.sources,
            watch=with_progress,
        )
        datastore.save(made, folder)
        about = made.metadata
        print(f"wrote {about.num_tokens:,} tokens of {about.num_documents:,} documents to {folder}")
