"""Every raise in the package has a test that matches some of its text.

Read statically: a message is cut into runs of three words, holes for values left open; the runs that no other message
of the package has are its fingerprint; one of them must stand in a string of a test. Regex escapes there are undone.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.gates.source import FunctionNode, Module, dotted, functions

_RUN_WORDS = 3
_HOLE = "\0"  # a value in a message
_NO_MESSAGE = {"AssertionError", "KeyboardInterrupt", "StopIteration", "SystemExit", "GeneratorExit"}


@dataclass(frozen=True, kw_only=True)
class Message:
    """One raise statement: where it is and its literal texts, with a _HOLE for each value."""

    path: str
    line: int
    texts: tuple[str, ...]


def message_faults(package: Sequence[Module], tests: Sequence[Module]) -> list[str]:
    messages = [message for module in package for message in sorted(messages_of(module), key=lambda found: found.line)]
    # The same text raised in two places is one message: a test of either matches both.
    counts = Counter(run for texts in {message.texts for message in messages} for run in _runs(texts))
    tested = "\n".join(re.sub(r"\\(.)", r"\1", text) for module in tests for text in _texts(module.tree))
    tested = re.sub(r"[^\S\n]+", " ", tested)
    faults = []
    for message in messages:
        place = f"{message.path}:{message.line}"
        runs = _runs(message.texts)
        if not runs:
            faults.append(f"{place}: the message has no literal words; say what is wrong in the raise")
            continue
        fingerprint = [run for run in runs if counts[run] == 1] or sorted(runs)
        if not any(re.search(run, tested) for run in fingerprint):
            shown = max(message.texts, key=len).replace(_HOLE, "{}")
            faults.append(f"{place}: no test matches the text {shown!r}")
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
        texts = _literals(node.exc, names=constants | local, helpers=helpers)
        yield Message(path=module.path, line=node.lineno, texts=tuple(texts))


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
    """The texts of an expression, through names assigned in reach and helpers of the same file."""
    found = list(_texts(node))
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and child.id in names:
            found += _texts(names[child.id])
        elif isinstance(child, ast.Call) and (helper := helpers.get(dotted(child.func).split(".")[-1])):
            for statement in helper.body[1:] if ast.get_docstring(helper) else helper.body:
                found += _texts(statement)
    # `"... {name} ...".format(name=...)` has holes inside one literal.
    return [re.sub(r"\{\w*\}", _HOLE, text) for text in found]


def _texts(tree: ast.AST) -> Iterator[str]:
    """String literals; an f-string is one text with holes, and what strings its holes hold come after it."""
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        yield tree.value
    elif isinstance(tree, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else _HOLE for part in tree.values)
        for part in tree.values:
            if isinstance(part, ast.FormattedValue):
                yield from _texts(part.value)
    else:
        for child in ast.iter_child_nodes(tree):
            yield from _texts(child)


def _assignments(nodes: Sequence[ast.AST]) -> dict[str, ast.expr]:
    return {
        target.id: node.value
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _runs(texts: Sequence[str]) -> set[str]:
    """Runs of three words as patterns, in which a hole is anything on the line; a shorter text is one run."""
    runs: set[str] = set()
    for text in texts:
        words = re.findall(rf"{_HOLE}|[\w'`=-]*\w[\w'`=-]*", text)
        starts = [index for index, word in enumerate(words) if word != _HOLE]
        if not starts or sum(len(words[index]) for index in starts) < 5:
            continue
        size = min(_RUN_WORDS, len(starts))
        runs |= {_pattern(words[starts[i] : starts[i + size - 1] + 1]) for i in range(len(starts) - size + 1)}
    return runs


def _pattern(words: Sequence[str]) -> str:
    pattern = re.escape(words[0])
    for before, word in itertools.pairwise(words):
        if word != _HOLE:
            pattern += (r".{0,80}?" if before == _HOLE else r"[^\w\n]+") + re.escape(word)
    return pattern
