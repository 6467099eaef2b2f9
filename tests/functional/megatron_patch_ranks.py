"""Megatron-core's own layers and a GPTModel of them, with the patch and without, on each rank of the pool.

The patch is on within a body only: the ranks of the pool serve other tests too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_frozen.diagnostics import Diagnosis, Recorder
from megatron_frozen.integrations import megatron_core as integration
from tests.functional import megatron_ddp_ranks as ddp
from tests.functional.megatron_cpu import block_spec, gpt_config, gpt_model, megatron_on_cpu, tokens

Options = dict[str, Any]
IN, OUT, SEQUENCE, BATCH = 6, 8, 4, 3


@contextmanager
def _patched(options: Options) -> Iterator[None]:
    """Patch if the options say so; see that nothing stays."""
    if not options["patched"]:
        yield
        return
    with integration.patched():
        yield
    assert not integration.is_patched()


def _part(full: Tensor, *, rank: int, world_size: int, dim: int) -> Tensor:
    return full.chunk(world_size, dim)[rank].contiguous()


def layer(rank: int, world_size: int, kind: str, options: Options) -> dict[str, Any]:
    """Run one layer of ``kind`` (column, row) forward and backward; return this rank's parts and the operations' names.

    options: patched, sp, and which of weight and bias train. The bias is added by the layer's own product (column) or
    after the sum over ranks (row). Gradients of a replicated bias under sequence parallelism are summed over ranks, as
    Megatron's finalize_model_grads does."""
    generator = torch.Generator().manual_seed(3)
    sizes = {"X": (SEQUENCE, BATCH, IN), "W": (OUT, IN), "b": (OUT,), "dY": (BATCH, SEQUENCE, OUT)}
    full = {name: torch.randn(*size, generator=generator) for name, size in sizes.items()}
    full["dY"] = full["dY"].transpose(0, 1)  # as logits that were made [b, s, V] come back
    sp, is_column = options["sp"], kind == "column"
    cut = {"rank": rank, "world_size": world_size}
    with megatron_on_cpu(tp=world_size), _patched(options):
        module = _layer(kind, tp=world_size, sp=sp)
        with torch.no_grad():
            module.weight.copy_(_part(full["W"], dim=0 if is_column else 1, **cut))
            module.bias.copy_(_part(full["b"], dim=0, **cut) if is_column else full["b"])
        module.weight.requires_grad_(options["weight"])
        module.bias.requires_grad_(options["bias"])
        X, dY = full["X"], full["dY"]
        X = _part(X, dim=0, **cut) if is_column and sp else X if is_column else _part(X, dim=2, **cut)
        dY = _part(dY, dim=2, **cut) if is_column else _part(dY, dim=0, **cut) if sp else dY
        if not (sp and not is_column):  # chunks along the sequence are made contiguous above
            dY = dY.transpose(0, 1).contiguous().transpose(0, 1)
        X.requires_grad_()
        with Recorder() as seen:
            Y, _ = module(X)
            Y.backward(dY)
        db = module.bias.grad
        if db is not None and sp and not is_column:
            torch.distributed.all_reduce(db)
    products = [op.name for op in seen.operations if op.name in ("aten.mm", "aten.addmm", "aten.bmm")]
    grads = {"dX": X.grad, "dW": module.weight.grad, "db": db}
    return {"Y": Y.detach(), **grads, "products": products, "collectives": dict(seen.collectives())}


def _layer(kind: str, *, tp: int, sp: bool) -> Any:
    from megatron.core import ModelParallelConfig, tensor_parallel

    options: dict[str, Any] = {
        "config": ModelParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sp, use_cpu_initialization=True),
        "init_method": nn.init.zeros_,
        "bias": True,
        "skip_bias_add": False,
    }
    if kind == "column":
        return tensor_parallel.ColumnParallelLinear(IN, OUT, gather_output=False, **options)
    return tensor_parallel.RowParallelLinear(IN, OUT, input_is_parallel=True, **options)


