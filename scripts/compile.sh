#!/usr/bin/env bash
# Compile the Triton kernels for a chip, without the chip, and print what fits on it: for the Ascend 910B3 by three
# releases of its compiler, or for Hopper. For the 910B3, what its compiler reads is then run on this CPU, where MLIR is:
#   apt-get install mlir-19-tools clang-19 libmlir-19
# What follows goes to compile_kernel.py:
#   bash scripts/compile.sh 910b --dtype float16 --head-dim 64 128
#   bash scripts/compile.sh hopper --dtype bfloat16 --kernel flash_attention_kernel
set -euo pipefail
scripts=$(dirname "$(readlink -f "$0" 2>/dev/null || echo "$0")")
compilers=(1.0.0 1.1.0 1.2.0) # of CANN 8.5.0, of 9.0.0 and of a newer one

accept() {
  begin "check that $python is Python 3.10 or 3.11 on Linux: triton-ascend and ascendnpu-ir have no other (set PYTHON)"
  "$python" -c 'import sys; sys.exit(sys.platform != "linux" or sys.version_info[:2] not in ((3, 10), (3, 11)))'
}

fill() { # triton-ascend installs as `triton`: hence an environment of its own
  begin "install torch and rich"
  install_cpu torch==2.13.0
  install 'numpy<2.3' pybind11 rich
  begin "install triton-ascend"
  install --no-deps triton_ascend==3.2.0
  for release in "${compilers[@]}"; do
    begin "install ascendnpu-ir $release"
    install --no-deps --target "$venv/ascendnpu-ir-$release" "ascendnpu-ir==$release"
  done
}

case ${1-} in
910b)
  name=compile
  . "$scripts/steps.sh"
  make_venv "$root/.venv-910b" "torch, numpy, rich, pybind11, triton.backends.ascend" \
    "$root"/scripts/{compile,steps}.sh
  shift
  folders=()
  for release in "${compilers[@]}"; do folders+=("$venv/ascendnpu-ir-$release"); done
  set -- 910b --compilers "${folders[@]}" "$@"
  ;;
hopper) . "$scripts/setup.sh" ;;
*)
  echo "compile: the chip is 910b or hopper, got '${1-}'" >&2
  exit 2
  ;;
esac
exec "$venv/bin/python" "$root/09_flash_attention/chips/compile_kernel.py" "$@"
