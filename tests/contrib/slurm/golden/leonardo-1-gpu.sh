#!/bin/bash
# Made by: grappe submit --site leonardo -- train digits epochs=3
# Leonardo Booster, CINECA. 1 process on 1 node
# 1 GPU for at most 00:30:00: 0.5 GPU-hours, 4 core-hours
# Unconfirmed, node.memory_per_gpu_gb: from memory
# Unconfirmed, node.memory_gb: 512 GB are in a node; how many of them a job may have is from memory
# Unconfirmed, node.network: from memory
# Unconfirmed, queue.normal: from memory
# Unconfirmed, queue.debug: its limits are from memory
# Unconfirmed, job.local: from memory
#SBATCH --job-name=digits-1
#SBATCH --account=abc
#SBATCH --partition=boost_usr_prod
#SBATCH --qos=normal
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:1
#SBATCH --mem=123G
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

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits epochs=3 --job --plan '' --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label --gpu-bind=none "$python" -m grappe train digits epochs=3 --run "$run" --data data
}
keep_going
finish train 50
