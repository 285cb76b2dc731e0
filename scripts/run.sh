#!/usr/bin/env bash
# Command 1: make .venv if need be, then run the phase. What follows goes to the program, and the last word counts:
#   bash scripts/run.sh --mode verify --causal
set -euo pipefail
scripts=$(dirname "$(readlink -f "$0" 2>/dev/null || echo "$0")")
. "$scripts/setup.sh"
# A default that is replaced is left out: its folder need not be one that can be written.
case " $* " in *" --json"*) ;; *) set -- --json "$root/results/flash_attention.json" "$@" ;; esac
case " ${*/--mode=/--mode } " in
*" --plot"* | *" --mode verify "* | *" --mode trace "*) ;; # these modes have no plot
*) set -- --plot "$root/results" "$@" ;;
esac
exec "$root/.venv/bin/python" "$root/09_flash_attention/flash_attention.py" --mode all "$@"
