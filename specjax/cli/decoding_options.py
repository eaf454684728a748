"""The options that commands share: those that load a target, and those that generate text."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import UseAppendAction, arg

from specjax.cli.environment import use_compilation_cache
from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, read_json
from specjax.core.settings import setting
from specjax.core.text import safe_console, token_ids

if TYPE_CHECKING:
    from specjax.cli.generation import GenerationRequest
    from specjax.decoding.drafter import Drafter
    from specjax.decoding.prompt import Prompt
    from specjax.decoding.sampling import Sampling
    from specjax.loading.targets import LoadedTarget


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The options of all commands that load a target."""

    target: str = "pocket"
    """The target: pocket, a folder in Hugging Face format, a GGUF file, or a hub id."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype for weights and compute; by default the fastest one on this machine."""
    quantize: Annotated[str | None, arg(metavar="int8|int4")] = None
    """Quantise the target's weights on loading. This may change what the target generates;
    drafting does not."""
    mesh: Annotated[str | None, arg(metavar="data=N,model=N")] = None
    """The devices to use, such as data=2,model=4: `data` splits the batch, `model` splits each
    layer. By default one device; training uses all of them for data."""

    def load_target(self, **others: Any) -> "LoadedTarget":
        """Loads the target; `others` are its other arguments. The process keeps its programs."""
        from specjax.loading.targets import load

        use_compilation_cache()
        options: dict[str, Any] = {"dtype": self.dtype, "mesh": self.mesh} | others
        return load(self.target, quantize=self.quantize, **options)


@dataclass(frozen=True, kw_only=True)
class PassOptions(TargetOptions):
    """The options of all commands that verify drafts."""

    padded_width: Annotated[int, arg(metavar="N")] = setting(0, at_least=0)
    """Pad every verification pass to N tokens per sequence, so that a GPU or TPU multiplies the
    same shapes whichever method drafts. 72 is enough for default settings; tuned ones may need
    more. Useful in 16 bits; not needed on a CPU."""

    def load_target(self, **others: Any) -> "LoadedTarget":
        return super().load_target(padded_width=self.padded_width, **others)


@dataclass(frozen=True, kw_only=True)
class MethodOptions(PassOptions):
    """The options that load a target with a drafting method."""

    revision: str | None = None
    """The branch, tag or commit of a hub id."""
    method: str = "pld"
    """The drafting method; `specjax methods` lists them."""
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=VALUE")] = ()
    """A setting of the method, such as num_tokens=20; `specjax methods METHOD` lists them."""
    drafter: Annotated[str | None, arg(metavar="FOLDER")] = None
    """The folder or hub id of a datastore (rest), a draft model (draft-model), a head, or a run of
    `specjax train`. Only the target pocket ships its own."""
    tuned: Path | None = None
    """A file of settings from `specjax tune`; by default those kept for the target."""
    max_new_tokens: int = setting(256, at_least=1)
    """The maximum number of new tokens."""

    def load_method(self) -> "tuple[LoadedTarget, tuple[Drafter, Any]]":
        from specjax.loading.drafters import load_drafter
        from specjax.loading.methods import METHODS
        from specjax.loading.tuned import auto_choice

        settings = METHODS.read_settings(self.method, self.set)
        target = self.load_target(revision=self.revision)
        loaded = load_drafter(self.method, target, self.drafter, self.tuned, **settings)
        if self.method == "auto":
            safe_console(stderr=True, soft_wrap=True).print(str(auto_choice(target, self.tuned)))
        return target, loaded


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(MethodOptions):
    """The options of all commands that generate text."""

    temperature: float = setting(0.0, at_least=0)
    """0 takes the most likely token; above 0, tokens are sampled."""
    top_k: int | None = setting(None, at_least=1)
    """Sample only from the N most likely tokens."""
    top_p: float = setting(1.0, above=0, at_most=1)
    """Sample only from the smallest set of tokens whose probabilities add up to this."""
    seed: int = setting(0, at_least=0, below=2**32)
    """The seed for sampling."""
    stop: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="TEXT")] = ()
    """Stop before this text would appear."""
    ignore_eos: bool = False
    """Ignore EOS and generate up to --max-new-tokens; not with a grammar."""
    min_p: float = setting(0.0, at_least=0, at_most=1)
    """Sample only from tokens with at least this fraction of the highest probability."""
    repetition_penalty: float = setting(1.0, at_least=0.001, at_most=1000)
    """Divide positive logits of tokens already in prompt or output by this, and multiply negative
    ones."""
    presence_penalty: float = setting(0.0, at_least=-2, at_most=2)
    """Subtract this from the logits of tokens in the output."""
    frequency_penalty: float = setting(0.0, at_least=-2, at_most=2)
    """Subtract this from the logit of a token for each of its occurrences in the output."""
    logit_bias: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="ID=X")] = ()
    """Add a number to the logit of a token id."""
    bad_words: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="TEXT")] = ()
    """Ban the tokens of this text, with and without a space in front; other tokens may still spell
    it."""
    min_new_tokens: int = setting(0, at_least=0)
    """Ban EOS for this many new tokens."""
    json_schema: Annotated[Path | None, arg(metavar="FILE")] = None
    """Generate JSON that this JSON schema allows, then end."""
    regex: str | None = None
    """Generate a text that matches this regular expression as a whole, then end."""
    choices: Annotated[tuple[str, ...] | None, arg(metavar="TEXT TEXT ...")] = None
    """Generate one of these texts, then end."""
    verification: Literal["coupled", "rejection", "typical"] = "coupled"
    """coupled samples exactly plain decoding's tokens; rejection preserves only the distribution.
    typical (Medusa; epsilon 0.09, delta 0.3) is LOSSY: above temperature 0 it accepts any token
    that is likely enough."""

    def load(self) -> "tuple[LoadedTarget, Callable[..., GenerationRequest]]":
        """Returns the target and a function from prompts to requests."""
        from specjax.cli.generation import GenerationRequest
        from specjax.loading.grammar import load_grammar
        from specjax.run.engines import make_engine
        from specjax.run.runner import Runner

        if "" in self.stop:
            raise SpecjaxError("--stop is empty; pass the text to stop at")
        target, drafter = self.load_method()
        if self.stop:
            target.require_tokenizer()
        sampling = self._sampling(target)
        schema = None if self.json_schema is None else read_json(expand_user(self.json_schema))
        grammar = {"json_schema": schema, "regex": self.regex, "choices": self.choices}
        automaton = load_grammar(target, **grammar)
        settings = self.max_new_tokens, sampling, automaton, self.ignore_eos
        engine = make_engine(target, drafter, *settings)

        def request(prompt: "Prompt", is_answer: bool = True) -> GenerationRequest:
            runner = Runner(self.method, *engine, prompt.tokens.shape[1], self.seed)
            return GenerationRequest(runner, target, prompt, self.stop, is_answer)

        return target, request

    def _sampling(self, target: "LoadedTarget") -> "Sampling":
        from specjax.decoding.sampling import Sampling

        names = {field.name for field in fields(Sampling)} & set(vars(self))
        settings = {name: getattr(self, name) for name in names}
        settings["logit_bias"] = tuple(map(_read_bias, self.logit_bias))
        if self.bad_words:
            settings["bad_words"] = token_ids(target.require_tokenizer(), self.bad_words)
        return Sampling(**settings)


def _read_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise SpecjaxError(
            f"--logit-bias {text!r} is not of the form ID=X; pass a token id and a number, such as "
            "42=-5"
        ) from None
