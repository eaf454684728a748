"""`specjax train METHOD` for the methods with a head: what each has of its own.

Defaults are the published ones. EAGLE and HASS: their released code; Medusa and Hydra likewise,
with EAGLE's number of texts per step where they depend on the number of devices; ParallelSpec:
Table 3 of its paper, whose batches of 32 texts are made of four here.
"""

from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from specjax.cli.train_heads import FLAT, TrainHead
from specjax.training.config import OptimizerOptions
from specjax.training.objectives.options import (
    EagleObjective,
    HassObjective,
    HydraObjective,
    MedusaObjective,
    Objective,
    ParallelEagleObjective,
    ParallelMedusaObjective,
)

if TYPE_CHECKING:
    from specjax.hub import LoadedTarget
    from specjax.models.config import TransformerConfig

HEADS_OPTIMIZER = partial(  # of Medusa and Hydra
    OptimizerOptions, decay="cosine", beta2=0.999, clip="norm", clip_at=1.0
)
PARALLEL_OPTIMIZER = partial(OptimizerOptions, weight_decay=0.0, accumulate=4)


@dataclass(frozen=True)
class TrainEagle(TrainHead):
    """Train an EAGLE head, which eagle and eagle2 draft with.

    The target reads every text once per epoch, in the training step itself; the head learns to
    predict its next feature and distribution.
    """

    fc_bias: bool = False
    """Give `fc` a bias, as the first published heads have; vLLM reads heads without one only."""
    objective: Annotated[EagleObjective, FLAT] = field(default_factory=EagleObjective)

    @property
    def told(self) -> Objective:
        return self.objective

    def new_head(self, target: "TransformerConfig") -> Any:
        """See the parent."""
        from specjax.models.heads.eagle import EagleConfig, EagleHead

        return EagleHead(EagleConfig.for_target(target, self.fc_bias))


@dataclass(frozen=True)
class TrainHass(TrainEagle):
    """Train a head with HASS: in the contexts of drafting, and on the tokens that matter."""

    objective: Annotated[HassObjective, FLAT] = field(default_factory=HassObjective)


@dataclass(frozen=True)
class TrainMedusa(TrainHead):
    """Train Medusa heads: each predicts a token further ahead from the same feature."""

    flags = MappingProxyType({"has_lm_heads": "--lm-heads"})
    num_heads: int = 5
    """Heads, and so tokens of the longest draft; the published tree uses 4 of them, a dynamic or a
    tuned one all."""
    num_layers: int = 1
    """Residual blocks of each head."""
    lm_heads: bool = True
    """Give each head an LM head of its own (version 1); without, all use the target's (2)."""
    optimizer: Annotated[OptimizerOptions, FLAT] = field(
        default_factory=partial(HEADS_OPTIMIZER, learning_rate=2e-3, weight_decay=0.0)
    )
    objective: Annotated[MedusaObjective, FLAT] = field(default_factory=MedusaObjective)

    @property
    def told(self) -> Objective:
        return self.objective

    def new_head(self, target: "TransformerConfig") -> Any:
        """See the parent."""
        from specjax.models.heads.medusa import MedusaConfig, MedusaHeads

        shape = MedusaConfig.for_target(target, self.num_heads, self.num_layers, self.lm_heads)
        return MedusaHeads(shape)


