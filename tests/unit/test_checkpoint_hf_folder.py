"""Hugging Face folders into sharded models and back: values, slices, vocabulary padding, ties, and every refusal."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron_frozen import io
from megatron_frozen.checkpoint import hf_folder
from megatron_frozen.checkpoint.hf_folder import Weight, load_hf_folder, save_hf_folder, write_hf_folder
from megatron_frozen.comm import get_data_parallel_rank, group_size, initialize_model_parallel
from megatron_frozen.errors import CheckpointError, ConfigError, ParallelError
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.lora import LoraConfig, apply_lora
from megatron_frozen.models import CausalLM
from megatron_frozen.params import gather_full
from megatron_frozen.testing import run_ranks
from tests.unit.models_reference import random_batch, tiny_model, weights_of

INDEX = "model.safetensors.index.json"


def source(
    folder: Path, variant: str = "llama", *, max_shard_size: str = "1GB", **settings: Any
) -> transformers.PreTrainedModel:
    """Write a tiny random checkpoint as transformers does."""
    model = tiny_model(variant, **settings)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def load(folder: Path, *, dtype: torch.dtype = torch.float32, tp_size: int = 1) -> CausalLM:
    return load_hf_folder(folder, parallel=ModelParallelConfig(tensor_model_parallel_size=tp_size, params_dtype=dtype))


def full_weights(model: CausalLM) -> dict[str, Tensor]:
    return {name: gather_full(parameter, group=model.tp_group) for name, parameter in model.named_parameters()}


def edit(folder: Path, **changes: Tensor | None) -> None:
    """Change tensors of a one-file folder; None deletes. Dots are written as double underscores."""
    tensors = io.read_safetensors(folder / "model.safetensors")
    for name, value in changes.items():
        key = name.replace("__", ".")
        tensors.pop(key, None)
        if value is not None:
            tensors[key] = value
    io.write_safetensors(folder / "model.safetensors", tensors)


def edit_config(folder: Path, **changes: Any) -> None:
    io.write_json(folder / "config.json", {**io.read_json(folder / "config.json"), **changes})


@pytest.mark.parametrize("variant", ["llama", "llama tied, biases", "mistral, wide window", "qwen2", "qwen3"])
def test_one_rank_gives_the_logits_of_transformers(tmp_path, variant):
    reference = source(tmp_path, variant)
    input_ids, _ = random_batch()
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path)(input_ids), reference(input_ids).logits, atol=1e-4, rtol=0)


def load_and_save(rank: int, world_size: int, folder: Path, out: Path | None, tp_size: int) -> dict[str, Any]:
    initialize_model_parallel(tp_size)
    count = {"elements": 0}
    real_read = io.SafetensorsFolder.read

    def counting_read(self, *args, **kwargs):
        value = real_read(self, *args, **kwargs)
        count["elements"] += value.numel()
        return value

    io.SafetensorsFolder.read = counting_read
    try:
        model = load(folder, tp_size=tp_size)
    finally:
        io.SafetensorsFolder.read = real_read
    if out is not None:
        save_hf_folder(model, out, source_folder=folder)
    shards = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"shards": shards, "full": full_weights(model), "elements_read": count["elements"]}


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("variant", ["llama", "llama tied, biases", "qwen3"])
def test_two_ranks_load_and_save_the_same_tensors(tmp_path, variant, max_shard_size):
    reference = source(tmp_path / "source", variant, max_shard_size=max_shard_size)
    assert (tmp_path / "source" / INDEX).exists() == (max_shard_size == "20KB")
    results = run_ranks(2, load_and_save, tmp_path / "source", tmp_path / "out", 2)
    expected = weights_of(reference)
    saved = io.read_safetensors(tmp_path / "out" / "model.safetensors")
    for full in (saved, results[0]["full"], results[1]["full"]):
        assert full.keys() == expected.keys()
        assert all(torch.equal(full[name], expected[name]) for name in expected)


def test_each_rank_reads_only_its_slices(tmp_path):
    source(tmp_path)
    results = run_ranks(2, load_and_save, tmp_path, None, 2)
    for result in results:
        assert result["elements_read"] == sum(shard.numel() for shard in result["shards"].values())
    whole = sum(full.numel() for full in results[0]["full"].values())
    assert results[0]["elements_read"] < 0.51 * whole


@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_that_does_not_divide(tmp_path, tied):
    """Case 32: 65 rows on two ranks are 66, the last one zero; the folder written has 65 again."""
    reference = source(tmp_path / "source", vocab_size=65, tie_word_embeddings=tied)
    results = run_ranks(2, load_and_save, tmp_path / "source", tmp_path / "out", 2)
    for name in ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not tied):
        assert results[1]["shards"][name].shape == (33, 32)
        assert results[1]["shards"][name][31:].abs().sum(dim=1).bool().tolist() == [True, False]
        saved = io.read_safetensors(tmp_path / "out" / "model.safetensors")[name]
        assert torch.equal(saved, weights_of(reference)[name])
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    input_ids, _ = random_batch()
    assert torch.equal(again(input_ids).logits, reference(input_ids).logits)


def test_more_ranks_than_rows_need(tmp_path):
    """Five rows on four ranks are two each: the third has one, the fourth none."""
    source(tmp_path / "source", vocab_size=5, num_key_value_heads=4, bos_token_id=1, eos_token_id=2)
    results = run_ranks(4, load_and_save, tmp_path / "source", tmp_path / "out", 4)
    rows = [result["shards"]["lm_head.weight"].abs().sum(dim=1).bool().tolist() for result in results]
    assert rows == [[True, True], [True, True], [True, False], [False, False]]
    assert io.SafetensorsFolder(tmp_path / "out").shape("lm_head.weight") == (5, 32)


def test_dtypes(tmp_path):
    source(tmp_path / "source")
    expected = io.read_safetensors(tmp_path / "source" / "model.safetensors")
    model = load(tmp_path / "source", dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name].bfloat16())
    save_hf_folder(model, tmp_path / "own", source_folder=tmp_path / "source")
    save_hf_folder(model, tmp_path / "fp32", dtype=torch.float32)
    assert io.read_json(tmp_path / "own" / "config.json")["torch_dtype"] == "bfloat16"
    assert io.read_json(tmp_path / "fp32" / "config.json")["torch_dtype"] == "float32"
    own, fp32 = (io.SafetensorsFolder(tmp_path / name) for name in ("own", "fp32"))
    assert {own.dtype(key) for key in own.keys()} == {"BF16"}  # noqa: SIM118 (no dict)
    assert {fp32.dtype(key) for key in fp32.keys()} == {"F32"}  # noqa: SIM118 (no dict)


@pytest.mark.parametrize("with_source", [True, False])
def test_written_folder_loads_in_transformers(tmp_path, with_source):
    reference = source(tmp_path / "source", "qwen3")
    (tmp_path / "source" / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / "source" / "optimizer.pt").write_text("not ours to copy")
    save_hf_folder(
        load(tmp_path / "source"), tmp_path / "out", source_folder=tmp_path / "source" if with_source else None
    )
    files = {"config.json", "model.safetensors"} | (
        {"tokenizer.json", "generation_config.json"} if with_source else set()
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    again, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    input_ids, _ = random_batch()
    assert torch.equal(again(input_ids).logits, reference(input_ids).logits)


def test_large_models_are_cut_into_files(tmp_path):
    reference = source(tmp_path / "source")
    model = load(tmp_path / "source")
    weights = [
        Weight(key=key, parameter=parameter, shard=parameter.detach, dtype=torch.float32)
        for key, parameter in model.named_parameters()
    ]
    write_hf_folder(model, tmp_path / "out", weights=weights, source_folder=None, max_file_bytes=20_000)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 2
    assert index["metadata"]["total_size"] == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert all((tmp_path / "out" / name).stat().st_size < 22_000 for name in files)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    input_ids, _ = random_batch()
    assert torch.equal(again(input_ids).logits, reference(input_ids).logits)


def test_tied_base_loads_without_and_with_an_equal_head(tmp_path):
    """Case 35: the head may be absent, or in the file as well, as some writers do."""
    source(tmp_path, tie_word_embeddings=True)
    without = load(tmp_path)
    assert "lm_head.weight" not in io.SafetensorsFolder(tmp_path).keys()  # noqa: SIM118 (no dict)
    edit(tmp_path, lm_head__weight=io.read_safetensors(tmp_path / "model.safetensors")["model.embed_tokens.weight"])
    input_ids, _ = random_batch()
    assert torch.equal(load(tmp_path)(input_ids), without(input_ids))


def test_buffers_of_older_checkpoints_are_ignored(tmp_path):
    source(tmp_path)
    edit(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    assert len(io.SafetensorsFolder(tmp_path).keys()) == 1 + len(dict(load(tmp_path).named_parameters()))


MISFITS = [
    (
        "llama",
        {"lm_head__weight": None},
        r"lm_head\.weight is missing \(which only tie_word_embeddings true does without\)",
    ),
    (
        "llama",
        {"model__norm__weight": None},
        r"does not fit its config\.json: model\.norm\.weight is missing; take weights",
    ),
    ("llama", {"model__extra": torch.ones(2)}, r"the model has no model\.extra;"),
    ("llama", {"model__norm__weight": torch.ones(31)}, r"model\.norm\.weight has shape \[31\] instead of \[32\]"),
    ("llama", {"lm_head__weight": torch.ones(63, 32)}, r"lm_head\.weight has shape \[63, 32\] instead of \[64, 32\]"),
    (
        "llama",
        {"model__norm__weight": torch.ones(32, dtype=torch.int8)},
        r"is stored as I8, and only BF16, F16, F32, F64",
    ),
    (
        "llama tied, biases",
        {"lm_head__weight": torch.ones(64, 32)},
        r"lm_head\.weight differs from .* although tie_word",
    ),
    (
        "llama tied, biases",
        {"lm_head__weight": torch.ones(65, 32)},
        r"lm_head\.weight differs from .* although tie_word",
    ),
]


@pytest.mark.parametrize(("variant", "change", "message"), MISFITS)
def test_tensors_that_do_not_fit_are_named(tmp_path, variant, change, message):
    source(tmp_path, variant)
    edit(tmp_path, **change)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_folder_of_another_model_is_described_briefly(tmp_path):
    source(tmp_path)
    edit_config(tmp_path, num_hidden_layers=6)
    with pytest.raises(CheckpointError, match=r"is missing; .*; and 32 more; take weights") as caught:
        load(tmp_path)
    assert len(str(caught.value)) < 600


def test_sizes_that_no_machine_holds_are_found_before_memory_is_asked_for(tmp_path):
    source(tmp_path)
    edit_config(tmp_path, vocab_size=2**24, hidden_size=2**24, intermediate_size=2**24)
    with pytest.raises(CheckpointError, match=r"does not fit its config\.json: .* instead of \["):
        load(tmp_path)


def test_folders_that_are_no_checkpoint(tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(CheckpointError, match=r"holds no config\.json; give a Hugging Face checkpoint folder"):
            load(folder)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"model_type": "gpt2"}, "model_type 'gpt2'"), ({"num_key_value_heads": 3}, "num_key_value_heads")],
)
def test_configuration_is_checked_before_weights_are_sought(tmp_path, changes, message):
    source(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    edit_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)
    edit_config(tmp_path, model_type="llama", num_key_value_heads=2)
    with pytest.raises(CheckpointError, match=r"holds no model\.safetensors and no model\.safetensors\.index\.json"):
        load(tmp_path)


def error_of(rank: int, world_size: int, folders: list[Path], tp_size: int) -> tuple[str, str]:
    initialize_model_parallel(tp_size)
    try:
        load(folders[rank], tp_size=tp_size)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_heads_that_do_not_divide_raise_on_every_rank_before_weights_are_sought(tmp_path):
    """Case 27."""
    source(tmp_path, num_attention_heads=3, num_key_value_heads=3, hidden_size=24)
    (tmp_path / "model.safetensors").unlink()
    for kind, text in run_ranks(2, error_of, [tmp_path] * 2, 2):
        assert kind == "ConfigError"
        assert re.search("num_attention_heads 3 does not divide by tensor-parallel size 2", text)


@pytest.mark.parametrize("tp_size", [2, 1])
def test_a_failure_on_one_rank_is_one_on_all(tmp_path, tp_size):
    """With TP=2, and with two data-parallel ranks."""
    source(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    cut = (tmp_path / "bad" / "model.safetensors").read_bytes()[:5000]
    (tmp_path / "bad" / "model.safetensors").write_bytes(cut)
    first, second = run_ranks(2, error_of, [tmp_path / "good", tmp_path / "bad"], tp_size)
    assert second[0] == "CheckpointError"
    assert first[0] == "ParallelError"
    assert re.search(r"rank 1 failed while loading .*: .*\(5000 bytes\) is not a whole safetensors file", first[1])


def save_error_of(rank: int, world_size: int, folder: Path, out: Path, tp_size: int) -> str:
    initialize_model_parallel(tp_size)
    model = load(folder, tp_size=tp_size)
    try:
        save_hf_folder(model, out)
    except (CheckpointError, ParallelError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("tp_size", [2, 1])
def test_saving_into_a_folder_in_use_raises_on_every_rank(tmp_path, tp_size):
    source(tmp_path / "source")
    for text in run_ranks(2, save_error_of, tmp_path / "source", tmp_path / "source", tp_size):
        assert "already holds files; give an empty or new folder" in text
    assert not list(tmp_path.glob(".*"))


def save_over_grid(rank: int, world_size: int, folder: Path, out: Path) -> tuple[int, int]:
    initialize_model_parallel(2)
    model = load(folder, tp_size=2)
    save_hf_folder(model, out)
    return group_size(model.tp_group), get_data_parallel_rank()


def test_data_parallel_copies_write_once(tmp_path):
    reference = source(tmp_path / "source")
    results = run_ranks(4, save_over_grid, tmp_path / "source", tmp_path / "out")
    assert results == [(2, 0), (2, 0), (2, 1), (2, 1)]
    saved = io.read_safetensors(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in weights_of(reference).items())


def failing_save(rank: int, world_size: int, folder: Path, out: Path) -> str:
    initialize_model_parallel(2)
    model = load(folder, tp_size=2)

    def full_disk(*_: Any, **__: Any) -> None:
        raise CheckpointError("no space left")

    hf_folder.write_safetensors = full_disk
    try:
        save_hf_folder(model, out)
    except (CheckpointError, ParallelError) as error:
        return str(error)
    finally:
        hf_folder.write_safetensors = io.write_safetensors
    return ""


def test_a_write_that_fails_raises_on_every_rank_and_leaves_nothing(tmp_path):
    source(tmp_path / "source")
    first, second = run_ranks(2, failing_save, tmp_path / "source", tmp_path / "out")
    assert first == "no space left"
    assert re.search(r"rank 0 failed while writing .*out: no space left", second)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_save_refuses(tmp_path):
    source(tmp_path / "source")
    source(tmp_path / "other", num_hidden_layers=1)
    model = load(tmp_path / "source")
    with pytest.raises(
        ConfigError, match="other holds another model than this one; give the folder it was loaded from"
    ):
        save_hf_folder(model, tmp_path / "out", source_folder=tmp_path / "other")
    apply_lora(model, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(
        ConfigError, match="carries LoRA adapters; save those with save_adapter, or the whole with merge"
    ):
        save_hf_folder(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
