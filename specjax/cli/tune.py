"""`specjax tune`: finds the settings that serve a target best, and keeps them for it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from tyro.conf import UseAppendAction, arg

from specjax.bench.options import names_in, parse_variants
from specjax.cli.options import TargetOptions
from specjax.cli.output import short
from specjax.core.errors import SpecjaxError
from specjax.core.settings import check_fields, setting

if TYPE_CHECKING:
    from specjax.bench.curves import Curve
    from specjax.loading.targets import LoadedTarget
    from specjax.loading.tuned import Tuned
    from specjax.tuning.machine import Result
    from specjax.tuning.runs import Workload


@dataclass(frozen=True, kw_only=True)
class TuneCommand(TargetOptions, ABC):
    """The options and the course of all subcommands."""

    if_stopped: ClassVar[str] = "no settings are written; the same command starts again"

    tasks: Annotated[str, arg(metavar="SOURCE")] = "pocket"
    """pocket, for tasks of its own that `bench` does not measure, or anything that `specjax bench
    --tasks` reads."""
    limit: int = setting(4, at_least=1)
    """Prompts of each kind of task."""
    max_new_tokens: int = setting(128, at_least=1)
    """New tokens per prompt at most."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write to this file; by default to the user's cache, for this target."""

    def run(self) -> None:
        """Tunes, prints the candidates, and writes the best settings."""
        check_fields(self)
        self.check()
        from specjax.core.files import check_writable, expand_user
        from specjax.loading.methods import METHODS
        from specjax.loading.tuned import (
            AUTO,
            Tuned,
            read_tuned,
            tuned_file,
            tuned_for,
            write_tuned,
        )
        from specjax.models.fingerprint import fingerprint
        from specjax.tuning.runs import Workload

        out = expand_user(self.out) if self.out else None
        if out is not None:
            check_writable(out, is_file=True)
        target = self.load_target()
        owner = fingerprint(target.config, target.params)
        path = out or tuned_file(target)
        check_writable(path, is_file=True)
        own = read_tuned(path, owner) if path.is_file() else Tuned()
        workload = Workload(target, self._prompts(target), self.max_new_tokens)
        found = self.tune(workload, tuned_for(target).updated(own))
        write_tuned(path, own.updated(found), owner)
        for method, settings in found.settings.items():
            shown = [
                name for name in settings if method == AUTO or name in METHODS[method].settings
            ]
            print(f"{method}: " + ", ".join(f"{name}={short(settings[name])}" for name in shown))
        print(f"written to {path}")

    def check(self) -> None:  # most have nothing to check
        """Raises SpecjaxError for options that cannot be, before the target loads."""

    @abstractmethod
    def tune(self, workload: "Workload", known: "Tuned") -> "Tuned":
        """Returns what was found; `known` is what was tuned before."""

    def _prompts(self, target: "LoadedTarget") -> list[tuple[int, ...]]:
        """Reads the prompts; those of different kinds alternate."""
        from specjax.run.distillation import answers_of
        from specjax.run.tasks import read_tasks, requests_of

        tasks = read_tasks(self.tasks, self.limit, is_validation=True)
        answer = answers_of(target, self.max_new_tokens)
        of_kind: dict[str, list[tuple[int, ...]]] = {}
        for request in requests_of(tasks, target, self.max_new_tokens, answer):
            of_kind.setdefault(request.kind, []).append(request.ids)
        return [ids for row in zip_longest(*of_kind.values()) for ids in row if ids is not None]


