"""The registry: one row per method, from which commands, loading, training and tests derive."""

from collections.abc import Mapping
from typing import Any

from specjax.decoding.drafters.auto import Auto
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.decoding.drafters.eagle import Eagle
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.decoding.drafters.grammar import GrammarDrafter
from specjax.decoding.drafters.hybrid import Hybrid
from specjax.decoding.drafters.hydra import Hydra
from specjax.decoding.drafters.lookahead import Lookahead
from specjax.decoding.drafters.medusa import Medusa
from specjax.decoding.drafters.parallel_spec import ParallelSpec, ParallelSpecMedusa
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.prompt_lookup_plus import PromptLookupPlus, PromptLookupPlusAttention
from specjax.decoding.drafters.recycling import Recycling
from specjax.decoding.drafters.retrieval import Retrieval
from specjax.loading.method import (
    Method,
    Registry,
    SearchSpace,
    load_auto,
    load_parts,
    load_seeded,
    load_with_datastore,
    load_with_draft_model,
)
from specjax.models.io.formats.eagle import EAGLE
from specjax.models.io.formats.eagle3 import EAGLE3
from specjax.models.io.formats.hydra import HYDRA
from specjax.models.io.formats.medusa import MEDUSA
from specjax.models.io.formats.parallel import PARALLEL
from specjax.training.objectives.eagle import EagleTraining
from specjax.training.objectives.eagle3 import Eagle3Training
from specjax.training.objectives.hass import HassFirstStage, HassSecondStage, HassTraining
from specjax.training.objectives.hydra import HydraTraining
from specjax.training.objectives.medusa import MedusaTraining
from specjax.training.objectives.parallel_spec import ParallelEagleTraining, ParallelMedusaTraining

COPIED = (3, 10, 31)  # tokens of a chain that is copied
LONGER: Mapping[str, tuple] = {"num_tokens": (3,), "max_tokens": (7,)}
PUBLISHED: Mapping[str, tuple] = {}  # the tuned settings, or the defaults
CHAIN: Mapping[str, tuple] = {"choices": (((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)),)}
DEPTH_TREES: SearchSpace = (
    PUBLISHED,
    {"tree": ("dynamic",), "top_k": (1,)},
    {"tree": ("dynamic",), "num_tokens": (8, 24)},
)
BEAMS: SearchSpace = (
    PUBLISHED,
    {"top_k": (1,), "depth": (3, 5)},
    {"top_k": (4,), "depth": (4,), "num_tokens": (8, 24)},
)


# Settings for a CPU, from the nodes of its cheap passes, root included.


def _chain(nodes: int) -> dict[str, Any]:
    return {"num_tokens": nodes - 1, "max_tokens": 2 * nodes - 1}


def _dynamic_tree(nodes: int) -> dict[str, Any]:
    return {"tree": "dynamic", "num_tokens": nodes}


def _beam(nodes: int) -> dict[str, Any]:
    return {"top_k": min(4, nodes - 1), "depth": nodes.bit_length() - 1, "num_tokens": nodes}


def _choices(nodes: int) -> dict[str, Any]:
    best_first = (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)
    return {"choices": best_first[: nodes - 1]}


