"""Our calls against Transformer Engine's own Python, release by release, read from its wheels with ast.

The wheels hold all of its Python and none of its C++. `general_gemm` is taken out of each and run up to the C++ call,
which a stand-in of that kernel's semantics takes. The wheels are downloaded once, into the user's cache.
"""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_frozen import environment
from megatron_frozen.gemm import reference, transformer_engine
from megatron_frozen.gemm.request import Product
from megatron_frozen.testing import relative_error
from tests.unit import gemm_foreign

# 2.0.0 was never published; workspace is an argument through 2.9; alpha and beta came in 2.7.
VERSIONS = ("2.1.0", "2.4.0", "2.6.0.post1", "2.8.0", "2.9.0", "2.10.0", "2.13.0", "2.20.2")
GEMM, BASE = "transformer_engine/pytorch/cpp_extensions/gemm.py", "transformer_engine/pytorch/module/base.py"
EXPORTS = "transformer_engine/pytorch/cpp_extensions/__init__.py"
CALLS = [
    (product, accumulate, with_bias)
    for product in Product
    for accumulate in (False, True)
    for with_bias in ([False] if product is Product.DGRAD else [False, True])
]


def wheel(version: str) -> Path:
    """The wheel of a release, from the cache or, the first time, from the package index."""
    folder = Path(environment.cache_home(), "megatron_frozen", "wheels")
    path = folder / f"transformer_engine-{version}-py3-none-any.whl"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            done = subprocess.run(
                [*command, "--dest", temporary, f"transformer_engine=={version}"], capture_output=True, text=True
            )
            if done.returncode:
                pytest.fail(f"pip could not download transformer_engine {version}; connect once: {done.stderr[-500:]}")
            os.replace(Path(temporary, path.name), path)
    return path


def tree_of(version: str, name: str) -> ast.Module:
    with zipfile.ZipFile(wheel(version)) as archive:
        return ast.parse(archive.read(name))


def function_of(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    return next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def general_gemm_of(version: str, tex: Any) -> Any:
    """The release's own `general_gemm` over a C++ module of ours; what serves quantized tensors says there are none."""
    tree = tree_of(version, GEMM)
    namespace: dict[str, Any] = {
        "torch": torch,
        "tex": tex,
        "TE_DType": {dtype: dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)},
        "swizzle_inputs": lambda *_: None,
        "reset_swizzled_inputs": lambda *_: None,
        "get_cublas_workspace": lambda *_: torch.empty(8, dtype=torch.uint8),
        "_unwrap_tensor": lambda tensor, _: tensor,
        "_validate_native_gemm_output_quantizer": lambda _: None,
    }
    namespace |= dict.fromkeys(("is_experimental", "is_custom", "_is_nvfp4_row_scaled_tensor"), lambda _: False)
    quantized = ("DebugQuantizer", "Float8BlockwiseQTensorBase", "Float8BlockwiseQTensorStorage")
    namespace |= {name: type(name, (), {}) for name in quantized}
    for name in ("validate_gemm_scale", "get_tensor_device", "general_gemm"):
        function = function_of(tree, name)
        if function is not None:
            exec(compile(_without_annotations(function), f"{version}/{GEMM}", "exec"), namespace)
    return namespace["general_gemm"]


def _without_annotations(function: ast.FunctionDef) -> ast.Module:
    for argument in function.args.args:
        argument.annotation = None
    function.returns = None
    return ast.Module(body=[function], type_ignores=[])


def generic_gemm(*args: Any, **keywords: Any) -> Any:
    """The C++ entry: 16 arguments by position in all releases, and communication, alpha and beta by keyword."""
    A, transa, B, transb, out, _, out_dtype, bias, _, gelu, _, grad, workspace, size, accumulate, _ = args
    assert (out_dtype, gelu, size) == (None, False, workspace.shape[0])
    assert keywords.get("alpha", 1.0) == 1.0
    assert keywords.get("beta", float(accumulate)) == float(accumulate)
    assert keywords["comm_overlap"] is None
    layout = "NT"[transa] + "NT"[transb]
    return gemm_foreign.general_gemm(A, B, layout=layout, out=out, accumulate=accumulate, bias=bias, grad=grad)


