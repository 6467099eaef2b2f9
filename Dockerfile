# Two images from one recipe, docker/install.sh, for a user who is not root:
#
#   docker build --build-arg ON=gpu --tag megatron-frozen:gpu .    NVIDIA's PyTorch, with Transformer Engine and apex
#   docker build --build-arg ON=cpu --tag megatron-frozen:cpu .    Python and a small torch
#
# EXTRA=test adds what the tests need. Where the index has another torch than a small one by default, hand pip one that
# has the CPU builds: --build-arg PIP_EXTRA_INDEX_URL=...

ARG ON=gpu

FROM nvcr.io/nvidia/pytorch:26.03-py3 AS base-gpu

FROM python:3.11.15-slim AS base-cpu
# This package and torch.compile build their kernels with a C++ compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

FROM base-${ON}
ARG EXTRA=train
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1
WORKDIR /opt/megatron_frozen
COPY setup.py pyproject.toml requirements-dev.txt README.md LICENSE ./
COPY docker docker
COPY megatron_frozen megatron_frozen
COPY examples examples
COPY tests tests
RUN docker/install.sh "$EXTRA"
RUN useradd --create-home --uid 10001 frozen && chown frozen: .
USER frozen
CMD ["megatron-frozen", "env"]
