"""Sweeps the settings of PLD+'s ablations: python -m benchmarks.claims.ablations --out FOLDER

Adds the curves of PLD and PLD+ over K (figure 4), of thresholds (table 7), of the number of
induction heads (table 6) and of whole layers of attention heads (figure 3) to FOLDER, where
`benchmarks.claims` reads them. Run `specjax tune pld-plus` and `specjax tune induction-heads`
first: other settings, and the ranking of the heads, are those tuned for the target.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.claims.curves import Curve, keep_curve
from benchmarks.harness import at_least_1, main, requests_for
from specjax import load, load_drafter
from specjax.bench.report.tables import sweep_table
from specjax.bench.report.terminal import print_grid
from specjax.core.files import writable_folder
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.prompt_lookup_plus import PromptLookupPlusAttention
from specjax.loading.tuned import tuned_for
from specjax.tuning.induction_heads import all_heads
from specjax.tuning.runs import Workload
from specjax.tuning.settings import FIRST_NUM_TOKENS, NUM_TOKENS, head_counts

THRESHOLDS = (-1.0, -0.75, -0.5, 0.0, 0.5, 0.75)


@dataclass(frozen=True)
class AblationOptions:
    """The options of this benchmark."""

    out: Path  # folder for the curves
    target: str = "pocket"  # pocket, a folder in Hugging Face format, or a hub id
    tasks: str = "pocket"  # as in `specjax bench --tasks`
    limit: int = 4  # prompts of each kind of task
    max_new_tokens: int = 128  # new tokens per prompt at most


def ablations(workload: Workload) -> Mapping[tuple[str, str], Mapping[str, Mapping[Any, Any]]]:
    """Returns the drafters of each series by value, by the title and the setting of their curve."""
    config = workload.target.config
    hidden: Any = load_drafter("pld-plus", workload.target)[0]
    layers = {
        layer: PromptLookupPlusAttention.heads_for(config, layer)
        for layer in range(config.num_hidden_layers)
    } | {"all": all_heads(config)}
    attention = PromptLookupPlusAttention(num_tokens=FIRST_NUM_TOKENS)
    ranked = tuple((layer, head) for layer, head, _ in tuned_for(workload.target).induction_heads)
    return {
        ("PLD+ (h) and PLD over K (Figure 4)", "num_tokens"): {
            "PLD+ (h)": {count: replace(hidden, num_tokens=count) for count in NUM_TOKENS},
            "PLD": {  # which as published drafts nothing where K tokens do not follow
                count: PromptLookup(count, allow_shorter=True) for count in NUM_TOKENS
            },
        },
        ("PLD+ (h) over thresholds (Table 7)", "min_similarity"): {
            "accepted length": {x: replace(hidden, min_similarity=x) for x in THRESHOLDS}
        },
        ("PLD+ (a) over the number of heads, K=10 (Table 6)", "number of heads"): {
            "accepted length": {
                n: replace(attention, heads=ranked[:n]) for n in head_counts(ranked)
            }
        },
        ("PLD+ (a) with all heads of a layer, K=10 (Figure 3)", "layer"): {
            name: {
                layer: replace(attention, heads=heads, aggregate=name)
                for layer, heads in layers.items()
            }
            for name in ("max", "sum")
        },
    }


def run(options: AblationOptions) -> None:
    """Sweeps all settings, prints their figures and keeps their curves."""
    at_least_1(options, "limit", "max_new_tokens")
    folder, target = writable_folder(options.out), load(options.target)
    requests = requests_for(target, options.tasks, options.limit, options.max_new_tokens)
    workload = Workload(target, [request.ids for request in requests], options.max_new_tokens)
    for (title, setting), series in ablations(workload).items():
        points = {
            name: workload.sweep({value: (drafter, None) for value, drafter in drafters.items()})
            for name, drafters in series.items()
        }
        keep_curve(folder, Curve(title, setting, points))
        for name, line in points.items():
            print_grid(sweep_table(f"{title}: {name}", setting, line))


if __name__ == "__main__":
    main(run, AblationOptions, __doc__)
