"""Python sources as the gates see them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_frozen"

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Module:
    """One file: its dotted name, whether it is a package's __init__, its text and its tree."""

    name: str
    is_package: bool
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """`megatron_frozen.comm` for everything in comm/."""
        return ".".join(self.name.split(".")[:2])

    @property
    def path(self) -> str:
        """Relative to the repository, for messages."""
        return self.name.replace(".", "/") + ("/__init__.py" if self.is_package else ".py")


def module_from(text: str, *, name: str, is_package: bool = False) -> Module:
    return Module(name=name, is_package=is_package, text=text, tree=ast.parse(text))


def modules_under(folder: str) -> list[Module]:
    """Every Python file below a folder of the repository."""
    modules = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(module_from(path.read_text(encoding="utf-8"), name=name, is_package=is_package))
    return modules


def functions(tree: ast.AST) -> Iterator[FunctionNode]:
    return (node for node in ast.walk(tree) if isinstance(node, FunctionNode))


def imports(tree: ast.AST) -> Iterator[tuple[int, str, list[str]]]:
    """(line, module, names taken from it) of every import, at any depth, importlib's with a literal name included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or ""), [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in {"import_module", "__import__"}:
            literals = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            yield from ((node.lineno, name, []) for name in literals if isinstance(name, str))


def dotted(node: ast.AST) -> str:
    """`torch.autograd.Function` for that expression, "" for anything that is no chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""
