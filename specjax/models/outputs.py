"""What a forward pass reveals: Taps asks, ModelOutput answers."""

from dataclasses import dataclass

from jaxtyping import Array, Float

from specjax.errors import SpecjaxError
from specjax.models.config import LlamaConfig
from specjax.pytree import pytree


@dataclass(frozen=True)
class Taps:
    """Static request for the inner values of a forward pass; what is not asked for is not kept.

    Hidden layers are numbered as in `transformers`: 0 is the embedding, l the output of layer l,
    and the last (`num_hidden_layers`) is taken after the final norm. Heads are
    `(layer, head)`, both from 0.
    """

    hidden_layers: tuple[int, ...] = ()
    attention_heads: tuple[tuple[int, int], ...] = ()
    logits: bool = True  # False skips the LM head; in a drafter's taps, it does not read them

    def check(self, config: LlamaConfig) -> None:
        """Raises SpecjaxError if the model has no such layer or head."""
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        for layer in self.hidden_layers:
            if not 0 <= layer <= layers:
                raise SpecjaxError(
                    f"hidden layer {layer} does not exist: the model has layers 0 to {layers}"
                )
        for layer, head in self.attention_heads:
            if not (0 <= layer < layers and 0 <= head < heads):
                raise SpecjaxError(
                    f"attention head (layer {layer}, head {head}) does not exist: the model has "
                    f"layers 0 to {layers - 1} with heads 0 to {heads - 1}"
                )


@pytree
class ModelOutput:
    """What one forward pass returned for its Q rows. V: vocabulary, S: cache slots."""

    logits: Float[Array, "B Q V"] | None  # float32
    hidden: Float[Array, "B Q T D"] | None = None  # T tapped layers, in the order asked for
    # A tapped heads, float32, rows sum to 1; R: the Q rows, or the one that a round keeps.
    attention: Float[Array, "B A R S"] | None = None
