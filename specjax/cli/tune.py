"""`specjax tune`: the settings that serve a target best, kept beside it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from specjax.core.errors import SpecjaxError

if TYPE_CHECKING:
    from specjax.bench.measure import Request
    from specjax.hub import LoadedTarget
    from specjax.tuned import Tuned

LOOKUP = ("pld-plus", "pld-plus-attention")
SERVED = {  # option: what it is for; the others serve all
    "by": LOOKUP,
    "rule": ("length",),
    "classifier": ("length",),
    "drafter": ("length", "tree", "machine"),
    "method": ("tree",),
    "num_choices": ("tree",),
    "methods": ("machine",),
    "temperature": ("machine",),
    "plots": (*LOOKUP, "length"),
}


@dataclass(frozen=True)
class Tune:
    """Find what serves a target best on validation prompts; `generate` and `bench` then use it.

    induction-heads ranks the heads that copy. pld-plus picks layer and number of tokens of PLD+ by
    hidden states; pld-plus-attention the number of ranked heads and of tokens of PLD+ by attention;
    length, always by speed, how long a draft model drafts. tree grows the static tree of a head
    from how often its first, second, ... token is right at each depth. machine measures what
    passes and drafts cost on this machine, and picks what the method auto does here. It serves one
    text at a time; what batches cost is estimated from that.
    """

    what: Annotated[
        Positional[
            Literal[
                "induction-heads", "pld-plus", "pld-plus-attention", "length", "tree", "machine"
            ]
        ],
        arg(metavar="WHAT"),
    ]
    """induction-heads, pld-plus, pld-plus-attention, length, tree or machine."""
    target: str = "pocket"
    """The model: pocket, a folder in Hugging Face format, or a hub id."""
    tasks: str = "pocket"
    """pocket for tasks of its own that `bench` does not measure, or a file: Spec-Bench's questions,
    HumanEval, MBPP, GSM8K, Alpaca or CNN/DailyMail as JSONL, or lines with `prompt` or `turns`."""
    limit: int = 4
    """Prompts of each kind of task."""
    max_new_tokens: int = 128
    """Stop after so many new tokens, if the text has not ended before."""
    by: Literal["accepted-length", "speed"] = "accepted-length"
    """For pld-plus and pld-plus-attention, what is best: new tokens per round, or per second."""
    rule: Literal["fixed", "confidence", "disco"] = "disco"
    """For length: the rule whose settings are wanted."""
    drafter: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="FOLDER")] = ()
    """For length the draft, for tree the head: a folder or a hub id. For machine METHOD=FOLDER, as
    often as there are methods that read something. By default pocket's own."""
    classifier: Annotated[str, arg(metavar="FOLDER")] = ""
    """For length with disco: its classifier; by default pocket's own."""
    method: Literal["medusa", "hydra", "parallel-medusa", "parallel-eagle"] = "medusa"
    """For tree: the method whose head and tree are meant."""
    num_choices: Annotated[int | None, arg(metavar="N")] = None
    """For tree: its nodes, without the root; by default as many as the published one has."""
    methods: str = ""
    """For machine: what is tried, with commas between, beside those of --drafter; by default all
    methods that serve this target."""
    temperature: float = 0.0
    """For machine: 0 takes the most likely token; above, tokens are drawn."""
    plots: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """For pld-plus, pld-plus-attention and length: also sweep the settings of the paper's
    ablations, and draw all curves into this folder."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write here instead of beside the target."""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, arg(metavar="float32|bfloat16|float16")
    ] = None
    """Of the weights and the arithmetic; by default float32 on CPU and bfloat16 elsewhere."""

    def run(self) -> None:
        """Tunes, prints what was tried, and writes what was found."""
        self._check()
        from specjax.cli.environment import use_compilation_cache
        from specjax.core.files import expand_user
        from specjax.hub import load
        from specjax.loading import tuned_file
        from specjax.models.fingerprint import fingerprint
        from specjax.tuned import Tuned, read_tuned, write_tuned
        from specjax.tuning.plots import prepare

        if self.plots is not None:
            prepare(expand_user(self.plots))
        use_compilation_cache()
        target = load(self.target, dtype=self.dtype)
        owner = fingerprint(target.config, target.params)
        path = expand_user(self.out) if self.out else tuned_file(target.name)
        known = read_tuned(path, owner) if path.is_file() else Tuned()
        requests = self._requests(target)
        write_tuned(path, known, owner)  # fails now rather than after the work
        found = self._tune(target, requests, known)
        write_tuned(path, found, owner)
        print(f"written to {path}")

    @property
    def source(self) -> str | None:
        """The one folder or hub id of --drafter, if it is given."""
        return self.drafter[0] if self.drafter else None

    def _check(self) -> None:
        """Raises SpecjaxError for options that do not serve `what`, or cannot be."""
        for field in fields(self):
            served = SERVED.get(field.name, (self.what,))
            if self.what not in served and getattr(self, field.name) != field.default:
                option = "--" + field.name.replace("_", "-")
                raise SpecjaxError(
                    f"{option} is for `specjax tune {'|'.join(served)}`, not for {self.what}; "
                    "leave it out"
                )
        if self.num_choices is not None and self.num_choices < 1:
            raise SpecjaxError(f"--num-choices {self.num_choices} must be at least 1")
        if self.what == "machine":
            from specjax.cli.tune_machine import check

            check(self)
        elif len(self.drafter) > 1:
            raise SpecjaxError(f"--drafter is given {len(self.drafter)} times; {self.what} takes 1")

    def _tune(
        self, target: "LoadedTarget", requests: "Sequence[Request]", known: "Tuned"
    ) -> "Tuned":
        if self.what == "induction-heads":
            from specjax.cli.tune_lookup import tune_heads

            heads = tune_heads(target, requests, self.max_new_tokens)
            return replace(known, induction_heads=heads)
        if self.what in LOOKUP:
            from specjax.cli.tune_lookup import tune_lookup

            return tune_lookup(self, target, requests, known)
        if self.what == "length":
            from specjax.cli.tune_length import tune_length

            settings, method = tune_length(self, target, requests), "draft-model"
        elif self.what == "tree":
            from specjax.cli.tune_tree import tune_tree

            settings, method = tune_tree(self, target, requests), self.method
        else:
            from specjax.cli.tune_machine import tune
            from specjax.tuning.machine import AUTO

            settings, method = tune(self, target, requests), AUTO
        return replace(known, settings={**known.settings, method: settings})

    def _requests(self, target: "LoadedTarget") -> "Sequence[Request]":
        from specjax.bench.measure import Request
        from specjax.bench.tasks import read_tasks, token_ids
        from specjax.decoding.request import check_length

        tokenizer = target.require_tokenizer()
        tasks = read_tasks(self.tasks, self.limit, is_validation=True)
        requests = [Request(task.kind, token_ids(task, tokenizer)) for task in tasks]
        longest = max(len(request.ids) for request in requests)
        check_length(longest, self.max_new_tokens, target.config)
        return requests
