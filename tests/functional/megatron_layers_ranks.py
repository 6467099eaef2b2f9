"""Single layers of ours that subclass megatron-core's, on each rank of the pool."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor

from megatron_frozen import gather_from_tensor_model_parallel_region
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.integrations import megatron_core as integration
from tests.functional.megatron_cpu import gpt_config, megatron_on_cpu

IN, OUT, SEQUENCE, BATCH = 8, 12, 4, 3


def _input(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _column(config: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    return integration.FrozenColumnParallelLinear(
        IN, OUT, **{"config": config, "init_method": torch.nn.init.xavier_normal_, "bias": False, **options}
    )


def _row(config: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    given = {"bias": False, "input_is_parallel": True, "skip_bias_add": True, **options}
    return integration.FrozenRowParallelLinear(
        OUT, IN, config=config, init_method=torch.nn.init.xavier_normal_, **given
    )


def switched_off_later(rank: int, world_size: int, switch: str) -> tuple[dict[str, int], Tensor, Tensor]:
    """Set ``switch`` after construction; return the collectives of a frozen step, and dX here and summed over ranks."""
    with megatron_on_cpu(tp=2):
        layer = _column(gpt_config(tensor_model_parallel_size=2)).requires_grad_(requires_grad=False)
        setattr(layer, switch, True)
        input_ = _input(SEQUENCE, BATCH, IN)
        with Recorder() as recorder:
            layer(input_)[0].sum().backward()
        assert input_.grad is not None
        total = input_.grad.clone()
        torch.distributed.all_reduce(total, group=layer.tp_group)
        return dict(recorder.collectives()), total, layer.weight.detach()


def partial_row(rank: int, world_size: int) -> tuple[dict[str, int], Tensor, Tensor, Tensor]:
    """Run a row layer whose caller sums; return its collectives, its partial output, input shard and weight shard."""
    with megatron_on_cpu(tp=2):
        layer = _row(gpt_config(tensor_model_parallel_size=2))
        layer.explicit_expert_comm = True
        input_ = _input(SEQUENCE, BATCH, OUT // 2, seed=rank)
        with Recorder() as recorder:
            output, bias = layer(input_)
        assert bias is None
        return dict(recorder.collectives()), output.detach(), input_.detach(), layer.weight.detach()


def against_upstream(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return pairs (ours, upstream's) of what a column layer followed by a row layer computes, both with biases."""
    from megatron.core.tensor_parallel import layers

    found: list[dict[str, Tensor]] = []
    with megatron_on_cpu(tp=world_size):
        config = gpt_config(tensor_model_parallel_size=world_size, sequence_parallel=options["sp"])
        classes = (
            (integration.FrozenColumnParallelLinear, integration.FrozenRowParallelLinear),
            (layers.ColumnParallelLinear, layers.RowParallelLinear),
        )
        for column_class, row_class in classes:
            torch.manual_seed(5)
            given: dict[str, Any] = {"config": config, "init_method": torch.nn.init.xavier_normal_}
            column: Any = column_class(IN, OUT, stride=2, **given)
            row: Any = row_class(OUT, IN, bias=True, input_is_parallel=True, skip_bias_add=False, **given)
            with torch.no_grad():
                column.bias.fill_(0.5)
                row.bias.fill_(0.25)
            input_ = _input(
                SEQUENCE // (world_size if options["sp"] else 1), BATCH, IN, seed=rank if options["sp"] else 0
            )
            if options["frozen"]:
                column.weight.requires_grad_(requires_grad=False)
                row.weight.requires_grad_(requires_grad=False)
                column.bias.requires_grad_(requires_grad=False)  # upstream loses its gradient there
            output, _ = row(column(input_)[0])
            output.square().sum().backward()
            tensors = {"y": output.detach(), "dx": input_.grad, "row db": row.bias.grad}
            for name, parameter in (("column", column.weight), ("row", row.weight), ("column bias", column.bias)):
                tensors[name] = parameter.detach()
                if parameter.requires_grad:
                    tensors[f"d {name}"] = parameter.grad
            marks = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel", "allreduce")
            for name, parameter in (("cw", column.weight), ("cb", column.bias), ("rw", row.weight), ("rb", row.bias)):
                values = [int(getattr(parameter, mark, -9)) for mark in marks]
                tensors[f"marks {name}"] = torch.tensor(values)
            found.append({key: value for key, value in tensors.items() if value is not None})
        assert found[0].keys() == found[1].keys()
        return {key: (found[0][key], found[1][key]) for key in found[0]}


