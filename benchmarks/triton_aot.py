"""What the Triton kernels compile to for sm_80, sm_90 and sm_100, without a GPU.

    python benchmarks/triton_aot.py [--core] [--json FILE]

Compiles the specialisations that the launchers launch (--core: one for each kernel and
loop, for sm_90). One line per kernel, specialisation and target:

    regs         registers of a thread
    spill        bytes of local memory of a thread
    smem         bytes of shared memory of a program
    load, store  narrowest global access of the loop over full tiles, bytes
    exp          exponentials of that loop per element
    bytes        that loop moves per element, and the floor: inputs read once, outputs written once
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_launches import ALIGNMENT_BYTES, Launch, launches

TARGETS = (80, 90, 100)


@dataclass(frozen=True)
class Report:
    """What one launch costs on one target."""

    kernel: str
    label: str
    target: int
    is_core: bool
    in_vectors: bool
    registers: int
    spilled_bytes: int
    shared_bytes: int
    load_bytes: int | None = None
    store_bytes: int | None = None
    exps_per_element: float | None = None
    bytes_per_element: float | None = None
    floor_bytes: int | None = None


def _resources(cubin: bytes) -> tuple[int, int, int]:
    """(registers, bytes of local memory, bytes of shared memory) as cuobjdump reports them."""
    tool = Path(str(triton.__file__)).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text))
    return int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"]), int(found["SHARED"])


def _innermost_loops(ptx: str) -> list[list[str]]:
    """Lines of each loop that holds no other: from a label to the last branch back to it."""
    lines = ptx.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\$L\w+):", line))}
    spans: dict[int, int] = {}
    for i, line in enumerate(lines):
        branch = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+)", line)
        if branch and labels.get(branch[1], i) < i:
            spans[labels[branch[1]]] = i
    inner = [
        (a, b)
        for a, b in spans.items()
        if not any(a <= c and d <= b and c != a for c, d in spans.items())
    ]
    return [lines[a : b + 1] for a, b in sorted(inner)]


def _access_bytes(lines: list[str], instruction: str) -> list[int]:
    """Width of each global load (ld) or store (st)."""
    pattern = rf"\b{instruction}\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)\s"
    found = (re.search(pattern, line) for line in lines)
    return [int(m[1] or 1) * int(m[2]) // 8 for m in found if m]


def _tile_loop(ptx: str, launch: Launch) -> list[str]:
    """The loop over full tiles: the first that loads a byte or more for each of their elements.

    It stores where the kernel writes as many elements as it reads, and only there.
    """
    return next(
        loop
        for loop in _innermost_loops(ptx)
        if sum(_access_bytes(loop, "ld")) >= launch.elements_per_thread
        and bool(_access_bytes(loop, "st")) == launch.writes_elements
    )


def compile_and_report(launch: Launch, target: int) -> Report:
    """Compiles one launch for sm_<target> and reads what came out."""
    source = ASTSource(
        fn=getattr(importlib.import_module(launch.module), launch.kernel),
        signature=dict(launch.signature),
        constexprs=dict(launch.constexprs),
        attrs={(i,): [["tt.divisibility", ALIGNMENT_BYTES]] for i in launch.aligned_arguments},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", target, 32), options=dict(launch.options)
    )
    registers, spilled_bytes, shared_bytes = _resources(compiled.asm["cubin"])
    report = {
        "kernel": launch.kernel,
        "label": launch.label,
        "target": target,
        "is_core": launch.is_core,
        "in_vectors": dict(launch.constexprs).get("VEC", 1) > 1,
        "registers": registers,
        "spilled_bytes": spilled_bytes,
        "shared_bytes": shared_bytes,
    }
    if launch.floor_bytes:
        loop = _tile_loop(compiled.asm["ptx"], launch)
        loads, stores = _access_bytes(loop, "ld"), _access_bytes(loop, "st")
        num_exps = sum("ex2.approx" in line for line in loop)
        report |= {
            "load_bytes": min(loads),
            "store_bytes": min(stores, default=None),
            "exps_per_element": num_exps / launch.elements_per_thread,
            "bytes_per_element": (sum(loads) + sum(stores)) / launch.elements_per_thread,
            "floor_bytes": launch.floor_bytes,
        }
    return Report(**report)


def _line(report: Report) -> str:
    def cell(value: float | None, width: int) -> str:
        return f"{'' if value is None else format(value, '.4g'):>{width}}"

    moved = (
        "" if report.floor_bytes is None else f"{report.bytes_per_element:g}/{report.floor_bytes}"
    )
    return (
        f"{report.kernel.strip('_').removesuffix('_kernel'):22s} {report.label:38s} "
        f"sm_{report.target:<4d}{report.registers:5d}{report.spilled_bytes:6d}"
        f"{report.shared_bytes:6d}{cell(report.load_bytes, 6)}{cell(report.store_bytes, 6)}"
        f"{cell(report.exps_per_element, 7)} {moved:>7}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--core", action="store_true", help="one of each kernel and loop, for sm_90"
    )
    parser.add_argument("--json", type=Path, help="write the reports here as well")
    options = parser.parse_args()
    found = [launch for launch in launches() if launch.is_core or not options.core]
    pairs = [(x, target) for x in found for target in ((90,) if options.core else TARGETS)]
    print(
        f"{'kernel':22s} {'specialisation':38s} {'target':7s}{'regs':>5}{'spill':>6}{'smem':>6}"
        f"{'load':>6}{'store':>6}{'exp':>7} {'bytes':>7}"
    )
    reports = []
    with ProcessPoolExecutor(max_workers=min(os.cpu_count() or 1, 8)) as pool:
        for report in pool.map(compile_and_report, *zip(*pairs, strict=True)):
            reports.append(report)
            print(_line(report), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(report) for report in reports], indent=1))


if __name__ == "__main__":
    main()
