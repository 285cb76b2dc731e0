#!/usr/bin/env bash
# Command 1: make .venv if need be, then run the phase. What follows goes to the program, and the last word counts:
#   bash scripts/run.sh --mode verify --causal
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec .venv/bin/python 09_flash_attention/flash_attention.py \
  --mode all --json results/flash_attention.json --plot results "$@"
