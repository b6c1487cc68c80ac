#!/usr/bin/env bash
# Everything that ten minutes on a GPU can tell. README.md beside this file says what the machine needs; --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
wheels=${GPU_WHEELS:-.wheels}
path=$PWD:$PWD/benchmarks
if compgen -G "$wheels/*.whl" >/dev/null; then # what the machine's own Python lacks: see wheels.sh
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  install=("$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --target "$site")
  if ! "${install[@]}" "$wheels"/*.whl; then # one that does not fit this Python stops pip, and must not stop the run
    for wheel in "$wheels"/*.whl; do "${install[@]}" "$wheel" || echo "not installed: $wheel"; done
  fi
  path=$path:$site
fi
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
"$python" -m gpu "$@"
