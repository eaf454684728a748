"""`specjax train disco`: trains the classifier that stops a draft model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tyro.conf import arg

from specjax.bench.measure import with_progress
from specjax.bench.report.tables import Grid, number
from specjax.bench.report.terminal import print_grid
from specjax.cli.options import TargetOptions
from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user
from specjax.loading.parts import load_draft
from specjax.models.fingerprint import FrozenModel
from specjax.models.io.classifier import CLASSIFIER, TrainedClassifier
from specjax.run.distillation import answers_of
from specjax.run.tasks import POCKET, Request, Task, read_tasks, requests_of
from specjax.training.draft_features import ContinuedPrompt, read_drafts
from specjax.training.objectives.length_classifier import (
    ClassifierTraining,
    Generate,
    score,
    train_classifier,
)
from specjax.training.run_folder import check_out


@dataclass(frozen=True, kw_only=True)
class TrainDisco(TargetOptions):
    """Train the classifier that tells a draft model when to stop (--set rule=disco).

    The target continues every prompt, the draft reads along, and the classifier learns where the
    two disagree.

      specjax train disco --target FOLDER --drafter FOLDER --out runs/disco
    """

    if_stopped: ClassVar[str] = (
        "the same command with --resume goes on, after the target has written again"
    )

    out: Annotated[Path, arg(metavar="FOLDER")]
    """The run folder: checkpoints, metrics, and at the end the classifier, in FOLDER/classifier."""
    resume: bool = False
    """Continue the run in the folder, if there is one."""
    drafter: Annotated[str, arg(metavar="FOLDER")] = "pocket"
    """The draft model: pocket, a folder in Hugging Face format, a GGUF file, or a hub id."""
    tasks: Annotated[str, arg(metavar="SOURCE")] = "pocket"
    """pocket, for tasks of its own that `bench` does not measure, or anything that `specjax bench
    --tasks` reads."""
    limit: int = 80
    """Prompts of each kind of task."""
    kinds: Annotated[str, arg(metavar="A,B")] = ""
    """Train on these kinds of task only, separated by commas."""
    test_tasks: Annotated[str, arg(metavar="SOURCE")] = ""
    """The tasks of the test; by default, if --tasks is pocket, those that `bench` measures."""
    test_limit: int = 10
    """Prompts of each kind of task in the test."""
    max_new_tokens: int = 128
    """New tokens of each prompt's continuation at most."""
    labels: Literal["match", "overlap"] = "match"
    """Learn where the greedy tokens are equal, or how much the two distributions overlap."""
    position: Literal["draft", "generation"] = "draft"
    """Count positions from the start of the draft, or of the new text."""
    num_steps: int = 3000
    """Steps of the optimizer."""

    def run(self) -> None:
        """Trains, prints the scores, and writes the classifier."""
        out = expand_user(self.out)
        check_out(out, self.resume, CLASSIFIER)
        settings = ClassifierTraining(
            labels=self.labels, position=self.position, num_steps=self.num_steps
        )
        target = self.load_target()
        draft = load_draft(target, self.drafter)
        tasks = self._training_tasks()
        test = self.test_tasks or (self.tasks if self.tasks == POCKET else "")
        test_tasks = read_tasks(test, self.test_limit) if test else ()
        frozen, reading = FrozenModel.of(target), FrozenModel.of(draft)
        watch = partial(with_progress, doing="The target writes")
        continue_all = answers_of(target, self.max_new_tokens, watch)
        requests, test_requests = (
            requests_of(each, target, self.max_new_tokens, continue_all) if each else []
            for each in (tasks, test_tasks)
        )
        prompts = [request.ids for request in requests]
        trained = train_classifier(
            frozen, reading, prompts, continue_all, settings, out, self.resume
        )
        for name, value in trained.scores.items():
            print(f"{name:<16} {value:.3f}" if isinstance(value, float) else f"{name:<16} {value}")
        print(f"written to {out / CLASSIFIER}")
        if test_requests:
            show_test(trained, test_requests, continue_all, frozen, reading)

    def _training_tasks(self) -> list[Task]:
        tasks = read_tasks(self.tasks, self.limit, is_validation=True)
        wanted = [kind.strip() for kind in self.kinds.split(",") if kind.strip()]
        for kind in wanted:
            if kind not in {task.kind for task in tasks}:
                known = ", ".join(dict.fromkeys(task.kind for task in tasks))
                raise SpecjaxError(f"--kinds {kind!r} matches no task; the kinds are {known}")
        return [task for task in tasks if not wanted or task.kind in wanted]


def show_test(
    trained: TrainedClassifier,
    requests: Sequence[Request],
    continue_all: Generate,
    target: FrozenModel,
    draft: FrozenModel,
) -> None:
    """Prints the scores of the classifier and of a static length on each kind of task."""
    rows = []
    for kind, group in groupby(requests, lambda request: request.kind):
        prompts = [request.ids for request in group]
        pairs = zip(prompts, continue_all(prompts), strict=True)
        texts = [ContinuedPrompt(*pair) for pair in pairs]
        data = read_drafts(texts, target, draft, trained.position)
        static_length = trained.scores["static_length"]
        scores = score(trained.model, trained.params, data, trained.threshold, static_length)
        shares = [scores[name] for name in ("f1", "precision", "recall", "static_f1")]
        rows.append((kind, *(number(share, 3) for share in shares), str(scores["num_tokens"])))
    print_grid(Grid("", ("test", "F1", "precision", "recall", "static F1", "tokens"), rows))
