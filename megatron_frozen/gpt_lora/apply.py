"""Adapters on a whole GPTModel: add, switch off, merge, and list what trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron_frozen.comm import WORLD, together
from megatron_frozen.errors import ConfigError
from megatron_frozen.gpt_lora.layer import ProjectionAdapters
from megatron_frozen.gpt_lora.projections import Projection, chosen_projections
from megatron_frozen.integrations.megatron_core.layers import use_frozen_linear
from megatron_frozen.lora import LoraConfig
from megatron_frozen.lora.factors import FullFactors
from megatron_frozen.lora.guard import assert_some_gradient
from megatron_frozen.lora.init import init_lora_a, shared_seed


def apply_lora(model: nn.Module, config: LoraConfig, *, seed: int = 0) -> nn.Module:
    """Put an adapter on every projection that ``config`` names, in place, freeze all else, and return ``model``.

    model: megatron-core's GPTModel from a local spec, before Megatron's DDP wraps it; its adapted linears become ours
    (see ``use_frozen_linear``) and keep their keys in state dicts. Only named projections train: with q_proj and v_proj
    the key's rows of a fused linear_qkv stay as they are. A starts from ``seed`` and the projection's Hugging Face path
    alone, so equally on all ranks and as in this package's own decoder; B starts at zero. Collectives: small object
    exchanges over the world.

    Raises ConfigError where a target matches nothing or cannot carry an adapter, or where adapters are on the model;
    nothing is changed then.
    """
    with together(group=WORLD, doing="adding a LoRA adapter"):
        check_new(model)
        chosen = checked_projections(model, config)
    seed = shared_seed(seed)

    def starting(projection: Projection) -> FullFactors:
        in_features = projection.linear.input_size
        full_A = init_lora_a(config.r, in_features, method=config.init_method, seed=seed, layer_name=projection.path)
        return full_A, torch.zeros(projection.output_size, config.r)

    install(model, config, chosen=chosen, full_factors=starting)
    return model


def check_new(model: nn.Module) -> None:
    """Raise ConfigError where adapters are on the model."""
    if any(isinstance(module, ProjectionAdapters) for module in model.modules()):
        raise ConfigError("the GPTModel carries adapters already; merge them, or build the model again")


def checked_projections(model: nn.Module, config: LoraConfig) -> list[Projection]:
    """Return what ``config`` names, and raise ConfigError where one of it cannot carry an adapter."""
    chosen = chosen_projections(model, config)
    for projection in chosen:
        linear = projection.linear
        if not hasattr(linear, "disable_grad_reduce") and not hasattr(linear, "input_is_parallel"):
            why_not = f"it is a {type(linear).__name__}; build the model from a local layer spec"
        elif linear.is_expert or linear.explicit_expert_comm:
            why_not = "it leaves communication to its caller, which an adapter would count twice; leave it out"
        else:
            continue
        raise ConfigError(f"LoRA target {projection.path} cannot carry an adapter: {why_not}")
    return chosen


def install(
    model: nn.Module,
    config: LoraConfig,
    *,
    chosen: list[Projection],
    full_factors: Callable[[Projection], FullFactors],
) -> None:
    """Put adapters made of full factors on the chosen projections and freeze all else. No collective."""
    model.requires_grad_(requires_grad=False)
    by_linear: dict[nn.Module, list[Projection]] = {}
    for projection in chosen:
        by_linear.setdefault(projection.linear, []).append(projection)
    for linear, projections in by_linear.items():
        use_frozen_linear(linear)
        adapters = ProjectionAdapters(linear, config, factors={at: full_factors(at) for at in projections})
        linear.adapter = adapters.train(linear.training)
    for path, module in model.named_modules():
        recomputes = getattr(getattr(module, "config", None), "recompute_granularity", None) is not None
        if recomputes and path.rpartition(".")[2] == "decoder":
            module.register_forward_pre_hook(_require_input_grads, with_kwargs=True)


def _require_input_grads(decoder: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Let the decoder's input require grad: Megatron's checkpoints run no backward where no input does, and behind a
    frozen embedding none would, so that the adapters inside would never learn."""
    has_adapters = any(isinstance(module, ProjectionAdapters) for module in decoder.modules())
    states = options.get("hidden_states")
    if states is not None and has_adapters and torch.is_grad_enabled() and not states.requires_grad:
        options = {**options, "hidden_states": states.detach().requires_grad_()}
    return args, options


def named_adapters(model: nn.Module) -> dict[str, ProjectionAdapters]:
    """Return {Hugging Face path of a projection: the adapters of its linear}. Raises ConfigError where none is."""
    found = {
        path: module
        for module in model.modules()
        if isinstance(module, ProjectionAdapters)
        for path in module.paths.values()
    }
    if not found:
        raise ConfigError("the GPTModel carries no adapter; call megatron_frozen.gpt_lora.apply_lora or load_adapter")
    return found


def lora_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return every A and B: what the optimizer takes. Raises ConfigError where there are none."""
    unique = dict.fromkeys(named_adapters(model).values())
    return [parameter for adapters in unique for parameter in adapters.parameters()]


def assert_adapters_learn(model: nn.Module) -> None:
    """Raise unless some adapter gradient is non-zero; see ``megatron_frozen.assert_adapters_learn``.

    Under Megatron's DDP call it before the wrapper takes the gradients out of ``.grad``, so without fused buffers.
    """
    assert_some_gradient(lora_parameters(model))


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Within this context the model is the base model. It must span the forward and the backward alike."""
    before = {adapters: adapters.is_enabled for adapters in named_adapters(model).values()}
    for adapters in before:
        adapters.is_enabled = False
    try:
        yield
    finally:
        for adapters, was_enabled in before.items():
            adapters.is_enabled = was_enabled


def merge_adapter(model: nn.Module) -> None:
    """Add every adapter to its linear's weight and take it off, in place. No collective: a shard needs its own factors.

    Raises ConfigError where there are none.
    """
    named_adapters(model)
    module: Any
    for module in model.modules():
        adapters = getattr(module, "adapter", None)
        if isinstance(adapters, ProjectionAdapters):
            adapters.merge_into(module.get_parameter("weight"))
            module.adapter = None
