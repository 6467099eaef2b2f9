"""Merged adapters: rightly rounded values, any TP size, the logits of base plus adapter, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron_frozen import io
from megatron_frozen.checkpoint.hf_folder import load_hf_folder
from megatron_frozen.checkpoint.merge import merge_adapter
from megatron_frozen.comm import initialize_model_parallel
from megatron_frozen.errors import CheckpointError, ConfigError
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.lora import (
    LoraConfig,
    adapters_disabled,
    apply_lora,
    named_lora_layers,
    save_adapter,
    set_active_adapter,
)
from megatron_frozen.models import CausalLM
from megatron_frozen.params import gather_full
from megatron_frozen.testing import run_ranks
from tests.unit.models_reference import random_batch, tiny_model, weights_of

Q_PROJ = "model.layers.0.self_attn.q_proj"


def load(folder: Path, *, dtype: torch.dtype = torch.float32, tp_size: int = 1) -> CausalLM:
    return load_hf_folder(folder, parallel=ModelParallelConfig(tensor_model_parallel_size=tp_size, params_dtype=dtype))


def add_adapter(model: CausalLM, **settings: Any) -> None:
    """Add an adapter whose B is random as well, the same at any TP size."""
    apply_lora(model, LoraConfig(**{"r": 4, "alpha": 8, **settings}))
    for index, (_, layer) in enumerate(named_lora_layers(model)):
        generator = torch.Generator().manual_seed(index)
        full_A = gather_full(layer.lora_A["default"], group=model.tp_group)
        full_B = torch.randn(layer.base_layer.output_size, full_A.shape[0], generator=generator) * 0.1
        layer.set_factors("default", full_A=full_A, full_B=full_B)


def one_layer_of_64(folder: Path) -> CausalLM:
    """A bf16 model whose first q_proj is 64 x 64."""
    tiny_model("llama", hidden_size=64, num_hidden_layers=1).save_pretrained(folder)
    return load(folder, dtype=torch.bfloat16)


def case_37() -> tuple[Tensor, Tensor, Tensor]:
    """W, A and B. The factors have so few digits that fp32 holds their product, in whatever order a CPU sums it."""
    generator = torch.Generator().manual_seed(0)
    W = (torch.randn(64, 64, generator=generator) * 0.05).bfloat16()
    A = (torch.randn(16, 64, generator=generator) * 102).round() / 2**10
    return W, A, (torch.randn(64, 16, generator=generator) * 82).round() / 2**12


def test_each_merged_entry_is_the_rightly_rounded_one(tmp_path):
    """Case 37: bf16 base, fp32 factors, scale 2."""
    W, A, B = case_37()
    model = one_layer_of_64(tmp_path / "base")
    apply_lora(model, LoraConfig(r=16, alpha=32, target_modules=["q_proj"]))
    ((_, layer),) = named_lora_layers(model)
    layer.weight.data.copy_(W)
    layer.set_factors("default", full_A=A, full_B=B)

    merge_adapter(model, tmp_path / "bf16")
    exact = W.double() + 2 * (B.double() @ A.double())
    merged = io.read_safetensors(tmp_path / "bf16" / "model.safetensors")[f"{Q_PROJ}.weight"]
    assert torch.equal(merged, exact.bfloat16())
    in_bf16 = W + 2 * (B.bfloat16() @ A.bfloat16())
    assert (in_bf16 != exact.bfloat16()).sum() > 500  # the control: what arithmetic in bf16 would give

    merge_adapter(model, tmp_path / "fp32", dtype=torch.float32)
    tensors = io.read_safetensors(tmp_path / "fp32" / "model.safetensors")
    torch.testing.assert_close(tensors[f"{Q_PROJ}.weight"].double(), exact, atol=1e-7, rtol=0)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert torch.equal(layer.weight, W)


def test_changes_under_half_a_step_live_on_in_fp32(tmp_path):
    """1.0 + 0.002 is 1.0 in bf16."""
    model = one_layer_of_64(tmp_path / "base")
    apply_lora(model, LoraConfig(r=1, alpha=1, target_modules=["q_proj"]))
    ((_, layer),) = named_lora_layers(model)
    layer.weight.data.fill_(1.0)
    layer.set_factors("default", full_A=torch.ones(1, 64), full_B=torch.full((64, 1), 0.002))
    for name, dtype, value in (("bf16", None, 1.0), ("fp32", torch.float32, 1.002)):
        merge_adapter(model, tmp_path / name, dtype=dtype)
        merged = io.read_safetensors(tmp_path / name / "model.safetensors")[f"{Q_PROJ}.weight"]
        torch.testing.assert_close(merged.float(), torch.full((64, 64), value), atol=1e-6, rtol=0)


def test_a_double_base_is_merged_in_double(tmp_path):
    tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "base")
    model = load(tmp_path / "base", dtype=torch.float64)
    add_adapter(model, target_modules=["q_proj"])
    ((_, layer),) = named_lora_layers(model)
    with torch.no_grad():
        layer.weight.add_(1e-12)  # below a step of fp32
    merge_adapter(model, tmp_path / "out")
    exact = layer.weight + 2 * (layer.lora_B["default"].double() @ layer.lora_A["default"].double())
    merged = io.read_safetensors(tmp_path / "out" / "model.safetensors")[f"{Q_PROJ}.weight"]
    torch.testing.assert_close(merged, exact.detach(), atol=1e-15, rtol=0)


def merge_on_ranks(rank: int, world_size: int, base: Path, out: Path) -> list[tuple[str, Tensor, Tensor]]:
    initialize_model_parallel(world_size)
    model = load(base, tp_size=world_size)
    add_adapter(model)
    merge_adapter(model, out, source_folder=base)
    save_adapter(model, out.with_name(f"{out.name}_adapter"))
    full = []
    for name, layer in named_lora_layers(model):
        factors = (layer.lora_A["default"], layer.lora_B["default"])
        A, B = (gather_full(factor, group=model.tp_group) for factor in factors)
        full.append((name, A, B))
    return full


@pytest.mark.parametrize("variant", ["llama", "llama tied, biases", "qwen2"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_merged_folder_is_base_plus_adapter_at_any_tp(tmp_path, variant, tp_size):
    """Case 33: column and row layers, gathered; the folder gives the logits of the adapter in transformers."""
    reference = tiny_model(variant)
    reference.save_pretrained(tmp_path / "base")
    factors = run_ranks(tp_size, merge_on_ranks, tmp_path / "base", tmp_path / "out")[0]
    expected = weights_of(reference)
    assert len(factors) == 14
    for name, A, B in factors:
        expected[f"{name}.weight"] = (expected[f"{name}.weight"].double() + 2 * (B.double() @ A.double())).float()
    saved = io.read_safetensors(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == expected.keys()
    for key, tensor in saved.items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-6, rtol=0, msg=lambda text, key=key: f"{key}: {text}")

    input_ids, _ = random_batch()
    model = load(tmp_path / "base")
    add_adapter(model)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids).logits, model(input_ids), atol=1e-4, rtol=0)
        with adapters_disabled(model):
            assert (merged(input_ids).logits - model(input_ids)).abs().max() > 0.1  # the control


def test_the_active_adapter_of_two_is_merged(tmp_path):
    reference = tiny_model("llama")
    reference.save_pretrained(tmp_path / "base")
    model = load(tmp_path / "base")
    add_adapter(model, target_modules=["q_proj"], layers_to_transform=[0])
    apply_lora(model, LoraConfig(r=2, target_modules=["v_proj"]), adapter_name="second")
    set_active_adapter(model, "default")
    merge_adapter(model, tmp_path / "out")
    saved = io.read_safetensors(tmp_path / "out" / "model.safetensors")
    changed = {key for key, weight in weights_of(reference).items() if not torch.equal(saved[key], weight)}
    assert changed == {f"{Q_PROJ}.weight"}


def test_what_merge_refuses(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    model = load(tmp_path / "base")
    message = "the model has no active LoRA adapter to merge; load one with load_adapter"
    with pytest.raises(ConfigError, match=message):
        merge_adapter(model, tmp_path / "out")
    add_adapter(model)
    with adapters_disabled(model), pytest.raises(ConfigError, match=message):
        merge_adapter(model, tmp_path / "out")
    with pytest.raises(CheckpointError, match="already holds files; give an empty or new folder"):
        merge_adapter(model, tmp_path / "base")
    assert not (tmp_path / "out").exists()


def test_an_adapter_on_a_tied_head_is_refused_at_setup_and_an_untied_one_merges(tmp_path):
    """Case 35: the embedding never changes with the output layer."""
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    with pytest.raises(ConfigError, match=r"lm_head.*tie"):
        apply_lora(load(tmp_path / "tied"), LoraConfig(target_modules=["lm_head"]))

    reference = tiny_model("llama")
    reference.save_pretrained(tmp_path / "untied")
    model = load(tmp_path / "untied")
    add_adapter(model, target_modules=["lm_head", "q_proj"])
    merge_adapter(model, tmp_path / "out", source_folder=tmp_path / "untied")
    saved, base = io.read_safetensors(tmp_path / "out" / "model.safetensors"), weights_of(reference)
    assert torch.equal(saved["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert not torch.equal(saved["lm_head.weight"], base["lm_head.weight"])
    assert io.read_json(tmp_path / "out" / "config.json")["tie_word_embeddings"] is False
    input_ids, _ = random_batch()
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "out")(input_ids), model(input_ids), atol=1e-4, rtol=0)
