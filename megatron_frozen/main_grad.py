"""The only place that knows the attributes by which a wrapper asks for weight gradients in a buffer of its own.

``facts_of`` reads the attributes, ``decide`` turns the facts into a plan, ``deliver_weight_gradient`` carries it out.

| situation | write | backward returns | flag |
|---|---|---|---|
| frozen weight | nothing | None | left |
| fusion off | nothing | the gradient | left |
| main_grad, no flag attribute | add | None | none |
| Megatron's DDP | add | a dummy, of zeros where ``zero_out_wgrad`` says that DDP adds it | True |
| Megatron-FSDP, gradients sharded | over; added from the weight's second use on | a dummy | True |
| Megatron-FSDP, gradients whole | add | a dummy | True |
| the same, weight shared with a layer that does not fuse | add | None, so that the other gradient is added | left |

The flag is ``grad_added_to_main_grad``; its presence says that a wrapper will look. A dummy is there because a
gradient of None lets autograd run DDP's hook, and its collectives, on another thread.

Without the flag, ``overwrite_main_grad`` must not meet reentrant checkpointing: each recomputed region runs a
backward of its own, and a weight used in two of them would lose its first use.
"""

from __future__ import annotations

import enum
import itertools
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from megatron_frozen import gemm
from megatron_frozen.errors import ConfigError
from megatron_frozen.gemm.wgrad_into import check_main_grad, wgrad_into
from megatron_frozen.storage import adjacent_view

_WRITTEN = "_written_in_backward"
_KEY = "_main_grad_key"
_NAME = "parameter_name"

# By key: a graph knows no more. Keys start anew in each process, so that one out of a pickled parameter finds nothing.
_WEIGHTS: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
_KEYS = itertools.count(secrets.randbits(60) + 1)


class Returns(enum.Enum):
    """What backward returns for the weight."""

    NOTHING = "None"
    GRADIENT = "the gradient"
    DUMMY = "a tensor of the weight's shape with any content"
    ZEROS = "a tensor of the weight's shape that a wrapper may add"


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFacts:
    """What a weight says about itself and about the wrapper around it."""

    is_fused: bool = True
    """gradient_accumulation_fusion is on."""
    trains: bool = True
    has_buffer: bool = False
    """``main_grad`` is a tensor."""
    has_getter: bool = False
    """``get_main_grad()`` makes the buffer: Megatron-FSDP."""
    is_sharded: bool | None = None
    """Megatron-FSDP shards gradients, so each backward fills a fresh bucket; None where its ``_gbuf`` is absent."""
    asks_to_overwrite: bool = False
    """``overwrite_main_grad``. It has no say where ``is_sharded`` is known: released Megatron-FSDPs set it always."""
    flag: bool | None = None
    """``grad_added_to_main_grad``; None where absent. True: the buffer holds what no wrapper has taken yet."""
    was_written: bool = False
    """Without the flag attribute: this backward has written the buffer already."""
    is_shared: bool = False
    """A layer that does not fuse, an embedding, uses the weight too."""
    is_gtp: bool = False
    """The weight is a shard that has a reduction of its own."""

    @property
    def overwrites(self) -> bool:
        """Whether the buffer holds nothing of use when a backward begins."""
        return self.asks_to_overwrite if self.is_sharded is None else self.is_sharded


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to do with one weight gradient."""

    writes: bool = False
    accumulates: bool = True
    returns: Returns = Returns.NOTHING
    sets_flag: bool = False


def decide(facts: WeightFacts, *, weight: torch.Tensor | None = None) -> Plan:
    """Return what to do by the table above: a pure function, called before anything is written.

    weight: gives its name to messages, nothing else.

    Raises ConfigError where no buffer is offered, or where the wrapper would lose a part of the gradient.
    """
    if not facts.trains:
        return Plan()
    if not facts.is_fused:
        return Plan(returns=Returns.GRADIENT)
    if facts.is_gtp:
        raise ConfigError(
            f"{described(weight)} is a generalised-tensor-parallel shard (is_gtp_weight_remat), whose gradient the "
            f"weight object reduces itself; use Megatron's own layers for it"
        )
    if not (facts.has_buffer or facts.has_getter):
        raise ConfigError(
            f"gradient_accumulation_fusion is on but {described(weight)} trains and has neither a main_grad buffer nor "
            f"a get_main_grad() that makes one; wrap the model so that each weight has a buffer, or turn the option off"
        )
    if facts.is_shared and facts.has_getter:
        if facts.overwrites:
            raise ConfigError(
                f"{described(weight)} is shared with a layer that does not fuse, and Megatron-FSDP with sharded "
                f"gradients drops what that layer adds; turn gradient_accumulation_fusion off or untie the weight"
            )
        return Plan(writes=True)
    holds_earlier_use = facts.was_written if facts.flag is None else facts.flag
    accumulates = not facts.overwrites or holds_earlier_use
    if facts.flag is None:
        return Plan(writes=True, accumulates=accumulates)
    dummy = Returns.ZEROS if facts.is_shared else Returns.DUMMY
    return Plan(writes=True, accumulates=accumulates, returns=dummy, sets_flag=True)


def facts_of(weight: Any) -> WeightFacts:
    """Read the attributes of a weight whose product is fused; nothing is called, nothing is allocated."""
    bucket = getattr(weight, "_gbuf", None)
    return WeightFacts(
        trains=weight.requires_grad,
        has_buffer=getattr(weight, "main_grad", None) is not None,
        has_getter=hasattr(weight, "get_main_grad"),
        is_sharded=None if bucket is None else bool(bucket.is_data_distributed),
        asks_to_overwrite=bool(getattr(weight, "overwrite_main_grad", False)),
        flag=_flag(weight),
        was_written=_was_written(weight),
        is_shared=_is_shared(weight),
        is_gtp=bool(getattr(weight, "is_gtp_weight_remat", False)),
    )


def _is_shared(weight: Any) -> bool:
    """``zero_out_wgrad`` is Megatron's mark for a tied embedding, ``_is_shared`` that of Megatron-FSDP."""
    return bool(getattr(weight, "zero_out_wgrad", False) or getattr(weight, "_is_shared", False))


