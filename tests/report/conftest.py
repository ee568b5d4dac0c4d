"""A run folder as the trainer writes it, from a made-up but plausible run."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

NUM_PROMPTS, PROMPTS_PER_STEP = 120, 16
BASE, BUDGET = 4, 8


@pytest.fixture(scope="session")
def write_run():
    """Writes config.toml, metrics.jsonl and rollouts/; returns the path and the metrics' rows."""
    return _write_run


def _write_run(
    path,
    *,
    name="xrpo",
    algorithm="xrpo",
    num_steps=40,
    asked_steps=None,
    data="builtin:symbols",
    seed=0,
    has_rollouts=True,
):
    rng = np.random.default_rng(seed)
    path.mkdir(parents=True)
    (path / "config.toml").write_text(
        f'algorithm = "{algorithm}"\n[run]\nname = "{name}"\nsteps = {asked_steps or num_steps}\n'
        f'seed = {seed}\n[model]\npath = "builtin:symbols"\n[data]\ntrain = "{data}"\n'
    )
    skills = rng.beta(0.4, 0.6, NUM_PROMPTS)
    rows = [{"step": 0, **_evaluation(0.24)}]
    for step in range(1, num_steps + 1):
        skills += (1 - skills) * rng.random(NUM_PROMPTS) * (3 if algorithm == "xrpo" else 2) / 90
        rollouts = _rollouts(rng, step, skills, algorithm == "xrpo")
        rows.append(_metrics(rng, step, rollouts, algorithm == "xrpo"))
        if step % 10 == 0 or step == num_steps:
            rows[-1].update(_evaluation(float(skills.mean())))
        if has_rollouts:
            (path / "rollouts").mkdir(exist_ok=True)
            table = pa.table({key: [row[key] for row in rollouts] for key in rollouts[0]})
            pq.write_table(table, path / "rollouts" / f"step_{step}.parquet")
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, rows


def _evaluation(accuracy):
    named = {"pass@1": accuracy, "pass@4": accuracy**0.5, "cons@32": accuracy**0.8}
    values = {}
    for name, value in named.items():
        key = f"eval/held_out/{name}"
        values |= {key: value, f"{key}/low": value * 0.95, f"{key}/high": value**0.95}
    return values | {"eval/held_out/tier/hard/pass@1": accuracy / 2}


def _rollouts(rng, step, skills, is_xrpo):
    rows = []
    for group, prompt in enumerate(rng.choice(NUM_PROMPTS, PROMPTS_PER_STEP, replace=False)):
        base = [bool(rng.random() < skills[prompt]) for _ in range(BASE)]
        spread = 1 + 3 * (0 < sum(base) < BASE) if is_xrpo else 0
        extra = BUDGET - BASE + spread - (2 if is_xrpo else 0)
        for sample in range(BASE + extra):
            is_seeded = is_xrpo and not any(base) and sample >= BASE and step > 2
            chance = max(skills[prompt], 0.5 * is_seeded)
            solved = base[sample] if sample < BASE else bool(rng.random() < chance)
            tokens = int(rng.integers(9, 26))
            score = float(-rng.exponential(0.4))
            rows.append(
                {
                    "step": step,
                    "prompt_id": f"train-{prompt}",
                    "prompt_index": int(prompt),
                    "group": group,
                    "sample_index": sample,
                    "round": 0 if sample < BASE else 1,
                    "finish_order": len(rows),
                    "seeded": is_seeded,
                    "reward": float(solved),
                    "solved": solved,
                    "num_tokens": tokens,
                    "truncated": False,
                    "advantage": 1.0 if solved else -1.0,
                    "bonus": max(0.0, 0.1 - 0.2 * score) if solved and is_xrpo else 0.0,
                    "score": score,
                    "eta": 1.0,
                    "similarity": float(rng.uniform(0.6, 1.0)) if is_seeded else None,
                    "tier": ("easy", "hard")[int(prompt) % 2],
                    "question": f"?ka:{prompt % 100:02d} <b>& co</b>" if sample < 2 else None,
                    "response": "kaJ663344$ " * 3 if sample < 2 else None,
                    "extracted": "44",
                }
            )
    return rows


def _metrics(rng, step, rollouts, is_xrpo):
    solved = np.array([row["solved"] for row in rollouts])
    lengths = np.array([row["num_tokens"] for row in rollouts])
    values = {
        "step": step,
        "reward/mean": float(solved.mean()),
        "groups/zero_variance_frac": float(rng.uniform(0.3, 0.6)),
        "completions/mean_length": float(lengths.mean()),
        "completions/truncated_frac": 0.0,
        "tokens/generated": int(lengths.sum()),
        "planner/gini": float(rng.uniform(0.1, 0.2)) if is_xrpo else 0.0,
        "mismatch/logprob_abs_mean": float(rng.uniform(1e-6, 2e-6)),
        "mismatch/logprob_abs_max": float(rng.uniform(1e-5, 2e-5)),
        "grad_norm": float(rng.uniform(0.5, 1.0)),
        "entropy": 0.6 - step / 100,
        "clip_frac/high": 0.02,
        "clip_frac/low": 0.03,
        "kl": None,
    }
    phases = {"generate": 0.5, "update": 0.3, "verify": 0.01, "plan": 0.004, "other": 0.02}
    seconds = {phase: float(s * rng.uniform(0.8, 1.2)) for phase, s in phases.items()}
    values |= {f"timing_s/{phase}": s for phase, s in seconds.items()}
    values["timing_s/step"] = sum(seconds.values())
    if is_xrpo:
        values |= {
            "icl/hopeless_prompts": 5,
            "icl/flipped_prompts": min(step, 3),
            "icl/flipped_frac": min(step, 3) / 5,
            "icl/seeded_prompts": 5,
            "icl/seeded_solved_frac": 0.5,
            "icl/corpus_size": min(3 * step, NUM_PROMPTS),
            "novelty/bonus_mean": 0.02,
        }
    return values
