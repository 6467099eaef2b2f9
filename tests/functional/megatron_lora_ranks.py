"""LoRA on a GPTModel of megatron-core: our adapters, and a wrapper that does what Megatron-Bridge's does, on each rank.

The reference for both is the same model on one rank whose weights have the adapters' products added.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_frozen import LoraConfig, gpt_lora, sum_partial_grads
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.gpt_lora.apply import named_adapters
from megatron_frozen.params import gather_full
from tests.functional.megatron_cpu import megatron_on_cpu, tokens
from tests.functional.megatron_specs_ranks import build

Options = dict[str, Any]

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def _fill(model: nn.Module) -> None:
    """Give every B values that depend on its path alone: zero would hide faults."""
    for path, adapters in named_adapters(model).items():
        name = path.rpartition(".")[2]
        full_A, full_B = adapters.full_factors(name)
        generator = torch.Generator().manual_seed(sum(map(ord, path)))
        adapters.set_factors(name, full_A=full_A, full_B=0.1 * torch.randn(full_B.shape, generator=generator))


def adapted(options: Options, **fields: Any) -> Any:
    """Return a model with adapters whose B is not zero."""
    model = build({"ours": True, **options})
    gpt_lora.apply_lora(model, LoraConfig(**{"r": 4, "alpha": 8, **fields}), seed=3)
    _fill(model)
    return model


def _group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def _loss(model: nn.Module, seed: int = 0) -> Tensor:
    ids, positions, mask, labels = tokens(seed=seed)
    return model(ids, positions, mask, labels=labels).mean()


def train(rank: int, world_size: int, options: Options, fields: Options) -> Options:
    """Run two steps; return losses, full factors' gradients of the first step, factors at the end, bits per rank."""
    with megatron_on_cpu(tp=options["tp"]):
        model = adapted(options, **fields)
        parameters = gpt_lora.lora_parameters(model)
        assert [p for p in model.parameters() if p.requires_grad] == parameters
        losses, grads = [], {}
        for step in range(2):
            torch.manual_seed(step)  # for dropout
            loss = _loss(model, seed=step)
            model.zero_grad()
            loss.backward()
            sum_partial_grads(parameters, group=_group())
            losses.append(loss.item())
            if not step:
                for name, parameter in model.named_parameters():
                    if parameter.requires_grad:
                        grads[name] = _full(parameter, parameter.grad)
            with torch.no_grad():
                for parameter in parameters:
                    parameter -= 0.5 * parameter.grad  # pyright: ignore[reportOperatorIssue]
        return {
            "losses": losses,
            "grads": grads,
            "factors": {path: module.full_factors(path.rpartition(".")[2]) for path, module in _adapters(model)},
        }


def _adapters(model: nn.Module) -> Any:
    return named_adapters(model).items()


def _full(parameter: Any, tensor: Any) -> Tensor:
    """Gather ``tensor`` as its parameter is cut."""
    twin: Any = nn.Parameter(tensor.detach().clone(), requires_grad=False)
    for mark in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        if hasattr(parameter, mark):
            setattr(twin, mark, getattr(parameter, mark))
    return gather_full(twin, group=_group())


def recomputed(rank: int, world_size: int, fields: Options) -> list[dict[str, Tensor]]:
    """Return the gradients of all factors without and with recomputed layers, whose embedding is frozen."""
    found = []
    with megatron_on_cpu():
        for overrides in ({}, fields):
            model = build({"ours": True, "tp": 1}, **overrides)
            gpt_lora.apply_lora(model, LoraConfig(r=4, target_modules=["gate_proj", "down_proj"]), seed=3)
            _fill(model)
            _loss(model).backward()
            grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
            found.append({name: grad for name, grad in grads.items() if grad is not None})
            assert len(found[-1]) == len(grads)
            gpt_lora.merge_adapter(model)
            model(*tokens()[:3], labels=None)
    return found


