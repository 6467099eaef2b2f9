"""The ladder, and what belongs in one place only."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tests.gates.source import PACKAGE, Module, dotted, functions, imports

# A room imports from itself and from rooms of a smaller number, nothing else. Whole numbers are the design's rungs; a
# fraction stands above its neighbours on one rung: all of rung 0 raises errors, kernels keep files by io, main_grad has
# gemm fill its buffers, and bench measures on the ranks that testing starts.
RUNGS = {
    "errors": 0, "layout": 0.5, "partition": 0.5, "storage": 0.5, "environment": 0.5,
    "io": 0.6, "script": 0.6, "kernels": 0.7,
    "gemm": 1, "comm": 1, "diagnostics": 1, "main_grad": 1.5,
    "autograd": 2, "params": 2,
    "functional": 3, "layers": 4,
    "lora": 5, "models": 5, "integrations": 5,
    "checkpoint": 6, "gpt_lora": 6, "train": 7,
    "testing": 8, "bench": 8.5,
    "cli": 9, "__main__": 10,
}  # fmt: skip

# Third-party libraries that may be absent (safetensors never is, but has one home too). torch and numpy are not here.
OPTIONAL_LIBRARIES = {
    "apex", "fused_weight_gradient_mlp_cuda", "gguf", "jinja2", "matplotlib", "megatron", "megatron_fsdp", "peft",
    "safetensors", "tensorboard", "tokenizers", "tqdm", "transformer_engine", "transformers", "yaml",
}  # fmt: skip
_OTHER_NAMES = {"torch.utils.tensorboard": "tensorboard"}

MAIN_GRAD_NAMES = {
    "main_grad", "get_main_grad", "grad_added_to_main_grad", "overwrite_main_grad", "zero_out_wgrad", "__fsdp_param__",
    "_gbuf", "is_data_distributed", "is_gtp_weight_remat",
}  # fmt: skip
_PRODUCTS = {
    "Bilinear", "Linear", "addbmm", "addbmm_", "addmm", "addmm_", "addmv", "addmv_", "addr", "addr_", "baddbmm",
    "baddbmm_", "bilinear", "bmm", "chain_matmul", "dot", "einsum", "ger", "inner", "linear", "matmul", "mm",
    "multi_dot", "multiply_into", "mv", "outer", "scaled_mm", "_scaled_mm", "tensordot", "vdot",
}  # fmt: skip
_COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather",
    "gather_object", "irecv", "isend", "monitored_barrier", "new_group", "new_subgroups",
    "new_subgroups_by_enumeration", "recv", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
}  # fmt: skip


def own_imports(module: Module, known: Iterable[str]) -> list[tuple[int, str]]:
    """(line, imported module of ours); `from package import x` counts as `package.x` where that is a module."""
    known = set(known)
    found = []
    for line, target, names in imports(module.tree):
        if target.split(".")[0] != PACKAGE:
            continue
        submodules = [f"{target}.{name}" for name in names if f"{target}.{name}" in known]
        found += [(line, name) for name in submodules]
        if len(submodules) < max(1, len(names)):
            found.append((line, target))
    return found


def ladder_faults(modules: Sequence[Module]) -> list[str]:
    faults = []
    known = [module.name for module in modules]
    for module in modules:
        rung = _rung(module.room)
        if rung is None:
            faults.append(f"{module.path}: the room {module.room} stands on no rung; add it to RUNGS")
            continue
        for line, target, _ in imports(module.tree):
            if target.startswith("."):
                faults.append(f"{module.path}:{line}: relative import {target}; write it in full")
        for line, target in own_imports(module, known):
            target_room = ".".join(target.split(".")[:2])
            target_rung = _rung(target_room)
            if target_room != module.room and (target_rung is None or target_rung >= rung):
                faults.append(f"{module.path}:{line}: imports {target}, which is not on a lower rung")
    return faults


def _rung(room: str) -> float | None:
    """The package's own __init__ is a table of contents: it imports every room, and no room imports it."""
    return 11 if room == PACKAGE else RUNGS.get(room.removeprefix(f"{PACKAGE}."))


def cycle_faults(modules: Sequence[Module]) -> list[str]:
    names = {module.name for module in modules}
    edges = {module.name: {target for _, target in own_imports(module, names)} & names for module in modules}
    done: set[str] = set()
    faults = []

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            faults.append("import cycle: " + " -> ".join([*trail[trail.index(name) :], name]))
        elif name not in done:
            for target in sorted(edges[name]):
                visit(target, [*trail, name])
            done.add(name)

    for name in sorted(edges):
        visit(name, [])
    return faults


