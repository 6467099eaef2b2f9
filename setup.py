from __future__ import annotations

from pathlib import Path

from setuptools import find_packages, setup

# torch has a floor and no pin: the wheel for the user's accelerator is the user's choice. NVIDIA apex is found where a
# container brings it; it has no release on the index, and the project of that name there is another one.
TRAIN = ["gguf", "jinja2", "matplotlib", "pyyaml", "tensorboard", "tokenizers", "tqdm"]
# Any torch suits megatron-core, so this never moves the installed one.
MEGATRON = ["megatron-core==0.16.1"]
ONNX = ["onnx", "onnxruntime", "onnxscript"]
TEST = [*TRAIN, *MEGATRON, *ONNX, "hypothesis", "peft", "pytest", "pytest-timeout", "transformers"]
DEV = [*TEST, "pyright[nodejs]", "ruff"]

setup(
    name="megatron-frozen",
    version="0.1.0",
    description="Megatron-style tensor-parallel layers that stay fast when their weights are frozen (LoRA).",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_frozen", "megatron_frozen.*"]),
    package_data={"megatron_frozen.kernels": ["csrc/*"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.8", "numpy", "safetensors"],
    extras_require={
        "train": TRAIN,
        "megatron": MEGATRON,
        "te": ["transformer-engine[pytorch]"],
        "test": TEST,
        "dev": DEV,
    },
    entry_points={"console_scripts": ["megatron-frozen = megatron_frozen.cli:console_main"]},
)