def _window(nodes: int) -> dict[str, Any]:
    size = max(nodes // 2 - 1, 1)
    return {"ngram_length": 3, "window_length": size, "num_guesses": size}


_ROWS = {
    "plain": Method(
        Autoregressive, "nothing: one token per pass", "nothing", "plain decoding, the baseline"
    ),
    "pld": Method(
        PromptLookup,
        "what followed an earlier occurrence of the last 3 tokens (or 2, or 1)",
        "nothing",
        "Prompt Lookup Decoding (Saxena, 2023)",
        on_cpu=_chain,
        copies=True,
        search_space=(
            {"num_tokens": COPIED, "allow_shorter": (True,)},
            {**LONGER, "allow_shorter": (True,)},
        ),
    ),
    "pld-plus": Method(
        PromptLookupPlus,
        "what followed the last token where the target's hidden states are most similar",
        "nothing",
        "PLD+ (Somasundaram et al., 2024)",
        lambda config: {"layer": PromptLookupPlus.layer_for(config)},
        on_cpu=_chain,
        copies=True,
        tuned=("layer", "num_tokens"),
        search_space=({"num_tokens": COPIED}, LONGER),
    ),
    "pld-plus-attention": Method(
        PromptLookupPlusAttention,
        "what followed the last token where the target's induction heads attend most",
        "nothing",
        "PLD+ (Somasundaram et al., 2024)",
        lambda config: {"heads": PromptLookupPlusAttention.heads_for(config)},
        on_cpu=_chain,
        copies=True,
        tuned=("heads", "num_tokens"),
        search_space=({"num_tokens": COPIED}, LONGER),
    ),
    "lookahead": Method(
        Lookahead,
        "n-grams that the target itself guessed in parallel",
        "nothing",
        "Lookahead Decoding (Fu et al., 2024)",
        on_cpu=_window,
    ),
    "recycling": Method(
        Recycling,
        "a tree of the tokens that the target found likely after the same tokens before",
        "nothing",
        "Token Recycling (Luo et al., 2024)",
        load=load_seeded,
        on_cpu=lambda nodes: {"num_tokens": nodes},
        search_space=({"num_tokens": (8, 24, 64)},),
    ),
    "draft-model": Method(
        DraftModel,
        "the tokens of a small model, until a rule stops it: fixed, heuristic, confidence or disco",
        "a draft model; for disco a classifier",
        "Leviathan et al. (2023); DISCO (Mamou et al., 2024)",
        part="draft",
        load=load_with_draft_model,
        search_space=(
            {"rule": ("fixed",), "length": (1, 2, 3, 5)},
            {"rule": ("confidence", "disco"), "max_length": (8,)},
        ),
    ),
    "rest": Method(
        Retrieval,
        "a tree of the most frequent continuations in a datastore",
        "a datastore, which `specjax datastore build` makes",
        "REST (He et al., 2023)",
        on_cpu=lambda nodes: {"max_drafted": nodes - 1},
        part="datastore",
        load=load_with_datastore,
        search_space=({"max_drafted": (7, 23, 63)},),
    ),
    "medusa": Method(
        Medusa,
        "a tree from heads that each predict one depth",
        "Medusa heads",
        "Medusa (Cai et al., 2024)",
        on_cpu=_dynamic_tree,
        part="medusa",
        head=MEDUSA,
        training=MedusaTraining,
        search_space=DEPTH_TREES,
    ),
    "hydra": Method(
        Hydra,
        "Medusa's tree from heads that see the tokens drafted above",
        "Hydra heads",
        "Hydra (Ankner et al., 2024)",
        on_cpu=_choices,
        part="hydra",
        head=HYDRA,
        training=HydraTraining,
        search_space=(PUBLISHED, CHAIN),
    ),
    "eagle": Method(
        Eagle,
        "a static tree from a one-layer head that predicts the target's next feature",
        "an EAGLE head",
        "EAGLE (Li et al., 2024 a)",
        on_cpu=_choices,
        part="eagle",
        head=EAGLE,
        training=EagleTraining,
        search_space=(PUBLISHED, CHAIN),
    ),
    "eagle2": Method(
        Eagle2,
        "a tree from an EAGLE head that grows where the head is confident",
        "an EAGLE head",
        "EAGLE-2 (Li et al., 2024 b)",
        on_cpu=_beam,
        part="eagle",
        head=EAGLE,
        search_space=BEAMS,
    ),
    "hass": Method(
        Eagle2,
        "the tree of EAGLE-2 from a head trained in the contexts of drafting",
        "a head trained with HASS",
        "HASS (Zhang et al., 2025)",
        on_cpu=_beam,
        part="hass",
        head=EAGLE,
        training=HassTraining,
        stages=(HassFirstStage, HassSecondStage),
        search_space=BEAMS,
    ),
    "eagle3": Method(
        Eagle2,
        "the tree of EAGLE-2 from a head that reads three of the target's layers",
        "an EAGLE-3 head",
        "EAGLE-3 (Li et al., 2025)",
        lambda config: {"depth": 8},  # the authors' 7 counts from the second pass
        on_cpu=_beam,
        part="eagle3",
        head=EAGLE3,
        training=Eagle3Training,
        search_space=BEAMS,
    ),
    "parallel-medusa": Method(
        ParallelSpecMedusa,
        "Medusa's tree from one pass of one layer over the text and mask tokens",
        "a ParallelSpec head",
        "ParallelSpec (Xiao et al., 2024)",
        on_cpu=_dynamic_tree,
        part="parallel-medusa",
        head=PARALLEL,
        training=ParallelMedusaTraining,
        search_space=DEPTH_TREES,
    ),
    "parallel-eagle": Method(
        ParallelSpec,
        "EAGLE's tree from one pass of an EAGLE head over the text and mask tokens",
        "a ParallelSpec head",
        "ParallelSpec (Xiao et al., 2024)",
        on_cpu=_dynamic_tree,
        part="parallel-eagle",
        head=PARALLEL,
        training=ParallelEagleTraining,
        search_space=DEPTH_TREES,
    ),
    "grammar": Method(
        GrammarDrafter,
        "the tokens about which a JSON schema, a regular expression or choices leave no choice",
        "nothing; drafts only with a grammar",
        "tokens that a grammar decides",
    ),
    "hybrid": Method(
        Hybrid,
        "what two others draft: `pld-plus` and `hass`, or without a head `pld` and `recycling`",
        "a head, or nothing",
        "two methods in one tree",
        on_cpu=lambda nodes: {"num_tokens": nodes, "max_tokens": 2 * nodes},
        load=load_parts,
        parts={"copy": "copy_source", "head": ""},
        untrained={"copy": "pld", "head": "recycling"},
    ),
    "auto": Method(
        Auto,
        "with the method that `specjax tune machine` chose (`pld` if untuned), while drafting pays",
        "what that method needs",
        "a gate in front of another method",
        load=load_auto,
        tuned=("machine", "method", "settings", "source", "break_even", "widths"),
    ),
}
METHODS = Registry(_ROWS)
