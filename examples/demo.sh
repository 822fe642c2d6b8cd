#!/usr/bin/env bash
# Measures this machine, searches the best layout of a Transformer language model, writes a report, and trains the
# model under the plan for 30 steps.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

layoutopt=.venv/bin/layoutopt
model=examples/transformer_lm.py
mesh="data:2;model:4"
machine=build/machine.json
mkdir -p build

# This takes one to two minutes, once. Without it, predictions use placeholder numbers instead of this machine's.
[[ -f $machine ]] || "$layoutopt" calibrate --mesh "$mesh" --out "$machine"
"$layoutopt" search "$model" --mesh "$mesh" --hardware "$machine" --out build/plan.json --report build/report.html
"$layoutopt" train "$model" --layout build/plan.json --mesh "$mesh" --hardware "$machine" --steps 30

cat <<END

Plan: build/plan.json; report: build/report.html; measurements of this machine: $machine. Next:

predict the time of your own layout:
  $layoutopt cost $model --mesh "$mesh" --layout "batch:data" --hardware $machine
search the shape of the mesh too, for other hardware:
  $layoutopt search $model --devices 512 --hardware tpu-v2
compare predictions with measurements:
  $layoutopt validate $model --mesh "$mesh" --hardware $machine
list all commands:
  $layoutopt --help
END
