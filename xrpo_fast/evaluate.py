"""Evaluate a model: pass@k, avg@k and cons@k with intervals, lengths, and a paired comparison.

    python -m xrpo_fast.evaluate CONFIG_OR_RUN [--model DIR] [--data SOURCE] [--samples 32]
        [--k 1,4,32] [--against RESULT_OR_RUN] [--out DIR] [--section.key value ...]

A run folder is evaluated at its latest checkpoint. Samples that the output folder already holds are
not generated again. Exit codes: 0 done; 1 it failed while running; 2 config, data or model cannot
be used; 130 stopped by Ctrl-C, graded samples kept.
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from xrpo_fast.config import Config, ConfigError
from xrpo_fast.config_file import load_config
from xrpo_fast.estimators import cons_at_k, pass_at_k
from xrpo_fast.run_dir import log_to_console
from xrpo_fast.train import EXIT_INTERRUPTED, explain, parse_overrides, run_and_exit

if TYPE_CHECKING:
    from xrpo_fast.evaluator import Evaluator, Sample
    from xrpo_fast.types import Prompt

__all__ = ["cons_at_k", "main", "pass_at_k"]

DEFAULT_KS = (1, 4, 32)
FLUSH_S = 30.0
"""Seconds of graded samples that a kill may lose."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    console = Console()
    log_to_console(console)
    try:
        run_evaluation(*parse_arguments(arguments), console)
    except KeyboardInterrupt:
        console.print("stopped; graded samples are kept, the same command goes on from them")
        return EXIT_INTERRUPTED
    except Exception as error:
        code, text = explain(error)
        Console(stderr=True).print(f"error: {text}", style="red", markup=False, highlight=False)
        return code
    return 0


def parse_arguments(
    arguments: Sequence[str] | None,
) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
    """Known options, and the --section.key value pairs."""
    parser = argparse.ArgumentParser(prog="python -m xrpo_fast.evaluate", allow_abbrev=False)
    parser.add_argument("target", metavar="CONFIG_OR_RUN", help="a TOML file or a run folder")
    parser.add_argument("--model", help="folder or id, instead of the config's or the checkpoint")
    parser.add_argument("--data", help="evaluate on this source instead of the held-out sets")
    parser.add_argument("--samples", type=int, default=32, help="responses per question")
    parser.add_argument("--k", help="of pass@k and cons@k; default: 1,4,32 up to --samples")
    parser.add_argument("--against", type=Path, help="result.json, its folder, or another run")
    parser.add_argument("--out", type=Path, help="where samples and result go")
    options, rest = parser.parse_known_args(arguments)
    options.k = parse_ks(options.k, options.samples)
    return options, parse_overrides(rest)


def parse_ks(text: str | None, samples: int) -> list[int]:
    """'1,4,32' -> [1, 4, 32], each at most the number of samples."""
    if samples < 1:
        raise ConfigError(f"--samples: expected at least 1, got {samples}")
    if text is None:
        return [k for k in DEFAULT_KS if k <= samples]
    try:
        ks = sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise ConfigError(f"--k: expected numbers as in 1,4,32, got {text!r}") from None
    if not 1 <= ks[0] <= ks[-1] <= samples:
        raise ConfigError(f"--k: expected 1 to --samples = {samples}, got {text}")
    return ks


@dataclass(frozen=True, slots=True)
class Target:
    """What is evaluated."""

    config: Config
    weights: Path | None
    """The checkpoint; None: config.model.path."""
    folder: Path
    """Under which results lie, where --out does not say."""

    @property
    def step(self) -> int | None:
        """Of a checkpoint of ours."""
        return int(self.weights.name.removeprefix("step_")) if self.weights else None

    def default_out(self, fingerprint: str) -> Path:
        """Another folder for other samples, the same one for the same."""
        model = self.weights.name if self.weights else Path(self.config.model.path).name
        name = f"{self.config.run.name}-{model}-{fingerprint}".replace(":", "_")
        return self.folder / name


