"""Training steps under megatron-core's own DistributedDataParallel, run on each rank of the pool.

Operands are small whole numbers, so fp32 sums of their products are exact and bf16 ones are not.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_frozen import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear, VocabParallelEmbedding
from megatron_frozen.testing import rank_device

HIDDEN, WIDE, VOCAB, SEQUENCE, BATCH = 16, 24, 24, 48, 4
MICRO_BATCHES, STEPS = 3, 2

# (module, input, gradient of the output) of each call, in the order of the backward
Calls = list[tuple[nn.Module, Tensor, Tensor]]


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Set up megatron-core's groups. It asks CUDA for the device wherever it runs; nothing else needs replacing.

    Where there are GPUs, nothing is replaced.
    """
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # of Transformer Engine and apex being absent
        if rank_device().type == "cpu":
            patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel()
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def whole_numbers(*shape: int, seed: int, limit: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-limit, limit + 1, shape, generator=generator).to(rank_device(), torch.bfloat16)


def _fill(weight: Tensor) -> None:
    weight.copy_(whole_numbers(*weight.shape, seed=sum(weight.shape), limit=2))


class Untied(nn.Module):
    """A column and a row layer."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__()
        self.first = ColumnParallelLinear(HIDDEN, WIDE, config=config, init_method=_fill, bias=False)
        self.second = RowParallelLinear(
            WIDE, HIDDEN, config=config, init_method=_fill, bias=False, input_is_parallel=True, skip_bias_add=False
        )

    def forward(self, input_: Tensor) -> Tensor:
        return self.second(self.first(input_)[0])[0]

    def random_input(self, seed: int) -> Tensor:
        return whole_numbers(SEQUENCE, BATCH, HIDDEN, seed=seed, limit=4)


class Tied(nn.Module):
    """An embedding and a head over one weight, marked as Megatron's LanguageModule marks it."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(VOCAB, HIDDEN, config=config, init_method=_fill)
        weight: Any = self.embedding.weight
        weight.zero_out_wgrad = True
        self.head = ColumnParallelLinear(
            HIDDEN, VOCAB, config=config, init_method=_fill, bias=False, skip_weight_param_allocation=True
        )

    def forward(self, input_: Tensor) -> Tensor:
        return self.head(self.embedding(input_), weight=self.embedding.weight)[0]

    def random_input(self, seed: int) -> Tensor:
        # Each id a few times only: the embedding's own gradient, which DDP adds, is summed in bf16.
        return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed)).view(VOCAB, 1).to(rank_device())


def _watch(model: nn.Module) -> Calls:
    """Record what each layer multiplies."""
    calls: Calls = []

    def after(module: nn.Module, inputs: tuple[Tensor, ...], outputs: Any) -> None:
        output = outputs[0] if isinstance(outputs, tuple) else outputs
        output.register_hook(lambda grad: calls.append((module, inputs[0].detach(), grad)))

    for module in model.children():
        module.register_forward_hook(after)
    return calls


def _exact(model: nn.Module, calls: Calls) -> dict[str, Tensor]:
    """The weight gradients of the recorded calls, in fp64."""
    totals = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in model.named_parameters()}
    for module, input_, grad in calls:
        rows = grad.double().reshape(-1, grad.shape[-1])
        if isinstance(model, Tied):
            total = totals["embedding.weight"]
        else:
            total = totals["first.weight" if module is model.first else "second.weight"]
        if input_.is_floating_point():
            total += rows.t() @ input_.double().reshape(-1, input_.shape[-1])
        else:
            total.index_add_(0, input_.reshape(-1), rows)
    return totals


def _wrap(model: nn.Module, *, overlap: bool) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    return DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1),
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=HIDDEN * WIDE),
        model,
    )


