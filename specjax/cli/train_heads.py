"""`specjax train eagle` and `specjax train hass`: heads that draft from the target's features."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from specjax.errors import SpecjaxError
from specjax.training.config import (
    DataOptions,
    DistillOptions,
    EagleSettings,
    HassSettings,
    HeadSettings,
    LoopOptions,
    OptimizerOptions,
)

if TYPE_CHECKING:
    from specjax.hub import Target
    from specjax.training.conversations import Conversation
    from specjax.training.examples import Example
    from specjax.training.loop import Evaluation

POCKET_CONVERSATIONS = 8000
FLAT = arg(name="")  # its fields are flags without a prefix


@dataclass(frozen=True)
class TrainHead:
    """What all heads are told."""

    out: Annotated[Path, arg(metavar="FOLDER")]
    """The run folder: checkpoints, metrics, and in the end the head, in FOLDER/head."""
    target: str = "pocket"
    """The model: pocket, a folder in Hugging Face format, or a hub id."""
    data: Annotated[tuple[str, ...], arg(metavar="SOURCE")] = ("pocket",)
    """JSONL or JSON files of conversations (ShareGPT, OpenAI, Alpaca, prompt and response, or
    plain text), hub ids of datasets, or pocket for edit tasks and code."""
    limit: int | None = None
    """Conversations at most; pocket makes 8000 by default."""
    resume: bool = False
    """Go on with the run in the folder, if there is one."""
    distill: bool = False
    """First let the target answer all prompts itself, and learn from that."""
    distillation: Annotated[DistillOptions, FLAT] = field(default_factory=DistillOptions)
    start: Annotated[str | None, arg(metavar="FOLDER")] = None
    """A head to go on from: a folder or a hub id; by default a new one."""
    epochs: float | None = None
    """Train so many times on all texts, in place of --num-steps."""
    eval_prompts: int = 24
    """Conversations that are kept out of the training, to measure the accepted length on."""
    eval_tokens: int = 128
    """New tokens per measured prompt."""
    fc_bias: bool = False
    """Give `fc` a bias, as the first published heads have; vLLM reads heads without one only."""
    remat: bool = False
    """Keep less for the gradients and compute it again: slower, and smaller in memory."""
    loop: Annotated[LoopOptions, FLAT] = field(default_factory=LoopOptions)
    optimizer: Annotated[OptimizerOptions, FLAT] = field(default_factory=OptimizerOptions)
    batches: Annotated[DataOptions, FLAT] = field(default_factory=DataOptions)
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, arg(metavar="float32|bfloat16|float16")
    ] = None
    """Of the target's weights and all arithmetic; by default float32 on CPU and bfloat16 elsewhere.
    The head's own weights are float32."""

    def train(self, objective: EagleSettings | HassSettings) -> None:
        """Reads the texts, trains, and writes the head."""
        from specjax.cli.environment import use_compilation_cache, watched
        from specjax.distillation import distill
        from specjax.files import expand_user
        from specjax.hub import load
        from specjax.models.heads.eagle_files import HEAD
        from specjax.training.draft_reading import FrozenModel
        from specjax.training.examples import tokenize_all
        from specjax.training.heads import train_head
        from specjax.training.run_folder import check_vacant
        from specjax.tuned import fingerprint

        if self.eval_prompts < 1 or self.eval_tokens < 1:
            raise SpecjaxError("eval_prompts and eval_tokens must be at least 1")
        out = expand_user(self.out)
        if not self.resume:
            check_vacant(out)
        use_compilation_cache()
        conversations = read_all(self.data, self.limit, self.loop.seed, not self.distill)
        target = load(self.target, dtype=self.dtype)
        held_out, conversations = split(conversations, self.eval_prompts)
        if self.distill:
            conversations = distill(
                target,
                conversations,
                out / "distilled.jsonl",
                self.distillation,
                self.loop.seed,
                partial(watched, doing="The target answers"),
                self.resume,
            )
        examples = tokenize_all(conversations, target.require_tokenizer(), self.batches.longest)
        settings = HeadSettings(
            objective,
            self._loop(examples),
            self.optimizer,
            self.batches,
            fc_bias=self.fc_bias,
            remat=self.remat,
        )
        name = fingerprint(target.config, target.params)
        trained = train_head(
            FrozenModel(target.model, target.params, name),
            examples,
            settings,
            out,
            start=self._start(target),
            evaluation=evaluation(target, held_out, self.eval_tokens),
            resume=self.resume,
        )
        print(f"best at step {trained.best_step}: accepted length {trained.best_score:.2f}")
        print(f"written to {out / HEAD}")

    def _loop(self, examples: "Sequence[Example]") -> LoopOptions:
        if self.epochs is None:
            return self.loop
        rows = self.batches.batch_size * self.optimizer.accumulate
        return replace(self.loop, num_steps=max(1, round(self.epochs * len(examples) / rows)))

    def _start(self, target: "Target") -> Any:
        if self.start is None:
            return None
        from specjax.drafting import load_head

        return load_head(self.start, target, "float32")


