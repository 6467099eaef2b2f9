"""Adapter files are PEFT's, at any tensor-parallel size (cases 33, 34)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_frozen.io import read_safetensors
from megatron_frozen.lora import (
    LoraConfig,
    adapter_delta,
    apply_lora,
    load_adapter,
    lora_parameters,
    named_lora_layers,
    save_adapter,
)
from megatron_frozen.lora.peft_files import config_from_peft, config_to_peft, peft_key
from megatron_frozen.params import shard_of, sum_partial_grads
from megatron_frozen.testing import run_ranks
from tests.unit.lora_peft_toys import IDS, loaded, reference_model
from tests.unit.lora_toys import seeded, start_ranks

CASES: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "alpha": 8},
    "rsLoRA": {"r": 8, "alpha": 16, "use_rslora": True},
    "some": {"r": 4, "alpha": 8, "target_modules": ["q_proj", "mlp.down_proj"], "layers_to_transform": [0]},
    "head": {"r": 4, "alpha": 8, "target_modules": ["v_proj", "lm_head"]},
}


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    reference_model().save_pretrained(folder)
    return folder


def _filled(model: Any) -> Any:
    """Random full factors, the same at any tensor-parallel size."""
    with torch.no_grad():
        for number, (_, layer) in enumerate(named_lora_layers(model)):
            r, base = layer.adapters["default"].r, layer.base_layer
            rows = min(base.output_size, 65)  # of the head's 66 at TP=2, one is padding
            full_B = torch.zeros(base.output_size, r)
            full_B[:rows] = 0.2 * seeded(rows, r, seed=200 + number)
            layer.set_factors("default", full_A=0.2 * seeded(r, base.input_size, seed=number), full_B=full_B)
    return model


def _save(
    rank: int, world_size: int, base: Path, folder: Path, fields: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    del rank
    start_ranks(world_size)
    model = _filled(apply_lora(loaded(base), LoraConfig(**fields)))
    save_adapter(model, folder, base_model_name=str(base))
    with torch.no_grad():
        return _joined(model(IDS)), _full(model)


def _joined(logits_shard: Tensor) -> Tensor:
    world_size = torch.distributed.get_world_size()
    shards = [torch.empty_like(logits_shard) for _ in range(world_size)]
    torch.distributed.all_gather(shards, logits_shard)
    return torch.cat(shards, dim=-1)[..., :65]


def _full(model: Any) -> dict[str, Tensor]:
    full = {}
    for name, layer in named_lora_layers(model):
        full[f"{name}.A"], full[f"{name}.B"] = (
            factor.clone() for factor in layer.full_factors(layer.active_adapter or "")
        )
    return full


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_peft_loads_our_folder_with_no_key_amiss_and_the_same_logits(
    case: str, world_size: int, base_folder: Path, tmp_path: Path
) -> None:
    fields, folder = CASES[case], tmp_path / "adapter"
    results = run_ranks(world_size, _save, base_folder, folder, fields)
    model = peft.PeftModel(reference_model(), peft.PeftConfig.from_pretrained(str(folder)))
    result = model.load_adapter(str(folder), "default")
    assert not [key for key in result.missing_keys if "lora_" in key]
    assert not result.unexpected_keys
    model.eval()
    with torch.no_grad():
        expected = model(IDS).logits
    for logits, _ in results:
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    adapted = "v_proj" if case == "head" else "q_proj"
    layer: Any = model.get_submodule(f"base_model.model.model.layers.0.self_attn.{adapted}")
    assert layer.scaling["default"] == pytest.approx(5.657 if case == "rsLoRA" else 2.0, abs=5e-4)


def test_the_files_of_a_tiny_llama_are_as_the_case_says(base_folder: Path, tmp_path: Path) -> None:
    run_ranks(2, _save, base_folder, tmp_path / "adapter", CASES["plain"])
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    tensors = read_safetensors(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 14
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    shapes = {key.removeprefix("base_model.model.model.layers.0."): tuple(t.shape) for key, t in tensors.items()}
    assert shapes["self_attn.k_proj.lora_B.weight"] == (8, 4)
    assert shapes["self_attn.o_proj.lora_A.weight"] == (4, 16)
    assert shapes["mlp.down_proj.lora_A.weight"] == (4, 24)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base_folder)
    assert config["target_modules"] == list(LoraConfig().target_modules)
    assert (config["r"], config["lora_alpha"], config["bias"], config["task_type"]) == (4, 8, "none", "CAUSAL_LM")


def test_the_written_config_is_one_that_peft_writes_the_same(tmp_path: Path) -> None:
    ours = config_to_peft(LoraConfig(r=4, alpha=8.0, dropout=0.1, target_modules=["q_proj"]), base_model_name="x")
    (tmp_path / "adapter_config.json").write_text(json.dumps(ours))
    peft.LoraConfig.from_pretrained(str(tmp_path)).save_pretrained(str(tmp_path))
    theirs = json.loads((tmp_path / "adapter_config.json").read_text())
    assert {key: theirs[key] for key in ours} == ours
    assert isinstance(ours["lora_alpha"], int)


def test_a_head_adapter_is_saved_without_the_padding_of_the_vocabulary(base_folder: Path, tmp_path: Path) -> None:
    run_ranks(2, _save, base_folder, tmp_path / "adapter", CASES["head"])
    tensors = read_safetensors(tmp_path / "adapter" / "adapter_model.safetensors")
    assert tensors["base_model.model.lm_head.lora_B.weight"].shape == (65, 4)


def _reload(rank: int, world_size: int, base: Path, folder: Path) -> tuple[Tensor, dict[str, Tensor], bool]:
    """Load onto a bare bf16-free base; also whether each rank's delta is its slice of the full one."""
    del rank
    group = start_ranks(world_size)
    model = load_adapter(loaded(base), folder, adapter_name="again")
    is_slice = True
    for _, layer in named_lora_layers(model):
        full_A, full_B = layer.full_factors("again")
        full = layer.adapters["again"].scale * full_B.double() @ full_A.double()
        delta = shard_of(full, partition_dim=1 if layer.lora_B.cut_dim is None else 0, group=group)
        is_slice = is_slice and torch.allclose(adapter_delta(layer).double(), delta, atol=1e-6)
    with torch.no_grad():
        return _joined(model(IDS)), _full(model), is_slice


