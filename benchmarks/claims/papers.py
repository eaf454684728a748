"""The claims of four papers, and of specjax, in our words, with the published figures.

Checked is the shape of a claim (more, faster, within), not its figure, which belongs to models and
GPUs of another size. A claim without a check names the command that would measure it.
"""

from typing import NamedTuple

from benchmarks.claims.checks import (
    AcceptsMore,
    AcceptsMoreDeeper,
    Check,
    DraftsFaster,
    DraftsInLess,
    Faster,
    GainsMoreOn,
    SameTokens,
    Spot,
    Sweep,
)
from benchmarks.claims.evidence import BEST_STATIC, CLOSE, EDITS, FREE


class Claim(NamedTuple):
    """One line of the report."""

    text: str  # names the bar, if that is not 1
    published: str  # figures, and where they stand
    check: Check | str  # or the command that would measure it


def _pld_plus(value: int) -> Spot:
    return Spot("num_tokens", "PLD+ (h)", value)


def _pld(value: int) -> Spot:
    return Spot("num_tokens", "PLD", value)


def _threshold(value: float) -> Spot:
    return Spot("min_similarity", "accepted length", value)


BEST_HEADS = Spot("number of heads", "accepted length", "best")
ALL_HEADS, ONE_LAYER = Spot("layer", "max", "all"), Spot("layer", "max", "best")
DEEP = 3  # depth from which drafts count as deep

PLD_PLUS = (
    Claim(
        "ranked by hidden states, copies are accepted further than PLD's (edits)",
        "above PLD at every K (figure 4)",
        AcceptsMore("pld-plus", "pld", EDITS),
    ),
    Claim(
        "so PLD+ is faster than PLD on input-guided tasks",
        "1.46x: 106.05 / 72.48 tokens/s, T=0 (table 1)",
        Faster("pld-plus", "pld", EDITS),
    ),
    Claim(
        "also when sampling",
        "1.21x: 59.66 / 49.47 tokens/s, T=1 (table 2)",
        Faster("pld-plus", "pld", EDITS, temperature=1.0),
    ),
    Claim(
        "sampling costs acceptance: edits at T=0 over T=1",
        "speedup 3.66x at T=0, 2.21x at T=1 (tables 1, 2)",
        AcceptsMore("pld-plus", "pld-plus", EDITS, second_temperature=1.0),
    ),
    Claim(
        f"attention ranks about as well as hidden states (ratio > {CLOSE})",
        "3.21 / 3.14 accepted (tables 6, 8), 103.23 / 106.05 tokens/s (table 1)",
        AcceptsMore("pld-plus-attention", "pld-plus", EDITS, bar=CLOSE),
    ),
    Claim(
        "PLD+ is faster than EAGLE, which is trained, on input-guided tasks",
        "1.33x: 106.05 / 79.84 tokens/s (table 1)",
        Faster("pld-plus", "eagle", EDITS),
    ),
    Claim(
        "faster than a draft model (SpS)",
        "1.98x: 106.05 / 53.58 tokens/s (table 1)",
        Faster("pld-plus", "draft-model", EDITS),
    ),
    Claim("faster than REST", "2.29x: 106.05 / 46.25 (table 1)", Faster("pld-plus", "rest", EDITS)),
    Claim(
        "faster than Lookahead",
        "2.52x: 106.05 / 42.05 tokens/s (table 1)",
        Faster("pld-plus", "lookahead", EDITS),
    ),
    Claim(
        "it gains most where the output repeats the input: edits over free text",
        "5.16x text editing, 1.92x conversation (table 1)",
        GainsMoreOn("pld-plus", EDITS, FREE),
    ),
    Claim(
        "the best induction heads rank better than all heads together",
        "1.11x: 3.21 / 2.90 accepted, 50 of 1024 heads (table 6)",
        Sweep(BEST_HEADS, ALL_HEADS),
    ),
    Claim(
        "and better than all heads of one layer",
        "best of all ways (figure 3)",
        Sweep(BEST_HEADS, ONE_LAYER),
    ),
    Claim(
        "long drafts pay: K=70 over K=10",
        "K=70 is best of 10 to 100 (section 5.5, figure 4)",
        Sweep(_pld_plus(70), _pld_plus(10)),
    ),
    Claim(
        "and more so than with PLD",
        "PLD+ gains from a larger K (section 7.2, figure 4)",
        Sweep(_pld_plus(70), _pld_plus(10), than=(_pld(70), _pld(10))),
    ),
    Claim(
        f"the accepted length levels off: K=70 over K=100 (ratio > {CLOSE})",
        "K=70 is best of 10 to 100 (section 5.5, figure 4)",
        Sweep(_pld_plus(70), _pld_plus(100), bar=CLOSE),
    ),
    Claim(
        "the last hidden state ranks better than the mean of the last four",
        "1.04x: 3.14 / 3.03 accepted (table 8)",
        "specjax reproduce pld-plus-table-8",
    ),
    Claim(
        "a strict threshold costs speed: none over cosine >= 0.75",
        "1.60x: 92.26 / 57.73 tokens/s (table 7)",
        Sweep(_threshold(-1.0), _threshold(0.75), is_speed=True),
    ),
    Claim(
        "drafting costs next to nothing: less than a tenth of a round",
        "no extra compute (abstract)",
        DraftsInLess("pld-plus", 0.1),
    ),
    Claim("layers 9 to 13 of 32 rank best", "figure 5", "specjax reproduce pld-plus-figure-5"),
    Claim(
        "it serves other model families as well",
        "2.12x Llama-2, 4.78x Mistral (table 3)",
        "specjax reproduce pld-plus-table-3",
    ),
    Claim(
        "copied tokens reveal their source",
        "token F1 on QuoteSum (table 10)",
        "specjax reproduce pld-plus-table-10",
    ),
)

