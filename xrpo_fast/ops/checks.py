"""Checks at the public edge: `<argument>: expected <what>, got <what>[; <cure>]`.

Checks of shape and dtype cost nothing and always run. Checks of values need the data: they run
inside the ops, always on the CPU, on other devices only with validate=True.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDICES = (torch.int32, torch.int64)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor(argument: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{argument}: expected a torch.Tensor, got {type(value).__module__}."
            f"{type(value).__name__}; torch.as_tensor() makes one"
        )


def dtype(argument: str, value: Tensor, allowed: Sequence[torch.dtype]) -> None:
    tensor(argument, value)
    if value.dtype not in allowed:
        names = ", ".join(_name(d) for d in allowed)
        raise TypeError(f"{argument}: expected {names}, got {_name(value.dtype)}")


def shape(argument: str, tensor: Tensor, expected: Sequence[int], what: str) -> None:
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(
            f"{argument}: expected shape {what} = {tuple(expected)}, got {tuple(tensor.shape)}"
        )


def same_device(argument: str, tensor: Tensor, other: str, reference: Tensor) -> None:
    if tensor.device != reference.device:
        raise ValueError(
            f"{argument}: expected the device of {other}, {reference.device}, got {tensor.device}"
        )


def like_rows(
    argument: str, tensor: Tensor, dtypes: Sequence[torch.dtype], other: str, reference: Tensor
) -> None:
    """One entry for each row of `reference` (..., V)."""
    dtype(argument, tensor, dtypes)
    shape(argument, tensor, reference.shape[:-1], f"{other}.shape[:-1]")
    same_device(argument, tensor, other, reference)


def vocab_size(value: int | None, columns: int) -> int:
    if value is None:
        return columns
    if not 0 < value <= columns:
        raise ValueError(f"vocab_size: expected 1..{columns} (columns of logits), got {value}")
    return value


def temperature(value: float | Tensor, other: str, reference: Tensor) -> None:
    if not isinstance(value, Tensor):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"temperature: expected a finite number > 0, got {value}")
        return
    dtype("temperature", value, (torch.float32,))
    if value.ndim != 0:
        shape("temperature", value, reference.shape[:-1], f"() or {other}.shape[:-1]")
    same_device("temperature", value, other, reference)


def choice(argument: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        names = ", ".join(f'"{name}"' for name in allowed)
        raise ValueError(f'{argument}: expected {names}, got "{value}"')


def positive_values(argument: str, tensor: Tensor) -> None:
    values = tensor.detach().cpu()
    good = (values > 0) & values.isfinite()
    if not bool(good.all()):
        bad = values[~good].flatten()[0].item()
        raise ValueError(f"{argument}: expected finite numbers > 0, got {bad}")


def cumulative(argument: str, tensor: Tensor, total: int, what: str) -> None:
    """`tensor` starts at 0, does not decrease, ends at `total`."""
    values = tensor.cpu().numpy()
    if values[0] == 0 and values[-1] == total and not (values[1:] < values[:-1]).any():
        return
    if values[0] != 0:
        raise ValueError(f"{argument}: expected to start at 0, got {values[0]}")
    if values[-1] != total:
        raise ValueError(f"{argument}: expected to end at {total} ({what}), got {values[-1]}")
    place = int((values[1:] < values[:-1]).argmax())
    raise ValueError(
        f"{argument}: expected values that do not decrease, got {values[place + 1]} after "
        f"{values[place]} at index {place + 1}"
    )
