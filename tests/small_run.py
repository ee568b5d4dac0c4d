"""A run of the built-in task small enough for tests: seconds, not minutes."""

from pathlib import Path

SMALL = {
    "run.steps": "4",
    "rollout.prompts_per_step": "12",
    "rollout.rollouts_per_prompt": "6",
    "planner.base_rollouts": "3",
    "eval.every_steps": "2",
    "eval.samples": "1",
    "eval.final_samples": "2",
    "eval.max_prompts": "6",
    "eval.k": "[1]",
    "checkpoint.every_steps": "2",
}

CONFIG = Path(__file__).parent.parent / "examples" / "quickstart.toml"


def small_arguments(output_dir: Path, *flags: str, **changes: str) -> list[str]:
    """Command-line arguments of train; changes use section__key=value."""
    values = SMALL | {"run.output_dir": str(output_dir)}
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    overrides = [word for key, value in values.items() for word in (f"--{key}", value)]
    return [str(CONFIG), *overrides, *flags]
