"""`specjax train METHOD`: trains the head of any method that the registry has a training for."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from functools import partial
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import jax
import numpy as np
from tyro.conf import UseAppendAction, arg

from specjax.bench.acceptance import acceptance, advice
from specjax.bench.measure import with_progress
from specjax.cli.decoding_options import TargetOptions
from specjax.cli.environment import distributed, use_compilation_cache
from specjax.core.errors import SpecjaxError, warn
from specjax.core.files import check_writable, expand_user
from specjax.core.pytree import cast_floats
from specjax.core.settings import setting
from specjax.data.conversations import Conversation, read_conversations
from specjax.data.task_files import TASKS
from specjax.decoding.drafter import Drafter
from specjax.decoding.drafters._trees import DepthTreeDrafter
from specjax.loading.hub import POCKET, find_head
from specjax.loading.methods import METHODS
from specjax.loading.parts import load_head
from specjax.loading.targets import LoadedTarget
from specjax.models.fingerprint import FrozenModel
from specjax.models.heads.layered import LayeredHead, with_draft_tokens
from specjax.models.io.head_files import HEAD, detect_format
from specjax.models.io.head_format import HeadFormat
from specjax.models.precision import default_dtype
from specjax.models.sharding import DATA, check_batch, make_mesh
from specjax.run.distillation import (
    DistillOptions,
    check_room,
    distill,
    generate_questions,
    prompt_of,
)
from specjax.training.checkpoints import checksum
from specjax.training.data import DataOptions, teaches
from specjax.training.examples import Example, tokenize_all
from specjax.training.heads import HeadSettings, check_trainable, shape_of, train_head
from specjax.training.kept_states import with_hidden_states
from specjax.training.loop import Evaluation, LoopOptions
from specjax.training.objectives.base import HeadTraining, layers_read
from specjax.training.optimizer import OptimizerOptions
from specjax.training.run_folder import check_out

NUM_QUESTIONS = 8000  # questions that the target generates, by default
SELF = "self"  # the source of conversations that the target writes


@dataclass(frozen=True, kw_only=True)
class TrainHead(TargetOptions):
    """Trains the head of a method; `train_command` sets the method and its defaults."""

    method: ClassVar[str] = ""
    if_stopped: ClassVar[str] = "to continue, run the same command with --resume"
    training: HeadTraining
    out: Annotated[Path, arg(metavar="FOLDER")]
    """The run folder: checkpoints, metrics, and at the end the head, in FOLDER/head."""
    resume: bool = False
    """Continue the run in the folder, if there is one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """The dtype for the target's weights and for compute; by default the fastest one on this
    machine, but bfloat16 for float16. The head's own weights are float32."""
    data: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="SOURCE")] = ()
    """A JSONL or JSON file of conversations (ShareGPT, OpenAI, Alpaca, prompt and response, or
    text), or its address; a .txt or .md file of plain text, cut at blank lines; a dataset of the
    hub as OWNER/NAME:CONFIGURATION:SPLIT; self, for questions that the target generates, which
    implies --distill; or pocket, the default, for edit tasks and code. Texts are cut off at
    --longest, and at the target's last position."""
    limit: int | None = setting(None, at_least=1)
    """The maximum number of conversations from each source; 8000 by default for pocket and self."""
    distill: bool = False
    """First generate the target's answers to all prompts, and learn from those."""
    distillation: DistillOptions = field(default_factory=DistillOptions)
    start: Annotated[str | None, arg(metavar="FOLDER")] = None
    """A head to start from: a folder or a hub id; by default a new one."""
    epochs: float = setting(0.0, at_least=0)
    """Passes over all texts, by default as many as published. --num-steps overrides it."""
    eval_prompts: int = setting(24, at_least=1)
    """Conversations held out to measure the accepted length on: at most a tenth of all."""
    eval_tokens: int = setting(128, at_least=1)
    """New tokens per measured prompt."""
    loop: LoopOptions = field(default_factory=LoopOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    batches: DataOptions = field(default_factory=DataOptions)
    hidden_states: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Keep the target's hidden states of all texts here, and read them in every epoch, and in other
    runs on the same texts: faster from the second epoch on. Each token takes one vector of the
    hidden size for each layer that the head reads."""
    remat: bool = False
    """Recompute activations for the gradients instead of storing them: slower, less memory."""
    fsdp: bool = False
    """Split the target's weights over the data devices too: less memory, more communication."""
    distributed: Annotated[str | None, arg(metavar="auto|HOST:PORT,N,RANK")] = None
    """Train in several processes, such as one per host, all with the same command and run folder:
    auto under SLURM, on TPU pods and with Open MPI; otherwise the address of the first process,
    the number of processes, and the rank of this one, from 0."""

    def run(self) -> None:
        with distributed(self.distributed):
            self._train(expand_user(self.out))

    def load_target(self, **others: Any) -> LoadedTarget:
        if self.dtype is None and default_dtype(0, is_packed=False) == "float16":
            others["dtype"] = "bfloat16"  # in float16 small gradients would be lost
        return super().load_target(**others)

    def _train(self, out: Path) -> None:
        use_compilation_cache()
        if jax.process_index() == 0:
            check_out(out, self.resume, HEAD)
        axes = self.mesh or (f"{DATA}={jax.device_count()}" if jax.device_count() > 1 else None)
        mesh = make_mesh(axes) if axes else None
        check_batch(mesh, self.batches.batch_size, "batch_size")
        sources, seed = self.data or (POCKET,), self.loop.seed
        is_distilled = self.distill or SELF in sources
        if jax.process_count() > 1:
            self._check_distributed(is_distilled)
        conversations = read_all(sources, self.limit, seed, not is_distilled)
        target = self.load_target(mesh=mesh, fsdp=self.fsdp)
        # Validate everything before the slow work.
        batches, max_length = self.batches, target.config.longest_text
        if batches.longest > max_length:
            if batches.buckets:
                raise SpecjaxError(
                    f"--buckets {batches.longest} exceeds the target's {max_length} positions; the "
                    f"last bucket can be {max_length} at most"
                )
            batches = replace(batches, longest=max_length)
        target.require_tokenizer()
        head, start = self.head_to_train(target)
        frozen = FrozenModel.of(target)
        check_trainable(head, frozen)
        if is_distilled:
            check_room(target, batches.longest, self.distillation)
        drafter = self._measured_drafter(target, head)
        if self.hidden_states is not None:
            check_writable(expand_user(self.hidden_states))
        if SELF in sources:
            count, file = self.limit or NUM_QUESTIONS, out / "questions.jsonl"
            watch = partial(with_progress, doing="Generating questions")
            conversations += generate_questions(
                target, count, file, self.distillation, seed, watch, self.resume
            )
        if len(conversations) < 2:
            raise SpecjaxError(
                f"--data {' '.join(sources)} has fewer than two conversations, but one is needed "
                "to train on and one to measure the head on; add more --data"
            )
        num_held_out = max(1, min(self.eval_prompts, len(conversations) // 10))
        held_out, conversations = conversations[:num_held_out], conversations[num_held_out:]
        measured = evaluation(target, drafter, held_out, batches.longest, self.eval_tokens)
        if is_distilled:
            file = out / "distilled.jsonl"
            watch = partial(with_progress, doing="Generating answers")
            options = self.distillation, seed, watch, self.resume
            conversations = distill(target, conversations, file, batches.longest, *options)
        examples = tokenize_all(conversations, target.tokenizer, batches.longest)
        if self.hidden_states is not None:
            folder = expand_user(self.hidden_states)
            watch = partial(with_progress, doing="Computing hidden states")
            examples = with_hidden_states(examples, frozen, layers_read(head), folder, watch)
        loop = self.loop_for(examples, batches)
        settings = HeadSettings(
            self.method, self.training, self.optimizer, loop, batches, self.remat
        )
        run = head, self.format, frozen, examples, settings, out
        trained = train_head(*run, start=start, evaluation=measured, resume=self.resume)
        if trained.best_score is not None:
            print(f"best at step {trained.best_step}: accepted length {trained.best_score:.2f}")
        print(f"written to {out / HEAD}")

    def _check_distributed(self, is_distilled: bool) -> None:
        if is_distilled:
            raise SpecjaxError(
                "--distill runs in one process: run this without --distributed until training "
                "starts, then pass --data OUT/distilled.jsonl without --distill to all processes"
            )
        if self.hidden_states is not None:
            raise SpecjaxError(
                "--hidden-states works in one process; leave it out, or --distributed"
            )

    def _measured_drafter(self, target: LoadedTarget, head: Any) -> Drafter:
        method = self.training.measured_as or self.method
        published = METHODS[method].published(target.config)
        drafter = METHODS.make(method, target.config, published, head)
        if isinstance(drafter, DepthTreeDrafter) and drafter.max_depth < drafter.num_depths:
            drafter = METHODS.make(method, target.config, published | {"tree": "dynamic"}, head)
        drafter.check(target.model, jax.eval_shape(head.initialise, jax.random.key(0)))
        return drafter

    @property
    def format(self) -> HeadFormat:
        format = METHODS[self.method].head
        assert format is not None
        return format

    def loop_for(self, examples: Sequence[Example], batches: DataOptions) -> LoopOptions:
        """Returns the options of the loop, with --epochs converted to steps."""
        if self.loop.num_steps is not None or self.epochs == 0:
            return self.loop
        useful = [example for example in examples if teaches(example)]  # `batches` skips others
        num_batches = math.ceil(len(useful) / batches.batch_size)
        if batches.packing:
            num_tokens = sum(len(example.tokens) for example in useful)
            num_batches = num_tokens / batches.longest / batches.batch_size
        num_steps = max(1, round(self.epochs * num_batches / self.optimizer.accumulate))
        print(f"{num_steps} steps: {self.epochs:g} epochs of {len(useful)} texts")
        return replace(self.loop, num_steps=num_steps)

    def head_to_train(self, target: LoadedTarget) -> tuple[Any, Any]:
        """Returns the head, and the params to start from; None for new ones."""
        new_head = self.training.new_head(target.config)
        if self.start is None:
            return new_head, None
        formats = METHODS.head_formats
        format = detect_format(find_head(self.start, formats), formats)
        if format.kind not in self.training.adopts:
            format = self.format
        head, params = load_head(self.start, target, formats, format, "float32")
        # A head with the target's LM head drafts the tokens that the options request.
        is_free = isinstance(head, LayeredHead) and not getattr(head.config, "has_lm_heads", False)
        if is_free:
            head, params = with_draft_tokens(head, params, [])
        head, params = self.training.adopt(head, params, jax.random.key(self.loop.seed))
        if is_free:
            drafted = new_head.config.draft_vocab_size
            head = type(head)(replace(head.config, draft_vocab_size=drafted))
        shape, requested = shape_of(head), shape_of(new_head)
        for name in shape | requested:  # a shape lacks a draft vocabulary of all tokens
            value, wanted = shape.get(name, 0), requested.get(name, 0)
            keeps_bias = name == "fc_bias" and value  # EAGLE's authors release heads with one
            if value != wanted and not keeps_bias:
                flag = self.training.flags.get(name, f"--{name.replace('_', '-')}")
                raise SpecjaxError(
                    f"{self.start} has {name} {value}, but the options request {wanted}; "
                    f"set {flag} to match that head"
                )
        return head, params


def train_command(name: str, kind: type[HeadTraining], example: str) -> type:
    """Returns the subcommand that trains the head of one method."""
    options = [
        ("training", kind, field(default_factory=kind)),
        ("epochs", float, kind.epochs),
        ("optimizer", OptimizerOptions, kind.optimizer),
    ]
    return make_dataclass(
        kind.__name__,
        options,
        bases=(TrainHead,),
        namespace={"method": name, "__doc__": f"{getdoc(kind)}\n\n  {example}"},
        frozen=True,
        kw_only=True,
    )


def read_all(
    sources: Sequence[str], limit: int | None, seed: int, needs_answers: bool
) -> list[Conversation]:
    """Reads the conversations of all sources but `self`, at most `limit` of each."""
    files = [source for source in sources if source not in (POCKET, SELF)]
    conversations = list(read_conversations(files, needs_answers, limit))
    random.Random(seed).shuffle(conversations)  # files may be sorted, and the first are held out
    if POCKET in sources:
        pocket = list(read_conversations([TASKS / "conversations.jsonl"]))
        if seed:
            random.Random(seed).shuffle(pocket)
        conversations += pocket[:limit]
    return conversations


def evaluation(
    target: LoadedTarget,
    drafter: Drafter,
    held_out: Sequence[Conversation],
    longest: int,
    max_new_tokens: int,
) -> Evaluation:
    """Returns a measurement of the accepted length at temperature 0, on the prompts that fit."""
    all_prompts = (prompt_of(target, chat, longest, max_new_tokens) for chat in held_out)
    prompts = [prompt for prompt in all_prompts if prompt]
    if not prompts:
        raise SpecjaxError(
            f"none of {len(held_out)} prompts leaves room to measure {max_new_tokens} tokens in "
            f"texts of {longest}; lower --eval-tokens, or raise --longest or --eval-prompts"
        )

    def measure(params: Any) -> dict[str, Any]:
        params = target.place(cast_floats(params, target.dtype))
        measured = acceptance(target, drafter, params, prompts, max_new_tokens=max_new_tokens)
        if text := advice(measured.accepted_length, sum(measured.counts)):
            warn(f"{text}; or train longer")
        rates = [round(rate, 4) for rate in measured.rates]
        return {"accepted_length": measured.accepted_length, "acceptance_rates": rates}

    about = {"eval_tokens": max_new_tokens, "prompts": checksum(list(map(np.asarray, prompts)))}
    return Evaluation(measure, "accepted_length", about)
