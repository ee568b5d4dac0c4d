"""What a step must show before hours are spent: plain warnings with the likely cause.

One finding stops the run: sampler and trainer disagree about log-probs, because then the engine
does not have the weights that are trained and every number that follows is wrong.
"""

import math
from collections.abc import Iterable, Mapping

import torch

MAX_MEAN_GAP_NATS = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""By dtype. Measured agreement: 1e-6 in float32 and about 0.01 in bfloat16; a stale
tied head shows 0.06, stale weights after some steps 0.1 to 0.8."""


class MismatchError(RuntimeError):
    """Sampler and trainer do not run the same policy. Exit code 1."""


class NotFiniteError(RuntimeError):
    """The gradient or the loss is NaN or infinite. Exit code 1, before anything is saved."""


def check_finite(metrics: Mapping[str, float], step: int) -> None:
    """Raise where an update used a gradient that is not finite: the weights are lost then."""
    for name in ("loss", "grad_norm"):
        value = metrics.get(name, 0.0)
        if not math.isfinite(value):
            raise NotFiniteError(
                f"step {step}: expected a finite {name}, got {value}; lower optim.learning_rate "
                "or compute in float32, and go on from the last checkpoint with --resume"
            )


def check_agreement(metrics: Mapping[str, float], dtypes: Iterable[torch.dtype], step: int) -> None:
    """Raise where the mean gap between sampler and trainer log-probs is beyond the rounding of the
    coarser of their dtypes."""
    gap = metrics.get("mismatch/logprob_abs_mean")
    coarsest = max(dtypes, key=MAX_MEAN_GAP_NATS.__getitem__)
    limit = MAX_MEAN_GAP_NATS[coarsest]
    if gap is not None and not gap <= limit:
        raise MismatchError(
            f"step {step}: expected sampler and trainer log-probs to agree to {limit:g} nats per "
            f"token on average ({str(coarsest).removeprefix('torch.')}), got {gap:.3g}; the "
            "engine does not run the trainer's weights or temperature"
        )


def first_step_findings(metrics: Mapping[str, float], response_limit: int) -> list[str]:
    """Warnings after the first step, each with its likely cause; empty where all is well."""
    findings = []

    def warn_if(is_odd: bool, text: str) -> None:
        if is_odd:
            findings.append(text)

    dead = metrics["groups/zero_variance_frac"]
    warn_if(
        dead >= 0.9,
        f"{dead:.0%} of the groups have equal rewards and teach nothing: the data is too hard or "
        "too easy for this model, or the reward does not parse its answers",
    )
    cut = metrics["completions/truncated_frac"]
    warn_if(
        cut >= 0.5,
        f"{cut:.0%} of the responses were cut at {response_limit} tokens: raise "
        "rollout.max_response_tokens, or the model does not end its answers",
    )
    warn_if(
        metrics["completions/duplicate_frac"] >= 0.5 and dead >= 0.5,
        f"{metrics['completions/duplicate_frac']:.0%} of the responses equal another one of their "
        "group: the temperature is too low or the model has collapsed",
    )
    warn_if(
        metrics["reward/errors"] > 0,
        f"{metrics['reward/errors']:.0f} verifications failed to run: see reward/errors in "
        "metrics.jsonl and log.txt",
    )
    warn_if(
        metrics["reward/std"] == 0,
        f"the reward is constant ({metrics['reward/mean']:.3g}): nothing can be learnt from it",
    )
    return findings
