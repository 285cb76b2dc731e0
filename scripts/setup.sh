#!/usr/bin/env bash
# Make .venv with everything in requirements.txt. A whole one is left as it is; a half-made one is
# made anew. On Ascend, torch and torch_npu follow the CANN release; an installed pair is kept.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
stamp=.venv/complete # written last, so a .venv without it is half-made
wanted=$(cat requirements.txt constraints.txt scripts/setup.sh scripts/ascend_pair.py | cksum)
[ "$(cat $stamp 2>/dev/null)" = "$wanted" ] && exit 0

trap 'echo "setup: failed at: $step" >&2' ERR
begin() {
  step=$1
  echo "setup: $step" >&2
}
install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" >&2; }
# The CPU build is a tenth of the size: from pip's own sources, else from PyTorch's.
install_cpu() {
  install "$1+cpu" 2>/dev/null ||
    install "$1+cpu" --extra-index-url https://download.pytorch.org/whl/cpu || install "$1"
}

begin "check that $python is Python 3.9 or newer"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))'

begin "look for CANN"
ascend=$("$python" scripts/ascend_pair.py)

begin "make .venv"
rm -rf .venv
"$python" -m venv .venv

case $ascend in
keep)
  begin "let .venv see the installed torch and torch_npu"
  site='import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec("torch").origin).parents[1])'
  purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
  "$python" -c "$site" >"$(.venv/bin/python -c "$purelib")/kept.pth"
  ;;
none)
  begin "install torch"
  torch=$(.venv/bin/python scripts/pinned.py torch)
  if [ "$(uname)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then
    install_cpu "$torch"
  else
    install "$torch"
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
  install -r requirements.txt -c constraints.txt
else
  install -r requirements.txt
fi

echo "$wanted" >$stamp