DISCO = (
    Claim(
        "the classifier's draft lengths are faster than the best static one",
        "1.11x: 10.3% less latency (table 5)",
        Faster("disco", BEST_STATIC),
    ),
    Claim("faster than drafts of 5", "1.06x to 1.26x (table 1)", Faster("disco", "draft-model")),
    Claim(
        "faster than the heuristic",
        "1.46x: 31.4% less latency (table 5)",
        Faster("disco", "heuristic"),
    ),
    Claim(
        "but the oracle is faster still",
        "1.12x to 1.24x (table 1)",
        "specjax reproduce disco-table-1",
    ),
    Claim(
        "the oracle needs fewer target passes than drafts of 5",
        "1.41x: 38 / 27 passes (figure 3)",
        "specjax reproduce disco-figure-3",
    ),
    Claim(
        "the best length varies widely: deviation over mean > 0.88, the smallest there",
        "18.0±46.2, 14.7±42.6, 3.2±4.0, 2.4±2.1 (table 2)",
        "specjax reproduce disco-table-2",
    ),
    Claim(
        "the classifier predicts acceptance better than a static length: F1",
        "95-85, 88-76, 77-68 (table 4)",
        "specjax reproduce disco-table-4",
    ),
    Claim(
        "a classifier carries over to another task of its kind",
        "MBPP to HumanEval 1.84x, static 1.63x (table 1)",
        "specjax reproduce disco-table-1",
    ),
)

PARALLEL_SPEC = (
    Claim(
        "one parallel drafter is accepted further than Medusa's heads",
        "1.38x: 3.31 / 2.39 (table 1)",
        AcceptsMore("parallel-medusa", "medusa"),
    ),
    Claim("and is faster", "1.63x: 2.31x / 1.42x (table 1)", Faster("parallel-medusa", "medusa")),
    Claim(
        "it even overtakes EAGLE",
        "1.06x: 2.31x / 2.18x (section 5.2)",
        Faster("parallel-medusa", "eagle"),
    ),
    Claim(
        f"in EAGLE it is accepted hardly less (ratio > {CLOSE})",
        "0.98x: 3.52 / 3.58 (table 1)",
        AcceptsMore("parallel-eagle", "eagle", bar=CLOSE),
    ),
    Claim(
        "and is faster than EAGLE",
        "1.17x: 2.55x / 2.18x (table 1)",
        Faster("parallel-eagle", "eagle"),
    ),
    Claim(
        f"the same at T=1: accepted hardly less (ratio > {CLOSE})",
        "0.97x: 3.09 / 3.18 (table 1)",
        AcceptsMore("parallel-eagle", "eagle", temperature=1.0, bar=CLOSE),
    ),
    Claim(
        "and faster",
        "1.10x: 2.02x / 1.84x (table 1)",
        Faster("parallel-eagle", "eagle", temperature=1.0),
    ),
    Claim(
        "one pass drafts in less than half of EAGLE's time, which takes five",
        "wall time (figure 1)",
        DraftsFaster("parallel-eagle", "eagle", 0.5),
    ),
    Claim(
        "and in less time than Medusa's heads",
        "less runtime of the drafter (section 5.2)",
        DraftsFaster("parallel-medusa", "medusa"),
    ),
    Claim(
        "Hydra's heads, which know what was drafted, are accepted further than Medusa's",
        "1.36x: 3.26 / 2.39 (table 1)",
        AcceptsMore("hydra", "medusa"),
    ),
    Claim(
        "the accepted length grows with the masks up to K=4, then levels off",
        "figure 4",
        "specjax reproduce parallelspec-figure-4",
    ),
    Claim(
        "texts generated by the target lengthen acceptance",
        "1.08x: 3.78 / 3.49 (table 2)",
        "specjax reproduce parallelspec-table-2",
    ),
    Claim(
        "newer targets gain too",
        "2.75x / 2.47x Llama-3 (table 2)",
        "specjax reproduce parallelspec-table-2",
    ),
)

