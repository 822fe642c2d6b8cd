#!/usr/bin/env bash
# Measures this machine, then searches a layout for a Transformer language model, reports it, and trains a little
# under it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

layoutopt=.venv/bin/layoutopt
model=examples/transformer_lm.py
mesh="data:2;model:4"
machine=build/machine.json
mkdir -p build

# One to two minutes, once; without it, predictions are of another machine.
[[ -f $machine ]] || "$layoutopt" calibrate --mesh "$mesh" --out "$machine"
"$layoutopt" search "$model" --mesh "$mesh" --hardware "$machine" --out build/plan.json --report build/report.html
"$layoutopt" train "$model" --layout build/plan.json --mesh "$mesh" --hardware "$machine" --steps 30

cat <<END

The plan is build/plan.json, its report build/report.html; $machine is what was measured. Next:
  $layoutopt cost $model --mesh "$mesh" --layout "batch:data"          price a layout of your own
  $layoutopt search $model --devices 512 --hardware tpu-v2   search the mesh's shape as well
  $layoutopt validate $model --mesh "$mesh" --hardware $machine   predictions beside measurements
  $layoutopt --help                                                    everything else
END
