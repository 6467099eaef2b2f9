"""What a decoder of the Llama family looks like, read from a ``config.json`` and checked before any weight is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_frozen.errors import ConfigError, nearest
from megatron_frozen.models.rope_config import RopeConfig, check_number

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
# The largest that can be meant: far above any checkpoint, and low enough that no product of them overflows.
_SIZES = {
    "vocab_size": 2**24,
    "hidden_size": 2**24,
    "intermediate_size": 2**24,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "max_position_embeddings": 2**31,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes and switches of one decoder. Field names are transformers' where it has the thing.

    Raises ConfigError where a size is no whole number above 0 or beyond sense, or sizes do not fit each other.
    """

    model_type: str
    """One of MODEL_TYPES."""
    vocab_size: int
    """Rows of the embedding as the checkpoint has them, before padding for tensor parallelism."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside the MLP."""
    num_hidden_layers: int
    """Number of decoder layers."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key and value heads; each serves num_attention_heads / num_key_value_heads query heads."""
    head_dim: int
    """Width of one head."""
    max_position_embeddings: int
    """Context length the checkpoint was made for; only scaled rotary embeddings read it."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in each RMSNorm."""
    initializer_range: float = 0.02
    """Standard deviation of weights that are not read from a checkpoint."""
    tie_word_embeddings: bool = False
    """The output layer uses the embedding's weight and has none of its own."""
    qkv_bias: bool = False
    """Query, key and value projections have a bias."""
    output_bias: bool = False
    """The attention's output projection has a bias."""
    mlp_bias: bool = False
    """The MLP's three projections have a bias."""
    qk_norm: bool = False
    """Each query and key head is RMS-normalised before the rotation."""
    layer_windows: tuple[int | None, ...]
    """Per layer: how many tokens, itself included, a token sees back; None: all."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary embedding."""

    def __post_init__(self) -> None:
        for name, largest in _SIZES.items():
            _check_size(getattr(self, name), name=name, largest=largest)
        for name in ("rms_norm_eps", "initializer_range"):
            check_number(getattr(self, name), name=name)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads "
                f"{self.num_key_value_heads}; correct config.json"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim is {self.head_dim}; rotary embeddings need an even one, so correct config.json"
            )
        if len(self.layer_windows) != self.num_hidden_layers:
            raise ConfigError(
                f"layer_types names {len(self.layer_windows)} layers and num_hidden_layers is "
                f"{self.num_hidden_layers}; make them agree in config.json"
            )
        for window in self.layer_windows:
            if window is not None:
                _check_size(window, name="sliding_window", largest=2**31)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the dictionary of a ``config.json`` as transformers 4 or 5 writes it.

        Raises ConfigError for another model type and for every setting that changes the mathematics in a way that is
        not built here, so that a checkpoint either gives transformers' values or is refused.
        """
        model_type = _checked_model_type(config)
        _refuse_unsupported(config)
        hidden_size, num_heads = _needed(config, "hidden_size"), _needed(config, "num_attention_heads")
        attention_bias = _flag(config, "attention_bias") and model_type in ("llama", "qwen3")
        return cls(
            model_type=model_type,
            vocab_size=_needed(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_needed(config, "intermediate_size"),
            num_hidden_layers=_needed(config, "num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=_num_key_value_heads(config, model_type=model_type, num_heads=num_heads),
            head_dim=_head_dim(config, model_type=model_type, hidden_size=hidden_size, num_heads=num_heads),
            max_position_embeddings=_needed(config, "max_position_embeddings"),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            initializer_range=config.get("initializer_range", 0.02),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            qkv_bias=attention_bias or model_type == "qwen2",
            output_bias=attention_bias,
            mlp_bias=_flag(config, "mlp_bias") and model_type == "llama",
            qk_norm=model_type == "qwen3",
            layer_windows=_layer_windows(config, model_type=model_type),
            rope=RopeConfig.from_hf(config),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return a ``config.json`` that transformers and `from_hf` read back as this model."""
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            **{name: getattr(self, name) for name in _SIZES},
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "initializer_range": self.initializer_range,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.qkv_bias,
            "attention_dropout": 0.0,
            **self.rope.to_hf(),
        }
        window = next((window for window in self.layer_windows if window is not None), None)
        if self.model_type == "llama":
            config["mlp_bias"] = self.mlp_bias
        elif self.model_type == "mistral":
            config["sliding_window"] = window
        else:
            layer_types = [_LAYER_TYPES[window is not None] for window in self.layer_windows]
            config.update(sliding_window=window, use_sliding_window=window is not None, layer_types=layer_types)
        return config