def bias_gradient(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of a trainable bias under a frozen weight, and the sum that it is."""
    with megatron_on_cpu(tp=2):
        layer = _column(gpt_config(tensor_model_parallel_size=2), bias=True)
        layer.weight.requires_grad_(requires_grad=False)
        grad = _input(SEQUENCE, BATCH, OUT // 2, seed=rank).detach()
        layer(_input(SEQUENCE, BATCH, IN).detach())[0].backward(grad)
        return layer.bias.grad, grad.sum((0, 1))


def wide_logits(rank: int, world_size: int) -> tuple[torch.dtype, Tensor, Tensor]:
    """Return the dtype of a bf16 layer's fp32 output, and the output with its fp64 reference."""
    with megatron_on_cpu(tp=2):
        config = gpt_config(tensor_model_parallel_size=2, params_dtype=torch.bfloat16, bf16=True)
        layer = _column(config, output_dtype=torch.float32, gather_output=True)
        input_ = _input(SEQUENCE, BATCH, IN).detach().bfloat16()
        output, _ = layer(input_)
        full = gather_from_tensor_model_parallel_region(layer.weight.detach().t().contiguous(), layer.tp_group)
        return output.dtype, output.detach(), input_.double() @ full.double()


def deferred(rank: int, world_size: int, *, frozen: bool) -> tuple[int, int, bool, Tensor | None]:
    """Run two micro-batches of a head that puts its weight gradient off; say what the buffers hold, and their product
    less the gradient that is not put off."""
    with megatron_on_cpu(tp=2):
        config = gpt_config(tensor_model_parallel_size=2)
        plain = _column(config)
        config.defer_embedding_wgrad_compute = True
        inputs: list[Tensor] = []
        grads: list[Tensor] = []
        layer = _column(config, embedding_activation_buffer=inputs, grad_output_buffer=grads)
        layer.weight.requires_grad_(requires_grad=not frozen)
        body = _column(config)  # not the head: it has no buffer to put anything into
        for seed in range(2):
            for module in (layer, body, plain):
                module(_input(SEQUENCE, BATCH, IN, seed=seed))[0].square().sum().backward()
        if frozen:
            return len(inputs), len(grads), layer.weight.grad is None, None
        total = sum(g.flatten(0, 1).t() @ x.flatten(0, 1) for x, g in zip(inputs, grads, strict=True))
        return len(inputs), len(grads), layer.weight.grad is None, (total - plain.weight.grad).abs().max()


def metadata_none(rank: int, world_size: int) -> dict[str, tuple[Any, ...]]:
    """Return key: global shape of both layers' sharded state dicts, asked for without metadata."""
    with megatron_on_cpu(tp=2):
        config = gpt_config(tensor_model_parallel_size=2)
        tensors = {
            **_column(config, bias=True).sharded_state_dict("c."),
            **_row(config, bias=True).sharded_state_dict("r."),
        }
        return {key: getattr(value, "global_shape", ()) for key, value in tensors.items()}


def unfilled(rank: int, world_size: int) -> list[tuple[Any, ...]]:
    """Return what Megatron-Bridge's AutoMapping and Megatron's norms read of layers that initialise nothing."""
    with megatron_on_cpu(tp=2):
        config = gpt_config(tensor_model_parallel_size=2, perform_initialization=False)
        layers = [_column(config), _row(config)]
        return [
            (m.tensor_model_parallel, m.partition_dim, m.weight.tensor_model_parallel, m.weight.partition_dim)
            for m in layers
        ]


def pickled_classes(rank: int, world_size: int) -> list[str]:
    """Return the names of the classes after a round trip through pickle."""
    with megatron_on_cpu(tp=world_size):
        names = ("FrozenColumnParallelLinear", "FrozenRowParallelLinear", "FrozenSpecProvider", "FrozenGPTModel")
        classes = [getattr(integration, name) for name in names]
        assert pickle.loads(pickle.dumps(classes)) == classes
        return [f"{made.__module__}.{made.__name__}" for made in classes]
