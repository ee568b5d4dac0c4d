"""Every specialisation of the Triton kernels that the launchers launch.

The launchers run on small CPU tensors with recorders in place of their kernels; what a recorder is
called with gives the signature that Triton would compile.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from xrpo_fast.kernels import advantages, logprobs

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
    def writes_elements(self) -> bool:
        """Whether a result is written for every element that is read."""
        return "dlogits_ptr" in dict(self.signature)

    @property
    def elements_per_thread(self) -> int:
        """Elements of a tile, per thread."""
        sizes = dict(self.constexprs)
        if "TILE_ROWS" in sizes:
            return sizes["VEC"] * sizes["TILE_ROWS"]
        return sizes.get("ROWS", 1) * sizes["BLOCK_T"] // (32 * dict(self.options)["num_warps"])


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
    assert not isinstance(value, bool), f"{param.name}: the interpreter of Triton 3.6 takes no bool"
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
