"""The rules of the code, applied to the code. Each rule has a control below it: a snippet that it must catch."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.gates import architecture, messages, shape
from tests.gates.source import PACKAGE, ROOT, Module, module_from, modules_under

PACKAGE_MODULES = modules_under(PACKAGE)
TEST_MODULES = modules_under("tests")
ALL_MODULES = PACKAGE_MODULES + TEST_MODULES + modules_under("examples")


def _package_module(text: str, name: str = "lora.layer") -> Module:
    return module_from(text, name=f"{PACKAGE}.{name}")


def _report(faults: list[str]) -> str:
    return "\n".join(faults)


# name: (rule for one file, the files it holds for, a snippet it must catch, what it must say)
PER_FILE: dict[str, tuple[Callable[[Module], list[str]], list[Module], str, str]] = {
    "file length": (shape.size_faults, ALL_MODULES, "x = 1\n" * 401, "401 lines, at most 400"),
    "function length": (shape.size_faults, ALL_MODULES, "def f():\n" + "    x = 1\n" * 60, "f() has 61 lines"),
    "parameters": (shape.signature_faults, PACKAGE_MODULES, "def f(*, a, b, c, d, e, g, h, i, j): ...", "9 parameters"),
    "positional": (
        shape.signature_faults,
        PACKAGE_MODULES,
        "class A:\n    def f(self, x: Tensor, a: int, b: int, c: int): ...",
        "A.f() takes a, b, c by position",
    ),
    "mutable config": (shape.config_faults, PACKAGE_MODULES, "@dataclass(frozen=True)\nclass AConfig: pass", "slots"),
    "undocumented field": (
        shape.config_faults,
        PACKAGE_MODULES,
        '@dataclass(frozen=True)\nclass AConfig:\n    a: int\n    """Said."""\n    b: int',
        "b has no docstring",
    ),
    "autograd table": (
        shape.autograd_faults,
        PACKAGE_MODULES,
        'class F(torch.autograd.Function):\n    """Shapes: x [T]\n    Forward: y\n    Dgrad: z"""',
        "the docstring of F lacks Wgrad, Dbias, Collectives, Saved, Why",
    ),
    "loose ends": (shape.loose_end_faults, ALL_MODULES, "x = 1  # TO" + "DO: more", "TO" + "DO"),
    "stub": (shape.loose_end_faults, ALL_MODULES, "def f():\n    raise NotImplementedError", "NotImplementedError"),
    "empty body": (shape.loose_end_faults, ALL_MODULES, 'def f():\n    """Text."""\n    pass', "f() does nothing"),
    "private import": (
        architecture.private_import_faults,
        PACKAGE_MODULES,
        "from megatron_frozen.comm import _all",
        "imports _all of megatron_frozen.comm, which is private there",
    ),
    "local import": (
        architecture.local_import_faults,
        PACKAGE_MODULES,
        "def f():\n    from megatron_frozen import io",
        "imports megatron_frozen inside f()",
    ),
    "hidden local import": (
        architecture.local_import_faults,
        PACKAGE_MODULES,
        "def f():\n    importlib.import_module('megatron_frozen.io')",
        "imports megatron_frozen.io inside f()",
    ),
    "main_grad attribute": (
        architecture.main_grad_faults,
        PACKAGE_MODULES,
        "weight.main_grad.zero_()",
        "names main_grad",
    ),
    "main_grad string": (
        architecture.main_grad_faults,
        PACKAGE_MODULES,
        "getattr(weight, 'grad_added_to_main_grad')",
        "names grad_added_to_main_grad",
    ),
    "matmul operator": (architecture.product_faults, PACKAGE_MODULES, "y = x @ w", "multiplies matrices"),
    "matmul call": (architecture.product_faults, PACKAGE_MODULES, "y = torch.matmul(x, w)", "multiplies matrices"),
    "product in place": (architecture.product_faults, PACKAGE_MODULES, "y.addmm_(x, w)", "multiplies matrices"),
    "product of kernels": (
        architecture.product_faults,
        PACKAGE_MODULES,
        "kernels.multiply_into(out, A, B, accumulate=True)",
        "multiplies matrices",
    ),
    "imported product": (
        architecture.product_faults,
        PACKAGE_MODULES,
        "from torch.nn.functional import linear",
        "multiplies matrices",
    ),
    "collective": (architecture.collective_faults, PACKAGE_MODULES, "dist.all_reduce(x)", "calls dist.all_reduce"),
    "imported collective": (
        architecture.collective_faults,
        PACKAGE_MODULES,
        "from torch.distributed import all_gather_single",
        "imports a collective",
    ),
    "environment": (
        architecture.environment_faults,
        PACKAGE_MODULES,
        "os.environ['RANK']",
        "touches the environment",
    ),
    "skip": (shape.skip_faults, TEST_MODULES, "@pytest.mark.skip\ndef test_x(): assert f()", "without a reason"),
    "skipif": (shape.skip_faults, TEST_MODULES, "@pytest.mark.skipif(True)\ndef test_x(): ...", "without a reason"),
    "importorskip": (shape.skip_faults, TEST_MODULES, "x = pytest.importorskip('x', reason='r')", "importorskip"),
    "no assertion": (shape.assertion_faults, TEST_MODULES, "def test_x():\n    f()", "test_x() asserts nothing"),
}


@pytest.mark.parametrize("name", PER_FILE)
def test_every_file_keeps_the_rule(name: str) -> None:
    rule, modules, _, _ = PER_FILE[name]
    faults = [fault for module in modules for fault in rule(module)]
    assert not faults, _report(faults)


@pytest.mark.parametrize("name", PER_FILE)
def test_the_rule_catches_its_control(name: str) -> None:
    rule, _, snippet, expected = PER_FILE[name]
    assert expected in _report(rule(_package_module(snippet)))


def test_imports_go_down_the_ladder() -> None:
    faults = architecture.ladder_faults(PACKAGE_MODULES)
    assert not faults, _report(faults)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemm.products", "from megatron_frozen.layers import ColumnParallelLinear"),
        ("lora.layer", "import megatron_frozen.models.config"),
        ("gemm.products", "from megatron_frozen import comm"),
        ("train.trainer", "from megatron_frozen import CausalLM"),
        ("lora.layer", "from .config import LoraConfig"),
        ("attic.old", "x = 1"),
    ],
)
def test_ladder_catches_a_step_up(name: str, text: str) -> None:
    comm = module_from("", name=f"{PACKAGE}.comm", is_package=True)
    assert architecture.ladder_faults([comm, _package_module(text, name)])


def test_ladder_lets_a_room_import_itself_and_lower_ones() -> None:
    text = "from megatron_frozen import comm\nfrom megatron_frozen.lora.config import LoraConfig\nimport torch"
    assert not architecture.ladder_faults([module_from("", name=f"{PACKAGE}.comm"), _package_module(text)])


def test_imports_have_no_cycles() -> None:
    faults = architecture.cycle_faults(PACKAGE_MODULES)
    assert not faults, _report(faults)


def test_cycle_is_caught() -> None:
    first = _package_module("from megatron_frozen.lora import second", "lora.first")
    second = _package_module("from megatron_frozen.lora.first import x", "lora.second")
    assert "lora.first -> megatron_frozen.lora.second" in _report(architecture.cycle_faults([first, second]))


def test_each_library_has_one_home() -> None:
    faults = architecture.library_faults(PACKAGE_MODULES)
    assert not faults, _report(faults)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f():\n    import yaml", "yaml is imported in 2 files"),
        ("from torch.utils import tensorboard", "tensorboard is imported in 2 files"),
        ("import pandas", "pandas is no library of this project"),
    ],
)
def test_second_home_and_unknown_library_are_caught(text: str, expected: str) -> None:
    homes = [_package_module(text, "train.first"), _package_module(text, "train.second")]
    assert expected in _report(architecture.library_faults(homes))


@functools.cache
def _loaded_by(statement: str) -> set[str]:
    """Optional libraries that a fresh interpreter has loaded after the statement."""
    code = f"import sys\n{statement}\nprint(*sorted(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name.split(".")[0] for name in output.split()} & architecture.OPTIONAL_LIBRARIES


def test_importing_the_package_loads_no_optional_library() -> None:
    assert _loaded_by(f"import {PACKAGE}") - _loaded_by("import torch") <= {"safetensors"}


def test_a_loaded_optional_library_is_noticed() -> None:
    assert "yaml" in _loaded_by("import yaml") - _loaded_by("import torch")


def test_public_face_is_a_table_of_contents() -> None:
    faults = architecture.face_faults(next(module for module in PACKAGE_MODULES if module.name == PACKAGE))
    assert not faults, _report(faults)


@pytest.mark.parametrize("text", ["from megatron_frozen.io import read_json", "import logging", "x = f()"])
def test_public_face_with_anything_else_is_caught(text: str) -> None:
    assert architecture.face_faults(module_from(text, name=PACKAGE, is_package=True))


def test_every_raise_has_a_test_that_matches_its_text() -> None:
    own_tests = [module for module in TEST_MODULES if "gates" not in module.name]
    faults = messages.message_faults(PACKAGE_MODULES, own_tests)
    assert not faults, _report(faults)


_RAISES = """
_TIED = "the head {name} is tied to the embedding"

