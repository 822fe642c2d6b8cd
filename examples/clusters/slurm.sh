#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append
# One process per GPU. Every process must see all GPUs of its node: --gpus-per-node, not --gpus-per-task.
export LAYOUTOPT_JOB_SECRET=$(openssl rand -hex 32)
export XLA_PYTHON_CLIENT_MEM_FRACTION=.95 SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
for attempt in 1 2 3 4; do
    srun --kill-on-bad-exit=0 layoutopt train model.py --cluster --mesh "data:4;model:8" --layout plan.json \
        --checkpoint "$SLURM_SUBMIT_DIR/run" --steps 100000 --every 500
    code=$?
    case $code in
    0 | 2 | 3 | 4) exit $code ;;
    130 | 143) sbatch "$0"; exit 0 ;;                 # out of time: the last step is saved
    esac                                              # 5 and more: a process was lost
done
exit $code
