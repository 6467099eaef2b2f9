"""config.json to DecoderConfig: both spellings, defaults of each family, what is refused, and the way back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron_frozen.errors import ConfigError
from megatron_frozen.models import DecoderConfig, RopeConfig, check_tensor_parallel
from megatron_frozen.models.config import MODEL_TYPES
from tests.unit.models_reference import LLAMA3_ROPE, VARIANTS, YARN_ROPE, tiny_config

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def _config(model_type: str = "llama", **settings: Any) -> dict[str, Any]:
    return {"model_type": model_type, **_SIZES, **settings}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_config_is_read_and_written_back_unchanged(variant: str, tmp_path: Path) -> None:
    transformers.AutoConfig.for_model(**tiny_config(variant)).save_pretrained(tmp_path)
    config = DecoderConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert DecoderConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_reads_our_config_as_its_own(variant: str) -> None:
    original = tiny_config(variant)
    written = DecoderConfig.from_hf(original).to_hf()
    read_back = transformers.AutoConfig.for_model(**written).to_dict()
    ours = written.keys() & original.keys() - {"architectures"}
    assert {name: read_back[name] for name in ours} == {name: original[name] for name in ours}
    rope = {key: value for key, value in read_back["rope_parameters"].items() if key != "type"}
    assert rope == original["rope_parameters"]


@pytest.mark.parametrize("rope", [LLAMA3_ROPE, YARN_ROPE], ids=["llama3", "yarn"])
def test_old_and_new_rope_spellings_agree(rope: dict[str, Any]) -> None:
    theta = rope["rope_theta"]
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "rope_type")}
    new = DecoderConfig.from_hf(_config(rope_parameters=rope))
    assert (
        DecoderConfig.from_hf(_config(rope_theta=theta, rope_scaling={"rope_type": rope["rope_type"], **scaling}))
        == new
    )
    assert DecoderConfig.from_hf(_config(rope_theta=theta, rope_scaling={"type": rope["rope_type"], **scaling})) == new
    assert new.rope.rope_type == rope["rope_type"]


def test_rope_defaults_and_the_outer_original_length() -> None:
    assert DecoderConfig.from_hf(_config(rope_scaling=None)).rope == RopeConfig(rope_theta=10000.0)
    assert DecoderConfig.from_hf(_config(rope_theta=5e5)).rope == RopeConfig(rope_theta=5e5)
    outer = DecoderConfig.from_hf(_config(rope_scaling=YARN_ROPE, original_max_position_embeddings=99))
    assert outer.rope.original_max_position_embeddings == 99


def test_family_defaults() -> None:
    families = [DecoderConfig.from_hf(_config(name, num_attention_heads=16)) for name in MODEL_TYPES]
    assert [config.model_type for config in families] == ["llama", "mistral", "qwen2", "qwen3"]
    assert [config.num_key_value_heads for config in families] == [16, 8, 16, 16]
    assert [config.head_dim for config in families] == [2, 2, 2, 128]
    assert [config.qkv_bias for config in families] == [False, False, True, False]
    assert [config.qk_norm for config in families] == [False, False, False, True]
    assert [config.layer_windows[0] for config in families] == [None, 4096, None, None]
    assert not any(config.output_bias or config.mlp_bias or config.tie_word_embeddings for config in families)


def test_mistral_without_a_window() -> None:
    assert (
        DecoderConfig.from_hf(_config("mistral", num_key_value_heads=2, sliding_window=None)).layer_windows
        == (None,) * 3
    )


def test_qwen_windows_from_layer_types_or_from_the_first_windowed_layer() -> None:
    window = {"use_sliding_window": True, "sliding_window": 7}
    assert DecoderConfig.from_hf(_config("qwen2", **window, max_window_layers=1)).layer_windows == (None, 7, 7)
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert DecoderConfig.from_hf(_config("qwen3", **window, layer_types=types)).layer_windows == (7, None, None)
    assert DecoderConfig.from_hf(_config("qwen2", sliding_window=7, max_window_layers=1)).layer_windows == (None,) * 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_config("gpt2"), r"model_type 'gpt2', but models/ runs only llama, mistral, qwen2, qwen3; choose"),
        (_config("lama"), r"did you mean 'llama'\?; choose a checkpoint of one of these"),
        (_SIZES, r"model_type None, but"),
        (
            _config(hidden_act="gelu"),
            r"hidden_act 'gelu', but models/ runs only 'silu'; choose a checkpoint with that or change config",
        ),
        (_config(attention_dropout=0.1), r"attention_dropout 0.1, but models/ runs only 0; choose"),
        (_config(quantization_config={"bits": 4}), r"quantization_config \{'bits': 4\}, but models/ runs only None"),
        (_config(partial_rotary_factor=0.5), r"partial_rotary_factor 0.5, but models/ rotates whole heads only"),
        (
            _config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25}),
            r"partial_rotary_factor 0.25",
        ),
        (
            _config(rope_scaling={"rope_type": "longrope", "factor": 2.0}),
            r"rope_type is 'longrope', but models/ computes",
        ),
        (_config(rope_scaling={"type": "yarm"}), r"did you mean 'yarn'\?; choose a checkpoint with one of these"),
        (
            _config(rope_scaling={"type": "linear"}),
            r"rope type 'linear' needs 'factor' and has none; add it",
        ),
        (
            _config(rope_scaling={**LLAMA3_ROPE, "low_freq_factor": -1}),
            r"'low_freq_factor' is -1; it must be a finite number above 0",
        ),
        (
            _config(rope_theta="big"),
            r"'rope_theta' is 'big'; it must be a finite number above 0, so correct config.json",
        ),
        (_config(rope_theta=0), r"'rope_theta' is 0; it must be a finite"),
        (_config(rope_theta=10**400), r"'rope_theta' is 10+; it must be a finite"),
        (_config(rope_parameters={"rope_theta": math.nan}), r"'rope_theta' is nan; it must be a finite"),
        (_config(rope_scaling={**YARN_ROPE, "beta_fast": "32"}), r"'beta_fast' is '32'; it must be a finite"),
        (_config(rope_scaling={**YARN_ROPE, "truncate": 1}), r"'truncate' is 1; it must be true or false"),
        (_config(rope_scaling={"type": 5}), r"rope_type is '5', but models/ computes"),
        (_config(rope_scaling=[]), r"'rope_scaling' is \[\]; it must be an object or null, so correct"),
        (_config(rope_parameters=5), r"'rope_parameters' is 5; it must be an object or null"),
        (_config(rms_norm_eps="a"), r"'rms_norm_eps' is 'a'; it must be a finite number above 0"),
        (_config(rms_norm_eps=-1), r"'rms_norm_eps' is -1; it must be a finite"),
        (_config(rms_norm_eps=math.nan), r"'rms_norm_eps' is nan; it must be a finite"),
        (_config(rms_norm_eps=None), r"'rms_norm_eps' is None; it must be a finite"),
        (_config(initializer_range=math.inf), r"'initializer_range' is inf; it must be a finite"),
        (_config(tie_word_embeddings="no"), r"'tie_word_embeddings' is 'no'; it must be true or false, so correct"),
        (_config(hidden_size=10**12), r"'hidden_size' is 10+; it must be a whole number from 1 to 16777216"),
        (_config(vocab_size=10**30), r"'vocab_size' is 10+; it must be a whole number from 1 to"),
        (_config(num_hidden_layers=10**9), r"'num_hidden_layers' is 10+; it must be a whole number from 1 to 4096"),
        (_config("qwen2", use_sliding_window=True, max_window_layers="a"), r"'max_window_layers' is 'a'; it must be a"),
        (_config("qwen2", layer_types=5), r"'layer_types' is 5; it must be a list with one name per layer"),
        (_config("qwen2", layer_types=[["full_attention"]] * 3), r"has layer type '\['full_attention'\]', but"),
        (
            _config(rope_parameters={"full_attention": {"rope_theta": 1.0}}),
            r"per layer type \(full_attention\), but models/",
        ),
        ({**_config(), "hidden_size": None}, r"has no 'hidden_size', which a decoder needs; take"),
        (_config(vocab_size="64"), r"'vocab_size' is '64'; it must be a whole number from 1 to 16777216, so correct"),
        (_config(num_hidden_layers=0), r"'num_hidden_layers' is 0; it must be"),
        (_config("mistral", num_key_value_heads=2, sliding_window=0), r"'sliding_window' is 0; it must be"),
        (_config(num_key_value_heads=3), r"num_attention_heads 4 is no multiple of num_key_value_heads 3; correct"),
        (
            _config(num_attention_heads=5),
            r"no head_dim and hidden_size 32 is no multiple of num_attention_heads 5; add",
        ),
        (_config(head_dim=7), r"head_dim is 7; rotary embeddings need an even one"),
        (
            _config("qwen2", layer_types=["full_attention"]),
            r"layer_types names 1 layers and num_hidden_layers is 3; make",
        ),
        (
            _config("qwen2", layer_types=["linear_attention"] * 3),
            r"layer type 'linear_attention', but models/ runs only .*; choose a checkpoint with these",
        ),
        (_config("qwen2", layer_types=["sliding_attention"] * 3), r"sliding_attention layers but no window"),
    ],
)
def test_what_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecoderConfig.from_hf(config)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "tp_size"), [(8, 2, 4), (6, 3, 2)])
def test_heads_that_do_not_divide_are_refused_before_any_weight(
    num_heads: int, num_kv_heads: int, tp_size: int
) -> None:
    config = DecoderConfig.from_hf(_config(num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, head_dim=4))
    with pytest.raises(
        ConfigError, match=rf"num_key_value_heads {num_kv_heads} does not divide by .* size {tp_size}; this"
    ):
        check_tensor_parallel(config, tp_size)


def test_heads_that_divide_are_taken() -> None:
    config = DecoderConfig.from_hf(_config(num_attention_heads=8, num_key_value_heads=4))
    check_tensor_parallel(config, 2)
    with pytest.raises(ConfigError, match=r"tensor-parallel size 3; this model takes 1, 2, 4$"):
        check_tensor_parallel(config, 3)
    with pytest.raises(ConfigError, match=r"tensor-parallel size 0; this model takes 1, 2, 4$"):
        check_tensor_parallel(config, 0)


def test_an_mlp_width_that_does_not_divide_is_refused() -> None:
    config = DecoderConfig.from_hf(_config(intermediate_size=49))
    with pytest.raises(
        ConfigError, match=r"intermediate_size 49 does not divide by tensor-parallel size 2; .* takes 1$"
    ):
        check_tensor_parallel(config, 2)
