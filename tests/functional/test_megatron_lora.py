"""LoRA on megatron-core 0.16.1's GPTModel with our linears: our own adapters, and a wrapper like Megatron-Bridge's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_frozen import LoraConfig, gpt_lora
from megatron_frozen.testing import run_ranks
from tests.functional import megatron_lora_ranks as ranks

PROJECTIONS = [
    f"model.layers.{layer}.{name}"
    for layer in range(2)
    for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj",
    )
]  # fmt: skip


@pytest.mark.parametrize(("tp", "sp"), [(2, False), (2, True)], ids=["all-reduce", "sequence parallel"])
@pytest.mark.parametrize("targets", [None, ["linear_proj"], ["q_proj", "linear_v", "down_proj"]], ids=str)
def test_training_equals_one_rank(tp: int, targets: list[str] | None, *, sp: bool) -> None:
    """Losses and gradients of two steps; replicated factors bit-equal on all ranks (cases 17, 19, 26)."""
    fields = {} if targets is None else {"target_modules": targets}
    (alone,) = run_ranks(1, ranks.train, {"tp": 1}, fields)
    answers = run_ranks(tp, ranks.train, {"tp": tp, "sp": sp}, fields)
    for answer in answers:
        assert answer["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert answer["grads"].keys() == alone["grads"].keys()
        for name, grad in alone["grads"].items():
            assert grad.abs().max() > 0, name
            torch.testing.assert_close(answer["grads"][name], grad, rtol=1e-4, atol=1e-6, msg=name)
    for path, factors in answers[0]["factors"].items():
        for mine, other in zip(factors, answers[1]["factors"][path], strict=True):
            assert torch.equal(mine, other)
    expected = PROJECTIONS
    if targets == ["linear_proj"]:
        expected = [path for path in PROJECTIONS if path.endswith("o_proj")]
    elif targets is not None:
        expected = [path for path in PROJECTIONS if path.endswith(("q_proj", "v_proj", "down_proj"))]
    assert set(alone["factors"]) == set(expected)


@pytest.mark.parametrize("sp", [False, True], ids=["all-reduce", "sequence parallel"])
def test_dropout_draws_what_one_rank_would(*, sp: bool) -> None:
    (alone,), (plain,) = (run_ranks(1, ranks.train, {"tp": 1}, {"dropout": p}) for p in (0.4, 0.0))
    assert alone["losses"] != pytest.approx(plain["losses"], rel=1e-3)
    for answer in run_ranks(2, ranks.train, {"tp": 2, "sp": sp}, {"dropout": 0.4}):
        assert answer["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        for name, grad in alone["grads"].items():
            torch.testing.assert_close(answer["grads"][name], grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("tp", [1, 2])
def test_merging_is_what_the_adapters_compute(tp: int) -> None:
    """Per-projection adapters meet their own rows of the fused weight (case 28), at any TP (case 33)."""
    for losses in run_ranks(tp, ranks.merged, {"tp": tp}):
        assert losses["merged"] == pytest.approx(losses["with"], rel=1e-5)
        assert abs(losses["merged"] - losses["without"]) > 1e-3


@pytest.mark.parametrize("sp", [False, True], ids=["all-reduce", "sequence parallel"])
def test_no_activation_is_communicated_for_adapters(*, sp: bool) -> None:
    """Under SP nothing at all; else one small all-reduce of the replicated factors of each of the eight linears."""
    for (forward, backward), (adapted_forward, adapted_backward) in run_ranks(
        2, ranks.collectives, {"tp": 2, "sp": sp}
    ):
        assert adapted_forward == forward
        extra = {key: adapted_backward[key] - backward.get(key, 0) for key in adapted_backward}
        assert {key: value for key, value in extra.items() if value} == ({} if sp else {"all_reduce": 8})


@pytest.mark.parametrize("tp", [1, 2])
def test_export_and_import(tmp_path: Path, tp: int) -> None:
    """PEFT's keys and shapes under Hugging Face names (case 34); import restores every bit at TP 1 and 2."""
    folder = tmp_path / "adapter"
    saved = run_ranks(tp, ranks.save, str(folder), {"tp": tp, "sp": tp > 1}, {})
    tensors = load_file(folder / "adapter_model.safetensors")
    assert set(tensors) == {f"base_model.model.{path}.lora_{kind}.weight" for path in PROJECTIONS for kind in "AB"}
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    shapes = {key.split("layers.0.")[1]: tuple(tensor.shape) for key, tensor in tensors.items() if "layers.0" in key}
    assert shapes["self_attn.q_proj.lora_B.weight"] == (16, 4)
    assert shapes["self_attn.k_proj.lora_B.weight"] == (8, 4)
    assert shapes["mlp.up_proj.lora_B.weight"] == (24, 4)
    assert shapes["mlp.down_proj.lora_A.weight"] == (4, 24)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, "base")
    assert set(config["target_modules"]) == {path.rpartition(".")[2] for path in PROJECTIONS}
    for path, (A, B) in saved[0]["factors"].items():
        assert torch.equal(tensors[f"base_model.model.{path}.lora_A.weight"], A)
        assert torch.equal(tensors[f"base_model.model.{path}.lora_B.weight"], B)
    for size in (1, 2):
        for body in (ranks.load, ranks.load_twice):
            for loaded in run_ranks(size, body, str(folder), {"tp": size}):
                assert loaded["loss"] == pytest.approx(saved[0]["loss"], rel=1e-6)
                for path, factors in saved[0]["factors"].items():
                    assert all(map(torch.equal, loaded["factors"][path], factors))


