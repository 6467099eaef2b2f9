"""The rotary-embedding settings of a checkpoint, read from both spellings that transformers has used."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_frozen.errors import ConfigError, nearest

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


_NUMBERS = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def check_number(value: object, *, name: str) -> None:
    """Raise ConfigError unless `value` is a finite number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"'{name}' is {value!r}; it must be a finite number above 0, so correct config.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """How rotary frequencies are derived. Fields carry transformers' names; None means its default."""

    rope_type: str = "default"
    """One of ROPE_TYPES."""
    rope_theta: float = 10000.0
    """Base of the geometric series of wavelengths."""
    factor: float | None = None
    """How much longer than the original context positions may get (linear, dynamic, llama3, yarn)."""
    original_max_position_embeddings: int | None = None
    """Context length before scaling (llama3, yarn); None: the model's max_position_embeddings."""
    low_freq_factor: float | None = None
    """llama3: wavelengths above original / low_freq_factor are divided by factor."""
    high_freq_factor: float | None = None
    """llama3: wavelengths below original / high_freq_factor are left alone."""
    attention_factor: float | None = None
    """yarn: multiplies cos and sin; None: derived from factor (and mscale)."""
    beta_fast: float | None = None
    """yarn: rotations over the original context above which a dimension is left alone; None: 32."""
    beta_slow: float | None = None
    """yarn: rotations below which a dimension is fully interpolated; None: 1."""
    mscale: float | None = None
    """yarn: numerator's scale of the derived attention factor."""
    mscale_all_dim: float | None = None
    """yarn: denominator's scale of the derived attention factor."""
    truncate: bool = True
    """yarn: round the bounds of the interpolated range to whole dimensions."""

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ConfigError(
                f"the checkpoint's rope_type is '{self.rope_type}', but models/ computes only {', '.join(ROPE_TYPES)}"
                f"{nearest(str(self.rope_type), ROPE_TYPES)}; choose a checkpoint with one of these"
            )
        for name in ("rope_theta", *_NEEDED[self.rope_type]):
            if getattr(self, name) is None:
                raise ConfigError(f"rope type '{self.rope_type}' needs '{name}' and has none; add it to config.json")
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and not (value == 0 and name.startswith("mscale")):
                check_number(value, name=name)
        if not isinstance(self.truncate, bool):
            raise ConfigError(f"'truncate' is {self.truncate!r}; it must be true or false, so correct config.json")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (transformers 4).

        Raises ConfigError for a partial rotary factor, for settings nested by layer type, and for a scaling that
        __post_init__ refuses.
        """
        for name in ("rope_scaling", "rope_parameters"):
            if not isinstance(config.get(name), Mapping | None):
                raise ConfigError(f"'{name}' is {config[name]!r}; it must be an object or null, so correct config.json")
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        nested = [key for key, value in scaling.items() if isinstance(value, Mapping)]
        if nested:
            raise ConfigError(
                f"config.json gives rope parameters per layer type ({', '.join(nested)}), but models/ computes "
                f"one set for all layers only; choose a checkpoint with that"
            )
        partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise ConfigError(
                f"config.json has partial_rotary_factor {partial}, but models/ rotates whole heads only (1.0); "
                f"choose a checkpoint without it"
            )
        names = cls.__dataclass_fields__
        fields = {name: value for name, value in scaling.items() if name in names and value is not None}
        fields.setdefault("rope_type", scaling.get("type") or "default")
        if config.get("rope_theta") is not None:
            fields.setdefault("rope_theta", config["rope_theta"])
        if config.get("original_max_position_embeddings") is not None:  # transformers lets the outer one win
            fields["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        return cls(**fields)

    def to_hf(self) -> dict[str, Any]:
        """Return ``rope_theta`` and ``rope_scaling``, the spelling that transformers 4 and 5 both read."""
        scaling = {
            name: value
            for name in self.__dataclass_fields__
            if name != "rope_theta" and (value := getattr(self, name)) is not None and (name != "truncate" or not value)
        }
        return {"rope_theta": self.rope_theta, "rope_scaling": scaling if self.rope_type != "default" else None}
