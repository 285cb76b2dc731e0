#!/usr/bin/env bash
# Check and time the Triton kernel on this machine's CUDA GPU within six minutes, once torch is there:
#   bash scripts/gpu_check.sh
# A python3 whose torch sees the GPU and that has Triton, rich and matplotlib is taken; else .venv is made.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
if ! "$python" -c 'import matplotlib, rich, torch, triton; torch.zeros(1, device="cuda")' 2>/dev/null; then
  bash "$root/scripts/setup.sh"
  python=$root/.venv/bin/python
fi
exec "$python" "$root/09_flash_attention/gpu_check.py" "$@"