@pytest.mark.parametrize("case", ["plain", "head"])
@pytest.mark.parametrize(("saved_at", "loaded_at"), [(2, 1), (2, 2), (1, 2)])
def test_factors_are_bit_equal_after_a_round_trip_at_any_size(
    case: str, saved_at: int, loaded_at: int, base_folder: Path, tmp_path: Path
) -> None:
    logits, before = run_ranks(saved_at, _save, base_folder, tmp_path / "adapter", CASES[case])[0]
    for again, after, is_slice in run_ranks(loaded_at, _reload, base_folder, tmp_path / "adapter"):
        torch.testing.assert_close(again, logits, atol=1e-5, rtol=1e-5)
        assert is_slice
        for name, factor in before.items():
            rows = min(65, len(factor))
            assert torch.equal(after[name][:rows], factor[:rows])


def _step_then_save(rank: int, world_size: int, base: Path, folder: Path) -> dict[str, Tensor]:
    del rank
    group = start_ranks(world_size)
    model = apply_lora(loaded(base), LoraConfig(**CASES["plain"]))
    parameters = lora_parameters(model)
    model(IDS, labels=IDS.roll(-1, 1)).mean().backward()
    sum_partial_grads(parameters, group=group)
    torch.optim.SGD(parameters, lr=1.0).step()
    save_adapter(model, folder)
    return _full(model)


def test_a_trained_adapter_saved_at_tp_2_is_whole(base_folder: Path, tmp_path: Path) -> None:
    first, second = run_ranks(2, _step_then_save, base_folder, tmp_path / "adapter")
    tensors = read_safetensors(tmp_path / "adapter" / "adapter_model.safetensors")
    for name, factor in first.items():
        path, _, letter = name.rpartition(".")
        key = peft_key(path, f"lora_{letter}")
        assert torch.equal(tensors[key], factor)
        assert torch.equal(second[name], factor)
        assert factor.any(dim=1).all() if letter == "A" else factor.abs().sum(dim=1).gt(0).float().mean() > 0.8


# ------------------------------------------------------------------------------------------------------ failing saves


def _failing_save(rank: int, world_size: int, base: Path, folder: Path) -> str:
    start_ranks(world_size)
    model = apply_lora(loaded(base), LoraConfig(**CASES["plain"]))
    with pytest.raises(ValueError, match=r"already holds files; give a new .* or replace=True to overwrite") as caught:
        save_adapter(model, folder)
    with pytest.raises(ValueError, match="adapter 'other' is not on the model"):
        save_adapter(model, folder, adapter_name="other")
    del rank
    return str(caught.value)


def test_a_save_that_fails_on_the_first_rank_fails_on_all_and_leaves_the_folder(
    base_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "keep").write_text("mine")
    first, second = run_ranks(2, _failing_save, base_folder, tmp_path)
    assert "rank 0 failed while saving the adapter to" in second
    assert "rank" not in first
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]


def test_the_base_model_is_the_folder_as_the_user_named_it_unless_told_and_replace_overwrites(
    base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base_folder.parent)
    model = apply_lora(loaded(Path(base_folder.name)), LoraConfig(**CASES["plain"]))
    for name, expected in ((None, base_folder.name), ("hub/name", "hub/name")):
        save_adapter(model, tmp_path / "adapter", base_model_name=name, replace=True)
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == expected


# ----------------------------------------------------------------------------------------------------------- the maps

_PATHS = st.lists(st.from_regex(r"[a-z_]{1,8}|[0-9]{1,2}", fullmatch=True), min_size=1, max_size=6).map(".".join)


@given(
    st.builds(
        LoraConfig,
        r=st.integers(1, 512),
        alpha=st.floats(0.5, 1024),
        dropout=st.floats(0, 0.9),
        target_modules=st.lists(_PATHS, min_size=1, max_size=3, unique=True),
        use_rslora=st.booleans(),
        layers_to_transform=st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=3),
    )
)
def test_configs_survive_the_way_to_peft_and_back(config: LoraConfig) -> None:
    assert config_from_peft(json.loads(json.dumps(config_to_peft(config, base_model_name=None)))) == config
