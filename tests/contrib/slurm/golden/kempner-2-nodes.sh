#!/bin/bash
# Made by: grappe submit --site kempner -- train digits epochs=3
# Kempner, A100, FASRC. 8 processes on 2 nodes, plan: replicate=8
# 8 GPUs for at most 00:30:00: 4 GPU-hours
# Unconfirmed, queue.kempner_requeue: its hours are those of the other partitions
# Unconfirmed, ask.account: inferred: each documented script has one
#SBATCH --job-name=digits-1
#SBATCH --account=kempner_abc
#SBATCH --partition=kempner
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --gres=gpu:4
#SBATCH --mem=960G
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

export GRAPPE_WARNS='0.2 kempner'
python=/home/me/.venv/bin/python

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits epochs=3 --job --plan replicate=8 --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label --gpu-bind=none "$python" -m grappe train digits epochs=3 --plan replicate=8 --run "$run" --data data
}
keep_going
finish train 50
