"""rollouts/step_N.parquet: one row per rollout, the input of replay and report."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xrpo_fast.files import replacing, writing
from xrpo_fast.ops import XrpoAdvantages
from xrpo_fast.types import Rollout

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("prompt_id", pa.string()),
        ("prompt_index", pa.int64()),
        ("group", pa.int64()),
        ("sample_index", pa.int64()),
        ("round", pa.int64()),
        ("finish_order", pa.int64()),
        ("seeded", pa.bool_()),
        ("similarity", pa.float32()),
        ("exemplar_ids", pa.list_(pa.string())),
        ("reward", pa.float64()),
        ("solved", pa.bool_()),
        ("error", pa.string()),
        ("extracted", pa.string()),
        ("num_tokens", pa.int64()),
        ("shared_tokens", pa.int64()),
        ("truncated", pa.bool_()),
        ("score", pa.float32()),
        ("eta", pa.float32()),
        ("advantage", pa.float32()),
        ("bonus", pa.float32()),
        ("tier", pa.string()),
        ("question", pa.string()),
        ("response", pa.string()),
    ]
)
"""score: mean log-prob in nats; similarity: of the nearest exemplar; shared_tokens: those that an
earlier leaf of the tree has too; texts: null where not kept."""


def write_rollouts(
    path: Path,
    step: int,
    rollouts: Sequence[Rollout],
    shaped: XrpoAdvantages,
    *,
    num_texts: int,
) -> None:
    """Write one step's rollouts; only the first `num_texts`, spread evenly, with their text."""
    keep = np.linspace(0, len(rollouts) - 1, min(num_texts, len(rollouts)))
    with_text = {round(i) for i in keep}
    table = pa.table(
        {
            "step": [step] * len(rollouts),
            "prompt_id": [r.prompt.id for r in rollouts],
            "prompt_index": [r.prompt.index for r in rollouts],
            "group": [r.completion.request.group for r in rollouts],
            "sample_index": [r.completion.request.sample_index for r in rollouts],
            "round": [r.round_index for r in rollouts],
            "finish_order": [r.finish_order for r in rollouts],
            "seeded": [r.is_seeded for r in rollouts],
            "similarity": [
                max((e.similarity for e in r.exemplars), default=None) for r in rollouts
            ],
            "exemplar_ids": [[e.prompt_id for e in r.exemplars] for r in rollouts],
            "reward": [r.verdict.reward for r in rollouts],
            "solved": [r.verdict.solved for r in rollouts],
            "error": [r.verdict.error for r in rollouts],
            "extracted": [r.verdict.extracted for r in rollouts],
            "num_tokens": [r.num_tokens for r in rollouts],
            "shared_tokens": [r.num_shared_tokens for r in rollouts],
            "truncated": [r.is_truncated for r in rollouts],
            "score": shaped.scores.float().numpy(),
            "eta": shaped.eta.float().numpy(),
            "advantage": shaped.advantages.float().numpy(),
            "bonus": shaped.bonus.float().numpy(),
            "tier": [r.prompt.tier for r in rollouts],
            "question": [
                r.prompt.question if i in with_text else None for i, r in enumerate(rollouts)
            ],
            "response": [r.text if i in with_text else None for i, r in enumerate(rollouts)],
        },
        schema=SCHEMA,
    )
    with writing(path), replacing(path) as temporary:
        pq.write_table(table, temporary)
