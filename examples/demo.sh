#!/usr/bin/env bash
# Calibrates this machine, searches the best layout of a Transformer language model, and measures it beside data
# parallelism at once; then searches a plan for Llama 3 8B on 64 H100s. Takes about four minutes of CPU time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PATH=$PWD/.venv/bin:$PATH
model=(examples/transformer_lm.py --set batch=8 --set length=32 --set d_model=512)
mesh="data:2;model:2"
machine=build/machine.json
mkdir -p build
began=$SECONDS

echo "== 1. Calibrate this machine ($(uptime | sed 's/.*load/load/'))"
layoutopt calibrate --mesh "$mesh" --out "$machine"

echo; echo "== 2. Search the best layout for four of its virtual devices"
layoutopt search "${model[@]}" --mesh "$mesh" --hardware "$machine" --out build/plan.json --report build/report.html

echo; echo "== 3. Measure the plan, then pure data parallelism: compare the rows 'step' and 'predicted'"
layoutopt measure "${model[@]}" --layout build/plan.json --hardware "$machine"
layoutopt measure "${model[@]}" --mesh "$mesh" --layout "batch:data+model" --hardware "$machine"

echo; echo "== 4. Plan for chips that you do not have: Llama 3 8B on 64 H100s, 32 sequences of 8,192 tokens per step"
layoutopt search examples/transformer_lm.py:llama3_8b --devices 64 --hardware h100 --set batch=32

cat <<END

The demo took $((SECONDS - began)) s. If a measured time is far from the predicted one, the note of \`measure\` says what may be why.
Report of step 2: build/report.html. Next:

compare predictions with measurements of more layouts, in turns, without the CPU time of other processes:
  .venv/bin/layoutopt validate ${model[*]} --mesh "$mesh" --hardware $machine
train the model:
  .venv/bin/layoutopt train ${model[*]} --layout build/plan.json --hardware $machine --steps 30
list all commands:
  .venv/bin/layoutopt --help
END
