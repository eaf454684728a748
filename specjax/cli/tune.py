"""`specjax tune`: the settings that serve a target best, kept beside it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from specjax.errors import SpecjaxError

if TYPE_CHECKING:
    from specjax.bench.measure import Request
    from specjax.hub import Target
    from specjax.tuned import Tuned
    from specjax.tuning.sweep import Curve


@dataclass(frozen=True)
class Tune:
    """Find what serves a target best on validation prompts; `generate` and `bench` then use it.

    induction-heads ranks the heads that copy. pld-plus picks layer and number of tokens of PLD+ by
    hidden states; pld-plus-attention the number of ranked heads and of tokens of PLD+ by attention;
    length, always by speed, how long a draft model drafts. tree grows the static tree of a head
    from how often its first, second, ... token is right at each depth.
    """

    what: Annotated[
        Positional[Literal["induction-heads", "pld-plus", "pld-plus-attention", "length", "tree"]],
        arg(metavar="WHAT"),
    ]
    """induction-heads, pld-plus, pld-plus-attention, length or tree."""
    target: str = "pocket"
    """The model: pocket, a folder in Hugging Face format, or a hub id."""
    tasks: str = "pocket"
    """pocket for tasks of its own that `bench` does not measure, or a JSONL file with `prompt` or
    `turns` in each line."""
    limit: int = 4
    """Prompts of each kind of task."""
    max_new_tokens: int = 128
    """Stop after so many new tokens, if the text has not ended before."""
    by: Literal["accepted-length", "speed"] = "accepted-length"
    """What is best: new tokens per round, or per second; trees only by the first."""
    rule: Literal["fixed", "confidence", "disco"] = "disco"
    """For length: the rule whose settings are wanted."""
    drafter: Annotated[str | None, arg(metavar="FOLDER")] = None
    """For length the draft, for tree the head: a folder or a hub id; by default pocket's own."""
    classifier: Annotated[str, arg(metavar="FOLDER")] = ""
    """For length with disco: its classifier; by default pocket's own."""
    method: Literal["medusa", "hydra", "parallel-medusa", "parallel-eagle"] = "medusa"
    """For tree: the method whose head and tree are meant."""
    num_choices: Annotated[int | None, arg(metavar="N")] = None
    """For tree: its nodes, without the root; by default as many as the published one has."""
    plots: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Also sweep the settings of the paper's ablations, and draw all curves into this folder;
    induction-heads and tree have none."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write here instead of beside the target."""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, arg(metavar="float32|bfloat16|float16")
    ] = None
    """Of the weights and the arithmetic; by default float32 on CPU and bfloat16 elsewhere."""

    def run(self) -> None:
        """Tunes, prints what was tried, and writes what was found."""
        from specjax.cli.environment import use_compilation_cache
        from specjax.drafting import tuned_file
        from specjax.files import expand_user
        from specjax.hub import load
        from specjax.tuned import Tuned, fingerprint, read_tuned, write_tuned
        from specjax.tuning.plots import prepare

        if self.num_choices is not None and self.num_choices < 1:
            raise SpecjaxError(f"--num-choices {self.num_choices} must be at least 1")
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

    def _tune(self, target: "Target", requests: "Sequence[Request]", known: "Tuned") -> "Tuned":
        if self.what == "induction-heads":
            return replace(known, induction_heads=self._induction_heads(target, requests))
        if self.what == "length":
            settings = self._length(target, requests)
            return replace(known, settings={**known.settings, "draft-model": settings})
        if self.what == "tree":
            settings = self._tree(target, requests)
            return replace(known, settings={**known.settings, self.method: settings})
        from specjax.decoding.drafters import METHODS
        from specjax.tuning.prompt_lookup import Tuner

        tuner = Tuner(target, requests, self.max_new_tokens, self.by, self._report)
        more = self.plots is not None
        if self.what == "pld-plus":
            chosen = tuner.hidden(more)
        else:
            heads = known.induction_heads or self._induction_heads(target, requests)
            known = replace(known, induction_heads=heads)
            chosen = tuner.attention(heads, more)
        settings = {name: getattr(chosen, name) for name in METHODS[self.what].tuned}
        print(f"{self.what}: " + ", ".join(f"{name}={value}" for name, value in settings.items()))
        return replace(known, settings={**known.settings, self.what: settings})

    def _length(self, target: "Target", requests: "Sequence[Request]") -> dict[str, Any]:
        from specjax.decoding.drafters.draft_model import DraftModel
        from specjax.drafting import TUNED_DRAFT, load_drafter
        from specjax.files import expand_user
        from specjax.tuned import fingerprint
        from specjax.tuning.draft_length import LengthTuner

        classifier = str(expand_user(self.classifier).resolve()) if self.classifier else ""
        drafter, params = load_drafter(
            "draft-model",
            target,
            self.drafter,
            rule=self.rule,
            classifier=classifier,
        )
        assert isinstance(drafter, DraftModel)
        tuner = LengthTuner(target, drafter, params, requests, self.max_new_tokens, self._report)
        settings = tuner.tune()
        if self.rule == "disco" and classifier:
            settings["classifier"] = classifier
        print("draft-model: " + ", ".join(f"{name}={value}" for name, value in settings.items()))
        return {**settings, TUNED_DRAFT: fingerprint(drafter.draft.config, params["draft"])}

    def _tree(self, target: "Target", requests: "Sequence[Request]") -> dict[str, Any]:
        from specjax.cli.environment import watched
        from specjax.decoding.drafters import METHODS
        from specjax.decoding.drafters.hydra import Hydra
        from specjax.decoding.drafters.medusa import Medusa
        from specjax.decoding.drafters.parallel_spec import ParallelSpec
        from specjax.drafting import TUNED_HEAD, load_drafter
        from specjax.tuned import params_fingerprint
        from specjax.tuning.head_ranks import NUM_RANKS, answer_ranks
        from specjax.tuning.induction_heads import answers
        from specjax.tuning.tree import expected_length, greedy_tree, rank_accuracies

        if self.by != "accepted-length":
            raise SpecjaxError("a tree is grown by accepted length; leave out --by speed")
        published = METHODS[self.method].drafter().choices
        drafter, params = load_drafter(self.method, target, self.drafter, choices=published)
        assert isinstance(drafter, Medusa | Hydra | ParallelSpec)
        texts = answers(target, requests, self.max_new_tokens)
        texts = watched(texts, "Ranking what the target says", len(requests))
        ranks = answer_ranks(texts, drafter.head, params, target.model, target.params)
        if not (ranks >= 0).any():
            raise SpecjaxError("the target says too little on these prompts; give other --tasks")
        published = tuple(choice for choice in published if len(choice) <= ranks.shape[1])
        accuracies = rank_accuracies(ranks, min(NUM_RANKS, target.config.vocab_size))
        choices = greedy_tree(accuracies, self.num_choices or len(published))
        print(f"{self.method}: over {len(ranks)} places, right at depth")
        for depth, (first, *others) in enumerate(accuracies.tolist(), 1):
            print(f"  {depth}: {first:.3f} with the first token, {sum(others):.3f} with the next")
        for name, tree in (("published", published), ("found", choices)):
            expected = expected_length(tree, accuracies)
            print(f"{name} tree of {len(tree)} nodes: {expected:.2f} tokens per round expected")
        return {"choices": choices, TUNED_HEAD: params_fingerprint(params)}

    def _induction_heads(self, target: "Target", requests: "Sequence[Request]"):
        from specjax.cli.environment import watched
        from specjax.tuning.induction_heads import answers, count_copies, ranked

        texts = answers(target, requests, self.max_new_tokens)
        texts = watched(texts, "Looking for heads that copy", len(requests))
        heads = ranked(count_copies(texts, target.model, target.params))
        total = target.config.num_hidden_layers * target.config.num_attention_heads
        print(f"{len(heads)} of {total} heads looked most at the source of a copied token")
        for layer, head, times in heads[:10]:
            print(f"  layer {layer}, head {head}: {times} times")
        return heads

    def _requests(self, target: "Target") -> "Sequence[Request]":
        from specjax.bench.measure import Request
        from specjax.bench.tasks import read_tasks, token_ids
        from specjax.decoding.request import check_length

        tokenizer = target.require_tokenizer()
        tasks = read_tasks(self.tasks, self.limit, is_validation=True)
        requests = [Request(task.kind, token_ids(task, tokenizer)) for task in tasks]
        longest = max(len(request.ids) for request in requests)
        check_length(longest, self.max_new_tokens, target.config)
        return requests

    def _report(self, curve: "Curve") -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table(curve.setting, title=curve.title, box=None)
        for name in curve.series:
            table.add_column(name, justify="right")
            table.add_column("tokens/s", justify="right")
        for row in zip(*curve.series.values(), strict=True):
            figures = [(point.accepted_length, point.tokens_per_second) for point in row]
            cells = [text for a, b in figures for text in (f"{a:.2f}", f"{b:.0f}")]
            table.add_row(str(row[0].value), *cells)
        Console(soft_wrap=True, markup=False, highlight=False).print(table)
        if self.plots is not None:
            from specjax.files import expand_user
            from specjax.tuning.plots import plot

            print(f"drawn in {plot(curve, expand_user(self.plots))}")
