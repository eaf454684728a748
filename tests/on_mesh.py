"""Loads, decodes and trains on meshes of 8 devices, and compares with one device.

Programs, for processes with 8 devices altogether; each ends with an error at a difference:

    python -m tests.on_mesh decode "data=1,model=8" pld eagle2    # by default all methods
    python -m tests.on_mesh load FOLDER
    python -m tests.on_mesh train FOLDER                          # resumes a killed run
    python -m tests.on_mesh killed FOLDER HOST:PORT,2,RANK        # the second process kills itself
"""

import json
import os
import re
import shutil
import signal
import sys
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from specjax import speculative_generate
from specjax.cli import main
from specjax.cli.environment import distributed
from specjax.core import memory
from specjax.core.errors import SpecjaxError, exit_code
from specjax.core.memory import device_bytes
from specjax.data.datastore import build
from specjax.data.datastore import params as datastore_params
from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.engine import Engine
from specjax.decoding.prompt import Prompt, from_ids
from specjax.decoding.sampling import Sampling
from specjax.decoding.state import Generation
from specjax.loading.methods import METHODS
from specjax.loading.targets import LoadedTarget, load
from specjax.models.config import TransformerConfig
from specjax.models.fingerprint import FrozenModel
from specjax.models.io.huggingface import load_transformer, save_transformer
from specjax.models.shapes import expected_shapes
from specjax.models.sharding import Placement, make_mesh, place
from specjax.models.transformer import Transformer
from specjax.run.runner import COMPILED, compilations, trial_key
from specjax.training.data import DataOptions
from specjax.training.examples import Example
from specjax.training.heads import HeadSettings, train_head
from specjax.training.loop import LoopOptions
from specjax.training.objectives.length_classifier import ClassifierTraining, fit
from specjax.training.optimizer import OptimizerOptions
from specjax.training.progress import Progress
from tests.training.test_length_classifier import made_up

# 8 heads, of which 4 are key-value heads: over 8 devices those are whole on each. With so few
# tokens, random heads are sometimes right.
CONFIG = TransformerConfig(32, 64, 64, 2, 8, 4, 8, max_position_embeddings=512)
BATCH, NEW_TOKENS, SAMPLING = 8, 24, Sampling(temperature=0.3)
BEAM = {"top_k": 2, "depth": 2, "num_tokens": 6}
TREE = {"choices": ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))}
SETTINGS = {
    **dict.fromkeys(("eagle", "medusa", "hydra"), TREE),
    **dict.fromkeys(("eagle2", "hass", "eagle3"), BEAM),
    "draft-model": {"rule": "fixed", "length": 2},
    "pld": {"num_tokens": 4},
}
STEPS, KILLED_AT, SAVE_EVERY = 20, 13, 5


def random_params(module: Any, seed: int, mesh: Mesh | None, fsdp: bool = False) -> Any:
    """Random params, large enough for the context to matter."""
    params = module.initialise(jax.random.key(seed))
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params)
    return place(params, mesh and Placement(mesh, CONFIG.head_dim, fsdp))


# ---- Decoding ------------------------------------------------------------------------------------


def drafter_of(method: str, mesh: Mesh | None) -> tuple[Drafter, Any]:
    """The drafter of a method and its params."""
    make = partial(METHODS.make, method, CONFIG, SETTINGS.get(method, {}))
    if METHODS[method].head:
        training = METHODS[method].training or METHODS["eagle"].training
        assert training is not None
        head = training().new_head(CONFIG)
        return make(head), random_params(head, 1, mesh)
    if method == "draft-model":
        draft = Transformer(CONFIG, mesh=mesh)
        return make(draft), {"draft": random_params(draft, 2, mesh), "rule": None}
    if method == "rest":
        texts = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (20, 50)).tolist()
        params = datastore_params(build(texts, CONFIG.vocab_size))
        return make(), place(params, mesh and Placement(mesh, CONFIG.head_dim))
    if method == "hybrid":
        (copy, no_params), (head, params) = (drafter_of(part, mesh) for part in ("pld", "hass"))
        return METHODS[method].drafter(copy, head, 8), {"copy": no_params, "head": params}
    if method == "auto":
        return METHODS[method].drafter(METHODS.make("pld", CONFIG, {}), 0.1), None
    return make(), None


def prompts() -> Prompt:
    """Ragged rows that repeat themselves, for the methods that copy."""
    rng = np.random.default_rng(5)
    parts = [rng.integers(0, CONFIG.vocab_size, 4 + row % 3).tolist() for row in range(BATCH)]
    return from_ids([part * 4 for part in parts], bucket=32)


