"""Without torchrun, tests run on CPUs, whatever the machine has; ranks of torchrun take the GPUs that there are."""

import os
import random

import pytest
import torch

if "TORCHELASTIC_RUN_ID" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before its fixtures: a test draws the same numbers whichever tests ran before it."""
    random.seed(0)
    torch.manual_seed(0)