def check_tensor_parallel(config: DecoderConfig, tp_size: int) -> None:
    """Raise ConfigError unless every sharded dimension of the model divides by ``tp_size``."""
    sizes = {
        name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    }
    common = math.gcd(*sizes.values())
    allowed = [size for size in range(1, common + 1) if common % size == 0]
    for name, size in sizes.items():
        if tp_size < 1 or size % tp_size:
            raise ConfigError(
                f"{name} {size} does not divide by tensor-parallel size {tp_size}; "
                f"this model takes {', '.join(map(str, allowed))}"
            )


def _checked_model_type(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            f"config.json has model_type {model_type!r}, but models/ runs only {', '.join(MODEL_TYPES)}"
            f"{nearest(str(model_type), MODEL_TYPES)}; choose a checkpoint of one of these"
        )
    return model_type


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    allowed = {"hidden_act": ("silu", "swish"), "attention_dropout": (0, 0.0), "quantization_config": (None,)}
    for name, values in allowed.items():
        value = config.get(name, values[0])
        if value not in values:
            raise ConfigError(
                f"config.json has {name} {value!r}, but models/ runs only {values[0]!r}; "
                f"choose a checkpoint with that or change config.json"
            )


def _check_size(value: object, *, name: str, largest: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        raise ConfigError(
            f"'{name}' is {value!r}; it must be a whole number from 1 to {largest}, so correct config.json"
        )
    return value


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"'{name}' is {value!r}; it must be true or false, so correct config.json")
    return bool(value)


def _needed(config: Mapping[str, Any], name: str) -> int:
    if config.get(name) is None:
        raise ConfigError(
            f"config.json has no '{name}', which a decoder needs; take the config.json that came with the weights"
        )
    return _check_size(config[name], name=name, largest=_SIZES[name])


def _num_key_value_heads(config: Mapping[str, Any], *, model_type: str, num_heads: int) -> int:
    if "num_key_value_heads" not in config and model_type == "mistral":
        return 8  # transformers' default for this family
    value = config.get("num_key_value_heads")
    return num_heads if value is None else value


def _head_dim(config: Mapping[str, Any], *, model_type: str, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return config["head_dim"]
    if model_type == "qwen3":
        return 128  # transformers' default for this family
    if hidden_size % num_heads:
        raise ConfigError(
            f"config.json has no head_dim and hidden_size {hidden_size} is no multiple of num_attention_heads "
            f"{num_heads}; add head_dim or correct them"
        )
    return hidden_size // num_heads


def _layer_windows(config: Mapping[str, Any], *, model_type: str) -> tuple[int | None, ...]:
    num_layers = _needed(config, "num_hidden_layers")
    if model_type == "llama":
        return (None,) * num_layers
    window = config.get("sliding_window", 4096)  # the default of all three families
    if model_type == "mistral":
        return (window,) * num_layers
    window = window if _flag(config, "use_sliding_window") else None
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise ConfigError(
                f"'max_window_layers' is {first!r}; it must be a number of layers, so correct config.json"
            )
        return tuple(window if index >= first else None for index in range(num_layers))
    if not isinstance(layer_types, list):
        raise ConfigError(f"'layer_types' is {layer_types!r}; it must be a list with one name per layer")
    unknown = [kind for kind in layer_types if kind not in _LAYER_TYPES]
    if unknown:
        raise ConfigError(
            f"config.json has layer type '{unknown[0]}', but models/ runs only {' and '.join(_LAYER_TYPES)}"
            f"{nearest(str(unknown[0]), _LAYER_TYPES)}; choose a checkpoint with these"
        )
    if window is None and "sliding_attention" in layer_types:
        raise ConfigError(
            "config.json has sliding_attention layers but no window (use_sliding_window false or sliding_window null); "
            "set both or make the layers full_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
