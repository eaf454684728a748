"""The engine: drafters propose, the target decides, one loop serves all."""

from specjax.decoding.drafter import Context, Drafter, Outcome, Params, Probe, Proposal, Start
from specjax.decoding.engine import Engine
from specjax.decoding.generate import speculative_generate, stream
from specjax.decoding.processors import Nodes, Processor, advanced
from specjax.decoding.prompt import Prompt
from specjax.decoding.reference import reference_generate
from specjax.decoding.sampling import Draw, Sampling
from specjax.decoding.state import Generation, Stats
from specjax.decoding.tree import DraftTree, LogProbs, chain, merge_paths

__all__ = [
    # generate
    "Engine",
    "Generation",
    "LogProbs",
    "Params",
    "Prompt",
    "Sampling",
    "Stats",
    "reference_generate",
    "speculative_generate",
    "stream",
    # write a processor
    "Processor",
    "Nodes",
    "advanced",
    # write a drafter
    "Context",
    "Draw",
    "Drafter",
    "DraftTree",
    "Outcome",
    "Probe",
    "Proposal",
    "Start",
    "chain",
    "merge_paths",
]
