#!/bin/bash
# A TPU of one host (8 chips): create, train, delete.
set -euo pipefail
NAME=layoutopt ZONE=us-west4-a
gcloud compute tpus tpu-vm create $NAME --zone=$ZONE --accelerator-type=v5litepod-8 --version=v2-alpha-tpuv5-lite
gcloud compute tpus tpu-vm scp --recurse layoutopt model.py plan.json $NAME: --zone=$ZONE
gcloud compute tpus tpu-vm ssh $NAME --zone=$ZONE --command='
    curl -LsSf https://astral.sh/uv/install.sh | sh
    ~/.local/bin/uv venv --python 3.12 ~/env
    ~/.local/bin/uv pip install --python ~/env/bin/python "./layoutopt[tpu]"
    ~/env/bin/layoutopt train model.py --layout plan.json --checkpoint run'
gcloud compute tpus tpu-vm scp --recurse $NAME:run . --zone=$ZONE
gcloud compute tpus tpu-vm delete $NAME --zone=$ZONE --quiet
