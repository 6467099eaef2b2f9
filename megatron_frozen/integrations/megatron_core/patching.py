"""The patch: megatron-core's own layers run our products, without a change to the code that builds the model.

Upstream's two autograd classes stay the same objects and get another forward and backward, so every module that holds
one, or a function that calls it, runs the new pair, however it was imported. Everything around them, such as the
layers, the gather of sequence parallelism and the checks of arguments, stays upstream's.

Where upstream folds a product by itself, that is found by running it (see ``probe``), and its own stays.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron_frozen.errors import ConfigError
from megatron_frozen.integrations.megatron_core import upstream
from megatron_frozen.integrations.megatron_core.bodies import (
    Body,
    folded_forward,
    frozen_pair,
    names_of,
    trainable_pair,
    with_bias_gradient,
)
from megatron_frozen.integrations.megatron_core.deferred import drain_embedding_wgrad_compute
from megatron_frozen.integrations.megatron_core.probe import probe_frozen

FIRST_RELEASE, LAST_RELEASE = (0, 14), (0, 20)

_FROZEN = "LinearWithFrozenWeight"
_TRAINABLE = "LinearWithGradAccumulationAndAsyncCommunication"
_FUSION = "_grad_accum_fusion_available"
_DRAIN = "drain_embedding_wgrad_compute"
# What ``apply`` takes in every known release, and what newer ones may add, in this order.
_ARGUMENTS = {
    _FROZEN: (("input", "weight", "bias", "allreduce_dgrad", "tp_group"), ("output_dtype",)),
    _TRAINABLE: (
        (
            "input", "weight", "bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel",
            "grad_output_buffer", "wgrad_deferral_limit", "tp_group",
        ),
        ("gtp_remat_size", "output_dtype"),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchReport:
    """What ``patch`` did to an install; ``str`` gives it as text, a line each."""

    version: str
    """Of megatron-core."""
    replaced: tuple[str, ...]
    """What runs our code now, by its name in megatron-core, and what for."""
    kept: tuple[str, ...]
    """What stays upstream's, and why."""

    def __str__(self) -> str:
        """Return a line for each entry."""
        lines = [f"replaced {entry}" for entry in self.replaced] + [f"kept {entry}" for entry in self.kept]
        return "\n".join([f"megatron-frozen patched megatron-core {self.version}:", *(f"  {line}" for line in lines)])


@dataclass(kw_only=True, slots=True)
class _Patch:
    """A patch in progress or in place: what it put where, and what stood there."""

    undo: list[Callable[[], None]] = field(default_factory=list)
    places: list[tuple[Any, str, object]] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    report: PatchReport | None = None
    num_bodies: int = 0
    """Of with statements that it is on for."""
    stays: bool = False
    """``patch`` was called, so the end of the last body does not take it away."""

    def put(self, owner: Any, name: str, *, value: object) -> None:
        """Set an attribute that stands in the owner's own namespace; ``undo`` gives back the very object there was."""
        before = vars(owner)[name]
        setattr(owner, name, value)
        self.undo.append(lambda: setattr(owner, name, before))
        self.places.append((owner, name, value))

    def put_method(self, function: Any, name: str, *, body: Body, what: str) -> None:
        """Replace a static method of an autograd class by one that shows the same signature."""
        self.put(function, name, value=staticmethod(functools.wraps(getattr(function, name))(body)))
        self.replaced.append(f"{_named(function, name)}: {what}")


_patch: _Patch | None = None
_lock = threading.RLock()


def patch() -> PatchReport:
    """Give the linear layers of the installed megatron-core our products; a second call changes nothing more.

    Folded forward, frozen and trainable dgrad; the bias gradient under a frozen weight; weight gradients written into
    ``main_grad`` by our backends, so gradient_accumulation_fusion needs no apex, and Megatron-FSDP's fp32 buffers get
    fp32 gradients. Call it in every process, before or after the model is built, and before it is compiled.

    Raises ConfigError, with nothing changed, where megatron-core is not there, is of a release that this patch does
    not know, or its functions take other arguments.
    """
    with _lock:
        found = _put_in_place()
        found.stays = True
    assert found.report is not None
    return found.report


def _put_in_place() -> _Patch:
    global _patch
    if _patch is None:
        found = _Patch()
        layers = _checked_layers()
        try:
            _patch_frozen(found, layers)
            _patch_trainable(found, layers)
            _patch_drain(found, layers)
        except BaseException:
            _undo(found)
            raise
        found.report = PatchReport(version=upstream.version(), replaced=tuple(found.replaced), kept=tuple(found.kept))
        _patch = found
    return _patch


def unpatch() -> None:
    """Give megatron-core its own code back, as if ``patch`` had never been called. Call it while no graph is alive.

    Raises ConfigError, with nothing changed, where somebody has put other code on top since, which would go with it.
    """
    global _patch
    with _lock:
        if _patch is None:
            return
        for owner, name, value in _patch.places:
            if vars(owner)[name] is not value:
                raise ConfigError(
                    f"{_named(owner, name)} has been replaced on top of this patch ({_shown(vars(owner)[name])}), and "
                    f"unpatching would take that away too; undo it first, as whoever came last goes first"
                )
        _undo(_patch)
        _patch = None


def is_patched() -> bool:
    """Return whether ``patch`` is in place in this process."""
    return _patch is not None


@contextmanager
def patched() -> Iterator[PatchReport]:
    """Patch for the body of a with statement, in all threads; it stays on until the last of several bodies ends.

    Where ``patch`` was called, before or in a body, the patch stays after it.
    """
    with _lock:
        found = _put_in_place()
        found.num_bodies += 1
    assert found.report is not None
    try:
        yield found.report
    finally:
        with _lock:
            found.num_bodies -= 1
            if found is _patch and not (found.num_bodies or found.stays):
                unpatch()


