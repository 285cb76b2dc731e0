#!/usr/bin/env bash
# Check and time the Triton kernels on this machine's CUDA GPU within six minutes, once torch is there:
#   bash scripts/gpu_check.sh
# A python3 whose torch sees the GPU and that has Triton, rich and matplotlib is taken; else .venv is made.
set -euo pipefail
scripts=$(dirname "$(readlink -f "$0" 2>/dev/null || echo "$0")")
name=gpu_check
. "$scripts/steps.sh"
if ! "$python" -c 'import matplotlib, rich, torch, triton; torch.zeros(1, device="cuda")' 2>/dev/null; then
  . "$scripts/setup.sh"
  python=$root/.venv/bin/python
fi
case " $* " in *" --folder"*) ;; *) set -- --folder "$root/results/gpu_check" "$@" ;; esac
exec "$python" "$root/09_flash_attention/chips/gpu_check.py" "$@"
