#!/usr/bin/env bash
# Make .venv with everything in requirements.txt. A whole one is left as it is; a half-made one is made anew.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
stamp=.venv/complete # written last, so a .venv without it is half-made
wanted=$(cat requirements.txt constraints.txt scripts/setup.sh | cksum)
[ "$(cat $stamp 2>/dev/null)" = "$wanted" ] && exit 0

step=start
trap 'echo "setup: failed at: $step" >&2' ERR
begin() {
  step=$1
  echo "setup: $step" >&2
}
install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" >&2; }

begin "check that $python is Python 3.9 or newer"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))'

begin "make .venv"
rm -rf .venv
"$python" -m venv .venv

begin "install torch"
# Without a GPU the CPU build will do, a tenth of the size: from pip's own sources, else from PyTorch's.
torch=$(.venv/bin/python scripts/pinned.py torch)
cpu_index=https://download.pytorch.org/whl/cpu
if [ "$(uname)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then
  install "$torch+cpu" 2>/dev/null || install "$torch+cpu" --extra-index-url $cpu_index || install "$torch"
else
  install "$torch"
fi

begin "install the other packages"
install -r requirements.txt -c constraints.txt

echo "$wanted" >$stamp
