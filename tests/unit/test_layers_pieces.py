"""The all-reduce of dX cut into pieces of rows: values beside the whole one's, counts, edges, errors, compiled code."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from megatron_frozen import (
    ColumnParallelLinear,
    Linear,
    LoraConfig,
    ModelParallelConfig,
    gemm,
    initialize_model_parallel,
    linear_with_frozen_weight,
)
from megatron_frozen.autograd import linear_products
from megatron_frozen.comm import collectives, gather_objects, get_tensor_model_parallel_group
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError
from megatron_frozen.lora import LoraLinear
from megatron_frozen.testing import assert_close_to, run_ranks
from tests.unit.core_ranks import seeded

S, B, IN, OUT = 6, 3, 14, 24
WEIGHTS = ("frozen", "trainable", "split")
LAYOUTS = {
    "dense": lambda grad: grad.contiguous(),
    "transposed": lambda grad: grad.transpose(0, 1).contiguous().transpose(0, 1),
    "hidden strided": lambda grad: grad.movedim(-1, 0).contiguous().movedim(0, -1),
    "expanded": lambda grad: grad[:, :1].expand_as(grad),
}
FP32_OPTIONS = ("dgrad_in_fp32", "allreduce_dgrad_in_fp32")


def layer_of(kind: str, *, dtype: torch.dtype = torch.float32, config: Any = None, **options: Any) -> Any:
    """Return a column layer of seeded weights with a bias, all frozen, trainable, or in parts of which one trains."""
    torch.manual_seed(0)
    layer = ColumnParallelLinear(
        IN, OUT, config=config or ModelParallelConfig(params_dtype=dtype, **options), init_method=torch.nn.init.normal_,
        parameters_split={"gate": 6, "up": 18} if kind == "split" else None,
    )  # fmt: skip
    for i, name in enumerate(layer.weight_names):
        getattr(layer, name).requires_grad = kind == "trainable" or i == 1
    return layer


def backward(layer: Any, x: torch.Tensor, grad: torch.Tensor) -> tuple[dict[str, Any], Recorder]:
    leaf = x.clone().requires_grad_()
    y, _ = layer(leaf)
    with Recorder() as seen:
        y.backward(grad)
    return {"dx": leaf.grad} | {name: param.grad for name, param in layer.named_parameters()}, seen


def matrix_body(rank: int, world_size: int, dtype: torch.dtype, options: tuple[str, ...]) -> int:
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    x = seeded(S, B, IN, seed=1, dtype=dtype)
    compared = 0
    for kind in WEIGHTS:
        for layout in LAYOUTS.values():
            grad = layout(seeded(S, B, OUT // world_size, seed=2 + rank, dtype=dtype))
            num_rows = S if grad.stride(1) == 0 else S * B
            asked = dict.fromkeys(options, True)
            whole, of_whole = backward(layer_of(kind, dtype=dtype, **asked), x, grad)
            wide, _ = backward(layer_of(kind, dtype=torch.float64), x.double(), grad.double())
            for pieces in (1, 2, 4, 1000):
                cut, of_cut = backward(layer_of(kind, dtype=dtype, allreduce_dgrad_pieces=pieces, **asked), x, grad)
                num_pieces = min(pieces, num_rows)
                assert of_cut.collectives() == {"all_reduce": num_pieces}
                assert of_cut.payload_bytes() == of_whole.payload_bytes()
                assert of_cut.count("aten.bmm") == 0
                assert of_cut.count("aten.mm") == of_whole.count("aten.mm") + num_pieces - 1
                if "dgrad_in_fp32" not in options:  # where so small a product upcasts its operands, each time
                    assert of_cut.copied_bytes() == of_whole.copied_bytes()
                eps = torch.finfo(dtype).eps
                assert_close_to({"dx": cut["dx"]}, {"dx": wide["dx"]}, tolerance=2 * eps)
                assert cut["dx"].dtype == dtype
                assert cut["dx"].stride() == whole["dx"].stride()
                for name in cut.keys() - {"dx"}:  # what is not cut has the same bits
                    assert (cut[name] is None and whole[name] is None) or torch.equal(cut[name], whole[name])
                first, *others = gather_objects(cut["dx"], group=group)
                assert all(torch.equal(first, other) for other in others)
                compared += 1
    return compared


@pytest.mark.parametrize("options", [(), FP32_OPTIONS[:1], FP32_OPTIONS[1:], FP32_OPTIONS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pieces_give_what_the_whole_gives(dtype: torch.dtype, options: tuple[str, ...]) -> None:
    assert run_ranks(2, matrix_body, dtype, options) == [3 * 4 * 4] * 2


def test_pieces_on_three_ranks() -> None:
    assert run_ranks(3, matrix_body, torch.float32, ()) == [3 * 4 * 4] * 3


def edges_body(rank: int, world_size: int) -> None:
    """No tokens: one empty all-reduce, as whole. Sequence parallelism and one that leaves the sum: not touched."""
    initialize_model_parallel(world_size)
    for kind in WEIGHTS:
        layer = layer_of(kind, allreduce_dgrad_pieces=4)
        found, seen = backward(layer, torch.zeros(0, 2, IN), torch.zeros(0, 2, OUT // world_size))
        assert found["dx"].shape == (0, 2, IN)
        assert seen.collectives() == {"all_reduce": 1}
        layer.allreduce_dgrad = False
        assert not backward(layer, torch.ones(S, B, IN), torch.ones(S, B, OUT // world_size))[1].collectives()
        layer = layer_of(kind, allreduce_dgrad_pieces=4, sequence_parallel=True)
        _, seen = backward(layer, torch.ones(S // world_size, B, IN), torch.ones(S, B, OUT // world_size))
        assert (seen.collectives()["all_reduce"], seen.collectives()["reduce_scatter"]) == (0, 1)
    options: dict[str, Any] = {"allreduce_dgrad": True, "sequence_parallel": False, "allreduce_dgrad_pieces": 2}
    x = seeded(4, IN, seed=3).requires_grad_()  # and under create_graph, where the backward runs with gradients on
    y = linear_with_frozen_weight(x, seeded(OUT, IN, seed=4).requires_grad_(), None, False, **options)  # noqa: FBT003
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert_close_to(
        {"dx": dx.detach()}, {"dx": world_size * seeded(OUT, IN, seed=4).sum(0).expand(4, IN)}, tolerance=1e-12
    )


def test_edges() -> None:
    run_ranks(2, edges_body)


def others_body(rank: int, world_size: int) -> None:
    """A layer with Transformer Engine's arguments cuts where its config says so; a config without the field does not,
    and what an adapter enters by is summed whole."""
    initialize_model_parallel(world_size)
    config = ModelParallelConfig(allreduce_dgrad_pieces=3)
    x, grad = torch.ones(S, B, IN), torch.ones(S, B, OUT // world_size)
    linear: Any = Linear(IN, OUT, parallel_mode="column", tp_group=get_tensor_model_parallel_group(), return_bias=True)
    linear.config = dataclasses.replace(linear.config, allreduce_dgrad_pieces=3)
    assert backward(linear, x, grad.transpose(0, 1).contiguous().transpose(0, 1))[1].collectives() == {"all_reduce": 3}
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del fields["allreduce_dgrad_pieces"]
    foreign = layer_of("frozen", config=types.SimpleNamespace(**fields))
    assert backward(foreign, x, grad)[1].collectives() == {"all_reduce": 1}
    adapted = LoraLinear(layer_of("frozen", config=config))
    full_A, full_B = seeded(2, IN, seed=5).float(), seeded(OUT, 2, seed=6).float()
    adapted.add_adapter("default", LoraConfig(r=2), full_A=full_A, full_B=full_B)
    adapted.active_adapter = "default"
    assert backward(adapted, x, grad)[1].collectives() == {"all_reduce": 1}


def test_which_layers_cut() -> None:
    run_ranks(2, others_body)


class Waits:
    """Counts the handles that were given out and waited for; waiting for the one of number ``fails_at`` raises."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.given, self.waited, self.fails_at = 0, 0, fails_at

    def all_reduce_(self, tensor: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Any]:
        summed, work = collectives.all_reduce_(tensor, **options)
        self.given += 1
        return summed, types.SimpleNamespace(wait=functools.partial(self._wait, self.given, work))

    def _wait(self, number: int, work: Any) -> None:
        work.wait()
        self.waited += 1
        if number == self.fails_at:
            raise ConnectionError("the peer is gone")


