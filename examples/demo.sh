#!/usr/bin/env bash
# Search, report and a short training of a Transformer language model, on this machine alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

layoutopt=.venv/bin/layoutopt
model=examples/transformer_lm.py
mesh="data:2;model:4"
mkdir -p build

"$layoutopt" search "$model" --mesh "$mesh" --out build/plan.json --report build/report.html
"$layoutopt" train "$model" --layout build/plan.json --mesh "$mesh" --steps 30

cat <<END

The plan is build/plan.json, its report build/report.html. Next:
  $layoutopt cost $model --mesh "$mesh" --layout "batch:data"          price a layout of your own
  $layoutopt search $model --devices 512 --hardware tpu-v2   search the mesh's shape as well
  $layoutopt calibrate                                                 fit the costs to this machine
  $layoutopt --help                                                    everything else
END
