"""Trains the heads of SmolLM2-135M-Instruct, one after another.

    python -m recipes.smollm2.heads --target TARGET --data TEXTS --out FOLDER [--ship FOLDER]

TEXTS are those that `recipes.smollm2.texts` writes. As in HASS (section 4.2), HASS and a longer
EAGLE start from one EAGLE head and take the same further steps on the same texts, 1250 with one
seed and 300 with another, and so does ParallelSpec for EAGLE, with new masks. The longer ones, and
EAGLE-3, read 5 million tokens in all. Distributions are compared over the tokens that are drafted.
ParallelSpec for Medusa is also trained to read the target's features, as Medusa does and the
paper's head does not. Medusa and Hydra read the target's LM head: a separate one for each depth
would be larger than the target. Hydra's and EAGLE-3's heads are not kept: they would add 46 MB to
the 36 MB of the others. The kept heads of HASS and ParallelSpec for EAGLE learned from more texts,
see `recipes.smollm2.many_heads`.
"""

from recipes.heads import Recipe, Run, lasting, main

COMMON = (  # a step reads 2048 tokens
    *("--packing", "--longest", "512", "--batch-size", "4", "--accumulate", "1"),
    *("--warmup", "0.04", "--decay", "cosine", "--clip", "norm", "--clip-at", "1.0"),
    *("--eval-every", "250", "--save-every", "50", "--log-every", "10", "--eval-prompts", "16"),
    *("--eval-tokens", "96", "--resume"),
)
DRAFTED = ("--draft-vocab", "16384")
EAGLE3 = ("--draft-vocab", "8192", "--test-steps", "3")  # 97% of the texts' tokens
RUNS = {
    "eagle": Run("eagle", (*lasting(1200, 1e-3), *DRAFTED)),
    "eagle-longer": Run("eagle", (*lasting(1250, 5e-4, seed=1), *DRAFTED), "eagle"),
    "hass": Run("hass", (*lasting(1250, 5e-4, seed=1), *DRAFTED), "eagle"),
    "eagle-short": Run("eagle", (*lasting(300, 5e-4, seed=2), *DRAFTED), "eagle"),
    "hass-short": Run("hass", (*lasting(300, 5e-4, seed=2), *DRAFTED), "eagle"),
    "parallel-eagle": Run("parallel-eagle", (*lasting(1250, 5e-4, seed=1), *DRAFTED), "eagle"),
    "medusa": Run("medusa", (*lasting(300, 2e-3), "--no-lm-heads")),
    "parallel-medusa": Run("parallel-medusa", lasting(300, 1e-3)),
    "parallel-medusa-features": Run("parallel-medusa", (*lasting(300, 1e-3), "--features")),
    "hydra": Run("hydra", (*lasting(200, 2e-3), "--no-lm-heads")),
    "eagle3": Run("eagle3", (*lasting(2450, 1e-3, seed=1), *EAGLE3)),
}
KEPT = {"eagle": "eagle-longer", "medusa": "medusa", "parallel-medusa": "parallel-medusa"}
SMOLLM2 = Recipe(None, RUNS, COMMON, KEPT, dtype="bfloat16", draft_vocab=16384, keeps_states=True)

if __name__ == "__main__":
    main(SMOLLM2)
