"""What frozen_layer_spec swaps and leaves alone in the specs of megatron-core 0.16.1, and what is refused."""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from megatron_frozen.errors import ConfigError, LayoutError
from megatron_frozen.integrations import megatron_core as integration
from megatron_frozen.integrations.megatron_core.layers import frozen_class
from megatron_frozen.testing import run_ranks
from tests.functional.megatron_cpu import block_spec, gpt_config, gpt_model, megatron_on_cpu

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Transformer Engine and apex being absent
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec_for_backend,
        get_mlp_module_spec_for_backend,
    )
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

OURS = (integration.FrozenColumnParallelLinear, integration.FrozenRowParallelLinear)


def _column(size: int = 4, **options: Any) -> Any:
    config = gpt_config()
    return integration.FrozenColumnParallelLinear(size, 8, config=config, init_method=nn.init.ones_, **options)


def test_a_dense_layer() -> None:
    spec: Any = get_gpt_layer_local_spec(qk_layernorm=True)
    before = copy.deepcopy(spec)
    swapped = integration.frozen_layer_spec(spec)
    attention, mlp = swapped.submodules.self_attention.submodules, swapped.submodules.mlp.submodules
    assert (attention.linear_qkv, attention.linear_proj) == OURS
    assert (mlp.linear_fc1, mlp.linear_fc2) == OURS
    assert spec == before
    given = before.submodules.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = given.linear_qkv, given.linear_proj
    mlp.linear_fc1, mlp.linear_fc2 = ColumnParallelLinear, RowParallelLinear
    assert swapped == before  # nothing else differs


def test_experts_are_left_alone() -> None:
    swapped: Any = integration.frozen_layer_spec(get_gpt_layer_local_spec(num_experts=4))
    moe = swapped.submodules.mlp.submodules
    assert moe.experts.submodules.linear_fc1 is ColumnParallelLinear
    assert (moe.shared_experts.submodules.linear_fc1, moe.shared_experts.submodules.linear_fc2) == OURS


def test_down_projections_are_left_alone() -> None:
    swapped: Any = integration.frozen_layer_spec(get_gpt_layer_local_spec(multi_latent_attention=True))
    attention = swapped.submodules.self_attention.submodules
    assert attention.linear_q_down_proj is attention.linear_kv_down_proj is ColumnParallelLinear
    assert attention.linear_proj is OURS[1]


def blocks_lists_and_prediction_layers(rank: int, world_size: int) -> list[str]:
    """Return what is wrong in the swapped specs of whole blocks; one rank, whose groups megatron-core asks for."""
    with megatron_on_cpu():
        config = gpt_config(mtp_num_layers=1)
        block: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        prediction: Any = get_gpt_mtp_block_spec_for_backend(config, block, backend=LocalSpecProvider())
    swapped = integration.frozen_layer_spec(block)
    deep: Any = integration.frozen_layer_spec(prediction)
    checks = {
        "all layers": [at.submodules.mlp.submodules.linear_fc2 for at in swapped.layer_specs] == [OURS[1]] * 2,
        "the given block": block.layer_specs[0].submodules.mlp.submodules.linear_fc2 is RowParallelLinear,
        "a list": integration.frozen_layer_spec(block.layer_specs) == swapped.layer_specs,
        "twice": integration.frozen_layer_spec(swapped) == swapped,
        "prediction": "FrozenColumnParallelLinear" in repr(deep),
        "the given prediction": "FrozenColumnParallelLinear" not in repr(prediction),
    }
    return [name for name, holds in checks.items() if not holds]


def test_blocks_lists_and_prediction_layers() -> None:
    assert run_ranks(1, blocks_lists_and_prediction_layers) == [[]]


def test_builders_around_a_class() -> None:
    layer: Any = get_gpt_layer_local_spec()
    layer.submodules.mlp.submodules.linear_fc1 = functools.partial(ColumnParallelLinear, stride=2)
    layer.submodules.mlp.submodules.linear_fc2 = ModuleSpec(module=RowParallelLinear, params={"stride": 1})
    where = (RowParallelLinear.__module__, "RowParallelLinear")
    layer.submodules.self_attention.submodules.linear_proj = ModuleSpec(module=where)
    swapped: Any = integration.frozen_layer_spec(layer)
    fc1, fc2 = swapped.submodules.mlp.submodules.linear_fc1, swapped.submodules.mlp.submodules.linear_fc2
    assert (fc1.func, fc1.keywords) == (OURS[0], {"stride": 2})
    assert (fc2.module, fc2.params) == (OURS[1], {"stride": 1})
    assert swapped.submodules.self_attention.submodules.linear_proj.module is OURS[1]
    assert layer.submodules.mlp.submodules.linear_fc2.module is RowParallelLinear


def test_the_provider() -> None:
    provider = integration.FrozenSpecProvider()
    assert isinstance(provider, LocalSpecProvider)
    mlp: Any = get_mlp_module_spec_for_backend(backend=provider)
    assert (mlp.submodules.linear_fc1, mlp.submodules.linear_fc2) == OURS
    assert provider.core_attention() is LocalSpecProvider().core_attention()


