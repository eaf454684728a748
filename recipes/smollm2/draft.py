"""Distils a draft model out of a target's own layers, for `draft-model` and DISCO.

    python -m recipes.smollm2.draft --target TARGET --data TEXTS --out FOLDER

The draft keeps a few layers, the embedding and the LM head, and learns the target's distribution on
TEXTS, which `recipes.smollm2.texts` writes. The same command goes on where it was interrupted. The
model is in FOLDER/model.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from jaxtyping import Array, Key

from benchmarks.harness import main
from specjax import LoadedTarget, SpecjaxError, Target, Transformer, load
from specjax.cli.environment import use_compilation_cache
from specjax.core.files import expand_user, new_folder, vacant
from specjax.core.pytree import cast_floats
from specjax.core.ranking import best_token
from specjax.data.conversations import read_conversations
from specjax.loading.targets import copy_tokenizer
from specjax.models import QueryRows, Taps
from specjax.models.fingerprint import fingerprint
from specjax.models.heads.training_attention import text_before
from specjax.models.io.huggingface import save_transformer
from specjax.training import DataOptions, LoopOptions, Step, batches, tokenize_all, train
from specjax.training.blocks import SlotValues
from specjax.training.losses import LossFn, soft_cross_entropy
from specjax.training.objectives.base import Prediction, Teacher
from specjax.training.optimizer import OptimizerOptions, optimizer_of

Params = Mapping[str, Any]
SHARED = ("embed_tokens", "lm_head")  # params that stay the target's


@dataclass(frozen=True)
class Options:
    """Distil a draft model."""

    target: str
    data: str
    """The texts, as `specjax train --data` reads them."""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """The run folder; the same command continues it."""
    layers: tuple[int, ...] = (0, 10, 20, 29)
    """Layers of the target that the draft starts from."""
    loop: LoopOptions = field(
        default_factory=partial(LoopOptions, num_steps=400, save_every=50, log_every=10)
    )
    optimizer: OptimizerOptions = OptimizerOptions(
        1e-3, warmup=0.04, decay="cosine", clip="norm", clip_at=1.0
    )
    batches: DataOptions = field(
        default_factory=partial(DataOptions, batch_size=4, longest=512, packing=True)
    )


def few_layers(target: LoadedTarget, layers: tuple[int, ...]) -> tuple[Transformer, dict[str, Any]]:
    """Returns a model of some of a target's layers and its final norm, and these as params."""
    count = target.config.num_hidden_layers
    if not layers or min(layers) < 0 or max(layers) >= count:
        raise SpecjaxError(f"--layers {layers}: the target has layers 0 to {count - 1}; name some")
    params = {f"layers_{new}": target.params[f"layers_{old}"] for new, old in enumerate(layers)}
    params["norm"] = target.params["norm"]
    return Transformer(replace(target.config, num_hidden_layers=len(layers))), params


def distillation_loss(draft: Transformer, target: Target) -> LossFn:
    """Returns the cross-entropy to the target's distribution on the tokens of answers."""

    def loss_fn(params: Params, frozen: Params, batch: Mapping[str, Array], key: Key[Array, ""]):
        step = Step(target, frozen, batch, key)
        rows = QueryRows(batch["tokens"], batch["positions"], text_before(batch["segments"]))
        params = whole(cast_floats(params, target.dtype(frozen)), frozen)
        cache = draft.new_cache(params, *batch["tokens"].shape)
        output, _ = draft.run(params, rows, cache, Taps(hidden_layers=(-1,), logits=False))
        assert output.hidden is not None

        def values_of(_: Any, predicted: Prediction, teacher: Teacher) -> SlotValues:
            logits = step.logits(predicted.inputs)
            return {
                "logit_loss": soft_cross_entropy(logits, teacher.logits),
                "is_right": best_token(logits) == best_token(teacher.logits),
            }

        return step.losses(values_of, [Prediction(0, output.hidden[:, :, 0])], {"logit_loss": 1.0})

    return loss_fn


def whole(params: Params, target: Params) -> dict[str, Any]:
    """Returns the params of the draft with those that it shares with the target."""
    return {**params, **{name: target[name] for name in SHARED if name in target}}


def build(options: Options) -> None:
    """Trains, then writes the model and the tokenizer."""
    use_compilation_cache()
    out = expand_user(options.out)
    folder = vacant(out / "model")
    target = load(options.target, packed=False)
    draft, params = few_layers(target, options.layers)
    tokenizer = target.require_tokenizer()
    texts = read_conversations([options.data])
    examples = tokenize_all(texts, tokenizer, options.batches.longest)
    settings = asdict(options) | {"target": fingerprint(target.config, target.params)}
    trained = train(
        distillation_loss(draft, target.model),
        cast_floats(params, "float32"),
        batches(examples, options.batches, options.loop.seed),
        optimizer_of(options.optimizer, options.loop.total_steps),
        options.loop,
        out,
        {name: settings[name] for name in settings if name not in ("out", "data")},
        frozen=target.params,
        title="distilling the draft",
    )
    with new_folder(folder) as unfinished:
        params = whole(trained.params, target.params)
        save_transformer(unfinished, draft.config, params, "bfloat16")
        copy_tokenizer(target, unfinished)
    print(f"written to {folder}")


if __name__ == "__main__":
    main(build, Options, __doc__)
