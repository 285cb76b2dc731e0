#!/usr/bin/env bash
# Make .venv with everything in requirements.txt. A whole one is left as it is; a half-made one is
# made anew. On Ascend, torch and torch_npu follow the CANN release; an installed pair is kept.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
name=setup venv=.venv
stamp=.venv/complete # written last, so a .venv without it is half-made
wanted=$(cat requirements.txt constraints.txt scripts/setup.sh scripts/steps.sh scripts/ascend_pair.py | cksum)
[ "$(cat $stamp 2>/dev/null)" = "$wanted" ] && exit 0
. scripts/steps.sh

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
  if [ "$(uname)" = Linux ]; then
    begin "install Triton, which only a CUDA build of torch brings along"
    install "$(.venv/bin/python scripts/pinned.py triton)"
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
