"""Flags measurements that cannot be trusted."""

from collections.abc import Sequence

from specjax.bench.acceptance import advice_on
from specjax.bench.summary import Measurement, last_task_rows
from specjax.bench.ties import near_tie_in
from specjax.decoding.sampling import Sampling


def same(row: Measurement, sampling: Sampling) -> str:
    """Describes in a word or two whether the tokens are plain decoding's."""
    if not row.is_compared and sampling.is_lossy:
        return "LOSSY"
    if not row.is_compared:
        return row.dtype if sampling.is_reproducible else "in distribution"
    if row.num_different:
        return "NO"
    return f"near ties: {row.num_near_ties}" if row.num_near_ties else "yes"


def near_ties(rows: Sequence[Measurement]) -> list[str]:
    """Returns one line for each difference that 16-bit arithmetic excuses."""
    return [
        f"near ties: {row.method} left plain decoding's text on {row.num_near_ties} of "
        f"{row.num_prompts} {row.task} prompts, each time between tokens within "
        f"{near_tie_in(row.dtype):.1%} of the largest logit, too close for {row.dtype} to rank"
        for row in rows
        if row.num_near_ties and not row.is_total
    ]


def problems(rows: Sequence[Measurement]) -> list[str]:
    """Returns one line for each problem that invalidates figures."""
    lines = []
    if rows and (num_missing := rows[0].num_missing):
        lines.append(
            f"INCOMPLETE: {num_missing} trials (one batch run by every method) are missing; "
            "with --out, the same command resumes"
        )
    last = last_task_rows(rows)
    for row in rows:
        text = advice_on(row.variant_of or row.method, row.mean_accepted_length, row.rounds)
        if text and row in last:
            lines.append(f"USELESS DRAFTER: {row.method}: {text}")
        if row.is_total:
            continue  # its parts have been checked
        if row.num_different:
            lines.append(
                f"DIFFERENT TOKENS: {row.method} did not generate plain decoding's text on "
                f"{row.num_different} of {row.num_prompts} {row.task} prompts"
            )
        if row.num_recompiled:
            lines.append(
                f"RECOMPILED: {row.num_recompiled} measured runs of {row.method} on {row.task} "
                "compiled something; their times are wrong"
            )
    return lines
