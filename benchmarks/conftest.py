"""A table at the end of a benchmark run: who is how fast, at what error, with how much memory.

    pytest benchmarks/ --benchmark-only                      everything, minutes
    XRPO_BENCH_QUICK=1 pytest benchmarks/ --benchmark-only   small sizes, one round: a smoke test

On a busy machine add --benchmark-timer=time.process_time: processor seconds of all threads, so that
what others take does not count. A benchmark that wants a row calls `measure`.
"""

import os
import resource
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.requirements import require

__all__ = ["require"]

IS_QUICK = os.environ.get("XRPO_BENCH_QUICK") == "1"
# A rival with a larger error answers another question: no ratio is taken to it.
MAX_RIVAL_ERROR = 1e-3
HEADER = ("workload", "provider", "median ms", "rival/it", "GB/s", "of read", "extra MiB", "error")


@pytest.fixture(scope="session")
def read_gb_per_s() -> float:
    """Bytes per second of a plain sum over 512 MiB of float32, best of 5, on torch's threads."""
    import time

    data = torch.ones((16 if IS_QUICK else 512) << 18)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - start)
    return data.numel() * 4 / min(seconds) / 1e9


@pytest.fixture
def measure(benchmark, read_gb_per_s) -> Callable[..., None]:
    """measure(run, workload, provider, num_bytes, error=0.0, rounds=7, calls=1): time run().

    num_bytes is the floor of the workload, whatever the provider really moves.
    """

    def rounds_of(
        run: Callable[[], object],
        workload: str,
        provider: str,
        num_bytes: int,
        error: float = 0.0,
        rounds: int = 7,
        calls: int = 1,
    ) -> None:
        run()
        benchmark.group = workload
        benchmark.extra_info.update(
            provider=provider,
            error=error,
            extra_mib=_extra_mib(run),
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            read_gb_per_s=read_gb_per_s,
            num_bytes=num_bytes,
        )
        benchmark.pedantic(
            run,
            rounds=1 if IS_QUICK else rounds,
            iterations=1 if IS_QUICK else calls,
            warmup_rounds=1,
        )

    return rounds_of


def _extra_mib(run: Callable[[], object]) -> float:
    """Peak resident memory of one call above what was there before, MiB (Linux; else NaN)."""
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    try:
        clear.write_text("5")
    except OSError:
        return float("nan")
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    run()
    peak_kib = next(
        int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")
    )
    return max(0.0, peak_kib / 1024 - pages * resource.getpagesize() / 2**20)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    session = getattr(config, "_benchmarksession", None)
    rows = [b for b in getattr(session, "benchmarks", []) if "num_bytes" in b.extra_info]
    if not rows:
        return
    lines = [HEADER]
    for workload in dict.fromkeys(b.group for b in rows):
        lines += _table([b for b in rows if b.group == workload])
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    terminalreporter.section("benchmarks: ours against the others")
    for line in lines:
        cells = [
            cell.ljust(w) if i < 2 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        terminalreporter.write_line("  ".join(cells))
    info = rows[0].extra_info
    terminalreporter.write_line(
        f"rival/it: median of the fastest rival of error <= {MAX_RIVAL_ERROR} over this one; "
        f"read: {info['read_gb_per_s']:.1f} GB/s, sum of float32; {info['threads']} threads, "
        f"torch {info['torch']}"
    )


def _table(rows: list) -> list[tuple[str, ...]]:
    def median(bench) -> float:
        return statistics.median(bench.stats.data)

    lines = []
    for bench in rows:
        info = bench.extra_info
        rivals = [
            median(b)
            for b in rows
            if b is not bench
            and b.extra_info["error"] <= MAX_RIVAL_ERROR
            and not b.extra_info["provider"].startswith(("ours", "floor"))
        ]
        rate = info["num_bytes"] / median(bench) / 1e9
        lines.append(
            (
                bench.group,
                info["provider"],
                f"{1e3 * median(bench):.3f}",
                f"{min(rivals) / median(bench):.2f}" if rivals else "",
                f"{rate:.2f}",
                f"{100 * rate / info['read_gb_per_s']:.0f} %",
                f"{info['extra_mib']:.0f}",
                f"{info['error']:.0e}",
            )
        )
    return lines
