"""Trains pocket's target or its draft model: `python -m recipes.pocket.target --out DIR`.

Repeated segments come first: without them the model learns the statistics of code long before it
learns to look back, and an edit task is mostly looking back. Edit tasks and plain code follow, and
finally both at twice the length. The same command goes on where it was interrupted.
"""

import json
import platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from benchmarks.harness import check_known, main
from recipes.pocket import corpus, tokenizer
from recipes.pocket.data import TrainingData
from recipes.pocket.edits import KINDS, answer_text, prompt_text
from specjax import SpecjaxError, Transformer, TransformerConfig
from specjax.core.files import expand_user, new_folder, readable, vacant, writable_folder
from specjax.core.folder import RunFolder
from specjax.models import causal_rows
from specjax.models.io.huggingface import save_transformer
from specjax.training import LoopOptions
from specjax.training import train as run_to_end
from specjax.training.data import from_function
from specjax.training.loop import Evaluation
from specjax.training.run_folder import METRICS

TARGET = TransformerConfig(
    vocab_size=2048,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=8,  # deep and narrow, so that a drafter of one layer is cheap
    num_attention_heads=3,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=(1,),
)
DRAFT = replace(
    TARGET,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)


@dataclass(frozen=True)
class Phase:
    """Some steps of training on one mixture of (repeats, edits, code)."""

    steps: int
    batch_size: int
    length: int
    mixture: tuple[float, float, float]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, except the Python whose library is read."""

    config: TransformerConfig
    phases: tuple[Phase, ...]
    learning_rate: float = 4e-3
    warmup_steps: int = 60
    decay_steps: int = 700  # the last steps, over which the rate falls to zero
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    seed: int = 0

    @property
    def num_steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def phase_at(self, step: int) -> Phase:
        """Returns the phase of a step, counted from 0."""
        for phase in self.phases:
            if step < phase.steps:
                return phase
            step -= phase.steps
        return self.phases[-1]


RECIPES = {
    "target": Recipe(
        TARGET,
        (
            Phase(300, 16, 256, (0.85, 0.0, 0.15)),
            Phase(1200, 16, 256, (0.15, 0.65, 0.20)),
            Phase(400, 8, 512, (0.10, 0.70, 0.20)),
        ),
    ),
    "draft": Recipe(
        DRAFT,
        (
            Phase(500, 16, 256, (0.85, 0.0, 0.15)),
            Phase(1700, 16, 256, (0.15, 0.65, 0.20)),
            Phase(300, 8, 512, (0.10, 0.70, 0.20)),
        ),
        learning_rate=6e-3,
        decay_steps=900,
    ),
}


@dataclass(frozen=True)
class Options:
    """Train pocket's target or its draft model."""

    out: Path
    """The run folder. At the end it holds the model in Hugging Face format."""
    size: str = "target"
    """Which model: target or draft."""
    vocabulary: Path | None = None
    """Folder of a trained tokenizer to use instead of training one; the draft uses the target's."""
    save_every: int = 100
    evaluate_every: int = 250


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Returns Muon for the matrices of the layers, Adam for the embedding and the norms."""
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, recipe.learning_rate, recipe.warmup_steps),
            optax.constant_schedule(recipe.learning_rate),
            optax.linear_schedule(recipe.learning_rate, 0.0, recipe.decay_steps),
        ],
        [recipe.warmup_steps, recipe.num_steps - recipe.decay_steps],
    )
    inner = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)

    def dimensions(params):
        def of(path, leaf):
            return inner if leaf.ndim == 2 and path[0].key != "embed_tokens" else None

        return jax.tree_util.tree_map_with_path(of, params)

    return optax.chain(
        optax.clip_by_global_norm(recipe.clip_norm),
        optax.contrib.muon(
            schedule,
            weight_decay=recipe.weight_decay,
            consistent_rms=0.2,  # updates as large as Adam's, so both share a learning rate
            adam_b2=0.95,
            muon_weight_dimension_numbers=dimensions,
        ),
    )


def next_token_losses(
    model: Transformer, params: Any, tokens: Int[Array, "B T"]
) -> tuple[Float[Array, "B T-1"], Float[Array, "B T-1"]]:
    """Returns cross-entropy and correctness (1.0 or 0.0) of predicting `tokens[:, 1:]`."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    batch, length = inputs.shape
    cache = model.new_cache(params, batch, length)
    rows = causal_rows(inputs, jnp.zeros((batch,), jnp.int32))
    output, _ = model.run(params, rows, cache)
    assert output.logits is not None
    losses = optax.softmax_cross_entropy_with_integer_labels(output.logits, labels)
    return losses, (jnp.argmax(output.logits, axis=-1) == labels).astype(jnp.float32)


