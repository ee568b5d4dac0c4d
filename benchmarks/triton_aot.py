"""What the Triton kernels compile to for sm_80, sm_90 and sm_100, without a GPU.

    python benchmarks/triton_aot.py [--core] [--json FILE]

The launchers run on small CPU tensors with recorders in place of their kernels, so that exactly the
specialisations that they launch are compiled (--core: one for each kernel and loop, for sm_90).
One line per kernel, specialisation and target:

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
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from xrpo_fast.kernels import advantages, logprobs

TARGETS = (80, 90, 100)
ALIGNMENT_BYTES = 16
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Launch:
    """One kernel with the arguments that a launcher gave it."""

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Any], ...]
    aligned_arguments: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    label: str
    is_core: bool
    floor_bytes: int
    """Bytes per element that the loop over tiles must move; 0 without such a loop."""

    @property
    def key(self) -> tuple:
        """What Triton compiles separately."""
        return self.kernel, self.signature, self.constexprs, self.aligned_arguments, self.options

    @property
    def elements_per_thread(self) -> int:
        """Elements of a tile, per thread."""
        sizes = dict(self.constexprs)
        if "TILE_ROWS" in sizes:
            return sizes["VEC"] * sizes["TILE_ROWS"]
        return sizes.get("ROWS", 1) * sizes["BLOCK_T"] // (32 * dict(self.options)["num_warps"])


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


class _Recorder:
    """Stands in for a kernel and keeps what it is launched with."""

    def __init__(self, kernel: Any, calls: list[tuple[Any, tuple, dict]]) -> None:
        self.kernel = kernel
        self.calls = calls

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.calls.append((self.kernel, args, kwargs))


def _recorded(
    module: Any, launch: Callable[[], Any], label: str, is_core: bool, floor_bytes: int
) -> Iterator[Launch]:
    """The launches behind one call of a launcher."""
    calls: list[tuple[Any, tuple, dict]] = []
    kernels = {name: value for name, value in vars(module).items() if name.endswith("_kernel")}
    recorders = {name: _Recorder(kernel, calls) for name, kernel in kernels.items()}
    with mock.patch.dict(vars(module), recorders):
        launch()
    for kernel, args, kwargs in calls:
        names = [param.name for param in kernel.params]
        values = dict(zip(names, args, strict=False))
        values |= {name: value for name, value in kwargs.items() if name in names}
        types = {p.name: _type_of(p, values[p.name]) for p in kernel.params}
        yield Launch(
            module=module.__name__,
            kernel=kernel.__name__,
            signature=tuple(types.items()),
            constexprs=tuple((n, _plain(values[n])) for n, t in types.items() if t == "constexpr"),
            aligned_arguments=tuple(
                index
                for index, param in enumerate(kernel.params)
                if isinstance(values[param.name], Tensor)
                and not param.do_not_specialize_on_alignment
                and values[param.name].data_ptr() % ALIGNMENT_BYTES == 0
            ),
            options=tuple((n, value) for n, value in kwargs.items() if n not in names),
            label=f"{label} split" if dict(kwargs).get("SPLIT") else label,
            is_core=is_core,
            floor_bytes=floor_bytes if {"VEC", "BLOCK_T"} & set(names) else 0,
        )


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _type_of(param: Any, value: Any) -> str:
    """The type that Triton derives from an argument of a launch."""
    if param.is_constexpr:
        return "constexpr"
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    assert param.do_not_specialize, f"{param.name}: a scalar that recompiles the kernel"
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _logprob_launches() -> Iterator[Launch]:
    """Forward (whole rows, and split with its merge) and backward."""
    core = {(torch.bfloat16, 151936), (torch.float32, 151936), (torch.bfloat16, 50257)}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for vocab_size in (151936, 50257, 4096, 257):
            for index_dtype in (torch.int64, torch.int32):
                for with_entropy in (False, True):
                    kind = "entropy" if with_entropy else "logprob"
                    label = f"{POINTERS[dtype]} V={vocab_size} {POINTERS[index_dtype]} {kind}"
                    is_core = (dtype, vocab_size) in core and index_dtype == torch.int64
                    calls = _logprob_calls(dtype, vocab_size, index_dtype, with_entropy)
                    for direction, call in enumerate(calls):
                        floor_bytes = dtype.itemsize * (1 if direction < 2 else 2)
                        yield from _recorded(logprobs, call, label, is_core, floor_bytes)


def _logprob_calls(
    dtype: torch.dtype, vocab_size: int, index_dtype: torch.dtype, with_entropy: bool
) -> list[Callable[[], Any]]:
    """Calls of the launchers: forward of one row (split), forward of two, backward."""
    logits = torch.zeros(2, vocab_size, dtype=dtype)
    labels = torch.zeros(2, dtype=index_dtype)
    stats, sums = torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    entropy = stats if with_entropy else None
    forward, backward = logprobs.token_logprobs_fwd, logprobs.token_logprobs_bwd
    options = (1.0, None, vocab_size)
    return [
        partial(forward, logits[:1], labels[:1], *options, with_entropy),
        partial(forward, logits, labels, *options, with_entropy),
        partial(backward, stats, entropy, logits, labels, *options, stats, sums, entropy),
    ]


def _advantage_launches() -> Iterator[Launch]:
    """Advantages from every source of scores, batch moments, and sequence scores."""
    pairs = [(torch.float32, d) for d in (torch.float32, torch.bfloat16, torch.float16)]
    for reward_dtype, dtype in (*pairs, (torch.float64, torch.float64)):
        for index_dtype in (torch.int64, torch.int32):
            rewards = torch.zeros(2, dtype=reward_dtype)
            values, padded = torch.zeros(4, dtype=dtype), torch.zeros(2, 3, dtype=dtype)
            offsets = torch.zeros(3, dtype=index_dtype)
            sources = {
                "no scores": (None, None, None, None),
                "scores": (values[:2], None, None, None),
                "packed": (None, values, offsets, None),
                "padded": (None, padded, None, torch.zeros(2, 3, dtype=torch.bool)),
            }
            is_core = dtype == torch.float32 and index_dtype == torch.int64
            types = f"{POINTERS[reward_dtype]} {POINTERS[dtype]} {POINTERS[index_dtype]}"
            for source, tensors in sources.items():
                floor_bytes = {"packed": dtype.itemsize, "padded": dtype.itemsize + 1}
                yield from _recorded(
                    advantages,
                    partial(
                        advantages.xrpo_advantages_fwd,
                        *(rewards, *tensors, offsets, None, 1.0, None),
                        *(2.5, 0.5, "batch", 1, 1e-6),
                    ),
                    f"{types} {source}",
                    is_core,
                    floor_bytes.get(source, 0),
                )
            yield from _recorded(
                advantages,
                partial(advantages.sequence_logprobs_fwd, values, offsets, "mean"),
                types,
                is_core,
                dtype.itemsize,
            )


def launches() -> list[Launch]:
    """Every distinct specialisation that the launchers launch."""
    distinct: dict[tuple, Launch] = {}
    for launch in (*_logprob_launches(), *_advantage_launches()):
        distinct.setdefault(launch.key, launch)
    return list(distinct.values())


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


def _tile_loop(ptx: str) -> list[str]:
    """The loop over full tiles: of the loops with the most loads, the first; masked ones last."""
    loops = [loop for loop in _innermost_loops(ptx) if _access_bytes(loop, "ld")]

    def order(loop: list[str]) -> tuple[int, bool]:
        masked = any(re.search(r"@!?%p\d+\s+ld\.global", line) for line in loop)
        return -sum(_access_bytes(loop, "ld")), masked

    return min(loops, key=order)


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
        loop = _tile_loop(compiled.asm["ptx"])
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
