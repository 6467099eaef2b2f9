"""Without torchrun, tests run on CPUs, whatever the machine has; ranks of torchrun take the GPUs that there are."""

import os
import random
import shutil

import pytest
import torch

if "TORCHELASTIC_RUN_ID" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what torch's inductor compiles where it finds no compiler."""
    if shutil.which(os.environ.get("CXX", "g++")) is not None:
        return
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if any(isinstance(value, str) and value == "inductor" for value in parameters.values()):
            item.add_marker(pytest.mark.skip(reason="inductor needs a C++ compiler: g++, or what CXX names"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before its fixtures: a test draws the same numbers whichever tests ran before it."""
    random.seed(0)
    torch.manual_seed(0)