def train(recipe: Recipe, data: TrainingData, options: Options) -> PyTree:
    """Runs `recipe` to its end, or on from the newest checkpoint; returns the trained params."""
    model = Transformer(recipe.config)

    def loss_fn(params, frozen, batch, key):
        del frozen, key  # the loss reads neither another model nor noise
        tokens, weights = batch
        losses, _ = next_token_losses(model, params, tokens)
        weights = weights[:, 1:]
        return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0), {}

    def batch_at(step: int):
        phase = recipe.phase_at(step)
        return data.batch(step, phase.batch_size, phase.length, phase.mixture)

    trained = run_to_end(
        loss_fn,
        model.initialise(jax.random.key(recipe.seed)),
        from_function(batch_at),
        optimizer(recipe),
        LoopOptions(
            num_steps=recipe.num_steps,
            save_every=options.save_every,
            log_every=options.save_every,
            eval_every=options.evaluate_every,
        ),
        options.out,
        asdict(recipe),
        evaluation=Evaluation(lambda params: evaluate(model, params, data), "accuracy"),
        title=f"pocket {options.size}",
    )
    return trained.params  # of the last step, at whose end the learning rate is zero


def evaluate(model: Transformer, params: dict, data: TrainingData, length: int = 384) -> dict:
    """Returns teacher-forced accuracy on held-out answers by kind of edit, and their loss."""
    losses = jax.jit(lambda tokens: next_token_losses(model, params, tokens))
    report, every_loss = {}, []
    for kind in KINDS:
        tasks = corpus.held_out_tasks(12, kinds=(kind,), max_characters=450)
        tokens = np.full((12, length), tokenizer.END_ID, np.int32)
        answers = np.zeros((12, length), np.float32)
        for row, task in enumerate(tasks):
            texts = prompt_text(task), answer_text(task)
            prompt, answer = (data.tokenizer.encode(text).ids for text in texts)
            whole = (prompt + answer)[:length]
            tokens[row, : len(whole)] = whole
            answers[row, len(prompt) : len(whole)] = 1.0
        loss, correct = losses(jnp.asarray(tokens))
        answers = answers[:, 1:]
        report[f"accuracy/{kind}"] = round(float(np.sum(correct * answers) / answers.sum()), 4)
        every_loss.append(float(np.sum(loss * answers) / answers.sum()))
    accuracy, loss = (round(float(np.mean(x)), 4) for x in ([*report.values()], every_loss))
    return report | {"accuracy": accuracy, "held_out_answer_loss": loss}


def find_tokenizer(options: Options, vocabulary_size: int) -> Path:
    """Returns the folder of the tokenizer: the one given, or the run's own, trained if new."""
    folder = expand_user(options.vocabulary or options.out / "tokenizer")
    with readable(folder):
        is_there = (folder / "tokenizer.json").is_file()
    if not is_there and options.vocabulary is not None:
        raise SpecjaxError(
            f"--vocabulary {folder} holds no tokenizer.json; leave it out to train a tokenizer"
        )
    if not is_there:
        with new_folder(folder) as unfinished:
            made = tokenizer.train_tokenizer(tokenizer.tokenizer_texts(), vocabulary_size)
            tokenizer.save(made, unfinished)
    return folder


def build(options: Options) -> None:
    """Trains, then writes the model, its tokenizer and a record of the run into one new folder."""
    check_known("--size", [options.size], RECIPES)
    recipe = RECIPES[options.size]
    options = replace(options, out=writable_folder(options.out))
    folder = vacant(options.out / "model")  # before the training, which takes long
    vocabulary = find_tokenizer(options, recipe.config.vocab_size)
    pieces, modules = corpus.pieces(held_out=False), corpus.module_texts(held_out=False)
    data = TrainingData.build(tokenizer.load(vocabulary), recipe.seed, pieces, modules)
    params = train(recipe, data, options)
    record = {
        "recipe": asdict(recipe),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "history": list(RunFolder(options.out).records(METRICS)),
    }
    with new_folder(folder) as unfinished:
        save_transformer(unfinished, recipe.config, params, jnp.float16)
        for file in vocabulary.iterdir():
            (unfinished / file.name).write_bytes(file.read_bytes())
        (unfinished / "recipe.json").write_text(json.dumps(record, indent=1, default=str))


if __name__ == "__main__":
    main(build, Options, __doc__)
