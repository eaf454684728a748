"""What the four papers claim, and specjax itself: in our words, with the published figure.

`specjax bench claims` measures the checks on pocket: the shape of a claim (more, faster, within),
not its figure, which belongs to models and GPUs of another size. Claims that need other models or
data stand here too, with what they need.
"""

from specjax.bench.claims.checks import (
    AcceptsMore,
    SameTokens,
)
from specjax.bench.claims.drafts import DISCO_CLAIMS, PLD_PLUS
from specjax.bench.claims.findings import (
    Claim,
    claims_of,
)
from specjax.bench.claims.heads import HASS_CLAIMS, PARALLEL_SPEC

# Contestants at temperature 1; `claims_run` tells their settings.
EAGLE2_BLIND, HASS_BLIND = "eagle2 blind to the noise", "hass blind to the noise"


OURS = claims_of(
    "specjax",
    (
        "same tokens as plain decoding, T=0",
        "every paper: greedy text is unchanged",
        SameTokens(0.0),
    ),
    (
        "same key, same tokens as plain decoding, T=1",
        "papers: the same distribution",
        SameTokens(1.0),
    ),
    (
        "EAGLE-2's tree that knows the noise is accepted further than the published one, T=1",
        "published trees do not know it",
        AcceptsMore("eagle2", EAGLE2_BLIND, temperature=1.0),
    ),
    (
        "the same with HASS's head",
        "published trees do not know it",
        AcceptsMore("hass", HASS_BLIND, temperature=1.0),
    ),
)

CLAIMS: tuple[Claim, ...] = (*PLD_PLUS, *DISCO_CLAIMS, *PARALLEL_SPEC, *HASS_CLAIMS, *OURS)