def test_transformer_engine_is_refused() -> None:
    class TELayerNormColumnParallelLinear(nn.Module):
        """Named as Transformer Engine's."""

    spec: Any = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.linear_qkv = TELayerNormColumnParallelLinear
    with pytest.raises(ConfigError, match="linear_qkv is a TELayerNormColumnParallelLinear of Transformer Engine"):
        integration.frozen_layer_spec(spec)


def test_other_specs_are_refused() -> None:
    spec: Any = get_gpt_layer_local_spec()
    spec.submodules.mlp.submodules.linear_fc1 = nn.Linear
    with pytest.raises(ConfigError, match="linear_fc1 is a Linear, which is not one of megatron-core's own"):
        integration.frozen_layer_spec(spec)
    with pytest.raises(ConfigError, match="found no linear_qkv, linear_proj, linear_fc1, linear_fc2 in the dict"):
        integration.frozen_layer_spec({})
    with pytest.raises(ConfigError, match=r"nn.modules.linear.Linear is no ColumnParallelLinear or RowParallelLinear"):
        frozen_class(nn.Linear)


def test_a_head_of_a_class_below_megatrons() -> None:
    """Current main's GPTModel has heads that fuse the loss; their own steps stay, their logits are ours."""

    class LossHead(ColumnParallelLinear):
        """A head whose forward calls megatron-core's."""

        def forward(self, input_: Any, weight: Any = None, *, doubled: bool = False) -> Any:
            output, bias = super().forward(input_, weight)
            return (output * 2 if doubled else output), bias

    model: Any = nn.Module()
    assert integration.use_frozen_head(model) is model
    model.output_layer = head = LossHead(4, 8, config=gpt_config(), init_method=nn.init.ones_, bias=False)
    integration.use_frozen_head(model)
    integration.use_frozen_head(model)
    assert model.output_layer is head
    assert isinstance(head, (LossHead, OURS[0]))
    assert type(head).__mro__.index(LossHead) < type(head).__mro__.index(OURS[0])
    output, _ = head(torch.ones(2, 1, 4), doubled=True)
    assert "LinearWithGradAccumulation" in str(output.grad_fn.next_functions[0][0])
    assert output.tolist() == [[[8.0] * 8]] * 2


def test_a_wrapped_model_is_refused() -> None:
    wrapper: Any = nn.Module()
    wrapper.module = nn.Module()
    with pytest.raises(ConfigError, match="use_frozen_head was given a Module around a model"):
        integration.use_frozen_head(wrapper)


def test_other_heads_are_refused() -> None:
    model: Any = nn.Module()
    model.output_layer = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="is a Linear, and only megatron-core's ColumnParallelLinear can be swapped"):
        integration.use_frozen_head(model)


@dataclass
class _Offloading:
    inside_context: bool


def test_inputs_are_marked_inside_the_offloading_context() -> None:
    layer = _column()
    layer.config._cpu_offloading_context = _Offloading(inside_context=True)
    layer.config.cpu_offloading_activations = True
    input_: Any = torch.ones(2, 1, 4)
    layer(input_)
    assert input_.activation_offloading
    layer.config._cpu_offloading_context.inside_context = False
    layer(other := torch.ones(2, 1, 4))
    assert not hasattr(other, "activation_offloading")


def test_weights_that_do_not_fit() -> None:
    headless = _column(bias=False, skip_weight_param_allocation=True)
    with pytest.raises(ConfigError, match=r"has no weight of its own \(skip_weight_param_allocation\)"):
        headless(torch.ones(2, 1, 4))
    with pytest.raises(LayoutError, match=r"was handed a weight of shape \[4, 8\]"):
        headless(torch.ones(2, 1, 4), weight=torch.ones(4, 8))
    assert headless(torch.ones(2, 1, 4), weight=torch.ones(8, 4))[0].shape == (2, 1, 8)


def test_a_bias_that_every_rank_would_add() -> None:
    given: dict[str, Any] = {"config": gpt_config(), "init_method": nn.init.ones_, "input_is_parallel": True}
    row = integration.FrozenRowParallelLinear(4, 8, bias=True, skip_bias_add=False, **given)
    row.explicit_expert_comm = True
    with pytest.raises(ConfigError, match="leaves the sum over ranks to its caller"):
        row(torch.ones(2, 1, 4))


def test_groups_of_a_collection() -> None:
    """Current main passes pg_collection in place of tp_group."""

    @dataclass
    class Groups:
        tp: Any
        expt_tp: Any

    groups = Groups(tp=None, expt_tp=None)
    assert _column(pg_collection=groups).tp_group is None
    assert (
        _column(pg_collection=groups, is_expert=True, name="decoder.fc1").weight.parameter_name == "decoder.fc1.weight"
    )


def fusion_without_apex(rank: int, world_size: int) -> str:
    """Return what a model with upstream's own body says under gradient_accumulation_fusion."""
    with megatron_on_cpu():
        config = gpt_config(gradient_accumulation_fusion=True)
        with pytest.raises(ConfigError) as failure:
            gpt_model(config, block_spec(config), make=integration.FrozenGPTModel)
        return str(failure.value)


def test_a_body_that_needs_apex_is_refused() -> None:
    (message,) = run_ranks(1, fusion_without_apex)
    assert "linear_proj is megatron-core's own RowParallelLinear under gradient_accumulation_fusion" in message
