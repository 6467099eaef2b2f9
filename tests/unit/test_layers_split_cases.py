"""Cases 3, 6, 9, 49 and 51 on split layers, and mixed dtypes, no tokens, changing numbers of tokens, FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError, LayoutError
from megatron_frozen.functional import linear_with_split_parameters
from megatron_frozen.layers import ColumnParallelLinear, LayerNormLinear, Linear, ModelParallelConfig
from megatron_frozen.testing import relative_error, run_ranks
from tests.unit.core_ranks import seeded
from tests.unit.split_case_ranks import bias_under_a_frozen_weight, column_case, layouts_on_ranks, under_fsdp2
from tests.unit.split_ranks import Case, build, make_disjoint, reference

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# ------------------------------------------------------------------------------------------ case 3: no bmm, no branch


@pytest.mark.parametrize("in_fp32", [False, True], ids=["", "dgrad in fp32"])
@pytest.mark.parametrize("memory", ["adjacent", "disjoint"])
def test_a_transposed_gradient_is_one_product_each(memory: str, *, in_fp32: bool) -> None:
    config = ModelParallelConfig(dgrad_in_fp32=in_fp32, params_dtype=torch.bfloat16)
    layer: Any = ColumnParallelLinear(
        7, 5, config=config, init_method=nn.init.normal_, parameters_split={"q": 2, "k": 3}
    )
    if memory == "disjoint":
        make_disjoint(layer)
    layer.q_weight.requires_grad = False
    input_ = seeded(6, 3, 7, seed=1, dtype=torch.bfloat16).requires_grad_()
    grad = seeded(3, 6, 5, seed=2, dtype=torch.bfloat16).transpose(0, 1)
    with Recorder() as seen:
        output, _ = layer(input_)
        output.backward(grad)
    assert seen.count("aten.bmm") == 0
    weight = torch.cat([layer.q_weight, layer.k_weight]).detach()
    wide = (grad.reshape(-1, 5).float() @ weight.float()).view(6, 3, 7)
    assert input_.grad is not None
    if in_fp32:
        assert torch.equal(input_.grad, wide.bfloat16())
    assert relative_error(input_.grad, wide) < 0.01
    assert relative_error(layer.k_weight.grad, torch.einsum("sbo,sbi->oi", grad.float(), input_.float())[2:]) < 0.01


def test_a_transposed_gradient_on_two_ranks() -> None:
    for rank_counts in run_ranks(2, layouts_on_ranks):
        for mode, counts in rank_counts.items():
            assert counts["aten.bmm"] == 0, mode
            assert counts["aten.mm"] + counts["aten.addmm"] == 3, mode


# ------------------------------------------------------------------------- case 6: a trainable bias, a frozen weight


@pytest.mark.parametrize("memory", ["adjacent", "disjoint"])
def test_a_bias_learns_under_a_frozen_weight(memory: str) -> None:
    layer: Any = Linear(7, 5, parameters_split={"q": 2, "k": 3})
    if memory == "disjoint":
        make_disjoint(layer)
    layer.q_weight.requires_grad = layer.k_weight.requires_grad = layer.q_bias.requires_grad = False
    for shape in ((6, 3, 7), (18, 7)):
        layer.zero_grad()
        layer(torch.randn(shape)).backward(torch.ones(*shape[:-1], 5))
        assert layer.k_bias.grad.tolist() == [18.0] * 3
        assert layer.q_bias.grad is None
        assert layer.q_weight.grad is None
        assert layer.k_weight.grad is None


def test_a_bias_learns_under_a_frozen_weight_on_two_ranks() -> None:
    for column, row in run_ranks(2, bias_under_a_frozen_weight):
        assert column == [18.0] * 2
        assert row == [18.0] * 4


# -------------------------------------------------------------------------------- case 9: bf16 products, fp32 buffers


def _fused(dtype: torch.dtype, make_buffer: Callable[[Any], Tensor]) -> tuple[Any, Tensor, Tensor]:
    layer: Any = Linear(7, 5, parameters_split={"q": 2, "k": 3}, params_dtype=dtype, fuse_wgrad_accumulation=True)
    for part in (layer.q_weight, layer.k_weight):
        part.get_main_grad = lambda part=part: make_buffer(part)
        part.grad_added_to_main_grad, part.overwrite_main_grad = False, True
    input_, grad = seeded(32, 7, seed=1, dtype=dtype), seeded(32, 5, seed=2, dtype=dtype)
    return layer, input_, grad


def test_bf16_operands_fill_fp32_buffers_that_fsdp_makes_in_backward() -> None:
    layer, input_, grad = _fused(torch.bfloat16, lambda part: torch.full(part.shape, torch.nan))
    layer(input_).backward(grad)
    exact = grad.float().t() @ input_.float()
    rounded = (grad.t() @ input_).float()
    for part, rows in ((layer.q_weight, slice(0, 2)), (layer.k_weight, slice(2, 5))):
        assert part.main_grad.dtype == torch.float32
        assert relative_error(part.main_grad, exact[rows]) < 1e-5
        assert not torch.equal(part.main_grad, rounded[rows])
        assert part.grad_added_to_main_grad is True


def test_bf16_buffers_work_and_integers_are_refused() -> None:
    layer, input_, grad = _fused(torch.bfloat16, lambda part: torch.zeros(part.shape, dtype=torch.bfloat16))
    layer(input_).backward(grad)
    assert relative_error(layer.k_weight.main_grad, (grad.float().t() @ input_.float())[2:]) < 0.01
    layer, input_, grad = _fused(torch.bfloat16, lambda part: torch.zeros(part.shape, dtype=torch.int32))
    output = layer(input_)
    with pytest.raises(LayoutError, match=r"int32"):
        output.backward(grad)


# -------------------------------------------------------------------------------------------- case 49: lists of parts


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])
@pytest.mark.parametrize("form", ["layer", "list", "unpacked"])
def test_a_frozen_part_beside_a_trainable_one(form: str, *, compiled: bool) -> None:
    layer: Any = Linear(4, 5, parameters_split={"q": 2, "k": 3}, bias=False)
    layer.q_weight.requires_grad = False
    weights = [layer.q_weight, layer.k_weight]
    run: Any = {
        "layer": layer,
        "list": lambda x: linear_with_split_parameters(x, weights),
        "unpacked": lambda x: linear_with_split_parameters(x, (layer.q_weight, layer.k_weight)),
    }[form]
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    input_, grad = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 5)
    output = run(input_)
    with Recorder() as seen:
        output.backward(grad)
    assert layer.q_weight.grad is None
    assert relative_error(layer.k_weight.grad, torch.einsum("sbo,sbi->oi", grad[..., 2:], input_.detach())) < 1e-6
    assert input_.grad is not None
    assert relative_error(input_.grad, grad @ torch.cat(weights).detach()) < 1e-6
    wgrads = [op.shapes for op in seen.operations if op.name == "aten.mm" and op.shapes[0][1] == 6]
    assert wgrads == [((3, 6), (6, 4))], "rows of the frozen part are in the weight gradient's product"


# ------------------------------------------------------------------------------------ case 51: column layers, two ranks


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["Linear", "Column", "LayerNormLinear"])
def test_parts_of_a_column_layer_on_two_ranks(kind: str, *, bias: bool) -> None:
    one = column_case(0, 1, kind, bias)
    assert one["sizes"] == [8, 4, 4]
    for two in run_ranks(2, column_case, kind, bias):
        assert two["sizes"] == [4, 2, 2]
        assert two["keys"] == one["keys"]
        assert two["k grad"] is None
        for name in ("full", "output", "dx", "q grad", "v grad"):
            assert relative_error(two[name], one[name]) < 1e-6, name
        assert torch.equal(two["full"], one["full"])
        assert "the size of part 'k' is 3, which does not divide by 2" in two["error"]


@pytest.mark.parametrize("layer_type", [Linear, LayerNormLinear])
def test_a_sum_that_is_wrong_is_named(layer_type: type) -> None:
    with pytest.raises(ConfigError, match=r"\(q_: 8, k_: 4, v_: 3\) sum to 15 where out_features is 16"):
        layer_type(8, 16, parameters_split={"q_": 8, "k_": 4, "v_": 3})


# ---------------------------------------------------------------------------------------------------------- the rest


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])
def test_an_fp32_part_beside_a_bf16_one(*, compiled: bool) -> None:
    layer: Any = Linear(7, 5, parameters_split={"q": 2, "k": 3})
    layer.q_weight.data, layer.q_bias.data = layer.q_weight.data.bfloat16(), layer.q_bias.data.bfloat16()
    run: Any = layer
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    input_, grad = torch.randn(6, 3, 7, requires_grad=True), torch.randn(6, 3, 5)
    output = run(input_)
    output.backward(grad)
    weight = torch.cat([layer.q_weight.float(), layer.k_weight])
    assert input_.grad is not None
    assert relative_error(output, nn.functional.linear(input_, weight)) < 1e-6
    assert relative_error(input_.grad, grad @ weight) < 1e-6
    wgrad = torch.einsum("sbo,sbi->oi", grad, input_.detach())
    assert layer.q_weight.grad.dtype == torch.bfloat16
    assert relative_error(layer.q_weight.grad, wgrad[:2]) < 0.01
    assert relative_error(layer.k_weight.grad, wgrad[2:]) < 1e-6
    assert layer.q_bias.grad.dtype == torch.bfloat16
    assert not layer.repack_()


@pytest.mark.parametrize("memory", ["adjacent", "disjoint"])
@pytest.mark.parametrize("fused", [False, True])
def test_no_tokens(memory: str, *, fused: bool) -> None:
    layer: Any = build(Case(kind="LayerNorm", bias=True, frozen="first", fused=fused))
    if memory == "disjoint":
        make_disjoint(layer)
    input_ = torch.randn(0, 1, 8, requires_grad=True)
    output = layer(input_)
    assert output.shape == (0, 1, 16)
    output.sum().backward()
    assert input_.grad is not None
    assert input_.grad.shape == (0, 1, 8)
    assert layer.k_bias.grad.tolist() == [0.0] * 4
    if fused:
        assert layer.k_weight.main_grad.eq(7.0).all()
    else:
        assert layer.k_weight.grad.eq(0.0).all()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("fused", [False, True])
def test_token_counts_that_change_compile_once(backend: str, *, fused: bool) -> None:
    layer: Any = build(Case(kind="RMSNorm", bias=True, frozen="middle", fused=fused))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for num_tokens in (3, 5, 9):
        input_ = torch.randn(num_tokens, 2, 8, requires_grad=True)
        output = compiled(input_)
        output.sum().backward()
        assert relative_error(output, layer(input_)) < 1e-6
    assert counter.frame_count == 1


def test_gamma_around_zero_and_the_norm_returned() -> None:
    case = Case(kind="RMSNorm", bias=True, frozen="none", fused=False)
    plain: Any = build(case, return_layernorm_output=True)
    centred: Any = build(case, zero_centered_gamma=True, return_bias=True, return_layernorm_output=True)
    with torch.no_grad():
        centred.layer_norm_weight.sub_(1)
    input_ = seeded(4, 3, 8, seed=1, dtype=torch.float32)
    output, normalised = plain(input_)
    product, bias, same = centred(input_)
    torch.testing.assert_close(product + bias, output)
    torch.testing.assert_close(same, normalised)
    torch.testing.assert_close(output.detach(), reference(case)["y"])
    torch.testing.assert_close(normalised, nn.functional.rms_norm(input_, (8,), plain.layer_norm_weight, eps=1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_has_fp32_statistics(dtype: str) -> None:
    """The norm of bf16 differs from that of fp32 by the rounding of its result only, however far off 0 the mean is."""
    layer: Any = LayerNormLinear(
        8, 16, parameters_split=["q", "k"], params_dtype=DTYPES[dtype], return_layernorm_output=True
    )
    input_ = (seeded(5, 8, seed=1, dtype=torch.float32) + 30).to(DTYPES[dtype])
    _, normalised = layer(input_)
    exact = nn.functional.layer_norm(input_.double(), (8,))
    assert relative_error(normalised, exact) < (4e-3 if dtype == "bf16" else 1e-5)


@pytest.mark.parametrize("split", [None, ["q"]], ids=["no split", "one part"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_of_one_part_is_a_linear(split: Any, *, frozen: bool) -> None:
    layer: Any = Linear(7, 5, parameters_split=split, fuse_wgrad_accumulation=True)
    weight, bias = layer.parameters()
    weight.requires_grad = not frozen
    weight.main_grad = torch.full(weight.shape, 7.0)
    input_, grad = torch.randn(6, 3, 7, requires_grad=True), torch.randn(3, 6, 5).transpose(0, 1)
    output = layer(input_)
    output.backward(grad)
    assert input_.grad is not None
    assert relative_error(output, nn.functional.linear(input_, weight, bias)) < 1e-6
    assert relative_error(input_.grad, grad @ weight.detach()) < 1e-6
    assert relative_error(bias.grad, grad.sum((0, 1))) < 1e-6
    wgrad = 0.0 if frozen else torch.einsum("sbo,sbi->oi", grad, input_.detach())
    assert relative_error(weight.main_grad, 7.0 + wgrad * torch.ones(5, 7)) < 1e-6
    assert weight.grad is None
    assert layer.repack_()


def test_under_fsdp2_parts_fall_apart_and_values_stay() -> None:
    for errors in run_ranks(2, under_fsdp2):
        assert max(errors.values()) < 1e-6, errors