@dataclass(frozen=True)
class TuneMachine(TuneCommand):
    """Find the fastest method on this machine, with its settings, for --method auto.

    All candidates run in turn with plain decoding, and the slower half is dropped again and again.
    The winner's break-even is measured with one text at a time.

      specjax tune machine
      specjax generate --method auto --compare
    """

    methods: Annotated[str, arg(metavar="A,B")] = ""
    """The methods to try, separated by commas, besides those of --drafter and --set; by default
    all that this target can have."""
    drafter: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="METHOD=FOLDER")] = ()
    """The folder or hub id that a method reads; by default pocket's own."""
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="METHOD.NAME=VALUE")] = ()
    """A setting of one method that is not to be searched, such as pld.num_tokens=10."""
    temperature: float = 0.0
    """0 takes the most likely token; above 0, tokens are sampled."""

    def tune(self, workload: "Workload", known: "Tuned") -> "Tuned":
        from specjax.decoding.sampling import Sampling
        from specjax.loading.tuned import AUTO, Tuned
        from specjax.tuning.machine import tune_machine

        workload = replace(workload, sampling=Sampling(self.temperature))
        variants = {
            name: variant._replace(source=variant.source and _absolute(variant.source))
            for name, variant in parse_variants(self.methods, self.drafter, self.set).items()
        }
        choice = tune_machine(workload, variants, bool(names_in(self.methods)), show_results)
        return Tuned({AUTO: choice.record()})


@dataclass(frozen=True)
class SweepCommand(TuneCommand):
    """A subcommand that sweeps settings and shows curves."""

    plots: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Draw the curves into this folder."""

    def check(self) -> None:
        from specjax.core.files import writable_folder

        if self.plots is not None:
            writable_folder(self.plots)

    def show_curve(self, curve: "Curve") -> None:
        """Prints a curve as a table, and draws it with --plots."""
        from specjax.bench.report.tables import curve_table
        from specjax.bench.report.terminal import print_grid

        print_grid(curve_table(curve))
        if self.plots is not None:
            from specjax.bench.curves import keep_curve
            from specjax.bench.report.plots import save_curve

            folder = self.plots.expanduser()
            print(f"drawn in {save_curve(curve, folder)}")
            keep_curve(folder, curve)


@dataclass(frozen=True)
class TunePldPlus(SweepCommand):
    """Pick the layer and the number of tokens of PLD+ by hidden states.

    specjax tune pld-plus --plots runs/plots
    """

    by: Literal["accepted-length", "speed"] = "accepted-length"
    """What to maximise: new tokens per round, or per second."""

    def tune(self, workload: "Workload", known: "Tuned") -> "Tuned":
        from specjax.loading.tuned import Tuned
        from specjax.tuning.settings import tune_hidden

        return Tuned({"pld-plus": tune_hidden(workload, self.by, self.show_curve)})


@dataclass(frozen=True)
class TunePldPlusAttention(TunePldPlus):
    """Pick the number of induction heads and of tokens of PLD+ by attention."""

    def tune(self, workload: "Workload", known: "Tuned") -> "Tuned":
        from specjax.loading.tuned import Tuned
        from specjax.tuning.settings import tune_attention

        found = Tuned() if known.induction_heads else TuneInductionHeads().tune(workload, known)
        ranked = known.updated(found).induction_heads
        settings = tune_attention(workload, ranked, self.by, self.show_curve)
        return replace(found, settings={"pld-plus-attention": settings})


@dataclass(frozen=True)
class TuneInductionHeads(TuneCommand):
    """Rank the attention heads that copy."""

    def tune(self, workload: "Workload", known: "Tuned") -> "Tuned":
        from specjax.bench.measure import with_progress
        from specjax.loading.tuned import Tuned
        from specjax.tuning.induction_heads import answers, count_copies, ranked

        target = workload.target
        texts = with_progress(
            answers(workload), "Looking for heads that copy", len(workload.prompts)
        )
        counts = count_copies(texts, target.model, target.params)
        heads = ranked(counts)
        print(f"{len(heads)} of {counts.size} heads attended most to the source of a copied token")
        for layer, head, times in heads[:10]:
            print(f"  layer {layer}, head {head}: {times} times")
        return Tuned(induction_heads=heads)


@dataclass(frozen=True)
class TuneLength(SweepCommand):
    """Pick how long a draft model drafts, by speed.

    specjax tune length --rule fixed
    """

    rule: Literal["fixed", "confidence", "disco"] = "disco"
    """The rule to tune."""
    drafter: Annotated[str | None, arg(metavar="FOLDER")] = None
    """The draft model: a folder or a hub id; by default pocket's own."""
    classifier: Annotated[str, arg(metavar="FOLDER")] = ""
    """The classifier of disco; by default pocket's own."""

    def tune(self, workload: "Workload", known: "Tuned") -> "Tuned":
        from specjax.loading.drafters import load_drafter
        from specjax.loading.tuned import OTHER_RULES, TUNED_DRAFT, Tuned
        from specjax.models.fingerprint import fingerprint
        from specjax.tuning.settings import tune_length

        method, given = "draft-model", {"rule": self.rule}
        if self.classifier and self.rule == "disco":
            given["classifier"] = _absolute(self.classifier)
        drafter: Any
        drafter, params = load_drafter(method, workload.target, self.drafter, **given)
        settings = tune_length(workload, drafter, params, self.show_curve)
        draft = fingerprint(drafter.draft.config, params["draft"])
        before = dict(known.settings.get(method, {}))
        is_same_draft = before.pop(TUNED_DRAFT, "") == draft
        rules = {**before.pop(OTHER_RULES, {}), before.get("rule"): before} if is_same_draft else {}
        others = {rule: found for rule, found in rules.items() if rule != self.rule}
        return Tuned({method: {**given, **settings, TUNED_DRAFT: draft, OTHER_RULES: others}})


@dataclass(frozen=True)
class TuneTree(TuneCommand):
    """Grow the static tree of a head from how often each of its tokens is right at each depth.

    specjax tune tree --method medusa
    """

    method: Annotated[str, arg(metavar="METHOD")] = ""
    """The method whose tree to grow; by default the first of `specjax methods` that has one."""
    drafter: Annotated[str | None, arg(metavar="FOLDER")] = None
    """The head: a folder or a hub id; by default pocket's own."""
    num_choices: Annotated[int | None, arg(metavar="N")] = setting(None, at_least=1)
    """Nodes of the tree without the root; by default as many as the published one has."""

    def check(self) -> None:
        methods = _tree_methods()
        if self.method and self.method not in methods:
            raise SpecjaxError(
                f"--method {self.method!r} has no such tree; use {', '.join(methods)}"
            )

    def tune(self, workload: "Workload", known: "Tuned") -> "Tuned":
        from specjax.loading.drafters import load_drafter
        from specjax.loading.methods import METHODS
        from specjax.loading.tuned import TUNED_HEAD, Tuned
        from specjax.models.fingerprint import params_fingerprint
        from specjax.tuning.tree import tune_tree

        method = self.method or _tree_methods()[0]
        published = METHODS[method].settings["choices"]
        drafter: Any
        drafter, params = load_drafter(method, workload.target, self.drafter, choices=published)
        choices = tune_tree(workload, drafter.head, params, published, self.num_choices, print)
        return Tuned({method: {"choices": choices, TUNED_HEAD: params_fingerprint(params)}})


def tune_commands() -> dict[str, type]:
    """Returns the subcommands by name."""
    return {
        "machine": TuneMachine,
        "pld-plus": TunePldPlus,
        "pld-plus-attention": TunePldPlusAttention,
        "induction-heads": TuneInductionHeads,
        "length": TuneLength,
        "tree": TuneTree,
    }


def show_results(title: str, results: "Sequence[Result]") -> None:
    """Prints a title, and results as a table."""
    from specjax.bench.report.tables import Grid, number
    from specjax.bench.report.terminal import print_grid

    columns = ("candidate", "x plain", "accepted length", "tokens/s") if results else ("",)
    rows = [
        (name, number(speed), number(length), f"{tokens_per_second:.0f}")
        for name, speed, length, tokens_per_second in results
    ]
    print_grid(Grid(title, columns, rows))


def _tree_methods() -> list[str]:
    """Returns the methods whose static trees can be tuned."""
    from specjax.loading.methods import METHODS

    return [name for name, row in METHODS.items() if "choices" in row.tuned]


def _absolute(source: str) -> str:
    """Returns a folder's absolute path; a hub id as it is."""
    from specjax.core.files import expand_user

    folder = expand_user(source)
    return str(folder.resolve()) if folder.exists() else source
