"""Trains pocket's heads, one after another: `python -m recipes.pocket.heads --data FILE --out DIR`.

Each run is a `specjax train` command, which works for any target. As in HASS (section 4.2), all
runs of EAGLE and HASS start from one EAGLE head and take the same number of further steps: with
EAGLE's own loss, with the Top-K loss added, and with 2, 3 and 4 steps of harmonized context
alignment. ParallelSpec for EAGLE starts from that head as well, with new masks; Medusa, Hydra and
ParallelSpec for Medusa start from random params. The distilled runs continue on texts that the
target wrote itself. Medusa's four heads have separate LM heads, as published; Hydra's are
larger and read the target's, to keep the package small. The same command resumes an interrupted
run.
"""

from recipes.heads import Recipe, Run, lasting, main

COMMON = (
    *("--packing", "--longest", "512", "--batch-size", "8"),
    *("--accumulate", "1", "--warmup", "0.04"),
    *("--decay", "cosine", "--clip", "norm", "--clip-at", "1.0", "--resume"),
)
TEXTS = ("--limit", "12000")
FIRST = (*TEXTS, *lasting(1500, 6e-3))
MORE = lasting(500, 3e-3, seed=1)
ALIGNED = (*MORE, *TEXTS, "--align-steps")
DISTILLED = ("--distill", "--limit", "4000")
AFTER = lasting(80, 2e-3, seed=2)


def distilled(method: str, start: str, *settings: str) -> Run:
    """Returns a run that continues `start` on the texts that the target wrote for HASS."""
    return Run(method, (*AFTER, *settings), start, "hass-3-distilled")


RUNS = {
    "eagle": Run("eagle", FIRST),
    "eagle-longer": Run("eagle", (*MORE, *TEXTS), "eagle"),
    "eagle-top-k": Run("hass", (*ALIGNED, "1"), "eagle"),
    "hass-2": Run("hass", (*ALIGNED, "2"), "eagle"),
    "hass-3": Run("hass", (*ALIGNED, "3"), "eagle"),
    "hass-4": Run("hass", (*ALIGNED, "4"), "eagle"),
    "hass-3-distilled": Run("hass", (*MORE, *DISTILLED, "--align-steps", "3"), "eagle"),
    "eagle-distilled": distilled("eagle", "eagle"),
    "eagle3": Run("eagle3", (*TEXTS, *lasting(150, 3e-3), "--draft-vocab", "0")),
    "medusa": Run("medusa", (*TEXTS, *lasting(1000, 2e-3), "--num-heads", "4")),
    "medusa-distilled": distilled("medusa", "medusa", "--num-heads", "4"),
    "hydra": Run("hydra", (*TEXTS, *lasting(400, 3e-3), "--no-lm-heads")),
    "hydra-distilled": distilled("hydra", "hydra", "--no-lm-heads"),
    "parallel-medusa": Run("parallel-medusa", (*TEXTS, *lasting(300, 6e-3))),
    "parallel-medusa-features": Run(
        "parallel-medusa", (*TEXTS, *lasting(200, 4e-3), "--features"), "eagle"
    ),
    "parallel-medusa-distilled": distilled("parallel-medusa", "parallel-medusa"),
    "parallel-eagle": Run("parallel-eagle", (*TEXTS, *lasting(500, 4e-3)), "eagle"),
    "parallel-eagle-distilled": distilled("parallel-eagle", "parallel-eagle"),
}
SHIPPED = {  # name in the package, run
    "eagle": "eagle",
    "hass": "hass-3",
    "eagle3": "eagle3",
    "medusa": "medusa",
    "hydra": "hydra",
    "parallel-medusa": "parallel-medusa",
    "parallel-eagle": "parallel-eagle",
}
POCKET = Recipe("pocket", RUNS, COMMON, SHIPPED, dtype="float16")

if __name__ == "__main__":
    main(POCKET)
