#!/usr/bin/env bash
# Run every lesson on a card and pack tables, JSON, plots, traces and versions into one file to send:
#   bash scripts/report_910b.sh npu:0
# A lesson that fails is part of the report: its exit status stands in summary.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:-npu}
bash scripts/setup.sh

report=results/report_910b
rm -rf $report
mkdir -p $report/traces
{
  date
  uname -a
  npu-smi info || echo "no npu-smi"
  .venv/bin/python -m pip list
} >$report/machine.txt 2>&1

lesson() { # name, script, options
  local name=$1 status=0
  shift
  echo "report: $name" >&2
  .venv/bin/python 09_flash_attention/"$@" --device "$device" --json $report/"$name".json \
    >$report/"$name".txt 2>&1 || status=$?
  echo "$name: exit status $status" | tee -a $report/summary.txt >&2
}
lesson attention flash_attention.py --mode all --plot $report
lesson attention_auto flash_attention.py --mode speed --br auto --bc auto
lesson attention_half flash_attention.py --mode all --dtype float16 --br auto --bc auto
lesson attention_causal flash_attention.py --mode all --causal --br auto --bc auto
lesson fast_tiles fast_tiles.py --plot $report
lesson articles articles.py
lesson cross_reference cross_reference.py --traces $report/traces
lesson variants flash_variants.py
lesson decoding flash_decoding.py --mode all
lesson backward flash_backward.py --mode all --br auto --bc auto
lesson mini_gpt mini_gpt.py

tar -czf $report.tar.gz -C results report_910b
echo "report: $report.tar.gz"
