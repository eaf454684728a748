"""Trains the heads of SmolLM2-135M-Instruct on many texts, on a GPU or TPU.

    python -m recipes.smollm2.many_heads --target TARGET --data TEXTS --out FOLDER [--ship FOLDER]

TEXTS are those that `recipes.smollm2.many_texts` writes. A step reads 8192 tokens, four times as
many as in `recipes.smollm2.heads`. All but EAGLE-3 start from the EAGLE head that ships, a copy of
which is FOLDER/eagle/head. Runs do not depend on each other, so several commands can share a
device; an H100 took three minutes for all three at once. EAGLE-3's head is not kept, as there.
"""

import sys
from dataclasses import replace

from recipes.heads import Run, main
from recipes.smollm2.heads import DRAFTED, EAGLE3, SMOLLM2, lasting

WIDER = ("--batch-size", "16", "--save-every", "500", "--eval-every", "1000")
STEPS = 1100
LASTING = (*WIDER, *lasting(STEPS, 1e-3, seed=3))
RUNS = {
    "hass-many": Run("hass", (*LASTING, *DRAFTED), "eagle"),
    "parallel-eagle-many": Run("parallel-eagle", (*LASTING, *DRAFTED), "eagle"),
    "eagle3-many": Run("eagle3", (*LASTING, *EAGLE3)),
}
KEPT = {"hass": "hass-many", "parallel-eagle": "parallel-eagle-many"}
ALL_RUNS, ALL_KEPT = {**SMOLLM2.runs, **RUNS}, {**SMOLLM2.shipped, **KEPT}
MANY = replace(SMOLLM2, runs=RUNS, shipped=KEPT, keeps_states=False)

if __name__ == "__main__":
    sys.exit(main(MANY))
