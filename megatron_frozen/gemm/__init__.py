"""The only place that multiplies matrices; inside attention, and in C++ for ``brgemm``, ``kernels`` does it."""

from megatron_frozen.gemm.autocast import autocast_is_on as autocast_is_on
from megatron_frozen.gemm.autocast import without_autocast as without_autocast
from megatron_frozen.gemm.joined import joined_dgrad as joined_dgrad
from megatron_frozen.gemm.joined import joined_forward as joined_forward
from megatron_frozen.gemm.products import add_product_ as add_product_
from megatron_frozen.gemm.products import bias_gradient as bias_gradient
from megatron_frozen.gemm.products import dgrad as dgrad
from megatron_frozen.gemm.products import dgrad_in_order as dgrad_in_order
from megatron_frozen.gemm.products import forward as forward
from megatron_frozen.gemm.products import forward_in_order as forward_in_order
from megatron_frozen.gemm.products import wgrad as wgrad
from megatron_frozen.gemm.wgrad_into import wgrad_into as wgrad_into
