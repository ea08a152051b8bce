#!/bin/bash
# Made by: grappe submit --site lumi -- train digits epochs=3
# LUMI-G, CSC. 16 processes on 2 nodes, plan: replicate=16
# 16 GPUs for at most 00:30:00: 8 GPU-hours
# Unconfirmed, queue.small-g: max_nodes is from memory
#SBATCH --job-name=digits-1
#SBATCH --account=project_abc
#SBATCH --partition=small-g
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=8
#SBATCH --mem=480G
#SBATCH --time=00:30:00
#SBATCH --signal=B:USR2@90
#SBATCH --output=/scratch/me/runs/digits-1/logs/job-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue

set -u
cd -- /scratch/me || exit 1
run=/scratch/me/runs/digits-1
# Passes signals on to the processes, puts the job back into the queue: grappe submit writes the file.
source "$run/logs/job.sh" || exit 1

python=/home/me/.venv/bin/python

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits epochs=3 --job --plan replicate=16 --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label --gpu-bind=none "$python" -m grappe train digits epochs=3 --plan replicate=16 --run "$run" --data data
}
keep_going
finish train 50