def _flag(weight: Any) -> bool | None:
    # A graph is traced before its backward, and must not be traced again because the flag has changed.
    if torch.compiler.is_compiling():
        return False if hasattr(weight, "grad_added_to_main_grad") else None
    return getattr(weight, "grad_added_to_main_grad", None)


def _was_written(weight: Any) -> bool:
    return not torch.compiler.is_compiling() and getattr(weight, _WRITTEN, -1) == _backward_id() != -1


def _backward_id() -> int:
    """Return the number of the backward that runs in this thread; -1 outside one."""
    return torch._C._current_graph_task_id()


def deliver_weight_gradient(
    weight: torch.Tensor | None,
    grad_output: torch.Tensor,
    total_input: torch.Tensor,
    *,
    grad_dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """Bring dY^T X to where the weight's wrapper wants it, and return what backward must return for the weight.

    weight: the Parameter object itself [O, I] (a saved copy has no attributes), or None where fusion is off;
    grad_output [..., O]; total_input [..., I]; grad_dtype: of a gradient that is returned, by default that of the
    operands. ``get_main_grad()`` is called here, once, and no earlier. No collectives.

    Raises ConfigError (see ``decide``) and LayoutError for a buffer of another shape or of integers, before anything
    is written.
    """
    if weight is None:
        return gemm.wgrad(grad_output, total_input, dtype=grad_dtype)
    return deliver_weight_gradients([weight], grad_output, total_input)[0]


def deliver_weight_gradients(
    weights: Sequence[torch.Tensor], grad_output: torch.Tensor, total_input: torch.Tensor
) -> list[torch.Tensor | None]:
    """Do what ``deliver_weight_gradient`` does, for fused weights [O_i, I] one above the other, of grad_output
    [..., sum O_i].

    One product writes all buffers where they adjoin in memory and are written in one way, else one product each.
    """
    plans = _plans(weights)
    writing = [i for i, plan in enumerate(plans) if plan.writes]
    if writing:
        sizes = [weight.shape[0] for weight in weights]
        if len(writing) < len(weights):  # one was frozen since the forward
            columns = grad_output.split(sizes, dim=-1)
            grad_output = torch.cat([columns[i] for i in writing], dim=-1)
        _write(
            [_buffer(weights[i]) for i in writing],
            grad_output,
            total_input,
            plans=[plans[i] for i in writing],
            sizes=[sizes[i] for i in writing],
        )
    for weight, plan in zip(weights, plans, strict=True):
        _mark(weight, plan)
    return [
        _returned(plan.returns, shape=weight.shape, like=grad_output)
        for weight, plan in zip(weights, plans, strict=True)
    ]


def _plans(weights: Sequence[torch.Tensor | None]) -> list[Plan]:
    """Return the plan of each weight; one that stands among them before adds to what its first rows wrote."""
    plans: list[Plan] = []
    for i, weight in enumerate(weights):
        plan = Plan() if weight is None else decide(facts_of(weight), weight=weight)
        is_again = weight is not None and any(weight is other for other in weights[:i])
        plans.append(replace(plan, accumulates=True) if is_again else plan)
    return plans


def _write(
    main_grads: list[torch.Tensor],
    grad_output: torch.Tensor,
    total_input: torch.Tensor,
    *,
    plans: Sequence[Plan],
    sizes: Sequence[int],
) -> None:
    for main_grad, size in zip(main_grads, sizes, strict=True):  # all of them before the first is written
        check_main_grad(main_grad, shape=(size, total_input.shape[-1]))
    accumulates = {plan.accumulates for plan in plans}
    whole = adjacent_view(main_grads) if len(accumulates) == 1 else None
    if whole is not None:
        wgrad_into(whole, grad_output, total_input, accumulate=accumulates.pop())
        return
    parts = grad_output.split(list(sizes), dim=-1)
    for main_grad, plan, part in zip(main_grads, plans, parts, strict=True):
        wgrad_into(main_grad, part, total_input, accumulate=plan.accumulates)


def _buffer(weight: Any) -> torch.Tensor:
    if hasattr(weight, "get_main_grad"):  # what an earlier backward got may be freed by now
        weight.main_grad = weight.get_main_grad()
    return weight.main_grad


def _mark(weight: Any, plan: Plan) -> None:
    if plan.sets_flag:
        weight.grad_added_to_main_grad = True
    elif getattr(weight, "overwrite_main_grad", False):
        setattr(weight, _WRITTEN, _backward_id())


def _returned(returns: Returns, *, shape: torch.Size, like: torch.Tensor) -> torch.Tensor | None:
    # detect_anomaly would take what an empty dummy holds for a NaN of the model.
    looks_for_nan = not torch.compiler.is_compiling() and torch.is_anomaly_enabled()
    if returns is Returns.DUMMY and not looks_for_nan:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    if returns in (Returns.DUMMY, Returns.ZEROS):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    return None


def check_product(weight: torch.Tensor, *, is_put_off: bool = False, gtp_remat_size: int = 1) -> None:
    """Refuse, in forward, a weight that no product of ours may take.

    is_put_off: its gradient is computed by Megatron's ``drain_embedding_wgrad_compute`` after the backward.
    gtp_remat_size: over how many ranks generalised tensor parallelism cuts it further.
    Raises ConfigError.
    """
    if gtp_remat_size != 1 or getattr(weight, "is_gtp_weight_remat", False):
        decide(WeightFacts(is_gtp=True), weight=weight)
    if is_put_off and hasattr(weight, "get_main_grad") and facts_of(weight).overwrites:
        raise ConfigError(
            f"defer_embedding_wgrad_compute is on for {described(weight)} under Megatron-FSDP with sharded gradients, "
            f"whose buffer is reduced before the deferred gradient comes; turn defer_embedding_wgrad_compute off"
        )


def introduce(weight: torch.Tensor) -> None:
    """Make a new weight known to compiled graphs: one that sets its flag finds it by a number, with no reference."""
    _WEIGHTS[key := next(_KEYS)] = weight
    setattr(weight, _KEY, torch.tensor(key, device="cpu"))


def _no_key() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device="cpu")


