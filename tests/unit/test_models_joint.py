"""The decoder multiplies q, k, v in one product and gate, up in another: where, with what values, and what it keeps."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_frozen.checkpoint.hf_folder import load_hf_folder
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.layers.joint_columns import HoldsJointColumns
from megatron_frozen.lora import LoraConfig, LoraLinear, apply_lora, named_lora_layers, require_input_grads
from megatron_frozen.models import CausalLM, DecoderConfig
from megatron_frozen.params import sum_partial_grads
from megatron_frozen.storage import adjacent_view
from megatron_frozen.testing import assert_close_to, run_ranks
from tests.unit.lora_toys import seeded, start_ranks
from tests.unit.models_ranks import build_model
from tests.unit.models_reference import random_batch, tiny_config, tiny_model, weights_of
from tests.unit.train_job_toy import toy_model

ADAPTED = {"nothing": (), "q and v": ("q_proj", "v_proj"), "all but k": ("q_proj", "v_proj", "gate_proj", "down_proj")}


def groups(model: nn.Module) -> list[HoldsJointColumns]:
    return [module for module in model.modules() if isinstance(module, HoldsJointColumns)]


def are_adjacent(model: nn.Module) -> bool:
    return all(adjacent_view(weights_of_group(group)) is not None for group in groups(model))


def weights_of_group(group: HoldsJointColumns) -> list[Tensor]:
    return [layer.weight for layer in group.joint_columns() if isinstance(layer.weight, Tensor)]


def go_one_by_one(model: nn.Module) -> None:
    """By a hook on each of the layers, which does nothing."""
    for group in groups(model):
        for layer in group.joint_columns():
            layer.register_forward_hook(lambda *_: None)


def adapt(model: CausalLM, targets: tuple[str, ...], **fields: Any) -> CausalLM:
    """With adapters whose B is not zero, each scaled apart."""
    if targets:
        apply_lora(model, LoraConfig(r=2, target_modules=list(targets), **fields))
        for number, (_, layer) in enumerate(named_lora_layers(model)):
            full_A, full_B = layer.full_factors("default")
            layer.set_factors("default", full_A=full_A, full_B=0.1 * seeded(*full_B.shape, seed=number))
    return model


def losses_and_gradients(model: CausalLM, **options: Any) -> dict[str, Tensor | None]:
    model.zero_grad()
    input_ids, labels = random_batch()
    losses = model(input_ids, labels=labels, **options)
    losses.sum().backward()
    sum_partial_grads(model.parameters(), group=model.tp_group)
    gradients = {name: param.grad for name, param in model.named_parameters() if param.requires_grad}
    return {"losses": losses.detach(), **gradients}


@pytest.mark.parametrize("document_lengths", [None, [[3, 7, 2], [12]]], ids=["whole rows", "packed"])
@pytest.mark.parametrize("adapted", ADAPTED)
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3, bias"])
def test_values_and_gradients_are_those_of_layers_called_one_by_one(
    variant: str, adapted: str, document_lengths: list[list[int]] | None
) -> None:
    reference = tiny_model(variant)
    model = adapt(build_model(reference.config.to_dict(), weights_of(reference)), ADAPTED[adapted]).double()
    apart = copy.deepcopy(model)
    go_one_by_one(apart)
    for _ in range(2):
        expected = losses_and_gradients(apart, document_lengths=document_lengths)
        actual = losses_and_gradients(model, document_lengths=document_lengths)
        assert_close_to(actual, expected, tolerance=1e-9)  # in fp64, as errors of 1e-7 grow in two layers
        assert len(actual) > 8
        for trained in (model, apart):
            for parameter in trained.parameters():
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=1e-4)


def test_gradients_with_a_graph_are_the_same_and_second_derivatives_are_refused() -> None:
    reference = tiny_model("llama")
    model = build_model(reference.config.to_dict(), weights_of(reference))
    weight = model.get_parameter("model.embed_tokens.weight")
    (expected,) = torch.autograd.grad(losses_of(model).sum(), weight)
    (actual,) = torch.autograd.grad(losses_of(model).sum(), weight, create_graph=True)
    assert torch.equal(actual, expected)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        actual.sum().backward()


def test_a_layer_takes_four_products_forward_and_four_input_gradients_back() -> None:
    reference = tiny_model("llama")
    model = build_model(reference.config.to_dict(), weights_of(reference)).requires_grad_(requires_grad=False)
    require_input_grads(model)
    num_products = {}
    for name in ("together", "one by one"):
        if name == "one by one":
            go_one_by_one(model)
        with Recorder() as forward:
            logits = model(random_batch()[0])
        with Recorder() as backward:
            logits.sum().backward()
        num_products[name] = forward.count("aten.mm"), backward.count("aten.mm")
    num_layers, head = 2, 1
    assert num_products["together"] == (num_layers * 4 + head, num_layers * 4 + head)
    assert num_products["one by one"] == (num_layers * 7 + head, num_layers * 7 + head)


def losses_of(model: CausalLM) -> Tensor:
    input_ids, labels = random_batch()
    return model(input_ids, labels=labels)


def test_adapters_of_one_input_share_their_thin_products_and_their_copy_of_it() -> None:
    """Per layer, forward: 4 of the base and 4 of A. Backward: 4 of the base, 4 of dA, and dh and dB of each of 7."""
    reference = tiny_model("llama")
    model = build_model(reference.config.to_dict(), weights_of(reference))
    adapt(model, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    saved: list[Tensor] = []
    with Recorder() as forward, torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        logits = model(random_batch()[0])
    with Recorder() as backward:
        logits.sum().backward()
    first_dgrad = 1  # below the first layer nothing trains
    assert forward.count("aten.mm") == 2 * (4 + 4) + 1
    assert backward.count("aten.mm") == 2 * (4 + 4 + 2 * 7) + 1 - first_dgrad
    widths = Counter(tensor.shape[-1] for tensor in saved if tensor.dim() == 3 and tensor.shape[0] == 12)
    assert widths[96] == 2  # gate and up of each layer, once, and nothing of silu(gate)
    assert (
        max(tensor.untyped_storage().nbytes() for tensor in saved if tensor.shape[-1] == 8) == 12 * 2 * (4 + 2) * 8 * 4
    )


def test_hooks_on_a_projection_see_its_call_and_change_its_output() -> None:
    reference = tiny_model("llama")
    model = adapt(build_model(reference.config.to_dict(), weights_of(reference)), ("q_proj", "v_proj"))
    before = losses_of(model).detach()
    seen: list[tuple[int, ...]] = []
    attention = model.get_submodule("model.layers.0.self_attn")
    attention.get_submodule("k_proj").register_forward_hook(lambda _m, _i, output: seen.append(output[0].shape))
    torch.testing.assert_close(losses_of(model).detach(), before)
    assert seen == [(12, 2, 16)]
    attention.get_submodule("v_proj").register_forward_hook(lambda _m, _i, output: (0 * output[0], None))
    assert not torch.allclose(losses_of(model).detach(), before)


def test_copies_casts_and_loading_leave_the_weights_adjacent_and_right() -> None:
    reference = tiny_model("qwen2")
    model = build_model(reference.config.to_dict(), weights_of(reference))
    apply_lora(model, LoraConfig(r=2))
    parameters = dict(model.named_parameters())
    expected = losses_of(model).detach()
    assert are_adjacent(model)
    assert are_adjacent(copy.deepcopy(model))
    torch.testing.assert_close(losses_of(copy.deepcopy(model)).detach(), expected, rtol=0, atol=0)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert are_adjacent(model)
    model.double()
    assert are_adjacent(model)
    torch.testing.assert_close(losses_of(model).detach().float(), expected)
    model.float()
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    torch.testing.assert_close(losses_of(model).detach(), expected, rtol=0, atol=0)


def test_weights_that_came_apart_are_multiplied_together_all_the_same() -> None:
    reference = tiny_model("qwen2")
    model = adapt(build_model(reference.config.to_dict(), weights_of(reference)), ("q_proj", "v_proj"))
    expected = losses_and_gradients(model)
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".lora_" in name
    assert not are_adjacent(model)
    with Recorder() as seen:
        losses_of(model)
    assert seen.count("aten.addmm") == 2  # q, k and v of each layer with their biases
    assert_close_to(losses_and_gradients(model), expected, tolerance=1e-6)


def test_weights_made_without_memory_are_adjacent_once_they_have_some() -> None:
    with torch.device("meta"):
        model = CausalLM(
            DecoderConfig.from_hf(tiny_config("qwen2")), parallel=ModelParallelConfig(use_cpu_initialization=True)
        )
    model.to_empty(device="cpu")
    assert are_adjacent(model)


def test_weights_read_from_a_folder_are_adjacent(tmp_path: Path) -> None:
    folder = toy_model(tmp_path / "base")
    assert are_adjacent(load_hf_folder(folder, parallel=ModelParallelConfig(params_dtype=torch.bfloat16)))


def test_weights_in_shared_memory_stay_there() -> None:
    """They came apart, so nobody but their owner knows why they lie where they do."""
    model = CausalLM(DecoderConfig.from_hf(tiny_config("llama")), parallel=ModelParallelConfig())
    for group in groups(model):
        for weight in weights_of_group(group):
            weight.data = weight.data.clone()
    model.share_memory()
    assert all(parameter.is_shared() for parameter in model.parameters())


def _both_ways(
    rank: int, world_size: int, mode: str, weights: dict[str, Tensor]
) -> list[tuple[Counter[str], dict[str, Tensor | None]]]:
    """Collectives, losses and gradients of adapters, together and one by one."""
    del rank
    start_ranks(world_size)
    model = build_model(tiny_config("qwen2"), weights, sequence_parallel=mode == "SP")
    adapt(model, ADAPTED["all but k"]).double()
    found = []
    for _ in range(2):
        with Recorder() as seen:
            values = losses_and_gradients(model)
        found.append((seen.collectives(), values))
        assert isinstance(model.get_submodule("model.layers.0.self_attn.q_proj"), LoraLinear)
        go_one_by_one(model)
    return found


@pytest.mark.parametrize("mode", ["plain", "SP"])
def test_two_ranks_send_as_much_as_one_by_one_and_get_the_same(mode: str) -> None:
    for (joint, values), (apart, expected) in run_ranks(2, _both_ways, mode, weights_of(tiny_model("qwen2"))):
        assert joint == apart
        assert sum(joint.values()) > 8
        assert_close_to(values, expected, tolerance=1e-9)
