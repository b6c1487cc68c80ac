#!/usr/bin/env bash
# Puts into .wheels/ (ignored by git) what a GPU machine without a package index lacks: a few megabytes for its Python and
# processor. bash benchmarks/gpu/wheels.sh [PYTHON VERSION, 3.12] [MACHINE, x86_64]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
version=${1:-3.12} machine=${2:-x86_64} python=${PYTHON:-python3} wheels=${GPU_WHEELS:-.wheels}
platforms=()
for release in 2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17; do
  platforms+=(--platform "manylinux_${release}_$machine")
done
rm -rf "$wheels"
mkdir -p "$wheels"
while read -r requirement; do
  [[ -z $requirement || $requirement == \#* ]] && continue
  "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --dest "$wheels" \
    --implementation cp --python-version "$version" "${platforms[@]}" --platform "manylinux2014_$machine" "$requirement" 2>/dev/null ||
    # Only a source archive: a wheel of it is the same for every Python, if nothing in it is compiled.
    "$python" -m pip wheel -q --disable-pip-version-check --no-deps --wheel-dir "$wheels" "$requirement"
done <benchmarks/gpu/wheels.txt
ls "$wheels"
