"""Options that commands share: those that load a target, and those that generate text."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import UseAppendAction, arg

from specjax.core.errors import SpecjaxError

if TYPE_CHECKING:
    from specjax.cli.measure import GenerationRequest
    from specjax.decoding.prompt import Prompt
    from specjax.loading.targets import LoadedTarget

MAX_SEED = 2**32 - 1


def check_seed(seed: int) -> None:
    """Raises SpecjaxError for a seed that does not fit into a key."""
    if not 0 <= seed <= MAX_SEED:
        raise SpecjaxError(f"--seed {seed} is outside 0 to {MAX_SEED}; choose another")


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The options of all commands that load a target."""

    target: str = "pocket"
    """The target: pocket, a folder in Hugging Face format, a GGUF file, or a hub id."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype for weights and compute; by default the one that is fastest on this machine."""
    quantize: Annotated[str | None, arg(metavar="int8|int4")] = None
    """Quantise the target's weights on loading. That may change its text; drafting does not."""
    mesh: Annotated[str | None, arg(metavar="data=N,model=N")] = None
    """Devices to spread over, such as data=2,model=4: the rows of a batch over `data`, each layer
    over `model`. By default one device; training takes all, for data."""

    def load_target(self, **others: Any) -> "LoadedTarget":
        """Loads the target, for a process that keeps its compiled programs.

        Raises:
            SpecjaxError: if it cannot be loaded.
        """
        from specjax.cli.environment import use_compilation_cache
        from specjax.loading.targets import load

        use_compilation_cache()
        options: dict[str, Any] = {"dtype": self.dtype, "quantize": self.quantize}
        options["mesh"] = self.mesh
        return load(self.target, **(options | others))


@dataclass(frozen=True, kw_only=True)
class PassOptions(TargetOptions):
    """The options of all commands that verify drafts."""

    padded_width: Annotated[int, arg(metavar="N")] = 0
    """Fill every pass that verifies up to N rows per text, so that a GPU or TPU multiplies the same
    shapes whichever method drafts. 72 are enough for default settings; tuned ones may need more.
    Useful in 16 bits; a CPU does not need it."""

    def load_target(self, **others: Any) -> "LoadedTarget":
        """Loads the target; see `TargetOptions`."""
        return super().load_target(**({"padded_width": self.padded_width} | others))


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(PassOptions):
    """The options of all commands that generate text."""

    revision: str | None = None
    """The branch, tag or commit of a hub id."""
    method: str = "pld"
    """The drafting method; `specjax methods` lists them."""
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=VALUE")] = ()
    """A setting of the method, such as num_tokens=20; `specjax methods METHOD` lists them."""
    drafter: Annotated[str | None, arg(metavar="FOLDER")] = None
    """What the method reads: a datastore (rest), a draft model (draft-model), or a head or the run
    folder of `specjax train`. Hub ids work too. By default pocket's own."""
    tuned: Path | None = None
    """Settings that `specjax tune` found; by default those kept for the target."""
    max_new_tokens: int = 256
    """New tokens at most."""
    temperature: float = 0.0
    """0 takes the most likely token; above 0, tokens are sampled."""
    top_k: int | None = None
    """Sample from the N most likely tokens only."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this total probability."""
    seed: int = 0
    """The seed for sampling."""
    stop: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="TEXT")] = ()
    """End where this text would appear; it is left out."""
    ignore_eos: bool = False
    """Go on after the tokens that end a text, up to --max-new-tokens."""
    verification: Literal["coupled", "rejection", "typical"] = "coupled"
    """coupled samples exactly plain decoding's tokens; rejection preserves only the distribution.
    typical (Medusa; epsilon 0.09, delta 0.3) is LOSSY: above temperature 0 it accepts any token
    that is likely enough."""

    def load(self) -> "tuple[LoadedTarget, Callable[[Prompt], GenerationRequest]]":
        """Returns the target and a function from prompts to requests.

        Raises:
            SpecjaxError: for options that cannot be; most are checked before the target loads.
        """
        from specjax.cli.measure import GenerationRequest
        from specjax.decoding.drafter import Params
        from specjax.decoding.engine import Engine
        from specjax.decoding.sampling import Sampling
        from specjax.loading.drafters import load_drafter
        from specjax.loading.methods import METHODS
        from specjax.loading.tuned import auto_choice
        from specjax.run.runner import Runner

        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.verification)
        settings = METHODS.read_settings(self.method, self.set)
        check_seed(self.seed)
        if "" in self.stop:
            raise SpecjaxError("--stop is empty; give the text to stop at")
        target = self.load_target(revision=self.revision)
        if self.stop:
            target.require_tokenizer()
        drafter, params = load_drafter(self.method, target, self.drafter, self.tuned, **settings)
        if self.method == "auto":
            print(auto_choice(target, self.tuned), file=sys.stderr)
        eos = () if self.ignore_eos else target.eos
        engine = Engine(target.model, drafter, sampling, self.max_new_tokens, eos)

        def request(prompt: "Prompt") -> GenerationRequest:
            padded_length = prompt.tokens.shape[1]
            all_params = Params(target.params, params)
            runner = Runner(self.method, engine, all_params, padded_length, self.seed)
            return GenerationRequest(runner, target, prompt, self.stop)

        return target, request
