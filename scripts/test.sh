#!/usr/bin/env bash
# Command 2: make .venv if need be, then run the tests. What follows goes to pytest.
set -euo pipefail
scripts=$(dirname "$(readlink -f "$0" 2>/dev/null || echo "$0")")
. "$scripts/setup.sh"
cd "$root"
export OMP_NUM_THREADS=1 # the tests' tensors are small, and threads that wait are slow
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
