"""Makes the built-in policies that a study's runs start from, before the first of them."""

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from xrpo_fast.policy import builtin_seed
from xrpo_fast.study.plan import Study
from xrpo_fast.tasks.seeded import WARMUP_CPU_S, cached_policy_dir, policy_dir


def prepare_policies(study: Study, console: Console) -> None:
    """Warm up what is missing, one after the other, under a progress line."""
    seeds = {builtin_seed(run.config.model.path) for run in study.runs}
    wanted = sorted(seed for seed in seeds if seed is not None)
    missing = [seed for seed in wanted if not cached_policy_dir(seed).exists()]
    if not missing:
        return
    threads = study.runs[0].config.run.threads
    if threads:
        torch.set_num_threads(threads)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
    with Progress(
        *columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True
    ) as progress:
        for seed in missing:
            console.print(
                f"warming up the built-in policy of seed {seed}, about {WARMUP_CPU_S} CPU seconds; "
                f"kept in {cached_policy_dir(seed)}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            task = progress.add_task(f"warm-up, seed {seed}", total=None)

            def show(step: int, num_steps: int, task=task) -> None:
                progress.update(task, completed=step, total=num_steps)

            policy_dir(seed, show)
            progress.remove_task(task)
