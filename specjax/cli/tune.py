"""`specjax tune`: finds the best settings for a target, and keeps them for it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import UseAppendAction, arg

from specjax.bench.measure import with_progress
from specjax.bench.options import MethodVariant, names_in, parse_variants
from specjax.bench.report.tables import Grid, number
from specjax.bench.report.terminal import print_grid
from specjax.cli.decoding_options import TargetOptions
from specjax.cli.output import short
from specjax.core.errors import SpecjaxError
from specjax.core.files import check_writable, expand_user
from specjax.core.settings import setting
from specjax.decoding.sampling import Sampling
from specjax.loading import tuned as kept
from specjax.loading.methods import METHODS
from specjax.loading.tuned import AUTO, Tuned
from specjax.models.fingerprint import fingerprint
from specjax.tuning.induction_heads import answers, count_copies, ranked
from specjax.tuning.machine import Result, tune_machine
from specjax.tuning.runs import Point, Workload
from specjax.tuning.settings import tune_attention, tune_hidden


@dataclass(frozen=True, kw_only=True)
class TuneCommand(TargetOptions, ABC):
    """The options and the steps of all subcommands."""

    if_stopped: ClassVar[str] = "no settings are written; the same command starts again"

    tasks: Annotated[str, arg(metavar="SOURCE")] = "pocket"
    """pocket, for tasks that `bench` does not measure, or anything that `specjax bench --tasks`
    reads."""
    limit: int = setting(4, at_least=1)
    """The number of prompts of each kind of task."""
    max_new_tokens: int = setting(128, at_least=1)
    """The maximum number of new tokens per prompt."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """The file to write; by default one in the user's cache, for this target."""

    def run(self) -> None:
        if self.out is not None:
            check_writable(expand_user(self.out), is_file=True)
        target = self.load_target()
        owner = fingerprint(target.config, target.params)
        path = expand_user(self.out) if self.out else kept.tuned_file(target)
        check_writable(path, is_file=True)
        stored = kept.read_tuned(path, owner) if path.is_file() else Tuned()
        workload = Workload.of_tasks(target, self.tasks, self.limit, self.max_new_tokens)
        tuned = self.tune(workload, kept.tuned_for(target).updated(stored))
        kept.write_tuned(path, stored.updated(tuned), owner)
        for method, settings in tuned.settings.items():
            shown = settings if method == AUTO else METHODS[method].settings
            parts = [f"{name}={short(settings[name])}" for name in settings if name in shown]
            print(f"{method}: {', '.join(parts)}")
        print(f"written to {path}")

    @abstractmethod
    def tune(self, workload: Workload, earlier: Tuned) -> Tuned:
        """Returns the best settings; `earlier` has those of previous runs."""


@dataclass(frozen=True)
class TuneMachine(TuneCommand):
    """Find the fastest method on this machine, with its settings, for --method auto.

    All candidates run in turn with plain decoding, and the slower half is dropped each time. The
    break-even of the fastest is measured at batch size 1.

      specjax tune machine
      specjax generate --method auto --compare
    """

    methods: Annotated[str, arg(metavar="A,B")] = ""
    """The methods to try, separated by commas, besides those of --drafter and --set; by default all
    that work with this target but hybrid, lookahead and grammar."""
    drafter: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="METHOD=FOLDER")] = ()
    """The folder or hub id of a method's drafter. Only the target pocket ships its own."""
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="METHOD.NAME=VALUE")] = ()
    """A fixed setting of one method, which is not searched, such as pld.num_tokens=10."""
    temperature: float = setting(0.0, at_least=0)
    """0 takes the most likely token; above 0, tokens are sampled."""

    def run(self) -> None:
        if self.variants.keys() - METHODS.keys():
            raise SpecjaxError(
                f"--methods {self.methods!r} must list methods, not `all` or NAME=METHOD; leave it "
                "out to try all methods"
            )
        super().run()

    @property
    def variants(self) -> dict[str, MethodVariant]:
        return parse_variants(self.methods, self.drafter, self.set)

    def tune(self, workload: Workload, earlier: Tuned) -> Tuned:
        workload = replace(workload, sampling=Sampling(self.temperature))
        variants = {name: _absolute(variant) for name, variant in self.variants.items()}
        choice = tune_machine(workload, variants, bool(names_in(self.methods)), show_results)
        return Tuned({AUTO: choice.record()})


@dataclass(frozen=True)
class TunePldPlus(TuneCommand):
    """Pick the layer and the number of tokens of PLD+ by hidden states.

    Both maximise the accepted length; `tune machine` looks for speed.

      specjax tune pld-plus
    """

    def tune(self, workload: Workload, earlier: Tuned) -> Tuned:
        return Tuned({"pld-plus": tune_hidden(workload, show_sweep)})


@dataclass(frozen=True)
class TunePldPlusAttention(TuneCommand):
    """Pick the number of induction heads and of tokens of PLD+ by attention."""

    def tune(self, workload: Workload, earlier: Tuned) -> Tuned:
        is_ranked = bool(earlier.induction_heads)
        heads = Tuned() if is_ranked else TuneInductionHeads().tune(workload, earlier)
        ranking = earlier.updated(heads).induction_heads
        settings = tune_attention(workload, ranking, show_sweep)
        return replace(heads, settings={"pld-plus-attention": settings})


@dataclass(frozen=True)
class TuneInductionHeads(TuneCommand):
    """Rank the attention heads that copy."""

    def tune(self, workload: Workload, earlier: Tuned) -> Tuned:
        target, num_texts = workload.target, len(workload.prompts)
        texts = with_progress(answers(workload), "Looking for heads that copy", num_texts)
        counts = count_copies(texts, target.model, target.params)
        heads = ranked(counts)
        print(f"{len(heads)} of {counts.size} heads attended most to the source of a copied token")
        for layer, head, times in heads[:10]:
            print(f"  layer {layer}, head {head}: {times} times")
        return Tuned(induction_heads=heads)


TUNE_COMMANDS: dict[str, type] = {
    "machine": TuneMachine,
    "pld-plus": TunePldPlus,
    "pld-plus-attention": TunePldPlusAttention,
    "induction-heads": TuneInductionHeads,
}


def show_sweep(title: str, setting: str, points: Sequence[Point]) -> None:
    """Prints the figures of all values of a setting."""
    rows = [(str(point.value), *_figures(point)) for point in points]
    print_grid(Grid(title, (setting, "accepted length", "tokens/s"), rows))


def show_results(title: str, results: Sequence[Result]) -> None:
    """Prints a title, and results as a table."""
    columns = ("candidate", "x plain", "accepted length", "tokens/s") if results else ("",)
    rows = [(result.name, number(result.speed), *_figures(result)) for result in results]
    print_grid(Grid(title, columns, rows))


def _figures(outcome: Point | Result) -> tuple[str, str]:
    """Formats accepted length and tokens per second."""
    return number(outcome.accepted_length), number(outcome.tokens_per_second, 0)


def _absolute(variant: MethodVariant) -> MethodVariant:
    """Makes the paths of a variant absolute, since `auto` may load it from another folder."""

    def absolute(source: str | None) -> str | None:
        folder = expand_user(source or "")
        return str(folder.resolve()) if source and folder.exists() else source

    settings = dict(variant.settings)
    if "classifier" in settings:
        settings["classifier"] = absolute(settings["classifier"])
    return variant._replace(source=absolute(variant.source), settings=settings)
