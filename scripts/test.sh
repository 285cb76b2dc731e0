#!/usr/bin/env bash
# Command 2: make .venv if need be, then run the tests. What follows goes to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec .venv/bin/python -m pytest "$@"
