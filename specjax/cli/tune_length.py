"""`specjax tune length`: how long a draft model drafts."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from specjax.bench.measure import Request
from specjax.cli.tune_lookup import show_curve
from specjax.core.files import expand_user
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.hub import LoadedTarget
from specjax.loading import TUNED_DRAFT, load_drafter
from specjax.models.fingerprint import fingerprint
from specjax.tuning.draft_length import LengthTuner

if TYPE_CHECKING:
    from specjax.cli.tune import Tune


def tune_length(
    options: "Tune", target: LoadedTarget, requests: Sequence[Request]
) -> dict[str, Any]:
    """The best settings of the draft's rule, and which draft they are for.

    Raises:
        SpecjaxError: for a draft or a classifier that is missing or does not fit.
    """
    classifier = str(expand_user(options.classifier).resolve()) if options.classifier else ""
    drafter, params = load_drafter(
        "draft-model", target, options.source, rule=options.rule, classifier=classifier
    )
    assert isinstance(drafter, DraftModel)
    report = partial(show_curve, plots=options.plots)
    tuner = LengthTuner(target, drafter, params, requests, options.max_new_tokens, report)
    settings = tuner.tune()
    if options.rule == "disco" and classifier:
        settings["classifier"] = classifier
    print("draft-model: " + ", ".join(f"{name}={value}" for name, value in settings.items()))
    return {**settings, TUNED_DRAFT: fingerprint(drafter.draft.config, params["draft"])}
