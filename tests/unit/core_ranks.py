"""What the tests of the core rooms share: one set of values in many memory layouts, and per-rank values by seed."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Each takes a tensor of at least two dims and returns the same values in other memory.
MEMORY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda tensor: tensor.clone(),
    "leading dims swapped": lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1),
    "first dim innermost": lambda tensor: tensor.movedim(0, -1).contiguous().movedim(-1, 0),
    "a slice": lambda tensor: torch.cat([tensor, torch.full_like(tensor, torch.nan)], dim=1)[:, : tensor.shape[1]],
    "every other": lambda tensor: torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=-1)[..., 0],
}


def seeded(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the same random values in any process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class Untouched:
    """Remembers every byte of tensors, what lies between their elements too, to say later whether one changed."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.bytes = [(_bytes(tensor), _bytes(tensor).clone()) for tensor in tensors]

    def check(self) -> None:
        """Assert that no byte changed."""
        for now, before in self.bytes:
            assert torch.equal(now, before), "a tensor that was passed in has been written to"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.detach().untyped_storage())
