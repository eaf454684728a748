"""What ParallelSpec and HASS claim, of heads that are trained to draft."""

from specjax.bench.claims.checks import (
    AcceptsMore,
    AcceptsMoreDeeper,
    DraftsFaster,
    Faster,
)
from specjax.bench.claims.findings import (
    CLOSE,
    FREE,
    claims_of,
)

DEEP = 3  # depth from which drafts count as deep


PARALLEL_SPEC = claims_of(
    "ParallelSpec",
    (
        "one parallel drafter is accepted further than Medusa's heads",
        "1.38x: 3.31 / 2.39 (table 1)",
        AcceptsMore("parallel-medusa", "medusa"),
    ),
    (
        "and is faster",
        "1.63x: 2.31x / 1.42x (table 1)",
        Faster("parallel-medusa", "medusa"),
    ),
    (
        "it even overtakes EAGLE",
        "1.06x: 2.31x / 2.18x (section 5.2)",
        Faster("parallel-medusa", "eagle"),
    ),
    (
        f"in EAGLE it is accepted hardly less (ratio > {CLOSE})",
        "0.98x: 3.52 / 3.58 (table 1)",
        AcceptsMore("parallel-eagle", "eagle", bar=CLOSE),
    ),
    (
        "and is faster than EAGLE",
        "1.17x: 2.55x / 2.18x (table 1)",
        Faster("parallel-eagle", "eagle"),
    ),
    (
        f"the same at T=1: accepted hardly less (ratio > {CLOSE})",
        "0.97x: 3.09 / 3.18 (table 1)",
        AcceptsMore("parallel-eagle", "eagle", temperature=1.0, bar=CLOSE),
    ),
    (
        "and faster",
        "1.10x: 2.02x / 1.84x (table 1)",
        Faster("parallel-eagle", "eagle", temperature=1.0),
    ),
    (
        "one pass drafts in less than half of EAGLE's time, which takes five",
        "wall time (figure 1)",
        DraftsFaster("parallel-eagle", "eagle", 0.5),
    ),
    (
        "and in less time than Medusa's heads",
        "less runtime of the drafter (section 5.2)",
        DraftsFaster("parallel-medusa", "medusa"),
    ),
    (
        "Hydra's heads, which know what was drafted, are accepted further than Medusa's",
        "1.36x: 3.26 / 2.39 (table 1)",
        AcceptsMore("hydra", "medusa"),
    ),
    (
        "the accepted length grows with the masks up to K=4, then levels off",
        "figure 4",
        "a head per K: python -m specjax.bench.group_size",
    ),
    (
        "texts of the target's own lengthen acceptance",
        "1.08x: 3.78 / 3.49 (table 2)",
        "one more head: python -m specjax.pocket.heads",
    ),
    ("newer targets gain too", "2.75x / 2.47x Llama-3 (table 2)", "a model of 8B"),
)

HASS_CLAIMS = claims_of(
    "HASS",
    (
        "training in the contexts of drafting lengthens what EAGLE-2 accepts",
        "1.12x: 5.15 / 4.61, T=0 (table 1)",
        AcceptsMore("hass", "eagle2"),
    ),
    (
        "also when sampling",
        "1.12x: 4.92 / 4.40, T=1 (table 1)",
        AcceptsMore("hass", "eagle2", temperature=1.0),
    ),
    (
        "and so it is faster",
        "1.15x: 3.24x / 2.81x, T=0 (table 2)",
        Faster("hass", "eagle2"),
    ),
    (
        "also when sampling",
        "1.12x: 2.90x / 2.60x, T=1 (table 2)",
        Faster("hass", "eagle2", temperature=1.0),
    ),
    (
        f"acceptance holds up better at depths {DEEP} and more",
        "above EAGLE-2 in later steps (figure 5)",
        AcceptsMoreDeeper("hass", "eagle2", DEEP),
    ),
    (
        "EAGLE-2's growing tree is accepted further than EAGLE's",
        "1.22x: 4.61 / 3.78 (table 1)",
        AcceptsMore("eagle2", "eagle"),
    ),
    ("and is faster", "1.40x: 2.81x / 2.01x (table 2)", Faster("eagle2", "eagle")),
    (
        "on free text EAGLE is accepted further than PLD, which is not trained",
        "2.59x: 3.78 / 1.46 (table 1)",
        AcceptsMore("eagle", "pld", FREE),
    ),
    (
        "and further than Lookahead",
        "2.24x: 3.78 / 1.69 (table 1)",
        AcceptsMore("eagle", "lookahead", FREE),
    ),
    (
        "three or four aligned steps are best",
        "4.78, 5.11, 5.15, 5.16, 5.11 with 1 to 5 (table 4)",
        "a head per number of steps: python -m specjax.pocket.heads",
    ),
    (
        "the Top-K loss helps at every weight",
        "5.09 without, up to 5.17 (table 7)",
        "a head per weight: specjax train hass --top-weight",
    ),
    (
        "texts of the target's own help",
        "1.07x: 5.51 / 5.15 (table 8)",
        "one more head: python -m specjax.pocket.heads",
    ),
)
