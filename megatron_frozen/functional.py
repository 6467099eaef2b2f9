"""The public functions: linear products with a frozen or a trainable weight, and vocab-parallel cross-entropy.

Argument names, order and defaults are those of Megatron-core 0.16.1. ``tp_group=None`` is the group of
``initialize_model_parallel``, one rank where nothing was set up.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from megatron_frozen import environment, gemm
from megatron_frozen.autograd import (
    FrozenHeadCrossEntropy,
    HeadPlan,
    LinearWithFrozenWeight,
    LinearWithGradAccumulationAndAsyncCommunication,
    SplitLinear,
    VocabParallelCrossEntropy,
)
from megatron_frozen.autograd.cross_entropy import IGNORED_TARGET
from megatron_frozen.autograd.linear_products import plan_for
from megatron_frozen.comm.groups import Group, chosen_group, group_size
from megatron_frozen.errors import ConfigError, LayoutError
from megatron_frozen.main_grad import check_product, graph_target


def _cast_to_autocast(input: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast to the autocast dtype where autocast is on, as F.linear does."""
    if gemm.autocast_is_on(input) and input.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(input.device.type)
        return tuple(tensor.to(dtype) for tensor in (input, *parts))
    return input, *parts


def _check_operands(input: torch.Tensor, *, weight_shape: Sequence[int], dtypes: set[torch.dtype]) -> None:
    if dtypes != {input.dtype}:
        given = sorted(map(str, {input.dtype} | dtypes))
        raise LayoutError(f"a linear product got operands of dtypes {given}; cast them to one dtype")
    if input.dim() == 0 or input.shape[-1] != weight_shape[1]:
        raise LayoutError(
            f"a linear product got an input of shape {list(input.shape)} for a weight of shape {list(weight_shape)}; "
            f"the last dim of the input must be {weight_shape[1]}"
        )