@dataclass(frozen=True)
class TrainEagle(TrainHead):
    """Train an EAGLE head, which eagle and eagle2 draft with.

    The target reads every text once per epoch, in the training step itself; the head learns to
    predict its next feature and distribution.
    """

    objective: Annotated[EagleSettings, FLAT] = field(default_factory=EagleSettings)

    def run(self) -> None:
        """See the class."""
        self.train(self.objective)


@dataclass(frozen=True)
class TrainHass(TrainHead):
    """Train a head with HASS: in the contexts of drafting, and on the tokens that matter."""

    objective: Annotated[HassSettings, FLAT] = field(default_factory=HassSettings)

    def run(self) -> None:
        """See the class."""
        self.train(self.objective)


def read_all(
    sources: Sequence[str], limit: int | None, seed: int, needs_answers: bool
) -> "list[Conversation]":
    """The conversations of all sources; `limit` bounds those of each.

    Raises:
        SpecjaxError: for a source that cannot be read or holds none.
    """
    from itertools import islice

    from specjax.pocket.conversations import pocket_conversations
    from specjax.training.conversations import read_conversations

    if limit is not None and limit < 1:
        raise SpecjaxError(f"limit {limit} must be at least 1")
    found = []
    for source in sources:
        if source == "pocket":
            found += pocket_conversations(limit or POCKET_CONVERSATIONS, seed)
        else:
            found += islice(read_conversations([source], needs_answers), limit)
    if len(found) < 2:
        raise SpecjaxError("there are fewer than two conversations; give more --data")
    return found


def split(
    conversations: "Sequence[Conversation]", num_held_out: int
) -> "tuple[list[Conversation], list[Conversation]]":
    """The first conversations to measure on, at most a tenth of all, and the others to learn."""
    count = max(1, min(num_held_out, len(conversations) // 10))
    return list(conversations[:count]), list(conversations[count:])


def evaluation(
    target: "Target", held_out: "Sequence[Conversation]", max_new_tokens: int
) -> "Evaluation":
    """Measures the accepted length of EAGLE-2 drafts by params of a head, at temperature 0."""
    import jax

    from specjax.bench.acceptance import acceptance, advice
    from specjax.decoding.drafters.eagle2 import Eagle2Settings
    from specjax.distillation import prompt_ids
    from specjax.models.heads.eagle import EagleConfig, EagleHead
    from specjax.training.loop import Evaluation

    tokenizer = target.require_tokenizer()
    prompts = [prompt_ids(tokenizer, each) for each in held_out]
    prompts = [ids for ids in prompts if len(ids) + max_new_tokens <= target.config.longest_text]
    if not prompts:
        raise SpecjaxError(
            f"no prompt leaves room for {max_new_tokens} tokens to measure on; lower --eval-tokens"
        )
    dtype = target.params["embed_tokens"]["weight"].dtype

    def measure(params: Any) -> dict[str, Any]:
        head = EagleHead(EagleConfig.for_target(target.config, "bias" in params["fc"]))
        drafter = Eagle2Settings().build(head, target.model)
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        found = acceptance(target, drafter, params, prompts, max_new_tokens=max_new_tokens)
        if found.accepted_length == 1.0:
            print("specjax:", advice(sum(found.counts)), file=sys.stderr)
        rates = [round(rate, 4) for rate in found.rates]
        return {"accepted_length": found.accepted_length, "acceptance_rates": rates}

    return Evaluation(measure, "accepted_length")