def test_peft_computes_the_same(tmp_path: Path) -> None:
    """transformers' Llama with the exported base and adapter, by PEFT: the logits of the GPTModel."""
    (logits,) = run_ranks(1, llama_and_adapter, str(tmp_path))
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    ids, *_ = ranks.tokens()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-5)


def llama_and_adapter(rank: int, world_size: int, folder: str) -> torch.Tensor:
    """Write a Llama folder of a GPTModel's weights, and its adapter; return the adapted GPTModel's logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from megatron_frozen.partition import fused_qkv_rows
    from tests.functional.megatron_cpu import VOCAB, megatron_on_cpu

    with megatron_on_cpu():
        model = ranks.adapted({"tp": 1})
        ids, positions, mask, _ = ranks.tokens()
        with torch.no_grad():
            logits = model(ids, positions, mask, labels=None)
        gpt_lora.save_adapter(model, Path(folder, "adapter"))
        state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    rows = fused_qkv_rows(num_heads=4, num_groups=2, head_dim=4)
    theirs = {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
        "lm_head.weight": state["output_layer.weight"],
    }
    for index in range(2):
        ours, to = f"decoder.layers.{index}", f"model.layers.{index}"
        for kind in ("weight", "bias"):
            fused = state[f"{ours}.self_attention.linear_qkv.{kind}"]
            theirs |= {f"{to}.self_attn.{part}_proj.{kind}": fused[rows[part]] for part in rows}
        theirs[f"{to}.self_attn.o_proj.weight"] = state[f"{ours}.self_attention.linear_proj.weight"]
        theirs[f"{to}.self_attn.o_proj.bias"] = torch.zeros(16)
        gate, up = state[f"{ours}.mlp.linear_fc1.weight"].chunk(2)
        theirs[f"{to}.mlp.gate_proj.weight"], theirs[f"{to}.mlp.up_proj.weight"] = gate, up
        theirs[f"{to}.mlp.down_proj.weight"] = state[f"{ours}.mlp.linear_fc2.weight"]
        theirs[f"{to}.input_layernorm.weight"] = state[f"{ours}.input_layernorm.weight"]
        theirs[f"{to}.post_attention_layernorm.weight"] = state[f"{ours}.pre_mlp_layernorm.weight"]
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, rms_norm_eps=1e-5, attention_bias=True, tie_word_embeddings=False,
    )  # fmt: skip
    llama = LlamaForCausalLM(config)
    llama.load_state_dict(theirs)
    llama.save_pretrained(Path(folder, "base"))
    return logits


def test_distributed_checkpoints_hold_whole_adapters(tmp_path: Path) -> None:
    for answer in run_ranks(2, ranks.resharded, str(tmp_path / "saved")):
        assert set(answer["differences"].values()) == {0.0}
        fc1, proj = "decoder.layers.0.mlp.linear_fc1.adapter", "decoder.layers.0.self_attention.linear_proj.adapter"
        assert answer["shapes"][f"{fc1}.lora_B.up_proj"] == (2, 24, 4)  # the layers stand in front
        assert answer["shapes"][f"{fc1}.lora_A.up_proj"] == (2, 4, 16)
        assert answer["shapes"][f"{proj}.lora_A.o_proj"] == (2, 4, 16)


def test_rank_stabilised_scale_and_layers(tmp_path: Path) -> None:
    folder = str(tmp_path / "adapter")
    fields: dict[str, Any] = {"use_rslora": True, "layers_to_transform": [1], "target_modules": ["linear_q", "o_proj"]}
    (saved,) = run_ranks(1, ranks.save, folder, {"tp": 1}, fields)
    assert set(saved["factors"]) == {"model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.o_proj"}
    config = json.loads(Path(folder, "adapter_config.json").read_text())
    assert config["use_rslora"]
    assert set(config["target_modules"]) == {"q_proj", "o_proj"}
    assert config["layers_to_transform"] == [1]
    assert LoraConfig(r=4, alpha=8, use_rslora=True).scale == 8 / math.sqrt(4)
    (loaded,) = run_ranks(1, ranks.load, folder, {"tp": 1})
    assert loaded["loss"] == pytest.approx(saved["loss"], rel=1e-6)


@pytest.mark.parametrize("sp", [False, True], ids=["all-reduce", "sequence parallel"])
def test_a_wrapper_like_bridges(*, sp: bool) -> None:
    """It takes our linears for Megatron's and computes beside them what it computes beside Megatron's own."""
    ours = run_ranks(2, ranks.bridge_like, {"tp": 2, "sp": sp, "ours": True})
    theirs = run_ranks(2, ranks.bridge_like, {"tp": 2, "sp": sp, "ours": False})
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine["losses"] == pytest.approx(reference["losses"], rel=1e-6)
        for grad, expected in zip(mine["grads"], reference["grads"], strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sp", [False, True], ids=["all-reduce", "sequence parallel"])
def test_a_wrapper_like_bridges_against_one_rank(*, sp: bool) -> None:
    """Not on fc1: its adapter's rows are in another order there, as Bridge cuts them."""
    options = {"ours": True, "names": ["linear_qkv", "linear_proj", "linear_fc2"]}
    (alone,) = run_ranks(1, ranks.bridge_like, {**options, "tp": 1})
    for answer in run_ranks(2, ranks.bridge_like, {**options, "tp": 2, "sp": sp}):
        assert answer["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        for mine, reference in zip(answer["grads"], alone["grads"], strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sp", [False, True], ids=["all-reduce", "sequence parallel"])
def test_gradients_under_megatrons_ddp(*, sp: bool) -> None:
    """Its finalize_model_grads sums what our marks ask for, and nothing is left for it without sequence parallelism."""
    (alone,) = run_ranks(1, ranks.under_ddp, {"tp": 1})
    assert len(alone) == 2 * len(PROJECTIONS)
    for answer in run_ranks(2, ranks.under_ddp, {"tp": 2, "sp": sp}):
        for name, grad in alone.items():
            torch.testing.assert_close(answer[name], grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "fields",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    ],
    ids=["full", "selective"],
)
def test_adapters_of_recomputed_layers_learn(fields: dict[str, Any]) -> None:
    """Megatron's checkpoints are reentrant: behind a frozen embedding they would run no backward."""
    ((plain, again),) = run_ranks(1, ranks.recomputed, fields)
    assert plain.keys() == again.keys()
    for name, grad in plain.items():
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(again[name], grad, rtol=1e-6, atol=1e-7, msg=name)
