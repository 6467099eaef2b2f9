"""A model with a frozen head that torch multiplies batched in the backward, and what a diagnosis finds in a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_frozen.diagnostics import Diagnosis
from megatron_frozen.diagnostics.findings import Direction, Fault, Finding

S, B, H, V = 6, 2, 8, 5
FORWARD, DGRAD, WGRAD = Direction.FORWARD, Direction.DGRAD, Direction.WGRAD


class _Unfolded(torch.autograd.Function):
    """A frozen linear whose backward leaves the folding to torch."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return torch.matmul(X, weight.t())

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dY.matmul(*ctx.saved_tensors), None


class Head(nn.Module):
    def __init__(self, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.multiply = multiply
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(V, H, generator=generator), requires_grad=False)

    def forward(self, X: Tensor) -> Tensor:
        return self.multiply(X, self.weight)


class Model(nn.Module):
    """Trainable layers and a frozen head, whose logits [S, B, V] go out as [B, S, V]."""

    def __init__(self, multiply: Callable[[Tensor, Tensor], Tensor] = _Unfolded.apply) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(H, H), nn.Linear(H, H)])
        self.head = Head(multiply)

    def forward(self, X: Tensor) -> Tensor:
        for layer in self.layers:
            X = torch.tanh(layer(X))
        return self.head(X).transpose(0, 1).contiguous()


def step(model: nn.Module, *, run: Callable[..., Tensor] = lambda model, X: model(X)) -> tuple[Tensor, Tensor]:
    X = torch.linspace(-1, 1, S * B * H).view(S, B, H).requires_grad_()
    logits = run(model, X)
    logits.sin().sum().backward()
    assert X.grad is not None
    return logits, X.grad


def found_in(call: Callable[[], object]) -> list[Finding]:
    with Diagnosis() as found:
        call()
    return found.findings


def kinds(findings: list[Finding]) -> set[tuple[str, Direction, Fault]]:
    return {(finding.module, finding.direction, finding.fault) for finding in findings}
