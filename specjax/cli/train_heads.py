"""What `specjax train` does for every method with a head; `train_methods` has the methods."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from tyro.conf import UseAppendAction, arg

from specjax.core.errors import SpecjaxError
from specjax.training.config import (
    DataOptions,
    DistillOptions,
    HeadSettings,
    LoopOptions,
    OptimizerOptions,
)
from specjax.training.objectives.options import METHOD_OF, Objective

if TYPE_CHECKING:
    from specjax.decoding.drafter import Drafter
    from specjax.hub import LoadedTarget
    from specjax.models.config import TransformerConfig
    from specjax.training.conversations import Conversation
    from specjax.training.examples import Example
    from specjax.training.loop import Evaluation

POCKET_CONVERSATIONS = 8000
FLAT = arg(name="")  # its fields are flags without a prefix


@dataclass(frozen=True)
class TrainHead(ABC):
    """What all heads are told."""

    out: Annotated[Path, arg(metavar="FOLDER")]
    """The run folder: checkpoints, metrics, and in the end the head, in FOLDER/head."""
    target: str = "pocket"
    """The model: pocket, a folder in Hugging Face format, or a hub id."""
    data: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="SOURCE")] = ()
    """A JSONL or JSON file of conversations (ShareGPT, OpenAI, Alpaca, prompt and response, or
    plain text), the hub id of a dataset, or pocket, the default, for edit tasks and code. May be
    given several times. Texts are cut off at --longest, and at the target's positions."""
    limit: Annotated[int | None, arg(metavar="INT")] = None
    """Conversations of each source at most; pocket makes 8000 by default."""
    resume: bool = False
    """Go on with the run in the folder, if there is one."""
    distill: bool = False
    """First let the target answer all prompts itself, and learn from that."""
    distillation: Annotated[DistillOptions, FLAT] = field(default_factory=DistillOptions)
    start: Annotated[str | None, arg(metavar="FOLDER")] = None
    """A head to go on from: a folder or a hub id; by default a new one."""
    epochs: float = 0.0
    """Train so many times on all texts; with --packing, on about as many tokens. --num-steps, where
    it is given, wins."""
    eval_prompts: int = 24
    """Conversations that are kept out of the training, to measure the accepted length on: a tenth
    of all at most."""
    eval_tokens: int = 128
    """New tokens per measured prompt."""
    remat: bool = False
    """Keep less for the gradients and compute it again: slower, and smaller in memory."""
    loop: Annotated[LoopOptions, FLAT] = field(default_factory=LoopOptions)
    optimizer: Annotated[OptimizerOptions, FLAT] = field(default_factory=OptimizerOptions)
    batches: Annotated[DataOptions, FLAT] = field(default_factory=DataOptions)
    dtype: Annotated[Literal["float32", "bfloat16"] | None, arg(metavar="float32|bfloat16")] = None
    """Of the target's weights and all arithmetic; by default float32 on CPU and bfloat16 elsewhere.
    The head's own weights are float32."""

    # What of a head's shape is not set by the flag of its name: by which.
    flags: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @property
    @abstractmethod
    def told(self) -> Objective:
        """What the loss is made of; its type decides the method."""

    @abstractmethod
    def new_head(self, target: "TransformerConfig") -> Any:
        """The head that the options ask for."""

    def run(self) -> None:
        """Reads the texts, trains, and writes the head."""
        from specjax.bench.progress import watched
        from specjax.cli.environment import use_compilation_cache
        from specjax.core.files import expand_user
        from specjax.hub import load
        from specjax.models.fingerprint import fingerprint
        from specjax.models.io.head_files import HEAD
        from specjax.training.distillation import check_room, distill
        from specjax.training.draft_reading import FrozenModel
        from specjax.training.examples import tokenize_all
        from specjax.training.heads import check_out, train_head

        self._check()
        out = expand_user(self.out)
        check_out(out, self.resume)
        use_compilation_cache()
        sources = self.data or ("pocket",)
        conversations = read_all(sources, self.limit, self.loop.seed, not self.distill)
        target = load(self.target, dtype=self.dtype)
        batches = within(self.batches, target)
        # All that can be refused is refused before anything that takes long.
        tokenizer, (head, start) = target.require_tokenizer(), self._start(target)
        held_out, conversations = split(conversations, self.eval_prompts)
        drafter = self._drafter(head, target)
        measured = evaluation(target, drafter, held_out, batches.longest, self.eval_tokens)
        if self.distill:
            check_room(target, batches.longest, self.distillation)
            conversations = distill(
                target,
                conversations,
                out / "distilled.jsonl",
                batches.longest,
                self.distillation,
                self.loop.seed,
                partial(watched, doing="The target answers"),
                self.resume,
            )
        examples = tokenize_all(conversations, tokenizer, batches.longest)
        settings = HeadSettings(
            self.told, self._loop(examples, batches), self.optimizer, batches, remat=self.remat
        )
        name = fingerprint(target.config, target.params)
        trained = train_head(
            head,
            FrozenModel(target.model, target.params, name),
            examples,
            settings,
            out,
            start=start,
            evaluation=measured,
            resume=self.resume,
        )
        if trained.best_score is not None:
            print(f"best at step {trained.best_step}: accepted length {trained.best_score:.2f}")
        print(f"written to {out / HEAD}")

    def _check(self) -> None:
        """Raises SpecjaxError for what no group of options checks for itself."""
        for name in ("limit", "eval_prompts", "eval_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecjaxError(f"{name} {value} must be at least 1")
        if not 0 <= self.epochs < float("inf"):
            raise SpecjaxError(f"epochs {self.epochs} is not a finite number >= 0")

    def _loop(self, examples: "Sequence[Example]", batches: DataOptions) -> LoopOptions:
        if self.loop.num_steps is not None or self.epochs == 0:
            return self.loop
        rows = len(examples)
        if batches.packing:
            rows = sum(len(example.tokens) for example in examples) / batches.longest
        rows_of_a_step = batches.batch_size * self.optimizer.accumulate
        num_steps = max(1, round(self.epochs * rows / rows_of_a_step))
        print(f"{num_steps} steps: {self.epochs:g} epochs of {len(examples)} texts")
        return replace(self.loop, num_steps=num_steps)

    def _start(self, target: "LoadedTarget") -> tuple[Any, Any]:
        """The head, and the params that it starts from, if not new ones.

        Raises:
            SpecjaxError: if the head to start from is not as the options ask.
        """
        from specjax.training.heads import TRAINABLE, shape_of

        wanted = self.new_head(target.config)
        if self.start is None:
            return wanted, None
        kind = TRAINABLE[METHOD_OF[type(self.told)]].kind
        head, params = self.load_start(self.start, target, kind)
        asked = shape_of(wanted)
        for name, value in shape_of(head).items():
            if value != asked[name]:
                flag = self.flags.get(name, f"--{name.replace('_', '-')}")
                raise SpecjaxError(
                    f"{self.start} has {name} {value}, but the options ask for {asked[name]}; "
                    f"set {flag} as that head has it"
                )
        return head, params

    def load_start(self, start: str, target: "LoadedTarget", kind: str) -> tuple[Any, Any]:
        """The head to start from and its params."""
        from specjax.loading import load_head

        return load_head(start, target, "float32", kind)

    def _drafter(self, head: Any, target: "LoadedTarget") -> "Drafter":
        """What the head is measured with: a dynamic tree where the static one does not reach all
        that the head predicts, and for EAGLE's."""
        from specjax.decoding.drafters._trees import TreeSettings
        from specjax.methods import METHODS

        method = METHOD_OF[type(self.told)]
        row = METHODS["eagle2" if method == "eagle" else method]
        tree, depths = row.drafter(), getattr(head.config, "num_depths", 0)
        is_short = isinstance(tree, TreeSettings) and tree.max_depth(depths) < depths
        settings: Any = row.drafter(tree="dynamic") if is_short else tree
        return settings.build(head, target.model)


def read_all(
    sources: Sequence[str], limit: int | None, seed: int, needs_answers: bool
) -> "list[Conversation]":
    """The conversations of all sources; `limit` bounds those of each.

    Raises:
        SpecjaxError: for a source that cannot be read or holds none.
    """
    import random

    from specjax.pocket.conversations import pocket_conversations
    from specjax.training.conversations import read_conversations

    files = [source for source in sources if source != "pocket"]
    found = list(read_conversations(files, needs_answers, limit))
    random.Random(seed).shuffle(found)  # files may be in an order, and the first are measured on
    for _ in range(len(files), len(sources)):
        found += pocket_conversations(limit or POCKET_CONVERSATIONS, seed)
    if len(found) < 2:
        raise SpecjaxError("there are fewer than two conversations; give more --data")
    return found


def within(batches: DataOptions, target: "LoadedTarget") -> DataOptions:
    """The options, with texts no longer than the target can read.

    Raises:
        SpecjaxError: if buckets are given for longer ones, or rows do not spread over the devices.
    """
    import jax

    if batches.batch_size % jax.device_count():
        raise SpecjaxError(
            f"batch_size {batches.batch_size} does not spread evenly over {jax.device_count()} "
            "devices; take a multiple of that"
        )
    most = target.config.longest_text
    if batches.longest <= most:
        return batches
    if batches.buckets:
        raise SpecjaxError(
            f"longest {batches.longest} exceeds the target's {most} positions; end the buckets "
            f"with {most} at most"
        )
    return replace(batches, longest=most)


def split(
    conversations: "Sequence[Conversation]", num_held_out: int
) -> "tuple[list[Conversation], list[Conversation]]":
    """The first conversations to measure on, at most a tenth of all, and the others to learn."""
    count = max(1, min(num_held_out, len(conversations) // 10))
    return list(conversations[:count]), list(conversations[count:])


def evaluation(
    target: "LoadedTarget",
    drafter: "Drafter",
    held_out: "Sequence[Conversation]",
    longest: int,
    max_new_tokens: int,
) -> "Evaluation":
    """Measures the accepted length of a drafter by its params, at temperature 0.

    Prompts that leave no room for `max_new_tokens` within `longest` tokens are left out.

    Raises:
        SpecjaxError: if no prompt can be continued so far.
    """
    import jax

    from specjax.bench.acceptance import USELESS, acceptance, advice
    from specjax.training.distillation import prompt_of
    from specjax.training.loop import Evaluation

    asked = [prompt_of(target, each, longest, max_new_tokens) for each in held_out]
    prompts = [prompt for prompt in asked if prompt]
    if not prompts:
        raise SpecjaxError(
            f"none of {len(held_out)} prompts leaves room for the {max_new_tokens} tokens to "
            f"measure on in texts of {longest}; lower --eval-tokens, or raise --longest or "
            "--eval-prompts"
        )
    dtype = target.dtype

    def measure(params: Any) -> dict[str, Any]:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        params = jax.device_put(params, jax.devices()[0])  # where the target is
        found = acceptance(target, drafter, params, prompts, max_new_tokens=max_new_tokens)
        if found.accepted_length < USELESS:
            told = advice(found.accepted_length, sum(found.counts))
            print(f"specjax: {told}; or train on", file=sys.stderr)
        rates = [round(rate, 4) for rate in found.rates]
        return {"accepted_length": found.accepted_length, "acceptance_rates": rates}

    return Evaluation(measure, "accepted_length")
