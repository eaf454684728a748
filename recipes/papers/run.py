"""Runs a recipe and prints the comparison table."""

import json
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from specjax import SpecjaxError, load_drafter
from specjax.bench.options import BenchOptions, sources_in
from specjax.bench.report.markdown import table
from specjax.bench.report.tables import Grid
from specjax.bench.report.terminal import print_grid
from specjax.bench.run import make_contestants, run_bench
from specjax.cli import COMMANDS
from specjax.cli.parser import parse
from specjax.cli.tune import show_sweep
from specjax.core.files import read_json, write_whole
from specjax.loading.methods import METHODS
from specjax.loading.tuned import read_tuned
from specjax.models.fingerprint import fingerprint
from specjax.models.io.classifier import CLASSIFIER, load_classifier
from specjax.models.io.head_files import HEAD
from specjax.tuning.runs import Workload

from .estimate import summary
from .figures import Figures, comparison, figures_of, improvement_factor, titles_of, uses_samples
from .inputs import TRIAL, Inputs
from .lengths import tune_length
from .oracle import WithOracle
from .questions import num_words, sources_of, write_tasks
from .quotesum import evaluate, read_quotesum
from .recipe import ALL, Cell, Figure, OwnHead, Part, RecipeMethod, shared_data
from .variants import ORACLE, alias, needs_ranking, needs_tuning, resolved

ALL_TASKS = 10**9


