"""`specjax tune induction-heads`, `pld-plus` and `pld-plus-attention`; curves as tables."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from specjax.bench.curves import Curve
from specjax.bench.measure import Request
from specjax.bench.progress import watched
from specjax.core.files import expand_user
from specjax.hub import LoadedTarget
from specjax.methods import METHODS
from specjax.tuned import Tuned
from specjax.tuning.induction_heads import answers, count_copies, ranked
from specjax.tuning.plots import plot
from specjax.tuning.prompt_lookup import Tuner

if TYPE_CHECKING:
    from specjax.cli.tune import Tune


def tune_lookup(
    options: "Tune", target: LoadedTarget, requests: Sequence[Request], known: Tuned
) -> Tuned:
    """What is known, with the best settings of PLD+ by hidden states or by attention.

    Raises:
        SpecjaxError: if no head of the target copies.
    """
    report = partial(show_curve, plots=options.plots)
    tuner = Tuner(target, requests, options.max_new_tokens, options.by, report)
    more = options.plots is not None
    if options.what == "pld-plus":
        chosen = tuner.hidden(more)
    else:
        heads = known.induction_heads or tune_heads(target, requests, options.max_new_tokens)
        known = replace(known, induction_heads=heads)
        chosen = tuner.attention(heads, more)
    settings = {name: getattr(chosen, name) for name in METHODS[options.what].tuned}
    print(f"{options.what}: " + ", ".join(f"{name}={value}" for name, value in settings.items()))
    return replace(known, settings={**known.settings, options.what: settings})


def tune_heads(
    target: LoadedTarget, requests: Sequence[Request], max_new_tokens: int
) -> tuple[tuple[int, int, int], ...]:
    """The heads that copy: layer, head, times; the best first."""
    texts = answers(target, requests, max_new_tokens)
    texts = watched(texts, "Looking for heads that copy", len(requests))
    heads = ranked(count_copies(texts, target.model, target.params))
    total = target.config.num_hidden_layers * target.config.num_attention_heads
    print(f"{len(heads)} of {total} heads looked most at the source of a copied token")
    for layer, head, times in heads[:10]:
        print(f"  layer {layer}, head {head}: {times} times")
    return heads


def show_curve(curve: Curve, plots: Path | None) -> None:
    """Prints a curve as a table, and draws it into the folder `plots`."""
    table = Table(curve.setting, title=curve.title, box=None)
    for name in curve.series:
        table.add_column(name, justify="right")
        table.add_column("tokens/s", justify="right")
    for row in zip(*curve.series.values(), strict=True):
        figures = [(point.accepted_length, point.tokens_per_second) for point in row]
        cells = [text for a, b in figures for text in (f"{a:.2f}", f"{b:.0f}")]
        table.add_row(str(row[0].value), *cells)
    Console(soft_wrap=True, markup=False, highlight=False).print(table)
    if plots is not None:
        print(f"drawn in {plot(curve, expand_user(plots))}")