def add_256_and_1(rank: int, world_size: int, way: str) -> tuple[list[float], list[torch.dtype]]:
    """Return the averaged gradients of weight and bias, of which rank r brings 256 ** (1 - r), and their dtypes.

    way: "ranks" brings the numbers in one backward on each rank; "micro-batches" both on each rank, one by one.
    """
    with megatron_on_cpu():
        config = ModelParallelConfig(gradient_accumulation_fusion=True, params_dtype=torch.bfloat16)
        model = ColumnParallelLinear(1, 1, config=config, init_method=nn.init.ones_)
        wrapped = _wrap(model, overlap=False)
        wrapped.zero_grad_buffer()
        for number in (256.0, 1.0) if way == "micro-batches" else (256.0 ** (1 - rank),):
            output, _ = wrapped(torch.ones(1, 1, 1, dtype=torch.bfloat16, device=rank_device()))
            output.backward(torch.full_like(output, number))
            assert all(parameter.grad is None for parameter in model.parameters())
        wrapped.finish_grad_sync()
        buffers: list[Tensor] = [parameter.main_grad for parameter in model.parameters()]  # pyright: ignore[reportAttributeAccessIssue]
        return [buffer.item() for buffer in buffers], [buffer.dtype for buffer in buffers]


def main_grads(rank: int, world_size: int, backend: str | None) -> list[Tensor]:
    """Return the averaged main_grads after three overlapped micro-batches, of layers compiled by a backend, if any."""
    with megatron_on_cpu():
        model = Untied(ModelParallelConfig(gradient_accumulation_fusion=True, params_dtype=torch.bfloat16))
        wrapped = _wrap(model, overlap=True)
        wrapped.zero_grad_buffer()
        if backend is not None:
            torch._dynamo.reset()
            model.compile(fullgraph=True, backend=backend)
        for micro_batch in range(MICRO_BATCHES):
            with nullcontext() if micro_batch == MICRO_BATCHES - 1 else wrapped.no_sync():
                output = wrapped(model.random_input(10 * rank + micro_batch))
                output.backward(whole_numbers(*output.shape, seed=micro_batch, limit=32))
        wrapped.finish_grad_sync()
        flags = [parameter.grad_added_to_main_grad for parameter in model.parameters()]  # pyright: ignore[reportAttributeAccessIssue]
        assert all(flags)
        return [parameter.main_grad.cpu() for parameter in model.parameters()]  # pyright: ignore[reportAttributeAccessIssue]


def train(rank: int, world_size: int, kind: type[nn.Module], options: dict[str, bool]) -> dict[str, float]:
    """Run two steps of three micro-batches; return the largest error of each averaged main_grad of the last step.

    options: fusion; overlap of the reduction with the backward.
    """
    with megatron_on_cpu():
        config = ModelParallelConfig(gradient_accumulation_fusion=options["fusion"], params_dtype=torch.bfloat16)
        model: Any = kind(config)
        calls = _watch(model)
        wrapped = _wrap(model, overlap=options["overlap"])
        for step in range(STEPS):
            calls.clear()
            wrapped.zero_grad_buffer()
            for micro_batch in range(MICRO_BATCHES):
                seed = 100 * rank + 10 * step + micro_batch
                is_last = micro_batch == MICRO_BATCHES - 1
                with nullcontext() if is_last else wrapped.no_sync():
                    output = wrapped(model.random_input(seed))
                    output.backward(whole_numbers(*output.shape, seed=1000 + seed, limit=32))
            wrapped.finish_grad_sync()
        assert all(parameter.grad is None for parameter in model.parameters())
        return _errors(model, calls, world_size=world_size)


def _errors(model: nn.Module, calls: Calls, *, world_size: int) -> dict[str, float]:
    errors = {}
    for name, total in _exact(model, calls).items():
        torch.distributed.all_reduce(total)
        main_grad = model.get_parameter(name).main_grad  # pyright: ignore[reportAttributeAccessIssue]
        assert main_grad.dtype == torch.float32
        expected = total / world_size
        errors[name] = ((main_grad.double() - expected).abs().max() / expected.abs().max()).item()
    return errors
