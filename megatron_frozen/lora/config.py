"""What a LoRA adapter is: rank, scale, dropout, and which layers carry it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from megatron_frozen.errors import ConfigError, nearest

InitMethod = Literal["kaiming_uniform", "xavier_normal"]

DECODER_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """A LoRA adapter: y = W x + scale * B A dropout(x), with A (r, in) and B (out, r).

    Raises:
        ConfigError: a field is out of range.
    """

    r: int = 16
    """Rank: rows of A and columns of B."""
    alpha: float = 32
    """PEFT's lora_alpha: scale = alpha / r, or alpha / sqrt(r) with use_rslora."""
    dropout: float = 0.0
    """Chance in [0, 1) that an entry of the adapter's input is zeroed while training."""
    target_modules: Sequence[str] | str = DECODER_LINEARS
    """Hugging Face names of linears (whole paths or their last parts), or one regular expression for whole paths."""
    use_rslora: bool = False
    """Rank-stabilised scale: alpha / sqrt(r)."""
    layers_to_transform: Sequence[int] | None = None
    """Decoder layer numbers that get adapters; None means all."""
    init_method: InitMethod = "kaiming_uniform"
    """How A starts, from the full matrix: PEFT's kaiming_uniform (a = sqrt(5)), or xavier_normal. B starts at zero."""
    dtype: torch.dtype | None = torch.float32
    """Type in which the factors are kept and trained; None takes the base weight's type."""

    def __post_init__(self) -> None:
        if isinstance(self.r, bool) or not isinstance(self.r, int) or self.r < 1:
            raise ConfigError(f"LoRA rank r must be a whole number of at least 1, got {self.r!r}.")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not 0 < self.alpha < math.inf:
            raise ConfigError(f"LoRA alpha must be a positive number, got {self.alpha!r}; scale is alpha / r.")
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ConfigError(f"LoRA dropout must be at least 0 and below 1, got {self.dropout!r}.")
        if self.init_method not in get_args(InitMethod):
            allowed = get_args(InitMethod)
            raise ConfigError(
                f"LoRA init_method must be one of {', '.join(allowed)}, got {self.init_method!r}"
                f"{nearest(str(self.init_method), allowed)}."
            )
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ConfigError(
                f"LoRA dtype must be a floating torch.dtype, or None for the base weight's type, got {self.dtype!r}."
            )
        self._check_targets()
        self._check_layers()

    def _check_targets(self) -> None:
        targets = self.target_modules
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except re.error as error:
                raise ConfigError(
                    f"LoRA target_modules is one string, so a regular expression, and {targets!r} is none ({error}); "
                    f"give a list for names."
                ) from error
            return
        if not targets or not all(isinstance(target, str) and target for target in targets):
            raise ConfigError(
                f"LoRA target_modules must name at least one linear, such as ['q_proj', 'v_proj'], got {targets!r}."
            )
        object.__setattr__(self, "target_modules", tuple(targets))

    def _check_layers(self) -> None:
        layers = self.layers_to_transform
        if layers is None:
            return
        if (
            isinstance(layers, str)
            or not isinstance(layers, Sequence)
            or not layers
            or not all(isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 for layer in layers)
        ):
            raise ConfigError(
                f"LoRA layers_to_transform must list layer numbers counted from 0, or be None for all, got {layers!r}."
            )
        object.__setattr__(self, "layers_to_transform", tuple(layers))

    @property
    def scale(self) -> float:
        """Factor of B A in the output: alpha / r, or alpha / sqrt(r) with use_rslora."""
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)