def errors_body(rank: int, world_size: int) -> None:
    """Whatever fails, every handle is waited for, and the next backward is as ever."""
    initialize_model_parallel(world_size)
    x, grad = seeded(S, B, IN, seed=1).float(), seeded(S, B, OUT // world_size, seed=2 + rank).float()
    expected, _ = backward(layer_of("frozen"), x, grad)
    layer = layer_of("frozen", allreduce_dgrad_pieces=4)
    products = iter(range(4))

    def fails_third(*operands: torch.Tensor, **options: Any) -> torch.Tensor:
        if next(products) == 2:
            raise MemoryError("the third product has no room")
        return torch.mm(*operands, out=options["out"])

    with pytest.MonkeyPatch.context() as patching:
        waits = Waits()
        patching.setattr(linear_products, "all_reduce_", waits.all_reduce_)
        patching.setattr(gemm, "dgrad", fails_third)
        with pytest.raises(MemoryError, match="the third product has no room"):
            backward(layer, x, grad)
        assert (waits.given, waits.waited) == (2, 2)
    with pytest.MonkeyPatch.context() as patching:
        waits = Waits(fails_at=2)
        patching.setattr(linear_products, "all_reduce_", waits.all_reduce_)
        with pytest.raises(ConnectionError, match="the peer is gone"):
            backward(layer, x, grad)
        assert (waits.given, waits.waited) == (4, 4)
    layer.zero_grad()
    assert_close_to(backward(layer, x, grad)[0], expected, tolerance=1e-6)


def test_every_handle_is_waited_for_where_something_fails() -> None:
    run_ranks(2, errors_body)


def compiled_body(rank: int, world_size: int) -> None:
    initialize_model_parallel(world_size)
    torch._dynamo.reset()
    x, grad = seeded(S, B, IN, seed=1).float(), seeded(S, B, OUT // world_size, seed=2 + rank).float()
    for kind in WEIGHTS:
        expected, _ = backward(layer_of(kind), x, grad)
        layer = layer_of(kind, allreduce_dgrad_pieces=4)
        graphs: list[str] = []

        def keep(graph: torch.fx.GraphModule, _: Any, *, graphs: list[str] = graphs) -> Any:
            graphs.append(graph.code)
            return make_boxed_func(graph.forward)

        compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
        leaf = x.clone().requires_grad_()
        compiled(leaf)[0].backward(grad)
        found = {"dx": leaf.grad} | {name: param.grad for name, param in layer.named_parameters()}
        assert_close_to(found, expected, tolerance=1e-6)
        assert "".join(graphs).count("_c10d_functional.all_reduce") == 1, graphs
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_sums_whole() -> None:
    run_ranks(2, compiled_body)


def test_a_number_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="allreduce_dgrad_pieces is 0; give a number of pieces, at least 1"):
        ModelParallelConfig(allreduce_dgrad_pieces=0)
    options: dict[str, Any] = {"allreduce_dgrad": True, "sequence_parallel": False, "allreduce_dgrad_pieces": -1}
    with pytest.raises(ConfigError, match="is -1; give the number of pieces that dX travels in, 1 for whole"):
        linear_with_frozen_weight(torch.ones(2, 3), torch.ones(4, 3), None, False, **options)  # noqa: FBT003