def f(name, sizes):
    if not sizes:
        raise ConfigError(f"sizes of {name} sum to nothing at all; give a Hugging Face folder")
    if name:
        raise ConfigError(_TIED.format(name=name))
    raise _refusal(name)

def _refusal(name):
    return DataError(f"{name}: this row is broken; give a Hugging Face folder")
"""


@pytest.mark.parametrize(
    ("matched", "missing"),
    [
        (r"sum to nothing at all|tied to the embedding|this row is broken", []),
        (r"tied to the embedding|a: this row is broken", ["sum to nothing at all"]),
        (r"sum to nothing at all|this row is broken", ["is tied to the embedding"]),
        (r"sum to nothing at all|tied to the embedding", ["this row is broken"]),
        # What two messages share proves neither.
        ("give a Hugging Face folder", ["sum to nothing at all", "is tied to the embedding", "this row is broken"]),
    ],
)
def test_raise_without_a_test_is_caught(matched: str, missing: list[str]) -> None:
    tests = [module_from(f"def test_x():\n    with pytest.raises(E, match={matched!r}):\n        f()", name="tests.x")]
    faults = messages.message_faults([_package_module(_RAISES)], tests)
    assert len(faults) == len(missing), _report(faults)
    assert all(text in fault for text, fault in zip(missing, faults, strict=True)), _report(faults)


def test_raise_without_words_is_caught() -> None:
    assert "no literal words" in _report(messages.message_faults([_package_module("raise ConfigError(str(x))")], []))


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    f()\nexcept DataError as error:\n    raise DataError(f'{place}: {error}') from error",
        "def raise_exception(message: str):\n    raise TemplateError(message)",
    ],
)
def test_raise_that_passes_on_a_text_needs_no_words(text: str) -> None:
    assert not messages.message_faults([_package_module(text)], [])
