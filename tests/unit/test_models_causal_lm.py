"""The whole model on one rank against transformers: logits, losses, every gradient, packed documents, recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_frozen.errors import ConfigError, LayoutError
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.models import CausalLM, DecoderConfig
from megatron_frozen.testing.reference import assert_close_to
from tests.unit.models_ranks import build_model
from tests.unit.models_reference import (
    VARIANTS,
    losses_and_gradients,
    random_batch,
    tiny_config,
    tiny_model,
    weights_of,
)

_DOCUMENTS = [[3, 7, 2], [12]]


def _gradients(model: CausalLM) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _model(variant: str = "llama", **overrides: Any) -> CausalLM:
    reference = tiny_model(variant, **overrides)
    return build_model(reference.config.to_dict(), weights_of(reference))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_losses_and_gradients_are_those_of_transformers(variant: str) -> None:
    reference = tiny_model(variant)
    input_ids, labels = random_batch()
    expected_losses, expected_gradients = losses_and_gradients(reference, input_ids, labels)
    model = build_model(reference.config.to_dict(), weights_of(reference))
    with torch.no_grad():
        expected_logits, logits = reference(input_ids).logits, model(input_ids)
    assert expected_logits.std() > 0.3
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-4)

    losses = model(input_ids, labels=labels)
    losses.sum().backward()
    assert losses.dtype == torch.float32
    assert losses.view(-1)[::5].eq(0).all()
    torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-5)
    assert_close_to(_gradients(model), expected_gradients, tolerance=1e-5)


@pytest.mark.parametrize("variant", ["llama", "llama dynamic rope", "mistral, narrow window", "qwen3"])
def test_packed_documents_give_what_they_give_apart(variant: str) -> None:
    model = _model(variant)
    input_ids, labels = random_batch()
    losses = model(input_ids, labels=labels, document_lengths=_DOCUMENTS)
    losses.sum().backward()
    packed_gradients = _gradients(model)

    model.zero_grad()
    apart = []
    for row, lengths in enumerate(_DOCUMENTS):
        for ids, targets in zip(input_ids[row].split(lengths), labels[row].split(lengths), strict=True):
            apart.append(model(ids[None], labels=targets[None])[0])
            apart[-1].sum().backward()
    torch.testing.assert_close(losses.view(-1), torch.cat(apart), rtol=0, atol=1e-5)
    assert_close_to(packed_gradients, _gradients(model), tolerance=1e-5)
    assert not torch.allclose(losses, model(input_ids, labels=labels), atol=1e-3), "packing must show in this test"


def test_given_positions_replace_those_of_the_documents() -> None:
    model = _model()
    input_ids, labels = random_batch()
    plain = model(input_ids, labels=labels)
    shifted = model(input_ids, labels=labels, position_ids=torch.arange(12).expand(2, 12) + 40)
    torch.testing.assert_close(shifted, plain, rtol=0, atol=1e-4)  # rotary attention sees distances only
    uneven = model(input_ids, labels=labels, position_ids=torch.arange(12).expand(2, 12) * 2)
    assert not torch.allclose(uneven, plain, atol=1e-3)


def test_dynamic_rope_follows_the_given_positions() -> None:
    reference = tiny_model("llama dynamic rope")
    input_ids, _ = random_batch()
    positions = torch.arange(12).expand(2, 12) + 30
    model = build_model(reference.config.to_dict(), weights_of(reference))
    with torch.no_grad():
        expected = reference(input_ids, position_ids=positions).logits
        torch.testing.assert_close(model(input_ids, position_ids=positions), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("frozen", ["nothing", "the embedding", "all but the value projections"])
def test_recomputed_layers_give_the_same_gradients(frozen: str) -> None:
    model = _model()
    for name, parameter in model.named_parameters():
        keep = {"nothing": True, "the embedding": "embed" not in name}.get(frozen, "v_proj" in name)
        parameter.requires_grad_(keep)
    input_ids, labels = random_batch()
    model(input_ids, labels=labels).sum().backward()
    kept = _gradients(model)

    model.zero_grad()
    model.activation_checkpointing = True
    calls = []
    model.get_submodule("model.layers.0.input_layernorm").register_forward_hook(lambda *_: calls.append(1))
    model(input_ids, labels=labels).sum().backward()
    assert len(calls) == 2, "the layer must run again in the backward"
    assert_close_to(_gradients(model), kept, tolerance=1e-6)
    assert any(gradient is not None for gradient in kept.values())


def _dropped_out(module: Any, inputs: Any, output: Any) -> Tensor:
    return torch.nn.functional.dropout(output, p=0.5)


def test_recomputed_layers_draw_the_same_dropout() -> None:
    model = _model()
    model.get_submodule("model.layers.0.mlp").register_forward_hook(_dropped_out)
    input_ids, labels = random_batch()
    gradients = []
    for model.activation_checkpointing in (False, True):
        model.zero_grad()
        torch.manual_seed(7)
        model(input_ids, labels=labels).sum().backward()
        gradients.append(_gradients(model))
    assert_close_to(gradients[1], gradients[0], tolerance=1e-6)


def test_recomputing_is_for_training_only() -> None:
    model = _model()
    model.activation_checkpointing = True
    calls = []
    model.get_submodule("model.layers.0.input_layernorm").register_forward_hook(lambda *_: calls.append(1))
    input_ids, labels = random_batch()
    model.eval()(input_ids, labels=labels).sum().backward()
    with torch.no_grad():
        model.train()(input_ids, labels=labels)
    assert len(calls) == 2


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_model_is_initialised_and_a_tied_head_has_no_key(*, tied: bool) -> None:
    config = DecoderConfig.from_hf(tiny_config("llama", tie_word_embeddings=tied))
    torch.manual_seed(3)
    model = CausalLM(config, parallel=ModelParallelConfig())
    assert ("lm_head.weight" in model.state_dict()) != tied
    assert model.get_parameter("model.layers.0.mlp.up_proj.weight").std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(model.model.norm.weight, torch.ones(32))


def test_a_model_can_be_built_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = CausalLM(DecoderConfig.from_hf(tiny_config("qwen3")), parallel=ModelParallelConfig())
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_bf16_weights_give_bf16_logits_and_fp32_losses() -> None:
    model = _model().to(torch.bfloat16)
    input_ids, labels = random_batch()
    assert model(input_ids).dtype == torch.bfloat16
    assert model(input_ids, labels=labels).dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"input_ids": torch.zeros(12, dtype=torch.int64)},
            r"input_ids has shape \[12\]; give token ids \[batch, sequence\]",
        ),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, r"input_ids has shape \[1, 0\]; give"),
        (
            {"labels": torch.zeros(2, 11, dtype=torch.int64)},
            r"labels has shape \[2, 11\] and input_ids \[2, 12\]; give them the same",
        ),
        ({"position_ids": torch.zeros(1, 12, dtype=torch.int64)}, r"position_ids has shape \[1, 12\] and input_ids"),
        ({"document_lengths": [[12]]}, r"document_lengths has 1 rows and input_ids has 2"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    arguments = {"input_ids": random_batch()[0], **arguments}
    with pytest.raises(LayoutError, match=message):
        _model()(arguments.pop("input_ids"), **arguments)


def test_fp32_reduction_of_input_gradients_is_off_on_one_rank_and_a_bad_switch_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGATRON_TRUE_ON_POLICY_DGRAD_ALLREDUCE_FP32", "yes")
    with pytest.raises(ConfigError, match=r"MEGATRON_TRUE_ON_POLICY_DGRAD_ALLREDUCE_FP32 is 'yes'; it takes 0 or 1"):
        _model()(random_batch()[0])
