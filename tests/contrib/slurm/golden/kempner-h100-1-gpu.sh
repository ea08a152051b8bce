#!/bin/bash
# Made by: grappe submit --site kempner-h100 -- train digits epochs=3
# Kempner, H100, FASRC. 1 process on 1 node
# 1 GPU for at most 00:30:00: 0.5 GPU-hours
# Unconfirmed, queue.kempner_requeue: its hours are those of the other partitions
# Unconfirmed, ask.account: inferred: each documented script has one
#SBATCH --job-name=digits-1
#SBATCH --account=kempner_abc
#SBATCH --partition=kempner_h100
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=24
#SBATCH --gres=gpu:1
#SBATCH --mem=360G
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

export GRAPPE_WARNS='0.2 kempner-h100'
python=/home/me/.venv/bin/python

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits epochs=3 --job --plan '' --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label --gpu-bind=none "$python" -m grappe train digits epochs=3 --run "$run" --data data
}
keep_going
finish train 50
