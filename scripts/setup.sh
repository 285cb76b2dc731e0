#!/usr/bin/env bash
# Make .venv with everything in requirements.txt. A whole one is left as it is; a half-made one is
# made anew. On Ascend, torch and torch_npu follow the CANN release; an installed pair is kept.
set -euo pipefail
scripts=$(dirname "$(readlink -f "$0" 2>/dev/null || echo "$0")")
name=setup
. "$scripts/steps.sh"

accept() {
  begin "check that $python is Python 3.9 or newer"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))'
  begin "look for CANN"
  ascend=$("$python" "$scripts/ascend_pair.py")
}

fill() {
  case $ascend in
  keep*)
    begin "let .venv see the installed torch and torch_npu"
    purelib=$("$venv/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    tail -n +2 <<<"$ascend" >"$purelib/kept.pth"
    ;;
  none)
    begin "install torch"
    torch=$("$venv/bin/python" -I "$scripts/pinned.py" torch)
    if [ "$(uname)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then
      install_cpu "$torch"
    else
      install "$torch"
    fi
    if [ "$(uname)" = Linux ]; then
      begin "install Triton, which only a CUDA build of torch brings along"
      install "$("$venv/bin/python" -I "$scripts/pinned.py" triton)"
    fi
    ;;
  *)
    begin "install $ascend"
    read -r torch torch_npu <<<"$ascend"
    install_cpu "$torch"
    # What torch_npu and CANN's compiler import without saying so.
    install "$torch_npu" "numpy<2" pyyaml setuptools attrs decorator psutil scipy cloudpickle tornado
    ;;
  esac
  begin "install the other packages"
  if [ "$ascend" = none ]; then
    install -r "$root/requirements.txt" -c "$root/constraints.txt"
  else
    install -r "$root/requirements.txt"
  fi
}

make_venv "$root/.venv" "torch, numpy, rich, matplotlib, pytest, hypothesis, ruff, xdist" \
  "$root"/{requirements.txt,constraints.txt,scripts/setup.sh,scripts/steps.sh,scripts/ascend_pair.py}
