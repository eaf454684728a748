"""What PLD+ and DISCO claim, of drafts that are copied and of how long drafts should be."""

from specjax.bench.claims.checks import (
    AcceptsMore,
    DraftsInLess,
    Faster,
    Foretells,
    GainsMore,
    GainsMoreOn,
    Varies,
)
from specjax.bench.claims.findings import (
    CLOSE,
    EDITS,
    FREE,
    claims_of,
)

# Contestants that are no method with its defaults; `claims_run` tells their settings.
PLD_SHORT, PLD_LONG = "pld K=10, cut short", "pld K=70, cut short"
PLUS_SHORT, PLUS_LONG = "pld-plus K=10", "pld-plus K=100"
PLUS_MEANS, PLUS_STRICT = "pld-plus m=4", "pld-plus cosine>=0.75"
ALL_HEADS, ONE_LAYER = "pld-plus-attention, all heads", "pld-plus-attention, one layer"
STATIC, STATIC_5, HEURISTIC = "draft-model static", "draft-model static-5", "draft-model heuristic"
DISCO, ORACLE = "draft-model disco", "draft-model oracle"


PLD_PLUS = claims_of(
    "PLD+",
    (
        "ranked by hidden states, copies are accepted further than PLD's (edits)",
        "above PLD at every K (figure 4)",
        AcceptsMore("pld-plus", "pld", EDITS),
    ),
    (
        "and so PLD+ is faster than PLD on input-guided tasks",
        "1.46x: 106.05 / 72.48 tokens/s, T=0 (table 1)",
        Faster("pld-plus", "pld", EDITS),
    ),
    (
        "also when sampling",
        "1.21x: 59.66 / 49.47 tokens/s, T=1 (table 2)",
        Faster("pld-plus", "pld", EDITS, temperature=1.0),
    ),
    (
        "sampling costs acceptance: edits at T=0 over T=1",
        "speedup 3.66x at T=0, 2.21x at T=1 (tables 1, 2)",
        AcceptsMore("pld-plus", "pld-plus", EDITS, second_temperature=1.0),
    ),
    (
        f"attention ranks about as well as hidden states (ratio > {CLOSE})",
        "3.21 / 3.14 accepted (tables 6, 8), 103.23 / 106.05 tokens/s (table 1)",
        AcceptsMore("pld-plus-attention", "pld-plus", EDITS, bar=CLOSE),
    ),
    (
        "PLD+ is faster than EAGLE, which is trained, on input-guided tasks",
        "1.33x: 106.05 / 79.84 tokens/s (table 1)",
        Faster("pld-plus", "eagle", EDITS),
    ),
    (
        "faster than a draft model (SpS)",
        "1.98x: 106.05 / 53.58 tokens/s (table 1)",
        Faster("pld-plus", STATIC, EDITS),
    ),
    ("faster than REST", "2.29x: 106.05 / 46.25 (table 1)", Faster("pld-plus", "rest", EDITS)),
    (
        "faster than Lookahead",
        "2.52x: 106.05 / 42.05 tokens/s (table 1)",
        Faster("pld-plus", "lookahead", EDITS),
    ),
    (
        "it gains most where the output repeats the input: edits over free text",
        "5.16x text editing, 1.92x conversation (table 1)",
        GainsMoreOn("pld-plus", EDITS, FREE),
    ),
    (
        "the best induction heads rank better than all heads together",
        "1.11x: 3.21 / 2.90 accepted, 50 of 1024 heads (table 6)",
        AcceptsMore("pld-plus-attention", ALL_HEADS, EDITS),
    ),
    (
        "and better than all heads of one layer",
        "best of all ways (figure 3)",
        AcceptsMore("pld-plus-attention", ONE_LAYER, EDITS),
    ),
    (
        "long drafts pay: K=70 over K=10",
        "K=70 is best of 10 to 100 (section 5.5, figure 4)",
        AcceptsMore("pld-plus", PLUS_SHORT, EDITS),
    ),
    (
        "and more so than with PLD",
        "PLD+ gains from a larger K (section 7.2, figure 4)",
        GainsMore(("pld-plus", PLUS_SHORT), (PLD_LONG, PLD_SHORT), EDITS),
    ),
    (
        f"the accepted length levels off: K=70 over K=100 (ratio > {CLOSE})",
        "K=70 is best of 10 to 100 (section 5.5, figure 4)",
        AcceptsMore("pld-plus", PLUS_LONG, EDITS, bar=CLOSE),
    ),
    (
        "the last hidden state ranks better than the mean of the last four",
        "1.04x: 3.14 / 3.03 accepted (table 8)",
        AcceptsMore("pld-plus", PLUS_MEANS, EDITS),
    ),
    (
        "a strict threshold costs speed: none over cosine >= 0.75",
        "1.60x: 92.26 / 57.73 tokens/s (table 7)",
        Faster("pld-plus", PLUS_STRICT, EDITS),
    ),
    (
        "drafting costs next to nothing: less than a tenth of a round",
        "no compute of its own (abstract)",
        DraftsInLess("pld-plus", 0.1),
    ),
    (
        "layers 9 to 13 of 32 rank best",
        "figure 5",
        "a run per layer: specjax tune pld-plus --plots FOLDER",
    ),
    (
        "it serves other model families as well",
        "2.12x Llama-2, 4.78x Mistral (table 3)",
        "models of 7B and 13B",
    ),
    (
        "copied tokens tell their source",
        "token F1 on QuoteSum (table 10)",
        "the QuoteSum data: specjax attribute",
    ),
)

DISCO_CLAIMS = claims_of(
    "DISCO",
    (
        "the classifier's draft lengths are faster than the best static one",
        "1.11x: 10.3% less latency (table 5)",
        Faster(DISCO, STATIC),
    ),
    (
        "faster than drafts of 5",
        "1.06x to 1.26x (table 1)",
        Faster(DISCO, STATIC_5),
    ),
    (
        "faster than the heuristic",
        "1.46x: 31.4% less latency (table 5)",
        Faster(DISCO, HEURISTIC),
    ),
    (
        "but the oracle is faster still",
        "1.12x to 1.24x (table 1)",
        Faster(ORACLE, DISCO),
    ),
    (
        "the oracle needs fewer target passes than drafts of 5",
        "1.41x: 38 / 27 passes (figure 3)",
        AcceptsMore(ORACLE, STATIC_5),
    ),
    (
        "the best length varies widely: deviation over mean > 0.88, the least there",
        "18.0±46.2, 14.7±42.6, 3.2±4.0, 2.4±2.1 (table 2)",
        Varies(ORACLE, 0.88),
    ),
    (
        "the classifier foretells acceptance better than a static length: F1",
        "95-85, 88-76, 77-68 (table 4)",
        Foretells(),
    ),
    (
        "a classifier carries over to another task of its kind",
        "MBPP to HumanEval 1.84x, static 1.63x (table 1)",
        "a classifier per task: specjax train disco --kinds KIND",
    ),
)