def generated(method: str, mesh: Mesh | None) -> Generation:
    """The text on a mesh, or on one device.

    On a mesh it also checks that the cache is split, and that what `lower` foresees is what runs.
    """
    model = Transformer(CONFIG, mesh=mesh)
    drafter, drafter_params = drafter_of(method, mesh)
    params = Params(random_params(model, 0, mesh), drafter_params)
    engine = Engine(model, drafter, SAMPLING, NEW_TOKENS)
    given = params, prompts(), trial_key(0, (0, 0))
    engine.check(*given[:2])
    programs = [each.compile() for each in engine.lower(*given)]
    state = engine.prefill(*given)
    num_compiled = compilations()[COMPILED]
    state = engine.run(params, state, NEW_TOKENS)
    assert compilations()[COMPILED] == num_compiled, f"{programs[1]} is another program"
    if mesh is not None:
        split = 4 if mesh.shape["model"] == 4 else 1
        expected = (BATCH // mesh.shape["data"], CONFIG.num_key_value_heads // split)
        assert state.cache.keys[0].sharding.shard_shape(state.cache.keys[0].shape)[:2] == expected
    return jax.device_get(engine.generation(state))


def check_decoding(axes: str, *methods: str) -> None:
    """Compares tokens and rounds of methods on one mesh, or on several with ; between."""
    for method in methods or METHODS:
        alone = generated(method, None)
        for each in axes.split(";"):
            found = generated(method, make_mesh(each))
            np.testing.assert_array_equal(found.tokens, alone.tokens, f"{method} on {each}")
            np.testing.assert_array_equal(found.stats.rounds, alone.stats.rounds)
        print(f"{method}: accepted length {alone.stats.mean_accepted_length:.2f}", flush=True)


def texts_of(target: LoadedTarget, drafter: Drafter) -> np.ndarray:
    """The greedy text of a loaded target."""
    generate = partial(speculative_generate, target=target.model, drafter=drafter)
    out = generate(Params(target.params), prompts(), jax.random.key(0), max_new_tokens=NEW_TOKENS)
    return np.asarray(out.tokens)


# ---- Loading -------------------------------------------------------------------------------------


def check_loading(folder: str) -> None:
    """Compares the params read to a mesh with those read whole; tries what cannot be."""
    mesh = make_mesh("data=2,model=4")
    # Its query, key and value are stored as one.
    fused = replace(CONFIG, model_type="phi3", sliding_window=64)
    place_fsdp = Placement(mesh, CONFIG.head_dim, fsdp=True)
    for name, config in {"plain": CONFIG, "fused": fused}.items():
        path = Path(folder) / name
        whole = random_params(Transformer(config), 3, None)
        save_transformer(path, config, whole, "bfloat16")
        for placement in (replace(place_fsdp, fsdp=False), place_fsdp):
            for quantize in (None, "int4"):
                alone = load_transformer(path, config, "float32", quantize=quantize)
                parts = load_transformer(
                    path, config, "float32", quantize=quantize, placement=placement
                )
                jax.tree.map(np.testing.assert_array_equal, parts, alone)
    loaded = load(Path(folder) / "plain", mesh="data=2,model=4", fsdp=True)
    layer: Any = loaded.params["layers_0"]
    shapes = {
        name: leaf["weight"].sharding.shard_shape(leaf["weight"].shape)
        for name, leaf in (layer["self_attn"] | layer["mlp"] | loaded.params["norm"]).items()
        if isinstance(leaf, dict)
    }
    assert shapes["q_proj"] == (16, 32) and shapes["o_proj"] == (32, 16)
    assert shapes["k_proj"] == (8, 32) and shapes["down_proj"] == (32, 16)
    heads = [row.training().new_head(CONFIG) for row in METHODS.values() if row.training]
    for module in (Transformer(CONFIG), *heads):
        for name, shape in expected_shapes(module).items():
            is_split = set(place_fsdp.of(name, shape).spec) == {"data", "model"}
            assert is_split or len(shape) < 2 or name == "mask_embeddings.weight", name
    for axes, message in {
        "data=9": r"needs 9 device\(s\), but this run has 8",
        "model=x": "is not of the form data=2,model=4",
        "heads=8": "is not of the form data=2,model=4",
    }.items():
        with pytest.raises(SpecjaxError, match=message):
            load(Path(folder) / "plain", mesh=axes)
    few = Path(folder) / "few"  # heads for 8 devices, which have them all
    config = TransformerConfig(32, 64, 64, 1, 4, 4, 8)
    save_transformer(few, config, Transformer(config).initialise(jax.random.key(0)), "float32")
    alone, parts = (load(few, mesh=axes) for axes in (None, "model=8"))
    layer = parts.params["layers_0"]
    assert layer["self_attn"]["q_proj"]["weight"].sharding.is_fully_replicated
    assert not layer["mlp"]["up_proj"]["weight"].sharding.is_fully_replicated
    texts = [texts_of(each, drafter_of("pld", None)[0]) for each in (alone, parts)]
    np.testing.assert_array_equal(*texts)
    engine = Engine(Transformer(CONFIG, mesh=make_mesh("data=8")), drafter_of("plain", None)[0])
    command = ["train", "eagle", "--out", f"{folder}/run", "--batch-size", "4"]
    with redirect_stderr(StringIO()) as error:
        assert main(command) == 2
    assert "batch_size 4 does not spread evenly over data=8 of the mesh" in error.getvalue()
    with pytest.raises(SpecjaxError, match="a batch of 3 does not spread evenly over data=8"):
        engine.check(Params(whole), jax.tree.map(lambda leaf: leaf[:3], prompts()))
    check_count(loaded)


def check_count(loaded: LoadedTarget) -> None:
    """Refuses a text of which both devices of `data` hold the cache, where one copy would fit."""
    engine = Engine(loaded.model, drafter_of("plain", None)[0])
    text = jax.tree.map(lambda leaf: leaf[:1], prompts())
    slots = engine.num_slots(text.tokens.shape[1])
    cache = jax.eval_shape(partial(loaded.model.new_cache, loaded.params, 1, slots))
    scores = 4 * CONFIG.num_attention_heads * text.tokens.shape[1] * slots
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_host_bytes", lambda: 3 * device_bytes(cache) + scores)
        engine.check(Params(loaded.params), text)
        patch.setattr(memory, "_host_bytes", lambda: device_bytes(cache) * 3 // 2 + scores)
        with pytest.raises(SpecjaxError, match="on each of 8 devices, and cpu has"):
            engine.check(Params(loaded.params), text)


# ---- Training ------------------------------------------------------------------------------------


def run(mesh: Mesh, folder: Path) -> list[float]:
    """Trains, or goes on; returns the losses of all steps."""
    model = Transformer(CONFIG, mesh=mesh)
    target = FrozenModel(model, random_params(model, 0, mesh, fsdp=True), "tiny")
    training = METHODS["eagle"].training
    assert training is not None
    settings = HeadSettings(
        "eagle",
        training(),
        OptimizerOptions(learning_rate=1e-3),
        LoopOptions(num_steps=STEPS, save_every=SAVE_EVERY, log_every=1),
        DataOptions(batch_size=8, longest=64),
    )
    rng = np.random.default_rng(0)
    texts = rng.integers(0, CONFIG.vocab_size, (40, 60)).astype(np.int32)
    examples = [Example(tokens, np.ones(60, bool)) for tokens in texts]
    head, format = training().new_head(CONFIG), METHODS["eagle"].head
    assert format is not None
    train_head(head, format, target, examples, settings, folder, resume=True)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def check_training(folder: str) -> None:
    """Compares one device's losses with those of a run that was killed on another mesh.

    A classifier is trained on one device: its batches need not spread over all.
    """
    fit(made_up(), ClassifierTraining(num_steps=1, batch_size=3))
    axes = ("data", "model")
    kinds, first = (AxisType.Auto,) * 2, jax.devices()[:1]
    single = jax.make_mesh((1, 1), axes, axis_types=kinds, devices=first)
    alone = run(single, Path(folder) / "alone")
    for name, mesh in {"one": single, "many": make_mesh("data=8")}.items():
        resumed = Path(shutil.copytree(Path(folder) / "killed", Path(folder) / name))
        assert max(map(int, os.listdir(resumed / "checkpoints"))) in range(SAVE_EVERY, KILLED_AT)
        np.testing.assert_allclose(run(mesh, resumed), alone, atol=1e-5, rtol=0)
        assert len(json.loads((resumed / "run.json").read_text())["starts"]) == 2


def killed_run(folder: str, how: str) -> None:
    """Trains in two processes of 4 devices, of which the second kills itself."""
    count, steps = Progress.count, iter(range(1, STEPS + 1))

    def count_to_the_end(self, batch):
        if next(steps) == KILLED_AT and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        count(self, batch)

    Progress.count = count_to_the_end
    with distributed(how):
        run(make_mesh("data=2,model=4"), Path(folder) / "killed")


PROGRAMS = {
    "decode": check_decoding,
    "load": check_loading,
    "train": check_training,
    "killed": killed_run,
}

if __name__ == "__main__":
    for words in re.split(r" then ", " ".join(sys.argv[1:])):
        name, *arguments = words.split()
        if code := exit_code(partial(PROGRAMS[name], *arguments)):
            sys.exit(code)