def hand_over(old: torch.Tensor, new: torch.Tensor, *, is_copy: bool = False) -> None:
    """Let ``new`` be known as ``old`` was, in whose place it stands; a copy beside it gets a key of its own."""
    if hasattr(old, _NAME):
        setattr(new, _NAME, getattr(old, _NAME))
    if hasattr(old, _KEY) and is_copy:
        introduce(new)
    elif hasattr(old, _KEY):
        setattr(new, _KEY, key := getattr(old, _KEY))
        _WEIGHTS[int(key)] = new


def name_parameters(module: torch.nn.Module, *, prefix: str = "") -> None:
    """Give each parameter its dotted name in ``module``, by which messages call it."""
    for name, parameter in module.named_parameters(prefix):
        setattr(parameter, _NAME, name)


def described(weight: torch.Tensor | None) -> str:
    """Return the name and the shape of a weight, for a message."""
    if weight is None:
        return "a weight"
    name = getattr(weight, _NAME, "")
    return f"weight {name!r} of shape {list(weight.shape)}" if name else f"a weight of shape {list(weight.shape)}"


class GraphTarget(NamedTuple):
    """What a compiled graph knows of a fused weight: a buffer that it mutates, a key, and what backward returns."""

    main_grad: torch.Tensor
    key: torch.Tensor
    returns: Returns


