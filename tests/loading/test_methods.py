"""The registry: settings are checked and parsed by the fields of each method's drafter."""

import random
from dataclasses import replace
from typing import Any

import jax
import pytest

import specjax
from specjax.core.errors import SpecjaxError
from specjax.core.settings import SettingError, bounds_of
from specjax.loading.method import Request
from specjax.loading.methods import METHODS
from tests.rejected import rejected_values


@pytest.fixture(scope="module")
def pocket():
    return specjax.load("pocket")


@pytest.mark.parametrize("method", ["medusa", "parallel-eagle"])
def test_a_static_tree_is_possible_on_a_cpu(pocket, method):
    for settings in ({"tree": "static"}, {"choices": ((0,), (0, 0), (1,))}):
        drafter, _ = specjax.load_drafter(method, pocket, **settings)
        assert drafter.tree == "static"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="passes are short there")
@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.on_cpu(8)])
def test_passes_of_a_cpu_have_its_cheap_nodes(pocket, method, nodes, monkeypatch):
    monkeypatch.setattr(specjax.loading.method, "cheap_rows", lambda *_: nodes)
    drafter, _ = Request(METHODS, method, pocket, uses_tuned=False).load()
    is_longer = method == "lookahead" or hasattr(drafter, "max_tokens")
    assert 2 <= drafter.pass_width <= (2 * nodes if is_longer else nodes)
    if hasattr(drafter, "max_tokens"):
        assert nodes in drafter.pass_widths


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="passes are short there")
def test_a_size_that_is_set_brings_the_others_that_suit_it(pocket, monkeypatch):
    kinds = []
    nodes_of = lambda _, kind: kinds.append(kind) or 4  # noqa: E731
    monkeypatch.setattr(specjax.loading.method, "cheap_rows", nodes_of)
    assert METHODS.make("rest", pocket.config, {"num_tokens": 3}).num_nodes == 4
    for settings, nodes, depth in (({"num_tokens": 60}, 60, 5), ({"depth": 6}, 7, 6)):
        drafter, _ = specjax.load_drafter("hass", pocket, **settings)
        assert (drafter.num_nodes, drafter.max_depth) == (nodes, depth)
    specjax.load_drafter("hass", specjax.load("pocket", quantize="int8"))
    assert kinds == [None, None, "int8"]


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        (method, name, value)
        for method, row in METHODS.items()
        for name, value in rejected_values(row.drafter)
        if name in row.settings
    ],
    ids=str,
)
def test_a_setting_outside_its_type_or_bounds_is_rejected(method, name, value):
    with pytest.raises(SettingError) as error:
        METHODS.check(method, {name: value})
    assert error.value.field == name


@pytest.mark.parametrize("method", METHODS)
def test_defaults_pass_and_survive_the_command_line(method):
    settings = {
        name: value
        for name, value in METHODS[method].settings.items()
        if isinstance(value, (bool, int, float, str, tuple))
    }
    texts = [f"{name.replace('_', '-')}={value}" for name, value in settings.items()]
    read = METHODS.read_settings(method, texts)
    assert read == settings
    assert list(map(type, read.values())) == list(map(type, settings.values()))


def test_a_value_that_python_cannot_build_is_one_error():
    with pytest.raises(SettingError, match="`heads` must be "):
        METHODS.read_settings("pld-plus-attention", ["heads={[1]:2}"])


def test_settings_of_parts_are_those_of_the_methods_they_name():
    read = METHODS.read_settings("hybrid", ["copy=pld,copy.max_ngram=4", "head.depth=3"])
    assert read == {"copy": "pld", "copy.max_ngram": 4, "head.depth": 3}
    with pytest.raises(SettingError, match=r"`max_ngram` .*; `specjax methods pld "):
        METHODS.read_settings("hybrid", ["copy=pld", "copy.max_ngram=few"])
    with pytest.raises(SpecjaxError, match="method 'pld' has no setting 'depth'"):
        METHODS.check("hybrid", {"copy": "pld", "copy.depth": 3})


# ---- Every setting runs, or is rejected before anything compiles ---------------------------------


def drawn_setting(numbers: random.Random, method: str, name: str) -> Any:
    """A value of a setting within its bounds, small enough to be traced quickly."""
    row = METHODS[method]
    bounds, default = bounds_of(row.drafter, name), row.settings[name]
    if name in row.parts:
        return numbers.choice(list(METHODS))
    if bounds.choices or isinstance(default, bool):
        return numbers.choice(bounds.choices or (False, True))
    least = bounds.at_least if bounds.above is None else bounds.above + 0.01
    if isinstance(default, int):
        return numbers.randint(least or 0, min(bounds.at_most or 12, (least or 0) + 12))
    if isinstance(default, float):
        return numbers.uniform(least or 0, bounds.at_most or 2)
    return default


def trace(target: specjax.LoadedTarget, method: str, settings: dict[str, Any]) -> bool:
    """Traces a whole run; returns False for settings that are rejected before it."""
    prompt, key = specjax.encode(target.tokenizer, ["def f(x):\n    return x\n"]), jax.random.key(0)
    try:
        drafter, drafter_params = specjax.load_drafter(method, target, **settings)
        engine = specjax.Engine(target.model, drafter, max_new_tokens=20)
        params = specjax.Params(target.params, drafter_params)
        engine.check(params, prompt)
    except SpecjaxError as error:
        assert "\n" not in str(error)
        return False
    state = jax.eval_shape(lambda *inputs: engine.prefill(*inputs), params, prompt, key)
    jax.eval_shape(lambda *inputs: engine.run(*inputs, max_rounds=20), params, state)
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"num_tokens": 5, "copy.num_tokens": 30}, {"copy": "hass", "head": "hybrid"}],
    ids=str,
)
def test_parts_of_a_hybrid_may_be_deeper_than_its_tree(pocket, settings):
    assert trace(pocket, "hybrid", settings)


def test_a_hybrid_without_a_head_copies_and_recycles(pocket):
    other = replace(pocket, name="another target")
    assert specjax.load_drafter("hybrid", other)[0].parts == (
        specjax.load_drafter("pld", other)[0],
        specjax.load_drafter("recycling", other)[0],
    )
    settings = METHODS.read_settings("hybrid", ["head.from_prompt=false,copy.num_guesses=2"])
    copy, head = specjax.load_drafter("hybrid", other, **settings)[0].parts
    assert (copy.num_guesses, head.from_prompt) == (2, False)
    with pytest.raises(SpecjaxError, match="name a folder"):
        specjax.load_drafter("hybrid", other, head="hass")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_drawn_settings_run_or_are_rejected(pocket, tiny, method):
    """A method that needs nothing of pocket is traced with two layers instead of eight."""
    row = METHODS[method]
    needs_pocket = row.part or row.parts or "heads" in row.settings
    target = pocket if needs_pocket else specjax.load(tiny)
    numbers, names = random.Random(method), list(row.settings)
    num_traced = 0
    for _ in range(12 if method == "hybrid" else 4 if names else 1):
        chosen = numbers.sample(names, min(len(names), numbers.randint(1, 3)))
        settings = {name: drawn_setting(numbers, method, name) for name in chosen}
        num_traced += trace(target, method, settings)
    assert num_traced
