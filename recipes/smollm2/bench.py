"""Measures all methods with SmolLM2-135M-Instruct, its shipped heads and other trained ones.

    python -m recipes.smollm2.bench --target TARGET --data FOLDER --out FOLDER [--short]

The data folder holds `spec_bench.jsonl`, `mbpp.jsonl` and an English text, `wiki_demo.txt`. The
questions are first turns of Spec-Bench's six groups, MBPP's problems, and edits: rename a function,
correct the spelling of a text. OUT/greedy gets every method at temperature 0 and the peers that are
installed; OUT/sampled some methods at temperatures 0 and 1, one prompt and four at a time. Trees
have 8 nodes, since rows cost time on a CPU. Once compiled, all of it takes 35 minutes on two
cores, `--short` five. The same command goes on where it was interrupted.
"""

import json
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.peers import PEERS
from recipes.smollm2.prompts import lines_of, problems_in, rows_of, statement_of
from specjax import SpecjaxError, load
from specjax.bench.options import BenchOptions
from specjax.bench.run import run_bench
from specjax.cli.environment import use_compilation_cache
from specjax.core.errors import exit_code
from specjax.core.files import expand_user, writable_folder

HEADS = Path(__file__).with_name("heads")
UNTRAINED = ("pld", "pld-plus", "pld-plus-attention", "lookahead", "recycling")
HEADED = {
    **{name: name for name in ("medusa", "parallel-medusa", "eagle", "parallel-eagle")},
    **{"eagle2": "eagle", "hass": "hass", "hybrid": "hass"},
}
TRAINED = {
    "hydra": "hydra/head",
    "eagle3": "eagle3/head",
    "draft-model": "draft/model",
    "rest": "datastore",
}
SAMPLED = ("pld-plus", "medusa", "eagle2", "hass", "hybrid")
SHORT = ("pld-plus", "hass", "hybrid")
TREE = "((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0))"
BEAM = {"top_k": 3, "depth": 5, "num_tokens": 8}
SETTINGS = {
    "pld-plus": {"num_tokens": 10},
    "pld-plus-attention": {"num_tokens": 10},
    "lookahead": {"window_length": 3, "num_guesses": 3, "ngram_length": 3},
    "recycling": {"num_tokens": 8},
    "rest": {"max_drafted": 7},
    **{
        name: {"choices": TREE}
        for name in ("medusa", "hydra", "parallel-medusa", "eagle", "parallel-eagle")
    },
    **dict.fromkeys(("eagle2", "hass", "eagle3"), BEAM),
    "hybrid": {"num_tokens": 8, **{f"head.{name}": value for name, value in BEAM.items()}},
}
PER_KIND = 4
NUM_EDITED_WORDS = 60
MBPP_TEST = range(11, 511)  # task ids
MT_BENCH = "writing roleplay reasoning math coding extraction stem humanities".split()


@dataclass(frozen=True)
class Options:
    """Measure all methods with SmolLM2 as the target."""

    target: str
    data: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    runs: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("runs")
    """The folder of drafters that do not ship: Hydra, EAGLE-3, the draft, the datastore."""
    short: bool = False
    """Measure three methods on a prompt of each kind, 48 new tokens."""

    def run(self) -> None:
        """Writes the questions and measures."""
        use_compilation_cache()
        out = writable_folder(self.out)
        questions = out / "questions.jsonl"
        text = "\n".join(json.dumps(each) for each in questions_in(expand_user(self.data)))
        questions.write_text(text + "\n", encoding="utf-8")
        sources = sources_at(expand_user(self.runs))
        shared = BenchOptions(tasks=str(questions), limit=PER_KIND, max_new_tokens=64, runs=1)
        if self.short:
            short = replace(shared, limit=1, max_new_tokens=48)
            self._measure(short, SHORT, sources, out / "short")
        else:
            greedy = replace(shared, peers=",".join(installed_peers()))
            self._measure(greedy, (*UNTRAINED, *sources), sources, out / "greedy")
            sampled = replace(shared, temperature="0,1", batch="1,4", max_new_tokens=32)
            self._measure(sampled, SAMPLED, sources, out / "sampled")

    def _measure(
        self,
        options: BenchOptions,
        methods: tuple[str, ...],
        sources: Mapping[str, Path],
        out: Path,
    ) -> None:
        drafters = tuple(f"{name}={sources[name]}" for name in methods if name in sources)
        settings = tuple(
            f"{method}.{name}={value}"
            for method in methods
            for name, value in SETTINGS.get(method, {}).items()
        )
        named = {"methods": ",".join(methods), "drafter": drafters, "set": settings, "out": out}
        run_bench(partial(load, self.target), replace(options, **named))


def sources_at(runs: Path) -> dict[str, Path]:
    """Returns the source of each method whose drafter exists."""
    sources = {method: HEADS / head for method, head in HEADED.items()}
    sources |= {method: runs / folder for method, folder in TRAINED.items()}
    for missing in [method for method, source in sources.items() if not source.exists()]:
        print(f"without {missing}: {sources.pop(missing)} is not there")
    return sources


def installed_peers() -> list[str]:
    """Returns the names of the installed peers; prints what the others lack."""
    for name, library in PEERS.items():
        if library.missing:
            print(f"without {name}: {' and '.join(library.missing)} not installed")
    return [name for name, library in PEERS.items() if not library.missing]


def questions_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the questions, each with its kind as `category`."""
    spec_bench = rows_of(folder / "spec_bench.jsonl", "category", "turns")
    of_kind = {kind: [row for row in spec_bench if row["category"] == kind] for kind in MT_BENCH}
    mixed = [row for rows in zip(*of_kind.values(), strict=False) for row in rows]
    yield from _questions("MT-bench", [row["turns"][0] for row in mixed[::3]])
    for kind in ("translation", "summarization", "qa", "math_reasoning", "rag"):
        yield from _questions(
            kind, [row["turns"][0] for row in spec_bench if row["category"] == kind]
        )
    problems = problems_in(folder, MBPP_TEST)
    yield from _questions("MBPP", map(statement_of, problems))
    yield from _questions("code edit", filter(None, (renaming(row["code"]) for row in problems)))
    texts = filter(str.strip, lines_of(folder / "wiki_demo.txt"))
    yield from _questions("text edit", map(correction, texts))


def renaming(code: str) -> str | None:
    """Returns the task to rename the one function of a program; None if it has more."""
    names = re.findall(r"^def (\w+)", code, re.MULTILINE)
    if len(names) != 1:
        return None
    program = code.replace("\r\n", "\n").strip()
    return (
        f"Rename the function `{names[0]}` to `solve` in this program, and return the whole "
        f"program.\n\n```python\n{program}\n```"
    )


def correction(text: str) -> str:
    """Returns the task to correct the beginning of a text, of which every tenth word is garbled."""
    words = text.split()[:NUM_EDITED_WORDS]
    shuffler = random.Random(0)
    for place in range(4, len(words), 10):
        letters = list(words[place])
        shuffler.shuffle(letters)
        words[place] = "".join(letters)
    text = " ".join(words)
    return f"Correct the spelling of this text, and return the whole text.\n\n{text}"


def _questions(kind: str, texts: Iterable[str]) -> Iterator[dict[str, Any]]:
    questions = [{"category": kind, "turns": [text]} for text in islice(texts, PER_KIND)]
    if len(questions) < PER_KIND:
        raise SpecjaxError(
            f"the data hold {len(questions)} questions of {kind} and {PER_KIND} are needed; see "
            "the recipe's help"
        )
    yield from questions


if __name__ == "__main__":
    sys.exit(exit_code(tyro.cli(Options, description=__doc__).run))
