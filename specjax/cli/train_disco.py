"""`specjax train disco`: trains the classifier that stops a draft model."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tyro.conf import arg

from specjax.bench.measure import with_progress
from specjax.cli.decoding_options import TargetOptions
from specjax.core.files import expand_user
from specjax.core.settings import setting
from specjax.loading.parts import load_draft
from specjax.loading.vocabularies import check_same_tokens
from specjax.models.fingerprint import FrozenModel
from specjax.models.io.classifier import CLASSIFIER
from specjax.run.distillation import answers_of
from specjax.run.tasks import read_tasks, task_prompts
from specjax.training.objectives.length_classifier import ClassifierTraining, train_classifier
from specjax.training.run_folder import check_out


@dataclass(frozen=True, kw_only=True)
class TrainDisco(TargetOptions):
    """Train the classifier that stops a draft model (--set rule=disco).

    The target continues every prompt, the draft model reads along, and the classifier learns where
    the two disagree.

      specjax train disco --target FOLDER --drafter FOLDER --out runs/disco
    """

    if_stopped: ClassVar[str] = (
        "to continue, run the same command with --resume; the target then generates again"
    )

    out: Annotated[Path, arg(metavar="FOLDER")]
    """The run folder: checkpoints, metrics, and at the end the classifier, in FOLDER/classifier."""
    resume: bool = False
    """Continue the run in the folder, if there is one."""
    drafter: Annotated[str, arg(metavar="FOLDER")] = "pocket"
    """The draft model: pocket, a folder in Hugging Face format, a GGUF file, or a hub id."""
    tasks: Annotated[str, arg(metavar="SOURCE")] = "pocket"
    """pocket, for tasks that `bench` does not measure, or anything that `specjax bench --tasks`
    reads."""
    limit: int = setting(80, at_least=1)
    """The number of prompts of each kind of task."""
    max_new_tokens: int = setting(128, at_least=1)
    """The maximum number of new tokens per prompt."""
    position: Literal["draft", "generation"] = "draft"
    """Count positions from the start of the draft, or of the new text."""
    num_steps: int = setting(3000, at_least=1)
    """Steps of the optimizer."""

    def run(self) -> None:
        out = expand_user(self.out)
        check_out(out, self.resume, CLASSIFIER)
        settings = ClassifierTraining(position=self.position, num_steps=self.num_steps)
        target = self.load_target()
        draft = load_draft(target, self.drafter)
        check_same_tokens(target, draft)
        tasks = read_tasks(self.tasks, self.limit, is_validation=True)
        watch = partial(with_progress, doing="Generating continuations")
        continue_all = answers_of(target, self.max_new_tokens, watch)
        prompts = task_prompts(tasks, target, self.max_new_tokens, continue_all)
        models = FrozenModel.of(target), FrozenModel.of(draft)
        ids = [prompt.ids for prompt in prompts]
        trained = train_classifier(*models, ids, continue_all, settings, out, self.resume)
        for name, value in trained.scores.items():
            print(f"{name:<16} {value:.3f}" if isinstance(value, float) else f"{name:<16} {value}")
        print(f"written to {out / CLASSIFIER}")