@dataclass(frozen=True)
class Reproduction(Inputs):
    """One run of a recipe."""

    def run(self) -> None:
        """Measures part by part, and shows and keeps the table."""
        print(self.recipe.title)
        if self.recipe.note:
            print(self.recipe.note)
        print(summary(self.recipe), file=sys.stderr)
        ours: Figures = {}
        for number, part in enumerate(self.parts, start=1):
            self.say(f"part {number} of {len(self.parts)}: {part.model} on {', '.join(part.data)}")
            ours |= getattr(self, f"measure_{self.recipe.measure}")(part)
            jax.clear_caches()
        lines = comparison(self.recipe, ours)
        grid = Grid(self.legend, lines[0], lines[1:])
        print_grid(grid)
        path = self.out / f"{self.recipe.name}.md"
        note = f"{self.recipe.note}\n\n" if self.recipe.note else ""
        page = f"# {self.recipe.title}\n\n{note}{table(grid)}\n"
        write_whole(path, page.encode())
        print(f"kept in {path}")

    @property
    def legend(self) -> str:
        """The legend of the table."""
        if not self.recipe.models:
            return "Ours / published (difference)."
        target = self.options.target or "the paper's models"
        limit = f", {self.options.limit} questions of each data set" if self.options.limit else ""
        over = "rounds" if uses_samples(self.recipe) else "runs"
        return (
            f"Ours ± deviation over {over} / published (difference). Ours: {target}{limit}, "
            f"{self.recipe.max_new_tokens} new tokens at most, {self.recipe.runs} run(s). "
            f"Published: {self.recipe.device}."
        )

    # ---- Kinds of measurement --------------------------------------------------------------------

    def measure_bench(self, part: Part) -> Figures:
        """Trains, ranks and tunes what is missing, and measures all methods in turn."""
        tasks = write_tasks(self.questions(part), self.out)
        sources = self.sources(part, self.recipe.methods)
        variants = {title: self.recipe.methods[title] for title in sources}
        ranking = self.ranking(part, tasks) if needs_ranking(variants) else None
        tuned = self.tuned_lengths(part) if needs_tuning(variants) else {}
        target = self.load(part)
        owner = fingerprint(target.config, target.params)
        ranked = read_tuned(ranking, owner).induction_heads if ranking else ()
        is_published = self.options.target is None
        names, methods, drafters, settings, oracle = {}, [], [], [], None
        for title, variant in resolved(variants, target.config, ranked, tuned, is_published):
            name = alias(title)
            names[name] = title
            source = sources.get(title)
            if variant.settings.get("rule") == ORACLE:
                oracle = WithOracle(name, source, variant.settings["max_length"])
                continue
            methods.append(f"{name}={variant.method}")
            drafters += [f"{name}={source}"] if source else []
            chosen = METHODS[variant.method].published(target.config) | dict(variant.settings)
            settings += [f"{name}.{key}={value}" for key, value in chosen.items()]
        options = BenchOptions(
            methods=",".join(methods) or "plain",
            drafter=tuple(drafters),
            set=tuple(settings),
            tasks=str(tasks),
            limit=ALL_TASKS,
            system=self.options.system,
            chat_template=self.options.chat_template or self.model_of(part).chat_template,
            max_new_tokens=self.recipe.max_new_tokens,
            temperature=",".join(map(str, self.recipe.temperatures)),
            runs=self.recipe.runs,
            seed=self.options.seed,
        )
        measured = checksum(options, oracle, target.name, target.dtype_name)
        folder = self.out / "bench" / f"{part.model}-{measured}"
        run_bench(lambda: target, replace(options, out=folder), oracle or make_contestants)
        return dict(figures_of(self.recipe, part, folder, titles_of(self.recipe, names)))

    def measure_classifier(self, part: Part) -> Figures:
        """Trains a classifier, and reads its scores in percent."""
        scores = load_classifier(self.classifier(part)).scores
        percent = {name: 100 * scores[name] for name in ("f1", "static_f1")}
        return self.cells(part, dict.fromkeys(self.recipe.methods, percent))

    def measure_attribution(self, part: Part) -> Figures:
        """Scores the attribution of copied tokens."""
        data = shared_data()[self.recipe.data[part.data[0]]]
        [source] = sources_of(data, self.options.data)
        examples = read_quotesum(source, self.options.limit)
        layer = None if self.options.target else 9  # as published
        scores = evaluate(examples, self.load(part), layer, (2, 5, 8))
        rows = {f"threshold {least}": each._asdict() for least, each in scores.items()}
        return self.cells(part, rows)

    def measure_words(self, part: Part) -> Figures:
        """Counts the words of the questions."""
        [column] = self.recipe.columns
        return {
            self.cell(part, column, data=title): Figure(num_words(questions))
            for title, questions in self.questions(part).items()
        }

    def measure_equation(self, part: Part) -> Figures:
        """Computes equation 1 of DISCO."""
        metrics = [column.metric for column in self.recipe.columns.values()]
        lengths = {metric: int(metric.split()[1]) for metric in metrics}
        factors = {}
        for title, variant in self.recipe.methods.items():
            rate, cost = variant.settings["alpha"], variant.settings["cost"]
            factors[title] = {
                metric: improvement_factor(rate, length, cost) for metric, length in lengths.items()
            }
        return self.cells(part, factors)

    def cells(self, part: Part, rows: Mapping[str, Mapping[str, float]]) -> Figures:
        """Returns the figures of rows by metric."""
        return {
            self.cell(part, column, method=title): Figure(values[spec.metric])
            for title, values in rows.items()
            for column, spec in self.recipe.columns.items()
        }

    def cell(self, part: Part, column: str, data: str = "", method: str = "") -> Any:
        """Returns the place of a figure at the first temperature."""
        data = data or (part.data[0] if self.recipe.model_of else ALL)
        return Cell(self.recipe.temperatures[0], part.model, data, method, column)

    # ---- Steps -----------------------------------------------------------------------------------

    def sources(self, part: Part, methods: Mapping[str, RecipeMethod]) -> dict[str, str | None]:
        """Returns the drafter's source of each variant; drops variants without one.

        Trains the heads that are missing.
        """
        sources: dict[str, str | None] = {}
        named = sources_in(self.options.drafter)
        for method in named:
            heads = {variant.head for variant in methods.values() if variant.method == method}
            if len(heads) > 1:
                raise SpecjaxError(
                    f"{self.recipe.name} compares {len(heads)} heads of {method}, which no one "
                    f"drafter replaces; leave out --drafter {method}"
                )
        for title, variant in methods.items():
            if variant.head is not None and variant.method not in named:
                sources[title] = str(self.trained(self.recipe.heads[variant.head], part))
                continue
            source = self.source_of(variant.method, part)
            if METHODS[variant.method].part and source is None:
                self.say(
                    f"{title} is left out: nothing is known that {variant.method} could read; "
                    f"give --drafter {variant.method}=FOLDER"
                )
                continue
            sources[title] = source
        if not sources:
            raise SpecjaxError(f"no method of {self.recipe.name} is left; give --drafter")
        return sources

    def trained(self, head: OwnHead, part: Part) -> Path:
        """Trains a head unless it is there, and returns the folder of the run."""
        data = shared_data()[head.data]
        flags = ["--data", *sources_of(data, self.options.data), *self.target_flags(part)]
        flags += ["--limit", str(data.sample), *head.options.split()]
        if head.start:
            start = self.source_of(head.start, part)
            if start is None:
                raise SpecjaxError(
                    f"the heads of {self.recipe.name} start from one of {head.start}; name it with "
                    f"--drafter {head.start}=FOLDER"
                )
            flags += ["--start", start]
        if limit := self.options.limit:
            flags += ["--limit", str(TRIAL * limit), "--num-steps", str(2 * limit)]
            flags += ["--longest", "256", "--batch-size", "2", "--accumulate", "1"]
            flags += ["--eval-prompts", "1", "--eval-tokens", "16", "--distill-tokens", "32"]
        flags += self.options.train.split()
        out = self.out / "heads" / f"{head.method}-{checksum(head.method, flags)}"
        if not (out / HEAD).is_dir():
            self.command("train", head.method, "--out", str(out), "--resume", *flags)
        return out

    def classifier(self, part: Part) -> Path:
        """Trains DISCO's classifier unless it is there, and returns its folder."""
        flags = self.task_flags(part, self.tasks_of(part, 0))
        if (draft := self.source_of("draft-model", part)) is not None:
            flags += ["--drafter", draft]
        out = self.out / "classifiers" / f"{part.model}-{checksum(flags)}"
        if not (out / CLASSIFIER).is_dir():
            self.command("train", "disco", "--out", str(out), "--resume", *flags)
        return out

    def ranking(self, part: Part, tasks: Path) -> Path:
        """Ranks the heads that copy unless that is done, and returns the file of the ranking."""
        flags = self.task_flags(part, tasks)
        file = self.out / "tuned" / f"{part.model}-induction-heads-{checksum(flags)}.json"
        if not file.is_file():
            self.command("tune", "induction-heads", "--out", str(file), *flags)
        return file

    def task_flags(self, part: Part, tasks: Path) -> list[str]:
        """Returns the flags of a command in which the target answers all of these tasks."""
        flags = ["--tasks", str(tasks), "--limit", str(ALL_TASKS), *self.target_flags(part)]
        return [*flags, "--max-new-tokens", str(self.recipe.max_new_tokens)]

    def tuned_lengths(self, part: Part) -> dict[str, dict[str, Any]]:
        """Tunes the draft length and DISCO's threshold, and returns the settings by rule."""
        disco = {"rule": "disco", "classifier": str(self.classifier(part))}
        tasks = self.tasks_of(part, 1)
        fixed = self.tuned_length(part, tasks, rule="fixed")
        return {"fixed": fixed, "disco": disco | self.tuned_length(part, tasks, **disco)}

    def tuned_length(self, part: Part, tasks: Path, **rule: str) -> dict[str, Any]:
        """Tunes a rule of the draft model unless that is done, and returns its settings."""
        source = self.source_of("draft-model", part)
        inputs = checksum(source, rule, self.task_flags(part, tasks))
        file = self.out / "tuned" / f"{part.model}-length-{inputs}.json"
        if not file.is_file():
            self.say(f"tuning {rule['rule']}")
            target = self.load(part)
            drafter: Any
            drafter, params = load_drafter("draft-model", target, source, **rule)
            workload = Workload.of_tasks(target, str(tasks), ALL_TASKS, self.recipe.max_new_tokens)
            settings = tune_length(workload, drafter, params, show_sweep)
            write_whole(file, json.dumps(settings).encode())
        return read_json(file)

    def command(self, *arguments: str) -> None:
        """Runs a command of specjax in this process."""
        self.say(f"specjax {' '.join(arguments)}")
        parse(arguments, COMMANDS).run()


def checksum(*values: Any) -> str:
    """Returns a short name for the inputs of a result."""
    return f"{zlib.crc32(repr(values).encode()):08x}"