def collectives(rank: int, world_size: int, options: Options) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Return the collectives of the forward and the backward of the frozen model, and of the same with adapters."""
    found = []
    with megatron_on_cpu(tp=options["tp"]):
        for adapts in (False, True):
            model = build({"ours": True, **options})
            if adapts:
                gpt_lora.apply_lora(model, LoraConfig(r=4), seed=3)
            else:
                model.requires_grad_(requires_grad=False)
            model.embedding.word_embeddings.weight.requires_grad_()  # so that both backwards reach the input
            with Recorder() as forward:
                loss = _loss(model)
            with Recorder() as backward:
                loss.backward()
            found.append((dict(forward.collectives()), dict(backward.collectives())))
    return found


def merged(rank: int, world_size: int, options: Options) -> dict[str, float]:
    """Return the loss with adapters, without them, merged, and of one that was merged on this number of ranks."""
    with megatron_on_cpu(tp=options["tp"]):
        model = adapted(options)
        with_adapters = _loss(model).item()
        with gpt_lora.adapters_disabled(model):
            without = _loss(model).item()
        keys = set(model.state_dict())
        gpt_lora.merge_adapter(model)
        bare = set(build({"ours": False, **options}).state_dict())
        assert bare <= keys
        assert set(model.state_dict()) == bare
        return {"with": with_adapters, "without": without, "merged": _loss(model).item()}


def save(rank: int, world_size: int, folder: str, options: Options, fields: Options) -> dict[str, Any]:
    """Save a model's adapters; return its loss and its full factors."""
    with megatron_on_cpu(tp=options["tp"]):
        model = adapted(options, **fields)
        gpt_lora.save_adapter(model, folder, base_model_name="base")
        factors = {path: module.full_factors(path.rpartition(".")[2]) for path, module in _adapters(model)}
        return {"loss": _loss(model).item(), "factors": factors}


def load(rank: int, world_size: int, folder: str, options: Options, *, twice: bool = False) -> dict[str, Any]:
    """Load adapters into a bare model, or into one that has them; return its loss and its full factors."""
    with megatron_on_cpu(tp=options["tp"]):
        model = build({"ours": True, **options})
        gpt_lora.load_adapter(model, folder)
        if twice:
            with torch.no_grad():
                for parameter in gpt_lora.lora_parameters(model):
                    parameter.zero_()
            gpt_lora.load_adapter(model, folder)
        factors = {path: module.full_factors(path.rpartition(".")[2]) for path, module in _adapters(model)}
        return {"loss": _loss(model).item(), "factors": factors}


def load_twice(rank: int, world_size: int, folder: str, options: Options) -> dict[str, Any]:
    """Load into a model that has the adapters already."""
    return load(rank, world_size, folder, options, twice=True)


def failing(rank: int, world_size: int, action: Callable[[Any], Any]) -> str:
    """Return what ``action`` on a bare one-rank model says as it fails."""
    with megatron_on_cpu():
        try:
            action(build({"ours": True, "tp": 1}))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def resharded(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Save a distributed checkpoint of a model with adapters, load it into another; return their differences."""
    from megatron.core import dist_checkpointing

    from tests.functional.megatron_cpu import child_processes

    with megatron_on_cpu(tp=2):
        first, second = adapted({"tp": 2}), adapted({"tp": 2})
        with torch.no_grad():
            for parameter in second.parameters():
                parameter.fill_(5.0)
        if rank == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        state = first.sharded_state_dict()
        shapes = {key: value.global_shape for key, value in state.items() if ".adapter." in key}
        with child_processes():
            dist_checkpointing.save(state, folder)
        second.load_state_dict(dist_checkpointing.load(second.sharded_state_dict(), folder))
        theirs = dict(second.named_parameters())
        return {
            "shapes": shapes,
            "differences": {name: (p - theirs[name]).abs().max().item() for name, p in first.named_parameters()},
        }


def under_ddp(rank: int, world_size: int, options: Options) -> dict[str, Tensor]:
    """Return the full main_grads of all factors after Megatron's own DDP and finalize_model_grads."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    with megatron_on_cpu(tp=options["tp"]):
        model = adapted(options)
        wrapped = DistributedDataParallel(
            model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False), model
        )
        wrapped.zero_grad_buffer()
        for seed in range(2):
            _loss(wrapped, seed=seed).backward()
        finalize_model_grads([wrapped])
        return {
            name: _full(parameter, parameter.main_grad)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }


class BridgeLikeAdapter(nn.Module):
    """The adapter that Megatron-Bridge puts beside a parallel linear (contracts 4.4), of megatron-core's layers."""

    def __init__(self, base: Any, *, dim: int) -> None:
        """Build linear_in and linear_out with sequence parallelism switched off on the shared config meanwhile."""
        super().__init__()
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        config = base.config
        self.is_row = isinstance(base, RowParallelLinear)
        assert self.is_row or isinstance(base, ColumnParallelLinear)
        self.sequence_parallel = config.sequence_parallel
        config.sequence_parallel = False
        shared: Options = {"config": config, "bias": False, "init_method": nn.init.xavier_normal_}
        if self.is_row:
            self.linear_in: Any = RowParallelLinear(
                base.input_size, dim, input_is_parallel=True, skip_bias_add=True, **shared
            )
        else:
            self.linear_in = ColumnParallelLinear(
                base.input_size, dim, gather_output=True, disable_grad_reduce=self.sequence_parallel, **shared
            )
        self.linear_out: Any = ColumnParallelLinear(dim, base.output_size, gather_output=self.is_row, **shared)
        config.sequence_parallel = self.sequence_parallel

    def forward(self, input_: Tensor) -> Tensor:
        """Return 2 B A x, gathered before or scattered after as the base is."""
        from megatron.core.tensor_parallel import (
            gather_from_sequence_parallel_region,
            scatter_to_sequence_parallel_region,
        )

        if self.sequence_parallel and not self.is_row:
            input_ = gather_from_sequence_parallel_region(input_)
        output, _ = self.linear_out(self.linear_in(input_)[0])
        if self.sequence_parallel and self.is_row:
            output = scatter_to_sequence_parallel_region(output)
        return 2 * output


class BridgeLikeLinear(nn.Module):
    """A base linear and its adapter, whose outputs are added."""

    def __init__(self, to_wrap: Any, *, dim: int) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, BridgeLikeAdapter(to_wrap, dim=dim)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ``(output, bias)`` as the base does."""
        output, bias = self.to_wrap(input_)
        return output + self.adapter(input_.contiguous()).reshape(output.shape), bias


def bridge_like(rank: int, world_size: int, options: Options) -> Options:
    """Train two steps with such wrappers; return losses and the largest gradient of a base weight's companion."""
    with megatron_on_cpu(tp=options["tp"]):
        model = build(options)
        model.requires_grad_(requires_grad=False)
        torch.manual_seed(11)
        names = options.get("names", LINEARS)
        for layer in model.decoder.layers:
            for owner in (layer.self_attention, layer.mlp):
                for name in [name for name in names if hasattr(owner, name)]:
                    setattr(owner, name, BridgeLikeLinear(getattr(owner, name), dim=4))
        losses, grads = [], []
        trained = [p for p in model.parameters() if p.requires_grad]
        assert len(trained) == 4 * len(names)
        for step in range(2):
            loss = _loss(model, seed=step)
            model.zero_grad()
            loss.backward()
            losses.append(loss.item())
            grads = [_full(parameter, parameter.grad) for parameter in trained]
            with torch.no_grad():
                for parameter in trained:
                    parameter -= 0.3 * parameter.grad  # pyright: ignore[reportOperatorIssue]
        return {"losses": losses, "grads": grads}
