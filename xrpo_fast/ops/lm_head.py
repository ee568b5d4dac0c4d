"""The GEMMs around an LM head, with float32 results. Legend: V vocabulary, D model width."""

from collections.abc import Iterator

import torch
from torch import Tensor

# Weights that are made float32 at a time where the GEMM cannot take them as they are.
_UPCAST_BYTES = 32 << 20


class LmHead:
    """The LM head, and the two GEMMs that need it, in float32 (float64) whatever its dtype.

    CUDA multiplies bfloat16 with float32 results. The CPU does not: there blocks of the vocabulary
    are made float32 one after the other.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, columns: int) -> None:
        self.weight = weight[:columns]
        self.bias = None if bias is None else bias[:columns]
        self.dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.is_native = weight.dtype == self.dtype
        self.has_mixed_gemm = weight.device.type == "cuda" and not self.is_native

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """(columns, their weights in the dtype of the logits)."""
        columns, width = self.weight.shape
        step = columns if self.is_native else max(1, _UPCAST_BYTES // (4 * width))
        for start in range(0, columns, step):
            part = slice(start, min(start + step, columns))
            yield part, self.weight[part].to(self.dtype)

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """out (n, columns) = hidden (n, D) @ weight.T + bias."""
        if self.has_mixed_gemm:
            torch.mm(hidden, self.weight.t(), out_dtype=self.dtype, out=out)
        else:
            hidden = hidden.to(self.dtype)
            for part, block in self.blocks():
                torch.mm(hidden, block.t(), out=out[:, part])
        if self.bias is not None:
            out += self.bias

    def dhidden(self, dlogits: Tensor) -> Tensor:
        """(n, D) = dlogits (n, columns) @ weight, in the dtype of the logits."""
        if self.has_mixed_gemm:
            return torch.mm(dlogits.to(self.weight.dtype), self.weight, out_dtype=self.dtype)
        total = torch.zeros(
            dlogits.shape[0], self.weight.shape[1], dtype=self.dtype, device=dlogits.device
        )
        for part, block in self.blocks():
            total.addmm_(dlogits[:, part], block)
        return total

    def add_dweight(self, dlogits: Tensor, hidden: Tensor, dweight: Tensor) -> None:
        """dweight (columns, D) += dlogits.T @ hidden."""
        if self.has_mixed_gemm:
            dlogits = dlogits.to(hidden.dtype)
            dweight += torch.mm(dlogits.t(), hidden, out_dtype=self.dtype)
        else:
            dweight.addmm_(dlogits.t(), hidden.to(self.dtype))
