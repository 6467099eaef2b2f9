"""One optimizer step after another.

The loss of a step is the sum over its labelled tokens divided by their number over all micro-batches and data-parallel
ranks, so it does not depend on how the rows were cut (the mean of means does).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_frozen.comm import (
    all_reduce,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
)
from megatron_frozen.errors import MegatronFrozenError
from megatron_frozen.models import CausalLM
from megatron_frozen.params import clip_grad_norm, grad_norm, sum_grads, sum_partial_grads
from megatron_frozen.train.batches import RowOrder, collate_all, num_labels
from megatron_frozen.train.config import TrainConfig
from megatron_frozen.train.packing import PackedRow
from megatron_frozen.train.schedule import learning_rate_at
from megatron_frozen.train.sharding import is_cut


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one step did, the same on every rank."""

    loss: float
    """Per labelled token, before the update."""
    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float
    """Used in the update."""
    tokens_per_s: float
    """Positions computed by all data-parallel ranks per second."""


class Trainer:
    """Model, optimizer and place in the data; `step` and `position` say how far it has come."""

    def __init__(
        self, model: CausalLM, *, config: TrainConfig, rows: Sequence[PackedRow], device: torch.device
    ) -> None:
        self.model, self.device = model, device
        self.step = 0
        self.position = 0
        self.length_multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._config, self._rows = config, rows
        self._order = RowOrder(len(rows), seed=config.seed)
        self.parameters = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.optimizer = _optimizer(list(self.parameters.values()), config=config)

    def precision(self) -> AbstractContextManager:
        """The context of every forward pass: autocast when fp32 parameters are to be computed with in bf16.

        FSDP casts them itself, as it gathers them."""
        enabled = self._config.lora is None and self._config.dtype == "bf16" and not is_cut(self.model)
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled)

    def run_step(self) -> StepReport:
        """Do one step. Every rank calls it; what goes wrong is raised on every rank before any parameter changes."""
        start = time.monotonic()
        self.step += 1
        loss, num_positions = self._accumulate()
        norm = self._reduce_gradients()
        self._check_numbers(loss, norm)
        rate = self._learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens_per_s = num_positions * get_data_parallel_world_size() / (time.monotonic() - start)
        return StepReport(loss=loss, grad_norm=norm, learning_rate=rate, tokens_per_s=tokens_per_s)

    def _accumulate(self) -> tuple[float, int]:
        """Gradients of this rank's rows of the step; `(global loss, positions computed here)`."""
        config = self._config
        per_rank = config.micro_batch_size * config.gradient_accumulation_steps
        count = per_rank * get_data_parallel_world_size()
        rows = [self._rows[index] for index in self._order.rows(self.position, count=count)]
        self.position += count
        total = num_labels(rows)
        first = get_data_parallel_rank() * per_rank
        batches = collate_all(
            rows[first : first + per_rank],
            size=config.micro_batch_size,
            multiple_of=self.length_multiple,
            device=self.device,
        )
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        for batch in batches:
            with self.precision():
                loss_BS = self.model(batch.input_ids, labels=batch.labels, document_lengths=batch.document_lengths)
                loss = loss_BS.sum() / total
            loss.backward()
            loss_sum += loss.detach()
        loss_sum, _ = all_reduce(loss_sum, group=get_data_parallel_group())
        return float(loss_sum), sum(batch.input_ids.numel() for batch in batches)

    def _reduce_gradients(self) -> float:
        """Sum the gradients over ranks and clip them; their global norm before that."""
        params, group, max_norm = list(self.parameters.values()), self.model.tp_group, self._config.max_grad_norm
        sum_partial_grads(params, group=group)
        whole = [param for param in params if not isinstance(param, DTensor)]  # FSDP has summed those that it cut
        sum_grads(whole, group=get_data_parallel_group())
        self._check_grads_exist()
        if max_norm is None:
            return float(grad_norm(params, group=group))
        return float(clip_grad_norm(params, max_norm=max_norm, group=group))

    def _learning_rate(self) -> float:
        config = self._config
        return learning_rate_at(
            self.step,
            peak=config.learning_rate,
            warmup_steps=config.warmup_steps,
            max_steps=config.max_steps,
            min_ratio=config.min_learning_rate_ratio,
        )

    def _check_grads_exist(self) -> None:
        missing = [name for name, param in self.parameters.items() if param.grad is None]
        if missing:
            raise MegatronFrozenError(
                f"step {self.step}: {len(missing)} of {len(self.parameters)} trainable parameters got no gradient "
                f"({missing[0]}, ...); they would never learn, so leave them out of target_modules"
            )

    def _check_numbers(self, loss: float, norm: float) -> None:
        """Both numbers are global, so that every rank comes to the same conclusion."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise MegatronFrozenError(
                f"step {self.step}: the loss is {loss} and the gradient norm {norm}; nothing was updated in this step. "
                f"Lower learning_rate, or set dtype=fp32, and start again"
            )
        if norm == 0.0:
            raise MegatronFrozenError(
                f"step {self.step}: every gradient is zero, so nothing would ever be learned; check that the rows have "
                f"labelled tokens and that the adapters are part of the forward pass, and lower learning_rate if the "
                f"loss rose before: a model thrown far off by a step too large can have none"
            )


def _optimizer(params: list[Tensor], *, config: TrainConfig) -> torch.optim.AdamW:
    groups = [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
    )
