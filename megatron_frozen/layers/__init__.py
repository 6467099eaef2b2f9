"""The public layers. They compose functions of lower rungs and hold parameters; nothing else."""

from megatron_frozen.layers.column_parallel import ColumnParallelLinear as ColumnParallelLinear
from megatron_frozen.layers.config import ModelParallelConfig as ModelParallelConfig
from megatron_frozen.layers.layer_norm_linear import LayerNormLinear as LayerNormLinear
from megatron_frozen.layers.linear import Linear as Linear
from megatron_frozen.layers.row_parallel import RowParallelLinear as RowParallelLinear
from megatron_frozen.layers.vocab_parallel_embedding import VocabParallelEmbedding as VocabParallelEmbedding
