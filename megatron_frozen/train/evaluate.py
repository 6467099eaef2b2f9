"""The loss on held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from megatron_frozen.comm import Group, all_reduce
from megatron_frozen.models import CausalLM
from megatron_frozen.train.batches import Batch
from megatron_frozen.train.packing import IGNORED


@torch.no_grad()
def evaluate(
    model: CausalLM, batches: Sequence[Batch], *, group: Group, precision: Callable[[], AbstractContextManager]
) -> tuple[float, int]:
    """`(loss per labelled token, labelled tokens)` over the batches of all ranks of the data-parallel `group`.

    Ranks may hold different numbers of batches. Dropout is off meanwhile. `precision` makes the context
    of the forward passes. Collectives: one all-reduce of two numbers.
    """
    was_training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    with precision():
        for batch in batches:
            loss_BS = model(batch.input_ids, labels=batch.labels, document_lengths=batch.document_lengths)
            totals[0] += loss_BS.double().sum()
            totals[1] += (batch.labels != IGNORED).sum()
    model.train(was_training)
    totals, _ = all_reduce(totals, group=group)
    return float(totals[0] / totals[1]), int(totals[1])