def resolve_target(options: argparse.Namespace, overrides: list[tuple[str, str]]) -> Target:
    """Config, weights and folder of the command line.

    Raises:
        ConfigError: no such config or run, or the run has no checkpoint.
    """
    from xrpo_fast.checkpoint import latest_checkpoint

    path = Path(options.target)
    is_run = path.is_dir()
    config_path = path / "config.toml" if is_run else path
    if is_run and not config_path.exists():
        raise ConfigError(
            f"CONFIG_OR_RUN: expected a TOML file or a run folder with config.toml, got {path}"
        )
    if options.model:
        overrides = [*overrides, ("model.path", options.model)]
    config = load_config(config_path, overrides)
    weights = latest_checkpoint(path) if is_run and not options.model else None
    if is_run and not options.model and weights is None:
        raise ConfigError(
            f"CONFIG_OR_RUN: expected a complete checkpoint in {path / 'checkpoints'}, found none; "
            "train first, or give --model"
        )
    if options.data:
        name = Path(options.data.partition("?")[0].replace(":", "/")).stem
        data = config.data.model_copy(update={"eval": {name: options.data}})
        config = config.model_copy(update={"data": data})
    # Not in the folder of a run yet to come, which training would find occupied.
    folder = path if is_run else config.run.output_dir
    return Target(config, weights, folder / "evaluations")


def run_evaluation(
    options: argparse.Namespace, overrides: list[tuple[str, str]], console: Console
) -> dict[str, Any]:
    """Sample, grade, summarise, compare, write and show; returns the result as in result.json."""
    target = resolve_target(options, overrides)
    from xrpo_fast.eval_parts import open_parts
    from xrpo_fast.eval_report import compare, show, summarise_set
    from xrpo_fast.eval_store import SampleFile, find_result, write_result

    with ExitStack() as stack:
        parts = open_parts(target.config, target.weights, stack)
        against = None
        if options.against:
            # Before hours of sampling: a comparison that cannot be made.
            against = find_result(options.against, parts.questions_fingerprints)
        out = options.out or target.default_out(parts.fingerprint)
        files = {
            name: SampleFile(out / f"samples_{name}.parquet", fingerprint)
            for name, fingerprint in parts.sample_fingerprints.items()
        }
        samples = {
            name: fill(parts.evaluator, files[name], prompts, options.samples, name, console)
            for name, prompts in parts.sets.items()
        }
        result = {
            "format": 1,
            "model": str(target.weights or target.config.model.path),
            "step": target.step,
            "grader": parts.grader,
            "sampling": {**parts.sampling, "samples": options.samples},
            "sets": {
                name: {
                    "questions": len(prompts),
                    "questions_fingerprint": parts.questions_fingerprints[name],
                    "samples_fingerprint": files[name].fingerprint,
                    "metrics": summarise_set(parts.evaluator, prompts, samples[name], options.k),
                }
                for name, prompts in parts.sets.items()
            },
        }
        if against is not None:
            result["against"] = compare(
                against, result, parts.sets, samples, options.k, parts.evaluator.equivalent
            )
        path = write_result(out, result)
    show(result, console)
    console.print(f"result: {path}", markup=False, highlight=False, soft_wrap=True)
    return result


def fill(
    evaluator: "Evaluator",
    file: Any,
    prompts: Sequence["Prompt"],
    num_samples: int,
    name: str,
    console: Console,
) -> list["Sample"]:
    """The first num_samples of each prompt, those that the file lacks generated and written."""
    samples = file.read()
    have = {(sample.prompt_index, sample.sample_index) for sample in samples}
    every = [(group, i) for group in range(len(prompts)) for i in range(num_samples)]
    wanted = [pair for pair in every if pair not in have]
    last_flush_s = time.monotonic()
    from xrpo_fast.display import SamplingDisplay

    try:
        with SamplingDisplay(console, name, len(every), len(every) - len(wanted)) as display:
            for sample in evaluator.stream(prompts, wanted) if wanted else ():
                samples.append(sample)
                display.advance()
                if time.monotonic() - last_flush_s > FLUSH_S:
                    file.write(prompts, samples)
                    last_flush_s = time.monotonic()
    finally:
        if wanted:
            file.write(prompts, samples)
    chosen = [sample for sample in samples if sample.sample_index < num_samples]
    return sorted(chosen, key=lambda s: (s.prompt_index, s.sample_index))


if __name__ == "__main__":
    run_and_exit(main)
