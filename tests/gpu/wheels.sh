#!/usr/bin/env bash
# Fill tests/gpu/wheels for tests/gpu/run: `bash tests/gpu/wheels.sh [PYTHON_VERSION]`, 3.12 by default, with a network.
#
# Everything that Rankbook and its tests need for Linux on x86_64, but for torch and what only torch needs, which the
# machine with the GPU has. At most 60 MiB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
version=${1:-3.12}
folder=tests/gpu/wheels
rm -rf "$folder"
mkdir -p "$folder"
names=(ipython ipykernel pyzmq msgspec anywidget ipywidgets debugpy comm cloudpickle psutil platformdirs isal numpy
  jupyter_client pytest pytest-timeout pytest-xdist hypothesis pip)
python3 -m pip download -q -c constraints.txt --only-binary=:all: --python-version "$version" \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any \
  --implementation cp --abi "cp${version/./}" --abi abi3 --abi none -d "$folder" "${names[@]}"
size=$(du -sm "$folder" | cut -f1)
echo "$folder: $(ls "$folder" | wc -l) wheels, $size MiB"
((size <= 60)) || { echo "expected at most 60 MiB" >&2; exit 1; }
