"""The compiled passes over activations: no further from fp64 than torch's own, in odd widths and orders of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from megatron_frozen import kernels, vocab_parallel_cross_entropy
from megatron_frozen.autograd.causal_attention import causal_attention_unsupported
from megatron_frozen.autograd.head_loss import FrozenHeadCrossEntropy, HeadPlan
from megatron_frozen.autograd.rms_norm import RMSNormFunction
from megatron_frozen.kernels import passes
from megatron_frozen.models.joint_heads import rotate_joint
from megatron_frozen.models.mlp import _GateJoint
from megatron_frozen.models.rope import RotaryTables, rotate
from megatron_frozen.testing import relative_error
from tests.unit.cpu_kernels import needs_kernels

LEADING = {
    "rows": lambda x: x.flatten(0, 1),
    "sequence first": lambda x: x,
    "batch first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "a slice": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
}


def three_ways(
    function: Callable[..., Tensor], given: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (the kernels', torch's, in fp64) of the result and of the first operand's gradient, from one upstream."""
    assert passes.takes(*given[:1], max_leading=3), "the case does not reach the kernels"
    found = []
    for dtype, absent in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float64, True)):
        with monkeypatch.context() as patch:
            if absent:
                patch.setattr(passes, "takes", lambda *_, **__: False)
            leaves = [tensor.detach().to(dtype).requires_grad_(index < 1) for index, tensor in enumerate(given)]
            result = function(*leaves)
            upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
            result.backward(torch.empty_like(result).copy_(upstream))  # in the result's order of memory
            found.append([result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert len(found[0]) == 2
    yield from zip(*found, strict=True)


def assert_as_near(ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == torch.bfloat16
    assert relative_error(ours, exact) < 1.05 * relative_error(theirs, exact) + 1e-4


@needs_kernels
@pytest.mark.parametrize("order", LEADING)
@pytest.mark.parametrize("width", [64, 77, 576])
@pytest.mark.usefixtures("num_threads")
def test_rms_norm(order: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    input_ = LEADING[order](torch.randn(37, 3, width).mul_(3).bfloat16())
    weight = (1 + torch.randn(width) / 4).bfloat16()
    for triple in three_ways(lambda x, w: RMSNormFunction.apply(x, w, 1e-5), [input_, weight], monkeypatch):
        assert_as_near(*triple)


@needs_kernels
def test_a_row_alone_and_rows_of_many_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels take at most two leading dims; a fourth dim was passed over in the gate, and a vector refused."""
    torch.manual_seed(0)
    norm = torch.randn(8192).bfloat16(), (1 + torch.randn(8192) / 4).bfloat16()
    for triple in three_ways(lambda x, w: RMSNormFunction.apply(x, w, 1e-5), list(norm), monkeypatch):
        assert_as_near(*triple)
    for triple in three_ways(_GateJoint.apply, [torch.randn(8192).bfloat16()], monkeypatch):
        assert_as_near(*triple)
    joint = torch.randn(3, 4, 5, 256).bfloat16()
    gate, up = joint.chunk(2, dim=-1)
    assert torch.equal(_GateJoint.apply(joint), F.silu(gate) * up)


@needs_kernels
def test_a_trained_norm_weight_gets_its_gradient() -> None:
    torch.manual_seed(0)
    input_, grad = torch.randn(2, 64, 96).bfloat16(), torch.randn(2, 64, 96).bfloat16()
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        weight = torch.full((96,), 0.75, dtype=dtype, requires_grad=True)
        x = input_.clone().to(dtype).detach().requires_grad_()
        RMSNormFunction.apply(x, weight, 1e-5).backward(grad.to(dtype))
        found.append((x.grad, weight.grad))
    for ours, exact in zip(*found, strict=True):
        assert ours is not None
        assert exact is not None
        assert relative_error(ours, exact) < 4e-3


@needs_kernels
@pytest.mark.parametrize("order", LEADING)
@pytest.mark.parametrize("half", [48, 53])
@pytest.mark.usefixtures("num_threads")
def test_gate(order: str, half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    joint = LEADING[order](torch.randn(35, 3, 2 * half).mul_(4).bfloat16())
    for triple in three_ways(_GateJoint.apply, [joint], monkeypatch):
        assert_as_near(*triple)


@needs_kernels
def test_gate_at_the_ends_of_the_range() -> None:
    ends = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 200.0, -200.0, 3e38, -3e38, torch.inf, torch.nan])
    gate = ends.bfloat16().repeat(512)
    joint = torch.cat([gate, torch.full_like(gate, 0.5)]).view(1, -1)
    expected = F.silu(gate) * 0.5
    assert torch.equal(passes.gate(joint)[0].isnan(), expected.isnan())
    torch.testing.assert_close(passes.gate(joint)[0], expected, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("head_dim", [8, 22, 64])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.usefixtures("num_threads")
def test_rotation(head_dim: int, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    angles = torch.randn(150, num_rows, 1, head_dim // 2)
    cos, sin = torch.cat([angles.cos()] * 2, dim=-1), angles.sin()
    heads = torch.randn(3, 150, 4, head_dim).bfloat16().transpose(0, 1)

    def turned(x: Tensor) -> Tensor:
        return rotate(x, RotaryTables(cos=cos.bfloat16().to(x.dtype), sin=sin.bfloat16().to(x.dtype)))

    for triple in three_ways(turned, [heads], monkeypatch):
        assert_as_near(*triple)

    def jointly(joint: Tensor) -> Tensor:
        tables = RotaryTables(cos=cos.bfloat16().to(joint.dtype), sin=sin.bfloat16().to(joint.dtype))
        query, key, value = rotate_joint(joint, tables, head_dim=head_dim, num_kv_heads=1)
        return torch.cat([query, key, value], dim=2)

    for triple in three_ways(jointly, [heads.flatten(2)], monkeypatch):
        assert_as_near(*triple)


@needs_kernels
@pytest.mark.parametrize("width", [33, 500, 4099])
@pytest.mark.usefixtures("num_threads")
def test_softmax_in_place(width: int) -> None:
    torch.manual_seed(0)
    whole = (8 * torch.randn(131, width + 3)).bfloat16()
    logits, before = whole[:, :width], whole.clone()
    exact = logits.double()
    top, total = passes.softmax_(logits)
    assert torch.equal(top.double(), exact.amax(-1))
    torch.testing.assert_close(total.double(), (exact - top[:, None]).exp().sum(-1), rtol=1e-6, atol=0)
    rounded = exact.softmax(-1).bfloat16()
    assert relative_error(logits, exact.softmax(-1)) < 1.01 * relative_error(rounded, exact.softmax(-1))
    assert torch.equal(whole[:, width:], before[:, width:]), "it wrote beside the rows"


@needs_kernels
@pytest.mark.parametrize("order", LEADING)
def test_cross_entropy_of_logits(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = LEADING[order]((5 * torch.randn(41, 3, 1003)).bfloat16())
    target = torch.randint(1003, logits.shape[:-1])
    logits.scatter_(-1, target[..., None], 30)  # confident rows, whose p - 1 has no digits left in bf16
    target.view(-1)[::5] = -100
    logits.flatten(0, -2)[5] = torch.nan  # of a label that is left out
    function = partial(vocab_parallel_cross_entropy, target=target)
    (loss, _, exact), (grad, other, exact_grad) = three_ways(function, [logits], monkeypatch)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)
    assert grad.stride() == other.stride()
    assert_as_near(grad, other, exact_grad)
    assert torch.equal(grad[target == -100], torch.zeros_like(grad[target == -100]))


@needs_kernels
def test_cross_entropy_of_one_token_and_of_a_shard_that_is_padding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    target = torch.tensor(17)
    for ours, _, exact in three_ways(lambda x: vocab_parallel_cross_entropy(x, target), [torch.randn(5000).bfloat16()],
                                     monkeypatch):  # fmt: skip
        assert relative_error(ours, exact) < 4e-3
    top, total = passes.logsumexp(torch.full((2, 4096), -torch.inf, dtype=torch.bfloat16))
    assert top.tolist() == [torch.finfo(torch.float32).min] * 2
    assert total.tolist() == [0, 0]


@needs_kernels
def test_softmax_of_rows_with_what_is_not_finite() -> None:
    logits = torch.zeros(4, 4096, dtype=torch.bfloat16)
    logits[0, 7], logits[1, 7], logits[2, :7] = torch.nan, torch.inf, -torch.inf
    expected = logits.float().softmax(-1).bfloat16()
    passes.softmax_(logits)
    torch.testing.assert_close(logits, expected, equal_nan=True)


@needs_kernels
def test_the_loss_over_a_frozen_head(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 32).bfloat16(), torch.randn(1000, 32).bfloat16()
    target = torch.randint(1000, (300,))
    target[::7] = -100
    plan = HeadPlan(group=None, num_real_columns=997, with_dgrad=True, dgrad_in_fp32=False, logits_dtype=None)
    target.clamp_(max=996)

    def losses(x: Tensor) -> Tensor:
        return FrozenHeadCrossEntropy.apply(x, weight.to(x.dtype), target, plan)

    for index, (ours, theirs, exact) in enumerate(three_ways(losses, [hidden], monkeypatch)):
        assert relative_error(ours, exact) < 1.05 * relative_error(theirs, exact) + 1e-4, index


def test_what_is_left_to_torch() -> None:
    large = torch.zeros(64, 64, dtype=torch.bfloat16)
    assert passes.takes(large) == (kernels.absent() is None)
    assert not passes.takes(large.float())
    assert not passes.takes(large.t())
    assert not passes.takes(large[:8])
    assert not passes.takes(large.view(2, 2, 16, 64))
    assert not passes.takes(large, large.float())
    assert not passes.takes(torch.empty(64, 64, dtype=torch.bfloat16, device="meta"))


@needs_kernels
@pytest.mark.parametrize("name", ["norm", "gate", "rotation"])
def test_rows_that_are_windows_one_element_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty tensor like them has columns where they have rows."""
    torch.manual_seed(0)
    numbers, angles = torch.randn(8000).bfloat16(), torch.randn(10, 1, 1, 1000)
    tables = RotaryTables(cos=torch.cat([angles.cos()] * 2, dim=-1).bfloat16(), sin=angles.sin().bfloat16())
    function, given = {
        "norm": (lambda x, w: RMSNormFunction.apply(x, w, 1e-5), [numbers.unfold(0, 2000, 1)[:10], numbers[:2000]]),
        "gate": (_GateJoint.apply, [numbers.unfold(0, 2000, 1)[:10]]),
        "rotation": (
            lambda x: rotate(x, RotaryTables(cos=tables.cos.to(x.dtype), sin=tables.sin.to(x.dtype))),
            [numbers.as_strided((10, 1, 1, 2000), (1, 1, 1, 1))],
        ),
    }[name]
    for triple in three_ways(function, given, monkeypatch):
        assert_as_near(*triple)


@needs_kernels
@pytest.mark.parametrize("shape", [(37, 3, 77), (1, 300, 16), (3, 33, 2049), (2, 64, 4100), (5, 1, 1000)], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=str)
@pytest.mark.usefixtures("num_threads")
def test_parts_of_sums(shape: tuple[int, int, int], order: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    dense = torch.randn([shape[dim] for dim in order]).bfloat16()
    rows = torch.cat([dense, dense], dim=-1)[..., : shape[-1]].permute(order)
    sums = rows.double().sum(1)
    for num_parts, error in ((1, 2.0**-8), (2, 2.0**-16), (3, 3e-7)):
        parts = passes.parts_of_sums(rows, num_parts).view(num_parts, *sums.shape)
        assert relative_error(parts.double().sum(0), sums) < error


@needs_kernels
def test_a_sum_of_a_million_rows_is_as_exact_as_a_product() -> None:
    """One running sum of groups of 32 rows was 2e-6 off."""
    torch.manual_seed(0)
    rows = torch.randn(1, 10**6, 16).bfloat16() + 1
    parts = passes.parts_of_sums(rows, 3)
    assert relative_error(parts.double().sum(0), rows.double().sum(1)[0]) < 1e-6


@needs_kernels
def test_gradients_without_an_address_are_left_to_torch() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 96).bfloat16().requires_grad_(), torch.ones(96).bfloat16()
    output = RMSNormFunction.apply(x, weight, 1e-5)
    assert not passes.takes(torch.ops.aten._efficientzerotensor([64, 96], dtype=torch.bfloat16))
    upstream = torch.randn(3, 64, 96).bfloat16()
    (together,) = torch.autograd.grad(output, x, upstream, is_grads_batched=True, retain_graph=True)
    for grad, ours in zip(upstream, together, strict=True):
        (alone,) = torch.autograd.grad(output, x, grad, retain_graph=True)
        assert relative_error(ours, alone.double()) < 4e-3


@needs_kernels
def test_real_tensors_where_fake_ones_are_made_or_a_graph_is_recorded() -> None:
    """Outputs there have no address, or are filled behind the graph's back."""
    large = torch.randn(1, 2, 64, 64).bfloat16()
    assert passes.takes(large[0])
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert not passes.takes(large[0])
        assert causal_attention_unsupported(large, large, large) is not None
    graph = make_fx(lambda x: RMSNormFunction.apply(x, large[0, 0, 0], 1e-5))(large[0])
    other = 2 + large[0]
    assert relative_error(graph(other), RMSNormFunction.apply(other, large[0, 0, 0], 1e-5).double()) < 4e-3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: passes.rms_norm(x, x[0, :63], eps=1e-5), "rows of 64 got a weight of"),
        (lambda x: passes.rms_norm_backward(x[1:], x, x[0], x[:, :1]), "got a gradient of"),
        (lambda x: passes.gate(x[:, :63]), "rows of 63 have no halves"),
        (lambda x: passes.gate_backward(x, x), "got torch.Size"),
        (lambda x: passes.rotate(x[:, None, None], x[:, None, None, :62], x[:, None, None, :31], sign=1,
                                 out=x[:, None, None].clone()), "got tables"),
        (lambda x: passes.rotate(x[:, None, None, :63], x[:, None, None, :63], x[:, None, None, :31], sign=1,
                                 out=x[:, None, None, :63].clone()), "got tables"),
        (lambda x: passes.softmax_gradient(x, *(torch.ones(63) for _ in range(4))), "got torch.Size"),
        (lambda x: passes.parts_of_sums(x, 2), "rows to sum have the shape"),
        (lambda x: kernels.multiply_into(torch.empty(64, 64), x[:, :63], x, accumulate=False), "got an output"),
        (lambda x: kernels.multiply_into(torch.empty(63, 64), x, x, accumulate=False), "got an output"),
    ],
    ids=["weight", "norm", "odd gate", "gate", "tables", "odd head dim", "softmax", "sums", "inner", "output"],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_not_read(call: Callable[[Tensor], object], message: str) -> None:
    """What stood behind them in memory was, so that a wrong width gave numbers."""
    with pytest.raises(AssertionError, match=message):
        call(torch.ones(64, 64, dtype=torch.bfloat16))
