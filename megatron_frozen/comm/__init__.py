"""The only place that calls collectives: groups, raw collectives, agreement between ranks, differentiable mappings."""

from megatron_frozen.comm.agreement import on_first_rank as on_first_rank
from megatron_frozen.comm.agreement import raise_together as raise_together
from megatron_frozen.comm.agreement import together as together
from megatron_frozen.comm.collectives import all_gather as all_gather
from megatron_frozen.comm.collectives import all_reduce as all_reduce
from megatron_frozen.comm.collectives import all_reduce_ as all_reduce_
from megatron_frozen.comm.collectives import broadcast_ as broadcast_
from megatron_frozen.comm.collectives import broadcast_object as broadcast_object
from megatron_frozen.comm.collectives import gather_objects as gather_objects
from megatron_frozen.comm.collectives import reduce_scatter as reduce_scatter
from megatron_frozen.comm.groups import WORLD as WORLD
from megatron_frozen.comm.groups import AnyGroup as AnyGroup
from megatron_frozen.comm.groups import Group as Group
from megatron_frozen.comm.groups import chosen_group as chosen_group
from megatron_frozen.comm.groups import destroy_model_parallel as destroy_model_parallel
from megatron_frozen.comm.groups import get_data_parallel_group as get_data_parallel_group
from megatron_frozen.comm.groups import get_data_parallel_rank as get_data_parallel_rank
from megatron_frozen.comm.groups import get_data_parallel_world_size as get_data_parallel_world_size
from megatron_frozen.comm.groups import get_tensor_model_parallel_group as get_tensor_model_parallel_group
from megatron_frozen.comm.groups import get_tensor_model_parallel_rank as get_tensor_model_parallel_rank
from megatron_frozen.comm.groups import get_tensor_model_parallel_world_size as get_tensor_model_parallel_world_size
from megatron_frozen.comm.groups import group_rank as group_rank
from megatron_frozen.comm.groups import group_size as group_size
from megatron_frozen.comm.groups import initialize_model_parallel as initialize_model_parallel
from megatron_frozen.comm.mappings import copy_to_tensor_model_parallel_region as copy_to_tensor_model_parallel_region
from megatron_frozen.comm.mappings import gather_from_sequence_parallel_region as gather_from_sequence_parallel_region
from megatron_frozen.comm.mappings import (
    gather_from_tensor_model_parallel_region as gather_from_tensor_model_parallel_region,
)
from megatron_frozen.comm.mappings import (
    reduce_from_tensor_model_parallel_region as reduce_from_tensor_model_parallel_region,
)
from megatron_frozen.comm.mappings import (
    reduce_scatter_to_sequence_parallel_region as reduce_scatter_to_sequence_parallel_region,
)
from megatron_frozen.comm.mappings import scatter_to_sequence_parallel_region as scatter_to_sequence_parallel_region
from megatron_frozen.comm.mappings import (
    scatter_to_tensor_model_parallel_region as scatter_to_tensor_model_parallel_region,
)