def local_import_faults(module: Module) -> list[str]:
    return [
        f"{module.path}:{line}: imports {target} inside {function.name}(); import it on top"
        for function in functions(module.tree)
        for line, target, _ in imports(function)
        if target.split(".")[0] == PACKAGE
    ]


def private_import_faults(module: Module) -> list[str]:
    """A name with an underscore that is taken out of another file of ours."""
    return [
        f"{module.path}:{line}: imports {name} of {target}, which is private there; give it a public name"
        for line, target, names in imports(module.tree)
        if target.split(".")[0] == PACKAGE
        for name in names
        if name.startswith("_")
    ]


def library_faults(modules: Sequence[Module]) -> list[str]:
    """A third-party library outside the list, or one that is imported in more than one file."""
    homes: defaultdict[str, set[str]] = defaultdict(set)
    for module in modules:
        for _, target, names in imports(module.tree):
            full = [f"{target}.{name}" for name in names] + [target]
            library = next((_OTHER_NAMES[name] for name in full if name in _OTHER_NAMES), target.split(".")[0])
            if library and library not in sys.stdlib_module_names | {PACKAGE, "torch", "numpy"}:
                homes[library].add(module.path)
    faults = [
        f"{library} is no library of this project ({min(files)})"
        for library, files in homes.items()
        if library not in OPTIONAL_LIBRARIES
    ]
    return faults + [
        f"{library} is imported in {len(files)} files: {', '.join(sorted(files))}"
        for library, files in homes.items()
        if len(files) > 1
    ]


def main_grad_faults(module: Module) -> list[str]:
    return [
        f"{module.path}:{line}: names {name}, which only main_grad.py does"
        for line, name in _attributes_and_strings(module.tree)
        if name in MAIN_GRAD_NAMES and module.name != f"{PACKAGE}.main_grad"
    ]


def product_faults(module: Module) -> list[str]:
    """A matrix product outside gemm/."""
    if module.room == f"{PACKAGE}.gemm":
        return []
    lines = [node.lineno for node in ast.walk(module.tree) if isinstance(node, ast.BinOp) and _is_matmul(node.op)]
    lines += [
        node.lineno
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _PRODUCTS
        and dotted(node.func.value).split(".")[-1] != "gemm"
    ]
    lines += _taken_from(module, "torch", _PRODUCTS)
    return [f"{module.path}:{line}: multiplies matrices; only gemm/ does" for line in lines]


def _taken_from(module: Module, library: str, names: set[str]) -> list[int]:
    """Lines that import one of ``names`` from ``library`` or a part of it, to be called without a dot."""
    return [
        line
        for line, target, taken in imports(module.tree)
        if f"{target}.".startswith(f"{library}.") and names & set(taken)
    ]


def _is_matmul(operator: ast.operator) -> bool:
    return isinstance(operator, ast.MatMult)


def collective_faults(module: Module) -> list[str]:
    """A call of torch.distributed's collectives outside comm/."""
    if module.room == f"{PACKAGE}.comm":
        return []
    faults = [
        f"{module.path}:{node.lineno}: calls {dotted(node.func)}; only comm/ does"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and dotted(node.func).split(".")[-1] in _COLLECTIVES
        and dotted(node.func).split(".")[0] in {"dist", "torch"}
        and dotted(node.func).split(".")[:-1] != ["torch"]  # torch.gather is no collective
    ]
    taken = _taken_from(module, "torch.distributed", _COLLECTIVES)
    return faults + [f"{module.path}:{line}: imports a collective; only comm/ does" for line in taken]


def environment_faults(module: Module) -> list[str]:
    """A look at the process environment outside environment.py; the spawn pool sets up processes and may."""
    if module.room in {f"{PACKAGE}.environment", f"{PACKAGE}.testing"}:
        return []
    return [
        f"{module.path}:{node.lineno}: touches the environment; only environment.py does"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute | ast.Name)
        and dotted(node) in {"os.environ", "os.getenv", "os.putenv", "environ", "getenv"}
    ]


def face_faults(module: Module) -> list[str]:
    """Anything in the package's __init__ but its docstring, `X as X` imports of our own, and __version__."""
    faults = []
    for node in module.tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module == "__future__" or _exports(node)):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node is module.tree.body[0]:
            continue
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            continue
        faults.append(f"{module.path}:{node.lineno}: {ast.unparse(node)} is no line of a table of contents")
    return faults


def _exports(node: ast.ImportFrom) -> bool:
    is_ours = (node.module or "").split(".")[0] == PACKAGE
    return is_ours and all(alias.asname == alias.name for alias in node.names)


def _attributes_and_strings(tree: ast.AST) -> list[tuple[int, str]]:
    found = [(node.lineno, node.attr) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return found + [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