def unsharded(options: Options) -> dict[str, Tensor | None]:
    """The same layer in fp64 on one rank."""
    generator = torch.Generator().manual_seed(3)
    sizes = ((SEQUENCE, BATCH, IN), (OUT, IN), (OUT,), (BATCH, SEQUENCE, OUT))
    X, W, b, dY = (torch.randn(*size, generator=generator).double() for size in sizes)
    dY = dY.transpose(0, 1)
    return {
        "Y": torch.einsum("sbi,oi->sbo", X, W) + b,
        "dX": torch.einsum("sbo,oi->sbi", dY, W),
        "dW": torch.einsum("sbo,sbi->oi", dY, X) if options["weight"] else None,
        "db": dY.sum((0, 1)) if options["bias"] else None,
    }


def _build(options: Options, **overrides: Any) -> Any:
    config = gpt_config(
        tensor_model_parallel_size=options["tp"], sequence_parallel=options.get("sp", False), **overrides
    )
    model = gpt_model(config, block_spec(config), tied=options.get("tied", False))
    for name, parameter in model.named_parameters():
        trains = name.endswith("bias") if options.get("biases_only") else "norm" in name
        parameter.requires_grad_(trains or not options["frozen"])
    return model


def train(rank: int, world_size: int, options: Options) -> dict[str, Any]:
    """Run two steps of plain gradient descent of a GPTModel; return losses and this rank's gradients of each step.

    frozen: only norms train, or biases_only. The loss is taken from logits that come back as [b, s, V]
    (``labels=None``), as in RL post-training."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    with megatron_on_cpu(tp=options["tp"]), _patched(options):
        model, losses, grads = _build(options), [], []
        for step in range(2):
            ids, positions, mask, labels = tokens(seed=step)
            logits = model(ids, positions, mask, labels=None)
            loss = vocab_parallel_cross_entropy(logits.float(), labels).mean()
            model.zero_grad()
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is None:
                        continue
                    if getattr(parameter, "sequence_parallel", False):
                        torch.distributed.all_reduce(
                            parameter.grad, group=parallel_state.get_tensor_model_parallel_group()
                        )
                    parameter -= 0.5 * parameter.grad
            grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        return {"losses": losses, "grads": grads}


def diagnose(rank: int, world_size: int, options: Options) -> list[tuple[object, ...]]:
    """Watch a backward from logits that come back as [b, s, V]; return what each finding names."""
    with megatron_on_cpu(tp=options["tp"]), _patched(options):
        model, (ids, positions, mask, _) = _build(options), tokens(seed=0)
        with Diagnosis() as found:
            model(ids, positions, mask, labels=None).sin().sum().backward()
    return [(f.module, f.direction.value, f.fault.value, f.shape, f.stride, f.matrix) for f in found.findings]


class UpstreamUntied(ddp.Untied):
    """The column and the row layer of ``megatron_ddp_ranks``, of megatron-core's own."""

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        from megatron.core import ModelParallelConfig, tensor_parallel

        options: dict[str, Any] = {"config": _upstreams(ModelParallelConfig, config), "init_method": ddp._fill}
        self.first = tensor_parallel.ColumnParallelLinear(ddp.HIDDEN, ddp.WIDE, bias=False, **options)
        self.second = tensor_parallel.RowParallelLinear(
            ddp.WIDE, ddp.HIDDEN, bias=False, input_is_parallel=True, skip_bias_add=False, **options
        )


class UpstreamTied(ddp.Tied):
    """The tied embedding and head of ``megatron_ddp_ranks``, of megatron-core's own."""

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        from megatron.core import ModelParallelConfig, tensor_parallel

        options: dict[str, Any] = {"config": _upstreams(ModelParallelConfig, config), "init_method": ddp._fill}
        self.embedding = tensor_parallel.VocabParallelEmbedding(ddp.VOCAB, ddp.HIDDEN, **options)
        weight: Any = self.embedding.weight
        weight.zero_out_wgrad = True
        self.head = tensor_parallel.ColumnParallelLinear(
            ddp.HIDDEN, ddp.VOCAB, bias=False, skip_weight_param_allocation=True, **options
        )


def _upstreams(kind: Any, config: Any) -> Any:
    return kind(
        gradient_accumulation_fusion=config.gradient_accumulation_fusion,
        params_dtype=config.params_dtype,
        use_cpu_initialization=True,
    )


def ddp_errors(rank: int, world_size: int, kind: type[nn.Module], options: dict[str, bool]) -> dict[str, float]:
    """Return what ``megatron_ddp_ranks.train`` does, with the patch."""
    with _patched({"patched": True}):
        return ddp.train(rank, world_size, kind, options)
