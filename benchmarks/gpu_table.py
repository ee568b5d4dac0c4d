"""One JSON and one table of a GPU check.

    python benchmarks/gpu_table.py BENCHMARKS.json OUT.json [--tests TESTS.xml ...]

Reads what pytest-benchmark wrote for benchmarks/bench_gpu.py (and pytest's JUnit files), writes the
rows with the test counts to OUT.json and prints them: median, ratio to the best rival, GB/s, share
of the measured copy bandwidth, extra peak memory.
"""

import argparse
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any


def read_rows(benchmarks: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per timing; `speedup` is the best rival's median over this one, for our rows."""
    rows = [entry["extra_info"] for entry in benchmarks["benchmarks"]]
    for row in rows:
        rivals = [
            other["median_ms"]
            for other in rows
            if other["workload"] == row["workload"] and not other["provider"].startswith("ours")
        ]
        if row["provider"].startswith("ours") and rivals:
            row["speedup"] = min(rivals) / row["median_ms"]
    return sorted(rows, key=lambda row: row["workload"])


def count_tests(files: list[Path]) -> dict[str, int]:
    """Numbers of tests, failures, errors and skips of JUnit files."""
    suites = [s for file in files for s in ElementTree.parse(file).getroot().iter("testsuite")]
    names = ("tests", "failures", "errors", "skipped")
    totals = dict.fromkeys(names, 0)
    for suite in suites:
        for name in names:
            totals[name] += int(suite.get(name, 0))
    return totals


def _cell(value: float | None, spec: str, width: int) -> str:
    return f"{'-' if value is None else format(value, spec):>{width}}"


def format_table(rows: list[dict[str, Any]]) -> str:
    """The rows as text; the last line names the device and its copy bandwidth."""
    lines = [
        f"{'workload':38s} {'provider':28s} {'ms':>9} {'x rival':>8} {'GB/s':>7} "
        f"{'% copy':>7} {'peak MiB':>9}"
    ]
    for row in rows:
        copy_percent = 100 * row["copy_frac"] if "copy_frac" in row else None
        lines.append(
            f"{row['workload']:38s} {row['provider']:28s} {_cell(row['median_ms'], '.4f', 9)} "
            f"{_cell(row.get('speedup'), '.2f', 8)} {_cell(row.get('gb_per_s'), '.0f', 7)} "
            f"{_cell(copy_percent, '.1f', 7)} {_cell(row['peak_mib'], '.0f', 9)}"
        )
    if rows:
        first = rows[0]
        lines.append(
            f"{first['gpu']}, torch {first['torch']}, triton {first['triton']}; "
            f"copy {first['copy_gb_per_s']:.0f} GB/s (read + write)"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("benchmarks", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tests", type=Path, nargs="+", help="JUnit files of the GPU tests")
    options = parser.parse_args()
    rows = read_rows(json.loads(options.benchmarks.read_text()))
    result: dict[str, Any] = {"rows": rows}
    if options.tests:
        result["tests"] = count_tests(options.tests)
    options.out.write_text(json.dumps(result, indent=1))
    print(format_table(rows))
    if options.tests:
        print(", ".join(f"{count} {name}" for name, count in result["tests"].items()))


if __name__ == "__main__":
    main()
