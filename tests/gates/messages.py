"""Every raise in the package has a test that matches some of its text.

Read statically: the literal parts of a message are cut into runs of three words; the runs that no other message of the
package has are its fingerprint; one of them must stand in a string of a test. Regex escapes in the tests are undone.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.gates.source import FunctionNode, Module, dotted, functions

_RUN_WORDS = 3
_NO_MESSAGE = {"AssertionError", "KeyboardInterrupt", "StopIteration", "SystemExit", "GeneratorExit"}


@dataclass(frozen=True, kw_only=True)
class Message:
    """One raise statement: where it is and the literal parts of its text."""

    path: str
    line: int
    parts: tuple[str, ...]


def message_faults(package: Sequence[Module], tests: Sequence[Module]) -> list[str]:
    messages = [message for module in package for message in sorted(messages_of(module), key=lambda found: found.line)]
    # The same text raised in two places is one message: a test of either matches both.
    counts = Counter(run for parts in {message.parts for message in messages} for run in _runs(parts))
    tested = "\n".join(_normal(re.sub(r"\\(.)", r"\1", text)) for module in tests for text in _strings(module.tree))
    faults = []
    for message in messages:
        runs = _runs(message.parts)
        if not runs:
            faults.append(
                f"{message.path}:{message.line}: the message has no literal words; say what is wrong in the raise"
            )
            continue
        fingerprint = [run for run in runs if counts[run] == 1] or sorted(runs)
        if not any(run in tested for run in fingerprint):
            faults.append(f"{message.path}:{message.line}: no test matches the text {_longest(message.parts)!r}")
    return faults


def messages_of(module: Module) -> Iterator[Message]:
    """The raises that say something of their own, not those that pass on a caught or given text."""
    helpers = {function.name: function for function in functions(module.tree)}
    constants = _assignments(module.tree.body)
    caught = {node.name for node in ast.walk(module.tree) if isinstance(node, ast.ExceptHandler) and node.name}
    owners = {id(node): function for function in functions(module.tree) for node in ast.walk(function)}
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Raise) or node.exc is None or isinstance(node.exc, ast.Name):
            continue  # a bare raise, or one of an exception made elsewhere
        owner = owners.get(id(node))
        if _only_passes_on(node.exc, passed=caught | (_parameters(owner) if owner else set())):
            continue
        exception = dotted(node.exc.func).split(".")[-1] if isinstance(node.exc, ast.Call) else dotted(node.exc)
        if exception in _NO_MESSAGE or not exception:
            continue
        local = _assignments(list(ast.walk(owner))) if owner else {}
        parts = _literals(node.exc, names=constants | local, helpers=helpers)
        yield Message(path=module.path, line=node.lineno, parts=tuple(parts))


def _only_passes_on(exception: ast.expr, *, passed: set[str]) -> bool:
    """Whether a message of no own words carries the text of a caught exception or of a parameter."""
    words = [child.value for child in ast.walk(exception) if isinstance(child, ast.Constant)]
    names = {child.id for child in ast.walk(exception) if isinstance(child, ast.Name)}
    return not re.search(r"\w", "".join(str(word) for word in words)) and bool(names & passed)


def _parameters(function: FunctionNode) -> set[str]:
    return {arg.arg for arg in function.args.args + function.args.kwonlyargs if _is_text(arg)}


def _is_text(argument: ast.arg) -> bool:
    return argument.annotation is not None and ast.unparse(argument.annotation) == "str"


def _literals(node: ast.AST, *, names: dict[str, ast.expr], helpers: dict[str, FunctionNode]) -> list[str]:
    """The string literals of an expression, through names assigned in reach and helpers of the same file."""
    found: list[str] = []
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            found.append(child.value)
        elif isinstance(child, ast.Name) and child.id in names:
            found += _literals(names[child.id], names={}, helpers={})
        elif isinstance(child, ast.Call) and (helper := helpers.get(dotted(child.func).split(".")[-1])):
            for statement in helper.body[1:] if ast.get_docstring(helper) else helper.body:
                found += _literals(statement, names={}, helpers={})
    # `"... {name} ...".format(name=...)` has holes inside one literal.
    return [part for text in found for part in re.split(r"\{\w*\}", text)]


def _assignments(nodes: Sequence[ast.AST]) -> dict[str, ast.expr]:
    return {
        target.id: node.value
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _runs(parts: Sequence[str]) -> set[str]:
    """Runs of three words; where every part is shorter, the parts themselves."""
    runs: set[str] = set()
    for part in parts:
        words = _normal(part).split()
        runs |= {" ".join(words[start : start + _RUN_WORDS]) for start in range(len(words) - _RUN_WORDS + 1)}
    return runs or {text for part in parts if len(text := _normal(part)) >= 5}


def _normal(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip(" .,;:'\"()")


def _longest(parts: Sequence[str]) -> str:
    return max(parts, key=len).strip()


def _strings(tree: ast.AST) -> Iterator[str]:
    """String literals, f-strings in one piece with their holes left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
