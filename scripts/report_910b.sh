#!/usr/bin/env bash
# Run the lessons on a card, all that take one, and pack tables, JSON, plots, traces and versions into one file to send:
#   bash scripts/report_910b.sh npu:0
# A lesson that fails is part of the report: its exit status stands in summary.txt.
set -euo pipefail
scripts=$(dirname "$(readlink -f "$0" 2>/dev/null || echo "$0")")
. "$scripts/setup.sh"
name=report
device=${1:-npu}

report=$root/results/report_910b
begin "write down this machine"
rm -rf "$report" "$report.tar.gz"
mkdir -p "$report/traces"
{
  date
  uname -a
  run npu-smi info || echo "no npu-smi"
  run "$venv/bin/python" -I -m pip list
} >"$report/machine.txt" 2>&1

lesson() { # name, script, options
  local file=$report/$1 script=$root/09_flash_attention/$2 status=0
  begin "$1"
  shift 2
  run "$venv/bin/python" "$script" "$@" --device "$device" --json "$file.json" >"$file.txt" 2>&1 || status=$?
  echo "$step: exit status $status" | tee -a "$report/summary.txt" >&2
}
lesson small_attention small_attention.py
lesson safe_softmax safe_softmax.py
lesson attention flash_attention.py --mode all --plot "$report"
lesson attention_auto flash_attention.py --mode speed --br auto --bc auto
lesson attention_half flash_attention.py --mode all --dtype float16 --br auto --bc auto
lesson attention_causal flash_attention.py --mode all --causal --br auto --bc auto
lesson fast_tiles fast_tiles.py --plot "$report"
lesson articles articles.py
lesson cross_reference cross_reference.py --traces "$report/traces"
lesson roofline roofline.py --plot "$report"
lesson generations generations.py
lesson lazy_rescale lazy_rescale.py --plot "$report"
lesson approximate approximate.py --plot "$report"
lesson variants flash_variants.py
lesson decoding flash_decoding.py --mode all
lesson pages flash_pages.py
lesson judge judge_kernel.py --kernel npu --plot "$report"
lesson backward flash_backward.py --mode all --br auto --bc auto
lesson mini_gpt mini_gpt.py

begin "pack the report"
run tar -czf "$report.part" -C "$root/results" report_910b
mv "$report.part" "$report.tar.gz"
echo "report: $report.tar.gz"