HASS = (
    Claim(
        "training in the contexts of drafting lengthens what EAGLE-2 accepts",
        "1.12x: 5.15 / 4.61, T=0 (table 1)",
        AcceptsMore("hass", "eagle2"),
    ),
    Claim(
        "also when sampling",
        "1.12x: 4.92 / 4.40, T=1 (table 1)",
        AcceptsMore("hass", "eagle2", temperature=1.0),
    ),
    Claim("so it is faster", "1.15x: 3.24x / 2.81x, T=0 (table 2)", Faster("hass", "eagle2")),
    Claim(
        "also when sampling",
        "1.12x: 2.90x / 2.60x, T=1 (table 2)",
        Faster("hass", "eagle2", temperature=1.0),
    ),
    Claim(
        f"acceptance holds up better at depths {DEEP} and more",
        "above EAGLE-2 in later steps (figure 5)",
        AcceptsMoreDeeper("hass", "eagle2", DEEP),
    ),
    Claim(
        "EAGLE-2's growing tree is accepted further than EAGLE's",
        "1.22x: 4.61 / 3.78 (table 1)",
        AcceptsMore("eagle2", "eagle"),
    ),
    Claim("and is faster", "1.40x: 2.81x / 2.01x (table 2)", Faster("eagle2", "eagle")),
    Claim(
        "on free text EAGLE is accepted further than PLD, which is not trained",
        "2.59x: 3.78 / 1.46 (table 1)",
        AcceptsMore("eagle", "pld", FREE),
    ),
    Claim(
        "and further than Lookahead",
        "2.24x: 3.78 / 1.69 (table 1)",
        AcceptsMore("eagle", "lookahead", FREE),
    ),
    Claim(
        "three or four aligned steps are best",
        "4.78, 5.11, 5.15, 5.16, 5.11 with 1 to 5 (table 4)",
        "specjax reproduce hass-table-4",
    ),
    Claim(
        "the Top-K loss helps at every weight",
        "5.09 without, up to 5.17 (table 7)",
        "specjax reproduce hass-table-7",
    ),
    Claim(
        "texts generated by the target help",
        "1.07x: 5.51 / 5.15 (table 8)",
        "specjax reproduce hass-table-8",
    ),
)

SPECJAX = (
    Claim(
        "same tokens as plain decoding, T=0",
        "every paper: greedy text is unchanged",
        SameTokens(0.0),
    ),
    Claim(
        "same key, same tokens as plain decoding, T=1",
        "papers: the same distribution",
        SameTokens(1.0),
    ),
    Claim(
        "EAGLE-2's tree that knows the noise is accepted further than the published one, T=1",
        "published trees do not know it",
        AcceptsMore("eagle2", "blind", temperature=1.0),
    ),
    Claim(
        "the same with HASS's head",
        "published trees do not know it",
        AcceptsMore("hass", "blind-hass", temperature=1.0),
    ),
)

PAPERS = {
    "PLD+": PLD_PLUS,
    "DISCO": DISCO,
    "ParallelSpec": PARALLEL_SPEC,
    "HASS": HASS,
    "specjax": SPECJAX,
}
