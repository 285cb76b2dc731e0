#!/usr/bin/env bash
# Compile the Triton kernel for the Ascend 910B3, without a card, and print what fits on the chip. triton-ascend
# installs as `triton`, so it gets an environment of its own. What follows goes to compile_kernel.py:
#   bash scripts/compile_910b.sh --dtype float16 --head-dim 64 128
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

python=${PYTHON:-python3}
name=compile_910b venv=$root/.venv-910b
stamp=$venv/complete # written last, so an environment without it is half-made
wanted=$(cat "$root"/scripts/{compile_910b,steps}.sh | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  . "$root/scripts/steps.sh"
  begin "check that $python is Python 3.10 or 3.11 on Linux: triton-ascend and ascendnpu-ir have no other (set PYTHON)"
  "$python" -c 'import sys; sys.exit(sys.platform != "linux" or sys.version_info[:2] not in ((3, 10), (3, 11)))'
  begin "make .venv-910b"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  begin "install torch and rich"
  install_cpu torch==2.13.0
  install 'numpy<2.3' pybind11 rich
  begin "install triton-ascend"
  install --no-deps triton_ascend==3.2.0 ascendnpu-ir==1.2.0
  echo "$wanted" >"$stamp"
fi
exec "$venv/bin/python" "$root/09_flash_attention/compile_kernel.py" 910b "$@"