@pytest.fixture(autouse=True)
def _fresh_probe() -> Iterator[None]:
    transformer_engine._installed.cache_clear()
    yield
    transformer_engine._installed.cache_clear()


def install_release(monkeypatch: pytest.MonkeyPatch, version: str, general_gemm: Any) -> None:
    """Let our probe find the release: its `general_gemm`, and `get_workspace` where its module/base.py defines that."""
    gemm_foreign.install(monkeypatch, "transformer_engine.pytorch.cpp_extensions", general_gemm=general_gemm)
    has_workspace = function_of(tree_of(version, BASE), "get_workspace") is not None
    contents = {"get_workspace": lambda: torch.empty(8, dtype=torch.uint8)} if has_workspace else {}
    gemm_foreign.install(monkeypatch, "transformer_engine.pytorch.module.base", **contents)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_releases_own_python_takes_our_calls(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install_release(monkeypatch, version, general_gemm_of(version, SimpleNamespace(generic_gemm=generic_gemm)))
    for product, accumulate, with_bias in CALLS:
        request = gemm_foreign.make_request(product, accumulate=accumulate, with_bias=with_bias)
        for gaps in (False, True):
            left, right, out, bias = gemm_foreign.operands(request, gaps=gaps)
            expected = out.clone()
            expected_db = reference.run(request, left, right, out=expected, bias=bias)
            db = transformer_engine.run(request, left, right, out=out, bias=bias)
            assert relative_error(out, expected) < 1e-6, str(request)
            assert (db is None) == (expected_db is None)
            if db is not None and expected_db is not None:
                assert relative_error(db, expected_db) < 1e-6


@pytest.mark.parametrize("version", VERSIONS)
def test_our_arguments_bind_to_the_releases_signature(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    signature = inspect.signature(general_gemm_of(version, SimpleNamespace()))
    bound: list[inspect.BoundArguments] = []

    def general_gemm(*args: Any, **keywords: Any) -> Any:
        bound.append(signature.bind(*args, **keywords))
        return None, None, None, None

    install_release(monkeypatch, version, general_gemm)
    request = gemm_foreign.make_request(Product.WGRAD, accumulate=True)
    left, right, out, _ = gemm_foreign.operands(request, gaps=False)
    transformer_engine.run(request, left, right, out=out)
    arguments = bound[0].arguments
    assert arguments["A"] is right
    assert arguments["B"] is left
    assert arguments["out"] is out
    assert ("workspace" in arguments) == (tuple(map(int, version.split(".")[:2])) < (2, 10))
    other = {} if "workspace" in arguments else {"workspace": None}
    with pytest.raises(TypeError, match="workspace"):  # the control: the other generation's call does not fit
        signature.bind(right, left, layout="NT", **other)


@pytest.mark.parametrize("version", VERSIONS)
def test_general_gemm_is_exported_where_we_import_it(version: str) -> None:
    taken = [node.module for node in tree_of(version, EXPORTS).body if isinstance(node, ast.ImportFrom) and node.level]
    assert "gemm" in taken
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree_of(version, GEMM).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert "general_gemm" in names


_PROGRAM = """
import torch
from megatron_frozen.errors import ConfigError
from megatron_frozen.gemm import select, transformer_engine
from megatron_frozen.gemm.request import Product, Request
request = Request(
    product=Product.WGRAD, device_type="cuda", operand_dtype=torch.bfloat16, output_dtype=torch.float32,
)
print(transformer_engine.unsupported(request))
print(select.choose(request).NAME)
try:
    select.choose(request, wish="transformer_engine")
except ConfigError as error:
    print(error)
"""


# 2.8.0 first looks for CUDA libraries by running ldconfig, and raises CalledProcessError where that finds none.
@pytest.mark.parametrize(("version", "cause"), [("2.8.0", ""), ("2.20.2", "RuntimeError: Found empty ")])
def test_the_empty_meta_package_is_survived(tmp_path: Path, version: str, cause: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path)]
    subprocess.run([*command, str(wheel(version))], check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    reason, chosen, refusal = done.stdout.splitlines()
    assert reason.startswith("transformer_engine is installed but fails to import (" + cause)
    assert chosen != "transformer_engine"
    assert refusal.startswith("the gemm backend 'transformer_engine' cannot serve wgrad on cuda")
    assert reason in refusal
