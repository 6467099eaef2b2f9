"""How long, how wide and how documented: sizes, signatures, configs, autograd tables, stubs and tests."""

from __future__ import annotations

import ast
import io
import re
import tokenize

from tests.gates.source import FunctionNode, Module, dotted, functions

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
MAX_POSITIONAL = 2  # that are no tensors: "what, from where" reads well without names, a third one does not;
MAX_PRIVATE_POSITIONAL = 3  # its few callers stand in the same file

# Their argument lists are Megatron's or Transformer Engine's, or torch's protocol for autograd classes and modules.
FOREIGN_SIGNATURES = {
    "ColumnParallelLinear.__init__", "LayerNormLinear.__init__", "Linear.__init__", "RowParallelLinear.__init__",
    "VocabParallelEmbedding.__init__",
    "ColumnSteps.__init__", "RowSteps.__init__", "Steps.sharded_state_dict", "SavesShards.sharded_state_dict",
    "linear_with_frozen_weight", "linear_with_grad_accumulation_and_async_allreduce",
    "linear_with_split_parameters", "drop_extra_state", "initialize_model_parallel",
    "set_tensor_model_parallel_attributes", "vocab_parallel_cross_entropy",
}  # fmt: skip
_TORCH_PROTOCOL = {"__torch_dispatch__", "forward", "backward", "setup_context", "jvp", "vmap"}

AUTOGRAD_HEADINGS = ("Shapes", "Forward", "Dgrad", "Wgrad", "Dbias", "Collectives", "Saved", "Why")
_LOOSE_ENDS = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")  # in pieces: this line is text too


def size_faults(module: Module) -> list[str]:
    num_lines = len(module.text.splitlines())
    faults = [f"{module.path}: {num_lines} lines, at most {MAX_FILE_LINES}"] if num_lines > MAX_FILE_LINES else []
    for function in functions(module.tree):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        if length > MAX_FUNCTION_LINES:
            faults.append(
                f"{module.path}:{function.lineno}: {function.name}() has {length} lines, at most {MAX_FUNCTION_LINES}"
            )
    return faults


def signature_faults(module: Module) -> list[str]:
    faults = []
    for name, function in _qualified_functions(module.tree):
        if name in FOREIGN_SIGNATURES or function.name in _TORCH_PROTOCOL:
            continue
        arguments = function.args
        positional = [arg for arg in arguments.posonlyargs + arguments.args if arg.arg not in {"self", "cls"}]
        num_parameters = len(positional) + len(arguments.kwonlyargs)
        if num_parameters > MAX_PARAMETERS:
            faults.append(
                f"{module.path}:{function.lineno}: {name}() has {num_parameters} parameters, at most {MAX_PARAMETERS}"
            )
        others = [arg.arg for arg in positional if not _is_tensor(arg)]
        if len(others) > (MAX_PRIVATE_POSITIONAL if function.name.startswith("_") else MAX_POSITIONAL):
            faults.append(
                f"{module.path}:{function.lineno}: {name}() takes {', '.join(others)} by position; "
                "tensors are positional, the rest keyword-only"
            )
    return faults


def _qualified_functions(tree: ast.Module) -> list[tuple[str, FunctionNode]]:
    in_classes = {
        id(function): f"{owner.name}.{function.name}"
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for function in owner.body
        if isinstance(function, FunctionNode)
    }
    return [(in_classes.get(id(function), function.name), function) for function in functions(tree)]


def _is_tensor(argument: ast.arg) -> bool:
    """Annotated as a tensor, alone or in a union or a list."""
    return argument.annotation is not None and bool(re.search(r"Tensor|Parameter\b", ast.unparse(argument.annotation)))


def config_faults(module: Module) -> list[str]:
    """A configuration class that is not frozen, keyword-only and slotted, or has a field without its docstring."""
    faults = []
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ClassDef) or not node.name.endswith("Config"):
            continue
        switches = _dataclass_switches(node)
        if switches is None:
            continue
        faults += [
            f"{module.path}:{node.lineno}: {node.name} is no {switch}=True dataclass"
            for switch in ("frozen", "kw_only", "slots")
            if switch not in switches
        ]
        for field, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and not _is_docstring(following):
                faults.append(f"{module.path}:{field.lineno}: {ast.unparse(field.target)} has no docstring below it")
    return faults


