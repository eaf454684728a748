"""How files call the tensors of Medusa heads: the authors', and vLLM's."""

import re
from dataclasses import dataclass

from specjax.models.heads.medusa import MedusaConfig


@dataclass(frozen=True)
class Names:
    """How the tensors of a form are called; LM heads come behind the layers of their head."""

    block: str
    lm_head: str

    def block_in(self, name: str) -> re.Match[str] | None:
        """Whether this is the weight of a block, with groups `head` and `layer`."""
        return self._match(self.block, name)

    def lm_head_in(self, name: str) -> re.Match[str] | None:
        """Whether this is an LM head."""
        return self._match(self.lm_head, name)

    def _match(self, form: str, name: str) -> re.Match[str] | None:
        numbers = {number: rf"(?P<{number}>\d+)" for number in ("head", "layer")}
        return re.fullmatch(form.replace(".", r"\.").format(**numbers, part="weight"), name)

    def paths(self, config: MedusaConfig) -> dict[str, str]:
        """The path in our params of each stored tensor; layers are copies of one block."""
        heads, layers = range(config.num_heads), range(config.num_layers)
        found = {
            self.block.format(head=head, layer=layer, part=part): f"blocks_{head}.{part}"
            for head in heads
            for layer in layers
            for part in ("weight", "bias")
        }
        if config.has_lm_heads:
            for head in heads:
                name = self.lm_head.format(head=head, layer=config.num_layers)
                found[name] = f"lm_heads_{head}.weight"
        return found


OF_AUTHORS = Names("{head}.{layer}.linear.{part}", "{head}.{layer}.weight")
OF_VLLM = Names("blocks.{head}.layers.{layer}.{part}", "lm_heads.{head}.weight")