@dataclass(frozen=True)
class TrainHydra(TrainHead):
    """Train Hydra heads: each knows the tokens drafted before; learned from the target's own
    distribution."""

    flags = MappingProxyType({"has_lm_heads": "--lm-heads", "num_hidden_layers": "--prefix"})
    num_heads: int = 4
    """Heads, and so tokens of the longest draft."""
    num_layers: int = 4
    """Residual blocks of each head."""
    prefix: bool = False
    """Hydra++: a layer over the whole text prepares what the heads read."""
    lm_heads: bool = True
    """Give each head an LM head of its own, as published; without, all use the target's."""
    optimizer: Annotated[OptimizerOptions, FLAT] = field(
        default_factory=partial(
            HEADS_OPTIMIZER, learning_rate=5e-4, decay_to=0.33, weight_decay=0.1
        )
    )
    objective: Annotated[HydraObjective, FLAT] = field(default_factory=HydraObjective)

    @property
    def told(self) -> Objective:
        return self.objective

    def new_head(self, target: "TransformerConfig") -> Any:
        """See the parent."""
        from specjax.models.heads.hydra import HydraConfig, HydraHeads

        return HydraHeads(
            HydraConfig.for_target(
                target,
                has_prefix=self.prefix,
                num_heads=self.num_heads,
                num_layers=self.num_layers,
                has_lm_heads=self.lm_heads,
            )
        )


@dataclass(frozen=True)
class TrainParallel(TrainHead):
    """What both kinds of ParallelSpec are told."""

    flags = MappingProxyType({"reads_features": "--features", "num_hidden_layers": "--num-layers"})
    num_masks: int = 4
    """Masks of each group (K); a draft has one token more, if its tree is as deep: Medusa's has 4,
    EAGLE's 5, a dynamic or a tuned one as many as there are."""
    num_layers: int = 1
    """Layers of the head; the paper takes 1. With 2, masks can look for what the text repeats."""
    fc_bias: bool = False
    """Give `fc` a bias, where features are read."""

    def load_start(self, start: str, target: "LoadedTarget", kind: str) -> tuple[Any, Any]:
        """As the parent; an EAGLE head will do too, and gets new masks."""
        import jax

        from specjax.loading import find_head, load_head
        from specjax.models.heads.kinds import KINDS
        from specjax.models.heads.parallel import from_eagle
        from specjax.models.io.head_files import detect_format

        if detect_format(find_head(start), KINDS.values()).kind != "eagle":
            return super().load_start(start, target, kind)
        eagle, params = load_head(start, target, "float32", "eagle")
        return from_eagle(eagle, params, self.num_masks, jax.random.key(self.loop.seed))

    def parallel(self, target: "TransformerConfig", reads_features: bool) -> Any:
        """The new head of both kinds."""
        from specjax.models.heads.parallel import ParallelConfig, ParallelHead

        return ParallelHead(
            ParallelConfig.for_target(
                target, self.num_masks, reads_features, self.fc_bias, self.num_layers
            )
        )


@dataclass(frozen=True)
class TrainParallelMedusa(TrainParallel):
    """Train Medusa's ParallelSpec: one layer over the text drafts all tokens in one pass."""

    features: bool = False
    """Also read the target's features, as parallel-eagle does, which the paper's head does not."""
    epochs: float = 20.0
    """Train so many times on all texts; --num-steps, where it is given, wins."""
    optimizer: Annotated[OptimizerOptions, FLAT] = field(
        default_factory=partial(PARALLEL_OPTIMIZER, learning_rate=5e-4, beta2=0.999)
    )
    objective: Annotated[ParallelMedusaObjective, FLAT] = field(
        default_factory=ParallelMedusaObjective
    )

    @property
    def told(self) -> Objective:
        return self.objective

    def new_head(self, target: "TransformerConfig") -> Any:
        """See the parent."""
        return self.parallel(target, self.features)


@dataclass(frozen=True)
class TrainParallelEagle(TrainParallel):
    """Train EAGLE's ParallelSpec: one pass over text and features drafts all tokens."""

    epochs: float = 40.0
    """Train so many times on all texts; --num-steps, where it is given, wins."""
    optimizer: Annotated[OptimizerOptions, FLAT] = field(
        default_factory=partial(PARALLEL_OPTIMIZER, learning_rate=5e-5)
    )
    objective: Annotated[ParallelEagleObjective, FLAT] = field(
        default_factory=ParallelEagleObjective
    )

    @property
    def told(self) -> Objective:
        return self.objective

    def new_head(self, target: "TransformerConfig") -> Any:
        """See the parent."""
        return self.parallel(target, True)