def _dataclass_switches(node: ast.ClassDef) -> set[str] | None:
    """The keywords that are True in @dataclass(...), None where the class is no dataclass."""
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        if dotted(call.func if call else decorator).split(".")[-1] == "dataclass":
            keywords = call.keywords if call else []
            return {word.arg or "" for word in keywords if ast.unparse(word.value) == "True"}
    return None


def _is_docstring(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def autograd_faults(module: Module) -> list[str]:
    """An autograd class whose docstring is no table with all the headings."""
    faults = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and any(_is_autograd_function(base) for base in node.bases):
            text = ast.get_docstring(node) or ""
            missing = [
                word for word in AUTOGRAD_HEADINGS if not re.search(rf"^\W*{word}\b|\b{word}:", text, re.MULTILINE)
            ]
            if missing:
                faults.append(f"{module.path}:{node.lineno}: the docstring of {node.name} lacks {', '.join(missing)}")
    return faults


def _is_autograd_function(base: ast.expr) -> bool:
    return dotted(base) in {"torch.autograd.Function", "autograd.Function", "Function"}


def loose_end_faults(module: Module) -> list[str]:
    """Comments and docstrings that mark unfinished work, and functions with an empty body that are not abstract."""
    prose = [(token.start[0], token.string) for token in _comments(module.text)]
    prose += [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr) and _is_docstring(node)
    ]
    faults = [f"{module.path}:{line}: {match.group()}" for line, text in prose if (match := _LOOSE_ENDS.search(text))]
    faults += [
        f"{module.path}:{node.lineno}: raises NotImplementedError"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Raise) and node.exc is not None and "NotImplementedError" in ast.unparse(node.exc)
    ]
    protocols = {
        id(function)
        for owner in ast.walk(module.tree)
        if isinstance(owner, ast.ClassDef) and any(dotted(base).endswith("Protocol") for base in owner.bases)
        for function in owner.body
    }
    for function in functions(module.tree):
        marks = {dotted(decorator).split(".")[-1] for decorator in function.decorator_list}
        last = function.body[-1]  # a docstring alone says why there is nothing to do
        if (
            (isinstance(last, ast.Pass) or ast.unparse(last) == "...")
            and id(function) not in protocols
            and not marks & {"overload", "abstractmethod"}
        ):
            faults.append(f"{module.path}:{function.lineno}: {function.name}() does nothing")
    return faults


def _comments(text: str) -> list[tokenize.TokenInfo]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token for token in tokens if token.type == tokenize.COMMENT]


def skip_faults(module: Module) -> list[str]:
    """A skip or an expected failure that gives no reason; importorskip never has one."""
    faults = []
    with_arguments = {id(node.func): node for node in ast.walk(module.tree) if isinstance(node, ast.Call)}
    for node in ast.walk(module.tree):
        name = dotted(node)
        if (
            not isinstance(node, ast.Attribute)
            or not name.startswith("pytest.")
            or name.split(".")[-1] not in {"skip", "skipif", "xfail", "importorskip"}
        ):
            continue
        call = with_arguments.get(id(node))
        is_mark = name.startswith("pytest.mark.")
        given = call is not None and (
            any(word.arg in {"reason", "msg"} for word in call.keywords) or (not is_mark and bool(call.args))
        )
        if not given or name.endswith("importorskip"):
            faults.append(f"{module.path}:{node.lineno}: {name} without a reason")
    return faults


def assertion_faults(module: Module) -> list[str]:
    """A test that asserts nothing: no assert, no pytest.raises, no helper of the file or ranks that assert for it."""
    checking: set[str] = set()
    while more := {f.name for f in functions(module.tree) if _asserts(f, helpers=checking)} - checking:
        checking |= more
    return [
        f"{module.path}:{function.lineno}: {function.name}() asserts nothing"
        for function in functions(module.tree)
        if function.name.startswith("test_") and function.name not in checking
    ]


def _asserts(function: FunctionNode, *, helpers: set[str]) -> bool:
    names = {dotted(node.func).split(".")[-1] for node in ast.walk(function) if isinstance(node, ast.Call)}
    return (
        any(isinstance(node, ast.Assert) for node in ast.walk(function))
        or any(re.match(r"_?(assert|check|expect|raises|warns|run_ranks|fail)", name) for name in names)
        or bool(names & helpers)
    )
