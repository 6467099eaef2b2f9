"""A GPTModel of megatron-core with its own linears and with ours, on each rank of the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_frozen.diagnostics import Recorder
from megatron_frozen.integrations import megatron_core as integration
from tests.functional.megatron_cpu import block_spec, child_processes, gpt_config, gpt_model, megatron_on_cpu, tokens

Options = dict[str, Any]


def build(options: Options, **overrides: Any) -> Any:
    """Return the model: ``ours`` or upstream's, ``tied`` or not, with ``sp`` or without."""
    config = gpt_config(
        tensor_model_parallel_size=options["tp"], sequence_parallel=options.get("sp", False), **overrides
    )
    spec = block_spec(config)
    make = None
    if options["ours"]:
        spec, make = integration.frozen_layer_spec(spec), integration.FrozenGPTModel
    return gpt_model(config, spec, make=make, tied=options.get("tied", False))


def _freeze_linears(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)


def _sum_partial(model: nn.Module) -> None:
    """Do what Megatron's finalize_model_grads does under sequence parallelism."""
    from megatron.core import parallel_state

    for parameter in model.parameters():
        if parameter.grad is not None and getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())


def train(rank: int, world_size: int, options: Options) -> dict[str, Any]:
    """Run two steps of plain gradient descent; return the losses, and this rank's gradients of the second step."""
    with megatron_on_cpu(tp=options["tp"]):
        model = build(options, **options.get("overrides", {}))
        if options["frozen"]:
            _freeze_linears(model)
        losses = []
        for step in range(2):
            ids, positions, mask, labels = tokens(seed=step)
            loss = model(ids, positions, mask, labels=labels).mean()
            model.zero_grad()
            loss.backward()
            _sum_partial(model)
            losses.append(loss.item())
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.5 * parameter.grad
        return {
            "losses": losses,
            "grads": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        }


def frozen_head_products(rank: int, world_size: int, options: Options) -> tuple[Tensor, list[str]]:
    """Return the gradient of the final norm through a frozen head, and the products of that backward.

    The logits come back as [b, s, V] through a transpose, which is what makes plain matmul multiply in batches."""
    with megatron_on_cpu(tp=options["tp"]):
        model = build(options)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("final_layernorm" in name)
        ids, positions, mask, _ = tokens()
        logits = model(ids, positions, mask, labels=None)
        with Recorder() as recorder:
            logits.backward(torch.linspace(-1, 1, logits.numel()).view_as(logits))
        products = [op.name for op in recorder.operations if op.name in ("aten.mm", "aten.bmm", "aten.addmm")]
        return model.decoder.final_layernorm.weight.grad, products


def fused(rank: int, world_size: int, options: Options) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the main_grads of a model under megatron-core's DDP that fuses, and the gradients of one that does not."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    with megatron_on_cpu(tp=options["tp"]):
        model = build(options, gradient_accumulation_fusion=True)
        wrapped = DistributedDataParallel(
            model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False), model
        )
        plain = build(options)
        wrapped.zero_grad_buffer()
        for seed in range(2):
            ids, positions, mask, labels = tokens(seed=seed)
            wrapped(ids, positions, mask, labels=labels).mean().backward()
            plain(ids, positions, mask, labels=labels).mean().backward()
        assert model.output_layer.weight is None or model.output_layer.weight.grad is None
        fused_names = {name for name, p in model.named_parameters() if getattr(p, "grad_added_to_main_grad", False)}
        assert len(fused_names) == 8 + 1, fused_names
        return (
            {name: p.main_grad for name, p in model.named_parameters()},
            {name: p.grad for name, p in plain.named_parameters() if p.grad is not None},
        )


def interchange(rank: int, world_size: int, folder: str, options: Options) -> dict[str, float]:
    """Save a model as a distributed checkpoint, load it into one of the other classes; return the differences."""
    from megatron.core import dist_checkpointing

    with megatron_on_cpu(tp=options["tp"]):
        saved = build(options)
        path = Path(folder)
        if rank == 0:
            path.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        with child_processes():
            dist_checkpointing.save(saved.sharded_state_dict(), str(path))
        loaded = build({**options, "ours": not options["ours"]})
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.fill_(7.0)
        state = dist_checkpointing.load(loaded.sharded_state_dict(metadata=None), str(path))
        loaded.load_state_dict(state)
        theirs = dict(loaded.named_parameters())
        return {name: (p - theirs[name]).abs().max().item() for name, p in saved.named_parameters()}
