"""Without torchrun, tests run on CPUs, whatever the machine has; ranks of torchrun take the GPUs that there are."""

import os

if "TORCHELASTIC_RUN_ID" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