def _operands(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Cast under autocast, and check that the operands fit."""
    if (
        input.dtype is weight.dtype
        and (bias is None or bias.dtype is input.dtype)
        and input.dim() > 0
        and input.shape[-1] == weight.shape[1]
        and not gemm.autocast_is_on(input)
    ):
        return input, weight, bias  # nothing to cast and nothing to refuse: by far the most frequent call
    input, *parts = _cast_to_autocast(input, weight, *([] if bias is None else [bias]))
    _check_operands(input, weight_shape=parts[0].shape, dtypes={part.dtype for part in parts})
    return input, parts[0], parts[1] if bias is not None else None


def _refuse_cast_of_fused(weight: torch.Tensor, cast: torch.Tensor) -> None:
    if cast is not weight:
        raise ConfigError(
            f"gradient_accumulation_fusion is on for a {weight.dtype} weight and autocast to {cast.dtype}: the "
            f"cast copy has no main_grad, so keep the weight in {cast.dtype} or turn one of the two off"
        )


def _warn_of_async_grad_allreduce() -> None:
    warnings.warn(
        "async_grad_allreduce is ignored, as Megatron-core ignores it since 0.11; pass allreduce_dgrad instead",
        DeprecationWarning,
        stacklevel=3,
    )


def _output_dtype(input: torch.Tensor, wish: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of the product if it is to be wider than its operands, else None."""
    if wish is None or wish == input.dtype:
        return None
    if torch.promote_types(input.dtype, wish) != wish:
        raise ConfigError(f"output_dtype is {wish} for operands of {input.dtype}; give a dtype at least as wide")
    return wish


def linear_with_frozen_weight(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,  # noqa: FBT001 - Megatron's signature
    allreduce_dgrad: bool,  # noqa: FBT001
    sequence_parallel: bool,  # noqa: FBT001
    tp_group: Group = None,
    grad_output_buffer: list[torch.Tensor] | None = None,
    wgrad_deferral_limit: None = None,
    async_grad_allreduce: bool | None = None,  # noqa: FBT001
    *,
    dgrad_in_fp32: bool = False,
    allreduce_dgrad_in_fp32: bool = False,
    allreduce_dgrad_pieces: int = 1,
    output_dtype: torch.dtype | None = None,
    gtp_remat_size: int = 1,
) -> torch.Tensor:
    """Return X W^T + b for a frozen W; W gets no gradient, b does if it requires it.

    input [..., I], weight [O, I], bias [O] or None, all of one dtype (cast under autocast); returns [..., O].
    gradient_accumulation_fusion, grad_output_buffer and wgrad_deferral_limit are there for the shape of the call and
    must be None where None is the default. Collectives and the fp32 options: see ``LinearWithFrozenWeight``; the
    environment switches MEGATRON_TRUE_ON_POLICY_LINEAR_DGRAD_FP32 and MEGATRON_TRUE_ON_POLICY_DGRAD_ALLREDUCE_FP32
    turn them on too. allreduce_dgrad_pieces cuts dX into blocks of rows, each summed over the ranks while the next is
    multiplied (not in compiled code). output_dtype, if wider than the operands', is the dtype of the output, rounded to
    nothing narrower on the way; its gradient is cast back to the operands' dtype. gtp_remat_size, of Megatron's main,
    must be 1.

    Raises LayoutError for operands that do not fit and ConfigError for options that exclude each other.
    """
    if grad_output_buffer is not None or wgrad_deferral_limit is not None:
        raise ConfigError(
            "grad_output_buffer or wgrad_deferral_limit was given for a frozen weight, which has no weight gradient to "
            "put off; leave them None"
        )
    if async_grad_allreduce is not None:
        _warn_of_async_grad_allreduce()
    plan = plan_for(
        chosen_group(tp_group),
        allreduce=allreduce_dgrad,
        sequence_parallel=sequence_parallel,
        dgrad_in_fp32=dgrad_in_fp32,
        allreduce_in_fp32=allreduce_dgrad_in_fp32,
        pieces=allreduce_dgrad_pieces,
    )
    check_product(weight, gtp_remat_size=gtp_remat_size)
    input, weight, bias = _operands(input, weight, bias)
    return LinearWithFrozenWeight.apply(
        input, weight, bias, plan.allreduce, plan.group, plan, _output_dtype(input, output_dtype)
    )


def linear_with_grad_accumulation_and_async_allreduce(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,  # noqa: FBT001 - Megatron's signature
    allreduce_dgrad: bool,  # noqa: FBT001
    sequence_parallel: bool,  # noqa: FBT001
    grad_output_buffer: list[torch.Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    async_grad_allreduce: bool | None = None,  # noqa: FBT001
    tp_group: Group = None,
    *,
    dgrad_in_fp32: bool = False,
    allreduce_dgrad_in_fp32: bool = False,
    allreduce_dgrad_pieces: int = 1,
    output_dtype: torch.dtype | None = None,
    gtp_remat_size: int = 1,
) -> torch.Tensor:
    """Return X W^T + b for a trainable W, whose gradient goes to ``.grad`` or, fused, into ``weight.main_grad``.

    input [..., I], weight [O, I], bias [O] or None, all of one dtype (cast under autocast); returns [..., O].
    grad_output_buffer collects dY for a weight gradient that its owner computes later, up to wgrad_deferral_limit of
    them (0: no limit). Collectives and the fp32 options: see ``LinearWithGradAccumulationAndAsyncCommunication`` and
    output_dtype and gtp_remat_size: see ``linear_with_frozen_weight``.

    Raises LayoutError for operands that do not fit and ConfigError for options that exclude each other.
    """
    if async_grad_allreduce is not None:
        _warn_of_async_grad_allreduce()
    plan = plan_for(
        chosen_group(tp_group),
        allreduce=allreduce_dgrad,
        sequence_parallel=sequence_parallel,
        dgrad_in_fp32=dgrad_in_fp32,
        allreduce_in_fp32=allreduce_dgrad_in_fp32,
        pieces=allreduce_dgrad_pieces,
    )
    check_product(weight, is_put_off=grad_output_buffer is not None, gtp_remat_size=gtp_remat_size)
    input, cast_weight, bias = _operands(input, weight, bias)
    target = None
    if gradient_accumulation_fusion:
        _refuse_cast_of_fused(weight, cast_weight)
        if torch.compiler.is_compiling() and torch.is_grad_enabled() and weight.requires_grad:
            target = graph_target(weight)
    return LinearWithGradAccumulationAndAsyncCommunication.apply(
        input,
        cast_weight,
        bias,
        gradient_accumulation_fusion,
        plan.allreduce,
        plan.sequence_parallel,
        grad_output_buffer,
        wgrad_deferral_limit,
        plan.group,
        plan,
        target,
        _output_dtype(input, output_dtype),
    )


def linear_with_split_parameters(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] = (),
    *,
    gradient_accumulation_fusion: bool = False,
    allreduce_dgrad: bool = False,
    sequence_parallel: bool = False,
    tp_group: Group = None,
    dgrad_in_fp32: bool = False,
    allreduce_dgrad_in_fp32: bool = False,
    allreduce_dgrad_pieces: int = 1,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return X W^T + b, where W and b stand in parts one above the other, each frozen or trainable on its own.

    input [..., I], weights [O_i, I] each, biases [O_i] each or none; returns [..., sum O_i] from one product. Parts of
    several dtypes are promoted to one, which must be the input's (all are cast under autocast). Collectives, gradients
    and memory: see ``SplitLinear``; the options are those of the other linear functions.

    Raises LayoutError for operands that do not fit and ConfigError for options that exclude each other.
    """
    plan = plan_for(
        chosen_group(tp_group),
        allreduce=allreduce_dgrad,
        sequence_parallel=sequence_parallel,
        dgrad_in_fp32=dgrad_in_fp32,
        allreduce_in_fp32=allreduce_dgrad_in_fp32,
        pieces=allreduce_dgrad_pieces,
    )
    _check_parts(weights, biases)
    num_parts = len(weights)
    for part in weights:
        check_product(part)
    input, *parts = _cast_to_autocast(input, *weights, *biases)
    _check_operands(input, weight_shape=weights[0].shape, dtypes=_promoted(parts[:num_parts], parts[num_parts:]))
    if gradient_accumulation_fusion:
        for part, cast in zip(weights, parts[:num_parts], strict=True):
            _refuse_cast_of_fused(part, cast)
    targets = None
    if torch.compiler.is_compiling() and gradient_accumulation_fusion and torch.is_grad_enabled():
        targets = [graph_target(part) for part in weights if part.requires_grad]
    return SplitLinear.apply(
        input, gradient_accumulation_fusion, plan, targets, _output_dtype(input, output_dtype), num_parts, *parts
    )


def _check_parts(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> None:
    if not weights or len(biases) not in (0, len(weights)):
        raise LayoutError(
            f"a split linear product got {len(weights)} weights and {len(biases)} biases; give at least one weight, "
            f"and a bias for each or none"
        )
    if any(part.dim() != 2 or part.shape[1] != weights[0].shape[1] for part in weights):
        raise LayoutError(
            f"a split linear product got weights of shapes {[list(part.shape) for part in weights]}; give matrices "
            f"with one number of input features"
        )
    if any(bias.shape != part.shape[:1] for bias, part in zip(biases, weights, strict=False)):  # there may be none
        raise LayoutError(
            f"a split linear product got biases of shapes {[list(bias.shape) for bias in biases]} for weights of "
            f"{[part.shape[0] for part in weights]} rows; give each weight a vector of as many entries as it has rows"
        )


def _promoted(*groups: Sequence[torch.Tensor]) -> set[torch.dtype]:
    """Return the dtype that each group of parts is promoted to."""
    dtypes = set()
    for parts in groups:
        if parts:
            dtype = parts[0].dtype
            for part in parts:
                dtype = torch.promote_types(dtype, part.dtype)
            dtypes.add(dtype)
    return dtypes


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    tp_group: Group = None,
) -> torch.Tensor:
    """Return the loss per token [...] in fp32 of logits [..., V/ranks] whose vocabulary is cut over the group.

    target [...] holds global ids, int64 or int32; -100 gives loss 0 and no gradient. label_smoothing is in [0, 1).
    Two all-reduces of token-sized tensors forward, none backward. The logits stay untouched. See
    ``VocabParallelCrossEntropy``.

    Raises LayoutError where shapes differ, the targets are no ids or, on the CPU, an id is out of range (on a GPU
    looking would stall it), and ConfigError for a label_smoothing out of range.
    """
    group = chosen_group(tp_group)
    return checked_cross_entropy(vocab_parallel_logits, target, label_smoothing=label_smoothing, group=group)


def checked_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, *, label_smoothing: float = 0.0, group: Group
) -> torch.Tensor:
    """Return ``vocab_parallel_cross_entropy`` over ``group``, where None is one rank, also where other groups stand."""
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise LayoutError(
            f"cross-entropy got logits of shape {list(vocab_parallel_logits.shape)} and targets of shape "
            f"{list(target.shape)}; give one target id for each row of logits"
        )
    num_vocab = vocab_parallel_logits.shape[-1] * group_size(group)
    _check_ids(target, num_vocab=num_vocab)
    if not 0.0 <= label_smoothing < 1.0:
        raise ConfigError(f"label_smoothing is {label_smoothing}; it takes a number from 0 up to, not including, 1")
    if label_smoothing and num_vocab == 1:
        raise ConfigError(
            f"label_smoothing is {label_smoothing} over a vocabulary of 1, which has no other id to smooth over; "
            f"set it to 0"
        )
    return VocabParallelCrossEntropy.apply(vocab_parallel_logits, target.long(), label_smoothing, group)


def frozen_head_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    num_real_columns: int | None = None,
    group: Group,
    dgrad_in_fp32: bool = False,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return ``vocab_parallel_cross_entropy`` of the logits X W^T [...] without holding them; W gets no gradient.

    input [..., I], which every rank has whole and whose gradient is this rank's part of a sum; weight [V/ranks, I] of
    the input's dtype (both are cast under autocast); target [...]. The first ``num_real_columns`` of this rank's rows
    of W stand for ids. output_dtype is that of the logits. ``group`` None is one rank. See ``FrozenHeadCrossEntropy``.

    Raises LayoutError for operands that do not fit and, on the CPU, an id out of range, ConfigError for a narrower
    output_dtype.
    """
    input, weight = _cast_to_autocast(input, weight)
    _check_operands(input, weight_shape=weight.shape, dtypes={weight.dtype})
    if input.shape[:-1] != target.shape:
        raise LayoutError(
            f"cross-entropy over a frozen head got an input of shape {list(input.shape)} and targets of shape "
            f"{list(target.shape)}; give one target id for each row of the input"
        )
    num_real_columns = weight.shape[0] if num_real_columns is None else num_real_columns
    _check_ids(target, num_vocab=num_real_columns if group is None else weight.shape[0] * group_size(group))
    plan = HeadPlan(
        group=group,
        num_real_columns=num_real_columns,
        with_dgrad=torch.is_grad_enabled() and input.requires_grad,
        dgrad_in_fp32=dgrad_in_fp32 or environment.switch(environment.LINEAR_DGRAD_FP32),
        logits_dtype=_output_dtype(input, output_dtype),
    )
    return FrozenHeadCrossEntropy.apply(input, weight, target.long(), plan)


def _check_ids(target: torch.Tensor, *, num_vocab: int) -> None:
    if target.dtype not in (torch.int64, torch.int32):
        raise LayoutError(f"cross-entropy got targets of {target.dtype}; give token ids as torch.int64 or torch.int32")
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = target[((target < 0) | (target >= num_vocab)) & (target != IGNORED_TARGET)]
        if wrong.numel():
            raise LayoutError(
                f"cross-entropy over a vocabulary of {num_vocab} got the target id {int(wrong[0])}; "
                f"ids go from 0 to {num_vocab - 1}, and {IGNORED_TARGET} marks a token to ignore"
            )