def _undo(found: _Patch) -> None:
    while found.undo:
        found.undo.pop()()


def _checked_layers() -> Any:
    """Return ``tensor_parallel.layers`` of an install that the patch knows."""
    version, release = upstream.version(), upstream.release()
    if not FIRST_RELEASE <= release <= LAST_RELEASE:
        raise ConfigError(
            f"this patch does not know megatron-core {version}; it knows {_dotted(FIRST_RELEASE)} to "
            f"{_dotted(LAST_RELEASE)}, so install one of these or leave the patch out"
        )
    layers = upstream.core("tensor_parallel.layers")
    for name, (always, later) in _ARGUMENTS.items():
        function = getattr(layers, name, None)
        if function is None or function.__module__ != layers.__name__:
            raise ConfigError(
                f"{layers.__name__}.{name} of megatron-core {version} is not its own ({function}); another patch may "
                f"have replaced it, so leave one of the two out"
            )
        for method in ("forward", "backward"):
            if not _is_own(getattr(function, method), module=layers.__name__):
                raise ConfigError(
                    f"{_named(function, method)} of megatron-core {version} is not its own "
                    f"({_shown(getattr(function, method))}); another patch has replaced it and would be lost under "
                    f"this one, so leave one of the two out"
                )
        names = names_of(function.forward)
        extras = names[len(always) :]
        if names[: len(always)] != always or extras != tuple(extra for extra in later if extra in extras):
            raise ConfigError(
                f"{layers.__name__}.{name} of megatron-core {version} takes {', '.join(names)}; this patch knows "
                f"{', '.join(always)} and then {' and '.join(later)}, so it leaves this install alone"
            )
    return layers


def _is_own(method: Any, *, module: str) -> bool:
    """Return whether ``module`` or a decorator of torch's defines the method and whatever that wraps."""
    homes = [_home(link) for link in _chain(method)]
    return all(home == module or home.startswith("torch.") for home in homes)


def _chain(method: Any) -> list[Any]:
    """Return a function and, from the outside in, what it says it wraps."""
    chain = [method]
    while hasattr(chain[-1], "__wrapped__"):
        chain.append(chain[-1].__wrapped__)
    return chain


def _home(function: Any) -> str:
    """Return where a function was written: functools.wraps gives it the name and the module of another."""
    return function.__globals__["__name__"] if inspect.isfunction(function) else ""


def _shown(value: Any) -> str:
    chain = _chain(value.__func__ if isinstance(value, staticmethod) else value)
    function = next((link for link in chain if not _home(link).startswith("torch.")), value)
    code = getattr(function, "__code__", None)
    return repr(value) if code is None else f"{code.co_name} in {code.co_filename}"


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def _patch_frozen(found: _Patch, layers: Any) -> None:
    function = getattr(layers, _FROZEN)
    forward, backward = function.forward, function.backward
    num_extras = len(names_of(forward)) - len(_ARGUMENTS[_FROZEN][0])
    facts = probe_frozen(function, num_extras=num_extras)
    if not facts.folds_dgrad:
        new_forward, new_backward = frozen_pair(forward, backward)
        found.put_method(function, "forward", body=new_forward, what="folds X")
        found.put_method(function, "backward", body=new_backward, what="folds dY, gives the bias gradient")
        return
    if facts.folds_forward:
        found.kept.append(f"{_named(function, 'forward')}: folds X by itself")
    else:
        found.put_method(function, "forward", body=folded_forward(forward), what="folds X for upstream's own product")
    if facts.gives_bias_gradient:
        found.kept.append(f"{_named(function, 'backward')}: folds dY and gives the bias gradient by itself")
    else:
        found.kept.append(f"{_named(function, 'backward')}: folds dY by itself")
        found.put_method(
            function, "backward", body=with_bias_gradient(backward), what="adds the bias gradient, no more"
        )


def _patch_trainable(found: _Patch, layers: Any) -> None:
    function = getattr(layers, _TRAINABLE)
    new_forward, new_backward = trainable_pair(function.forward, function.backward)
    found.put_method(function, "forward", body=new_forward, what="folds X")
    found.put_method(function, "backward", body=new_backward, what="folds dY, writes main_grad by our backends")


def _patch_drain(found: _Patch, layers: Any) -> None:
    """Without apex: let layers with fusion be built, and give the deferred gradient of the head its write.

    Modules hold the function by its name, so each that does gets ours, and has it taken away again, one imported in
    between included.
    """
    utils = upstream.core("utils")
    if getattr(layers, _FUSION):
        found.kept.append(f"{layers.__name__}.{_FUSION} and {utils.__name__}.{_DRAIN}: apex is there")
        return
    found.put(layers, _FUSION, value=True)
    found.replaced.append(f"{layers.__name__}.{_FUSION}: fused weight gradients need no apex now")
    ours, theirs = drain_embedding_wgrad_compute, getattr(utils, _DRAIN)
    found.undo.append(lambda: _exchange(ours, theirs))
    _exchange(theirs, ours)
    found.replaced.append(f"{utils.__name__}.{_DRAIN}: writes main_grad by our backends")


def _exchange(before: object, after: object) -> None:
    for module in upstream.imported_modules():
        for name, value in list(vars(module).items()):
            if value is before:
                setattr(module, name, after)


def _named(owner: Any, name: str) -> str:
    place = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    return f"{place}.{name}"
