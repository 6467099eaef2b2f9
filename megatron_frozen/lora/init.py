"""How adapters start: A drawn from the full matrix, the same on every rank whatever the ranks' own seeds; B zero."""

from __future__ import annotations

import hashlib
import math

import torch

from megatron_frozen.comm import WORLD, broadcast_object
from megatron_frozen.lora.config import InitMethod


def shared_seed(seed: int) -> int:
    """Return the seed that the first rank of the world was given. One broadcast of an object over the world."""
    return broadcast_object(seed, group=WORLD)


def init_lora_a(r: int, in_features: int, *, method: InitMethod, seed: int, layer_name: str) -> torch.Tensor:
    """Return the full A [r, in_features] in fp32 on the CPU: a pure function of its arguments, so TP-invariant.

    kaiming_uniform is PEFT's (a = sqrt(5), so the bound is 1 / sqrt(in_features)); xavier_normal has standard deviation
    sqrt(2 / (r + in_features)). The global random streams are left alone.
    """
    digest = hashlib.sha256(f"{seed}/{layer_name}/lora_A".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    weight = torch.empty(r, in_features, dtype=torch.float32)
    if method == "xavier_normal":
        return torch.nn.init.xavier_normal_(weight, generator=generator)
    return torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
