"""What a step's rollouts and rows say about it, by logged name. Pure functions of host data."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from xrpo_fast.types import Rollout, TrainingRow


def rollout_metrics(rollouts: Sequence[Rollout], step_rewards: np.ndarray) -> dict[str, float]:
    """reward/*, groups/*, completions/*, tokens/*, planner/* and icl/* of one step.

    Args:
        step_rewards: (S,) what the advantages saw, any penalty included; reward/* are without it.
    """
    rewards = np.array([rollout.verdict.reward for rollout in rollouts])
    lengths = np.array([rollout.num_tokens for rollout in rollouts])
    num_shared = sum(rollout.num_shared_tokens for rollout in rollouts)
    num_generated = int(lengths.sum()) - num_shared
    scored = rewards[~np.isnan(rewards)]
    groups: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.completion.request.group].append(rollout)
    values = {
        "reward/mean": _mean(scored),
        "reward/std": float(scored.std(ddof=1)) if len(scored) > 1 else 0.0,
        "reward/solved_frac": _mean([rollout.verdict.solved for rollout in rollouts]),
        "reward/errors": sum(rollout.verdict.error is not None for rollout in rollouts),
        "reward/unscored": len(rewards) - len(scored),
        "completions/mean_length": _mean(lengths),
        "completions/max_length": int(lengths.max()) if len(lengths) else 0,
        "completions/truncated_frac": _mean([rollout.is_truncated for rollout in rollouts]),
        "completions/duplicate_frac": _duplicate_frac(groups),
        "tokens/generated": num_generated,
        "tokens/shared_frac": num_shared / max(num_generated + num_shared, 1),
        "tokens/prompt": sum(len(rollout.completion.request.prompt_ids) for rollout in rollouts),
    }
    for name in sorted({name for rollout in rollouts for name in rollout.verdict.parts}):
        parts = [r.verdict.parts[name] for r in rollouts if name in r.verdict.parts]
        values[f"reward/{name}/mean"] = _mean([part for part in parts if not np.isnan(part)])
    values.update(_group_metrics(groups))
    num_mixed = _num_mixed(rollouts, step_rewards)
    values["groups/zero_variance_frac"] = 1 - num_mixed / max(len(groups), 1)
    values["groups/with_signal"] = num_mixed
    values["tokens/per_effective_group"] = num_generated / num_mixed if num_mixed else float("nan")
    values.update(_tier_metrics(rollouts))
    values.update(_seeding_metrics(rollouts, groups))
    return values


def _num_mixed(rollouts: Sequence[Rollout], step_rewards: np.ndarray) -> int:
    """Groups with signal."""
    rewards: dict[int, list[float]] = defaultdict(list)
    for rollout, reward in zip(rollouts, step_rewards.tolist(), strict=True):
        rewards[rollout.completion.request.group].append(reward)
    return sum(has_signal(own) for own in rewards.values())


def _group_metrics(groups: dict[int, list[Rollout]]) -> dict[str, float]:
    counts = np.array([len(group) for group in groups.values()])
    right = [all(rollout.verdict.solved for rollout in group) for group in groups.values()]
    wrong = [not any(rollout.verdict.solved for rollout in group) for group in groups.values()]
    return {
        "groups/all_right_frac": _mean(right),
        "groups/all_wrong_frac": _mean(wrong),
        "planner/rollouts_min": int(counts.min()) if len(counts) else 0,
        "planner/rollouts_max": int(counts.max()) if len(counts) else 0,
        "planner/gini": gini(counts),
        "planner/rollouts": int(counts.sum()),
    }


def _tier_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Solved share and rollouts of each difficulty label, where the data has them."""
    tiers: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.prompt.tier:
            tiers[rollout.prompt.tier].append(rollout)
    values: dict[str, float] = {}
    for tier, members in sorted(tiers.items()):
        values[f"tier/{tier}/solved_frac"] = _mean([r.verdict.solved for r in members])
        values[f"tier/{tier}/rollouts"] = len(members)
    return values


def _seeding_metrics(
    rollouts: Sequence[Rollout], groups: dict[int, list[Rollout]]
) -> dict[str, float]:
    """A prompt is hopeless when its base rollouts all fail; flipped when a later one succeeds."""
    hopeless, flipped, seeded_prompts = 0, 0, 0
    for group in groups.values():
        first_round = min(rollout.round_index for rollout in group)
        base = [rollout for rollout in group if rollout.round_index == first_round]
        if len(base) == len(group) or any(rollout.verdict.solved for rollout in base):
            continue
        hopeless += 1
        flipped += any(rollout.verdict.solved for rollout in group)
        seeded_prompts += any(rollout.is_seeded for rollout in group)
    seeded = [rollout for rollout in rollouts if rollout.is_seeded]
    return {
        "icl/hopeless_prompts": hopeless,
        "icl/flipped_prompts": flipped,
        "icl/flipped_frac": flipped / hopeless if hopeless else float("nan"),
        "icl/seeded_prompts": seeded_prompts,
        "icl/seeded_rollouts": len(seeded),
        "icl/seeded_solved_frac": _mean([rollout.verdict.solved for rollout in seeded]),
    }


def novelty_metrics(rows: Sequence[TrainingRow], bonus: np.ndarray) -> dict[str, float]:
    """Bonus mass, its correlation with length, and its share per length decile."""
    lengths = np.array([len(row.response_ids) for row in rows], dtype=np.float64)
    given = bonus > 0
    correlation = float("nan")
    if given.sum() > 2 and lengths[given].std() > 0 and bonus[given].std() > 0:
        correlation = float(np.corrcoef(bonus[given], lengths[given])[0, 1])
    values = {
        "novelty/bonus_mean": float(bonus.mean()) if len(bonus) else 0.0,
        "novelty/bonus_rows": int(given.sum()),
        "novelty/bonus_length_corr": correlation,
    }
    if given.any():
        deciles = np.searchsorted(np.quantile(lengths, np.arange(0.1, 1.0, 0.1)), lengths)
        mass = np.bincount(deciles, weights=bonus, minlength=10) / bonus.sum()
        values.update({f"novelty/bonus_mass/decile_{i}": m for i, m in enumerate(mass)})
    return values


def has_signal(rewards: Sequence[float]) -> bool:
    """True where the scored rewards of a group differ."""
    scored = [reward for reward in rewards if reward == reward]
    return len(scored) > 1 and min(scored) != max(scored)


def gini(counts: np.ndarray) -> float:
    """Gini coefficient of the rollout counts: 0 when all prompts get the same."""
    ordered = np.sort(counts.astype(np.float64))
    total = ordered.sum()
    if total == 0:
        return 0.0
    ranks = np.arange(1, len(ordered) + 1)
    return float(
        (2 * (ranks * ordered).sum()) / (len(ordered) * total) - (len(ordered) + 1) / len(ordered)
    )


def _duplicate_frac(groups: dict[int, list[Rollout]]) -> float:
    """Share of completions that an earlier one of their group equals token by token."""
    total = sum(len(group) for group in groups.values())
    distinct = sum(
        len({rollout.completion.token_ids for rollout in group}) for group in groups.values()
    )
    return 1 - distinct / total if total else 0.0


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
