"""Trains the heads of SmolLM2-135M-Instruct on many texts, on a GPU or TPU.

    python -m recipes.smollm2.many_heads --target TARGET --data TEXTS --out FOLDER [--ship FOLDER]

TEXTS are those that `recipes.smollm2.many_texts` writes. A step reads 8192 tokens, four times as
many as in `recipes.smollm2.heads`. All but EAGLE-3 start from the EAGLE head that ships. Runs do
not depend on each other, so several commands with `XLA_PYTHON_CLIENT_PREALLOCATE=false` can share a
device: an H100 took three minutes for three at once. EAGLE-3's head, of 20 MB, is not kept.
"""

from dataclasses import replace
from pathlib import Path

from recipes.heads import Run, lasting, main
from recipes.smollm2.heads import DRAFTED, EAGLE3, SMOLLM2

WIDER = ("--batch-size", "16", "--save-every", "500", "--eval-every", "1000")
START = ("--start", str(Path(__file__).parent / "heads/eagle"))
STEPS = 1100
LASTING = (*WIDER, *lasting(STEPS, 1e-3, seed=3))
RUNS = {
    "hass-many": Run("hass", (*LASTING, *DRAFTED, *START)),
    "parallel-eagle-many": Run("parallel-eagle", (*LASTING, *DRAFTED, *START)),
    "eagle3-many": Run("eagle3", (*LASTING, *EAGLE3)),
}
KEPT = {"hass": "hass-many", "parallel-eagle": "parallel-eagle-many"}
ALL_RUNS, ALL_KEPT = {**SMOLLM2.runs, **RUNS}, {**SMOLLM2.shipped, **KEPT}
MANY = replace(SMOLLM2, runs=RUNS, shipped=KEPT, keeps_states=False)


def start_of(run: Run) -> str | None:
    """Returns the run whose head this one starts from; None: it begins anew."""
    if "--start" not in run.settings:
        return run.start
    return ALL_KEPT[Path(run.settings[run.settings.index("--start") + 1]).name]


if __name__ == "__main__":
    main(MANY)
