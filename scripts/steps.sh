# Sourced by the scripts beside it: the repository's folder, steps that say what they do, an environment that is made
# once. They set `scripts`, this folder, and `name`, how their messages begin.
unset CDPATH PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PIP_PYTHON PIP_DRY_RUN # all that could lead elsewhere
root=$(cd "$scripts/.." && pwd)
python=${PYTHON:-python3}
step=start child=
exec 3>&2 # for messages, while a lesson's own output goes to a file
set -E    # functions too
trap 'echo "$name: failed at: $step" >&3' ERR
trap 'stop INT 130' INT
trap 'stop TERM 143' TERM
trap 'stop HUP 129' HUP

begin() {
  step=$1
  echo "$name: $step" >&3
}

# In a process group of its own, so that a stop ends all that it started.
run() {
  local status=0
  set -m
  "$@" </dev/null &
  child=$!
  set +m
  wait "$child" || status=$?
  child=
  return "$status"
}

stop() { # a signal, the exit status
  trap - INT TERM HUP ERR
  if [ -n "$child" ]; then { kill -"$1" -- "-$child" && wait "$child"; } 2>/dev/null || true; fi
  echo "$name: stopped at: $step" >&3
  exit "$2"
}

# Make the environment $1, unless a whole one is there, and see that the modules $2 load. The script defines `accept`,
# which refuses a Python, and `fill`, which installs. What is installed rests on the files $3 and further.
make_venv() {
  venv=$1 modules=$2
  shift 2
  rests_on=("$@")
  if whole; then return; fi
  step="start $python" # an activated $venv is about to go: then the Python that it was made with
  python=$("$python" -c 'import os, sys
inside = os.path.exists(sys.argv[1]) and os.path.samefile(sys.prefix, sys.argv[1])
print(sys._base_executable if inside else sys.executable)' "$venv")
  accept
  step="lock ${venv##*/}"
  exec 9>"$venv.lock" # held until this script and all that it started have ended
  run "$python" "$scripts/lock.py" now || {
    begin "wait for another set-up of ${venv##*/}"
    run "$python" "$scripts/lock.py" wait
  }
  if ! whole; then
    begin "make ${venv##*/}"
    rm -rf "$venv/complete" "$venv"
    run "$python" -I -m venv "$venv"
    fill
    begin "import what was installed: $modules"
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 run "$venv/bin/python" -I -c "import $modules"
    stamp "$venv/bin/python" >"$venv/complete"
  fi
  exec 9>&-
}

whole() { # and made with $PYTHON's version, where that is set
  local each found
  for each in "$venv/bin/python" ${PYTHON:+"$PYTHON"}; do
    found=$(stamp "$each" 2>/dev/null) && [ "$found" = "$(cat "$venv/complete" 2>/dev/null)" ] || return 1
  done
}
stamp() { "$1" "$scripts/stamp.py" "${rests_on[@]}"; }

# -I: what PYTHONPATH holds is not taken for installed.
install() { run "$venv/bin/python" -I -m pip install --quiet --disable-pip-version-check --no-user "$@" >&2; }

# The CPU build is a tenth of the size: from pip's own sources, else from PyTorch's.
install_cpu() {
  install "$1+cpu" 2>/dev/null ||
    install "$1+cpu" --extra-index-url https://download.pytorch.org/whl/cpu || {
      begin "install $1 in its plain build (on x86-64 with CUDA, some GB): no CPU build was found for $("$python" -V)"
      install "$1"
    }
}
