"""Other libraries on the same weights and prompts, as contestants."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from specjax import LoadedTarget, SpecjaxError
from specjax.bench.measure import Contestant

from . import llamacpp, transformers
from .peer import Work


class Library(NamedTuple):
    """A library to measure: it makes contestants and names its requirements."""

    make: Callable[[Work], list[Contestant]]
    packages: Mapping[str, str]  # of pip, by the names under which they are imported
    check: Callable[[LoadedTarget], None] = lambda target: None  # SpecjaxError: not this target
    max_rows: int | None = None  # the largest batch that it serves; None: any

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [package for package in self.packages if find_spec(package) is None]


PEERS = {
    "transformers": Library(transformers.make, {"torch": "torch"}, transformers.check),
    "llama.cpp": Library(
        llamacpp.make,
        {"llama_cpp": "llama-cpp-python", "gguf": "gguf"},
        llamacpp.check,
        llamacpp.LlamaCpp.max_rows,
    ),
}


def check_peer(name: str, batches: Sequence[int] = (1,)) -> None:
    """Raises SpecjaxError for a peer that is unknown, lacks a package, or serves no such batch."""
    if name not in PEERS:
        raise SpecjaxError(f"peer {name!r} is unknown; choose {', '.join(PEERS)}")
    library = PEERS[name]
    if library.missing:
        package, *_ = library.missing
        source = library.packages[package]
        raise SpecjaxError(f"the peer {name!r} needs {package}; run `pip install {source}`")
    if library.max_rows is not None and min(batches) > library.max_rows:
        raise SpecjaxError(
            f"the peer {name!r} serves a batch of {library.max_rows} at most; leave it out, or add "
            f"{library.max_rows} to --batch"
        )


def peers(names: Sequence[str], work: Work, num_rows: int) -> list[Contestant]:
    """Makes the contestants of these libraries that serve a batch of this size."""

    def serves(max_rows: int | None) -> bool:
        return max_rows is None or num_rows <= max_rows

    libraries = [PEERS[name] for name in names if serves(PEERS[name].max_rows)]
    made = [contestant for library in libraries for contestant in library.make(work)]
    return [contestant for contestant in made if serves(getattr(contestant, "max_rows", None))]
