#!/usr/bin/env bash
# Compile the Triton kernel for Hopper, without a GPU, and print what it takes on the chip. What follows goes to
# compile_kernel.py:
#   bash scripts/compile_hopper.sh --dtype bfloat16 --head-dim 128
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
bash "$root/scripts/setup.sh"
exec "$root/.venv/bin/python" "$root/09_flash_attention/compile_kernel.py" hopper "$@"
