"""The built-in policy by seed: the shipped one, or one warmed up here once and kept.

Seed N > 0 has other initial weights and other documents than seed 0, so that studies over seeds
also vary where training starts from.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from xrpo_fast.tasks.policy import POLICY_DIR

WARMUP_CPU_S = 140
"""About what one warm-up costs on one core."""


def cached_policy_dir(seed: int) -> Path:
    """Folder of the policy of a seed, whether or not it is there yet."""
    if seed == 0:
        return POLICY_DIR
    from xrpo_fast.tasks.warmup import NUM_STEPS, RECIPE

    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "xrpo_fast" / f"symbols-recipe{RECIPE}-{NUM_STEPS}-seed{seed}"


def policy_dir(seed: int, report: Callable[[int, int], None] | None = None) -> Path:
    """Folder of the policy of a seed, warmed up first where it is not there yet.

    report(steps done, steps in all) is called after each step of the warm-up. The folder appears
    complete or not at all; of two processes that make it at once, the first one's stays.
    """
    folder = cached_policy_dir(seed)
    if folder.exists():
        return folder
    from xrpo_fast.tasks.warmup import NUM_STEPS, save_policy, warm_up

    def show(step: int, loss: float) -> None:
        if report is not None:
            report(step + 1, NUM_STEPS)

    model, _ = warm_up(seed, NUM_STEPS, show)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save_policy(model, made)
        if not folder.exists():
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder
