# For the scripts that make an environment in $venv: steps that say what they do, and pip in it.
set -E # functions too
trap 'echo "$name: failed at: $step" >&2' ERR
trap 'echo "$name: stopped at: $step" >&2; exit 130' INT # pip ends as if it had failed
begin() {
  step=$1
  echo "$name: $step" >&2
}
install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2; }
# The CPU build is a tenth of the size: from pip's own sources, else from PyTorch's.
install_cpu() {
  install "$1+cpu" 2>/dev/null ||
    install "$1+cpu" --extra-index-url https://download.pytorch.org/whl/cpu || install "$1"
}
