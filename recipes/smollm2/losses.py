"""Compares the published losses with an LK loss on SmolLM2, in short runs with three seeds.

    python -m recipes.smollm2.losses --target TARGET --data TEXTS --out FOLDER

EAGLE-3 starts from random params, ParallelSpec from the EAGLE head that ships. Runs of one seed
read the same texts in the same order. The last line of a run's `metrics.jsonl` has its accepted
length.
"""

from pathlib import Path

from recipes.heads import Recipe, Run, lasting, main
from recipes.smollm2.heads import COMMON

EAGLE3 = ("--draft-vocab", "16384", "--test-steps", "3")
LK = ("--distribution-loss", "lk-lambda")
START = ("--start", str(Path(__file__).parent / "heads/eagle"))
METHODS = {"parallel-eagle": (5e-4, START), "eagle3": (1e-3, EAGLE3)}  # learning rate, settings
LOSSES = {"published": (), "lk-lambda": LK}
RUNS = {
    f"{method}-{loss}-{seed}": Run(method, (*lasting(50, rate, seed), *settings, *chosen))
    for seed in range(3)
    for method, (rate, settings) in METHODS.items()
    for loss, chosen in LOSSES.items()
}
COMPARISON = Recipe(None, RUNS, COMMON, {}, dtype="bfloat16")

if __name__ == "__main__":
    main(COMPARISON)
