#!/bin/bash
# Made by: grappe submit --site trillium -- train digits epochs=3
# Trillium, Digital Research Alliance of Canada. 4 processes on 1 node, plan: replicate=4
# 4 GPUs for at most 00:30:00: 2 GPU-hours, 24.4 RGU-hours, 3 times
# Unconfirmed, detect: from memory: the variable CC_CLUSTER
# Unconfirmed, ask.max_gpus_of: 20 GPUs without RRG or RPP; we infer that these accounts are def-*
# Unconfirmed, job.requeue: inferred: no job is submitted from its compute nodes, so none is requeued from one
#SBATCH --job-name=digits-1
#SBATCH --account=def-abc
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=24
#SBATCH --gpus-per-node=h100:4
#SBATCH --time=00:30:00
#SBATCH --signal=B:USR2@90
#SBATCH --output=/scratch/me/runs/digits-1/logs/job-%j.out
#SBATCH --open-mode=append
#SBATCH --array=1-3%1

set -u
cd -- /scratch/me || exit 1
run=/scratch/me/runs/digits-1
# Passes signals on to the processes, puts the job back into the queue: grappe submit writes the file.
source "$run/logs/job.sh" || exit 1

export WANDB_MODE=offline HF_HUB_OFFLINE=1 # compute nodes have no internet here
python=/home/me/.venv/bin/python

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits epochs=3 --job --plan replicate=4 --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label --gpu-bind=none "$python" -m grappe train digits epochs=3 --plan replicate=4 --run "$run" --data data
}
keep_going
finish train 50