def graph_target(weight: torch.Tensor) -> GraphTarget:
    """Return the buffer and key of a fused weight, looked up while a graph is traced.

    Raises ConfigError where the buffer comes into being in backward only, or where a flag is to be set on a weight
    that nobody introduced."""
    facts = facts_of(weight)
    plan = decide(facts, weight=weight)
    if facts.has_getter:
        raise ConfigError(
            f"{described(weight)} gets its buffer from Megatron-FSDP in backward, which a compiled graph cannot wait "
            f"for; leave this layer out of torch.compile or turn gradient_accumulation_fusion off"
        )
    key = getattr(weight, _KEY, None)
    if key is None and (plan.sets_flag or facts.asks_to_overwrite):
        raise ConfigError(
            f"{described(weight)} carries a wrapper's flag but no key by which a compiled graph could set it; make it "
            f"with a layer of this package, or call main_grad.introduce(weight) before compiling"
        )
    return GraphTarget(weight.main_grad, _no_key() if key is None else key, plan.returns)  # pyright: ignore[reportAttributeAccessIssue]


@torch.library.custom_op("megatron_frozen::wgrad_into_main_grads", mutates_args=("main_grads",))
def wgrad_into_main_grads(
    main_grads: list[torch.Tensor], grad_output: torch.Tensor, total_input: torch.Tensor, keys: list[torch.Tensor]
) -> None:
    """Write the rows of dY^T X into the buffers of weights that stand one above the other, and set their flags.

    main_grads: [O_i, I] each; grad_output [..., sum O_i]; total_input [..., I]; keys: what ``introduce`` gave the
    weights, 0 for one that has no flag; tensors, since a graph holds for one value of a plain int only. What
    ``decide`` says of each weight is done when this runs, not when it is traced: a graph can neither set attributes
    nor read the flag. No collectives.

    Raises ConfigError where a weight is gone.
    """
    weights = [_WEIGHTS.get(int(key)) for key in keys]
    if any(weight is None and int(key) for weight, key in zip(weights, keys, strict=True)):
        raise ConfigError(
            "a compiled graph holds the weight gradient of a parameter that no longer exists or comes from another "
            "process; compile the model again"
        )
    plans = _plans(weights)
    sizes = [main_grad.shape[0] for main_grad in main_grads]
    _write(main_grads, grad_output, total_input, plans=plans, sizes=sizes)
    for weight, plan in zip(weights, plans, strict=True):
        if weight is not None:
            _mark(weight, plan)


@wgrad_into_main_grads.register_fake
def _(
    main_grads: list[torch.Tensor], grad_output: torch.Tensor, total_input: torch.Tensor, keys: list[torch.Tensor]
) -> None:
    """Compute nothing: the result is the mutation."""


def deliver_in_graph(target: GraphTarget, grad_output: torch.Tensor, total_input: torch.Tensor) -> torch.Tensor | None:
    """Do what ``deliver_weight_gradient`` does in a traced backward, through the operator above."""
    return deliver_all_in_graph([target], grad_output, total_input)[0]


def deliver_all_in_graph(
    targets: Sequence[GraphTarget], grad_output: torch.Tensor, total_input: torch.Tensor
) -> list[torch.Tensor | None]:
    """Do what ``deliver_weight_gradients`` does in a traced backward, through the operator above."""
    main_grads, keys = [target.main_grad for target in targets], [target.key for target in targets]
    wgrad_into_main_grads(main_grads, grad_output, total_input, keys)
    return [_returned(target.returns, shape=target.main_grad.shape, like=grad_output) for target in targets]
