#!/usr/bin/env bash
# Installs megatron_frozen from this source tree: what both images of the Dockerfile run, and CI in a clean environment.
#
#   docker/install.sh [EXTRA]    EXTRA of setup.py is train if not given; PYTHON is the interpreter, python3 if not set
#
# A torch that is there stays, with everything that is compiled against it: their versions are constraints of each
# install, and compared afterwards. Where there is none, all packages are those that requirements-dev.txt pins.
set -euo pipefail

source=$(cd "$(dirname "$0")/.." && pwd)
extra=${1:-train}
python=${PYTHON:-python3}
pip=("$python" -m pip --disable-pip-version-check)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

kept_versions() {
    "$python" - <<'PYTHON'
from importlib import metadata

for name in (
    "torch", "torchvision", "torchaudio", "triton", "pytorch-triton", "numpy", "apex", "flash-attn",
    "transformer-engine", "transformer-engine-cu12", "transformer-engine-cu13", "transformer-engine-torch",
):
    try:
        print(f"{name}=={metadata.version(name)}")
    except metadata.PackageNotFoundError:
        continue
PYTHON
}

kept_versions > "$work/before.txt"
if grep -q '^torch==' "$work/before.txt"; then
    constraints=$work/before.txt
else
    constraints=$source/requirements-dev.txt
    : > "$work/before.txt" # nothing there is compiled against a torch
fi

# Built from a copy, so that the source tree stays as it is, and in an environment of its own, which no constraint of
# the base image may tie to an older setuptools.
mkdir "$work/source"
cp -r "$source"/{setup.py,pyproject.toml,README.md,LICENSE,megatron_frozen} "$work/source"
env -u PIP_CONSTRAINT "${pip[@]}" install --no-deps --force-reinstall "$work/source"
"${pip[@]}" install --constraint "$constraints" "megatron-frozen[$extra]"

kept_versions > "$work/after.txt"
while read -r version; do
    if ! grep -qxF -- "$version" "$work/after.txt"; then
        echo "install.sh: $version was installed, and another version is now; the install must leave it alone" >&2
        exit 1
    fi
done < "$work/before.txt"

cd "$work" # where no source tree hides what has been installed
"$python" -m megatron_frozen env
