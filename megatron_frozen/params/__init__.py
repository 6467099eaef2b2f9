"""What is known about parameters: how they are cut, initialised and joined, and how their gradients are summed and
clipped.
"""

from megatron_frozen.params.gradients import clip_grad_norm as clip_grad_norm
from megatron_frozen.params.gradients import grad_norm as grad_norm
from megatron_frozen.params.gradients import sum_grads as sum_grads
from megatron_frozen.params.gradients import sum_partial_grads as sum_partial_grads
from megatron_frozen.params.shards import KeepsMarks as KeepsMarks
from megatron_frozen.params.shards import SharesGroups as SharesGroups
from megatron_frozen.params.shards import gather_full as gather_full
from megatron_frozen.params.shards import init_shard_ as init_shard_
from megatron_frozen.params.shards import is_partial_grad as is_partial_grad
from megatron_frozen.params.shards import is_sharded as is_sharded
from megatron_frozen.params.shards import mark_partial_grad as mark_partial_grad
from megatron_frozen.params.shards import marks_kept as marks_kept
from megatron_frozen.params.shards import (
    param_is_not_tensor_parallel_duplicate as param_is_not_tensor_parallel_duplicate,
)
from megatron_frozen.params.shards import (
    set_tensor_model_parallel_attributes as set_tensor_model_parallel_attributes,
)
from megatron_frozen.params.shards import shard_of as shard_of
from megatron_frozen.params.shards import whole as whole
