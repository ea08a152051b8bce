#!/bin/bash
# Made by: grappe submit --site roihu -- train digits epochs=3
# Roihu, GPU nodes, CSC. 4 processes on 1 node, plan: replicate=4
# 4 GPUs for at most 00:30:00: 2 GPU-hours, 400 billing units
# Unconfirmed, node.capability: from memory: that of Hopper
#SBATCH --job-name=digits-1
#SBATCH --account=project_abc
#SBATCH --partition=gpumedium
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=72
#SBATCH --gres=gpu:gh200:4
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

unset PYTHONPATH PYTHONHOME; export PYTHONNOUSERSITE=1 # no packages of another Python
module purge
module load python-pytorch/2.10
env="$TMPDIR/grappe-$UID/0123456789ab"
on_each_node make_environment "$env" module python --no-deps
python=$env/bin/python

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits epochs=3 --job --plan replicate=4 --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label --gpu-bind=none "$python" -m grappe train digits epochs=3 --plan replicate=4 --run "$run" --data data
}
keep_going
finish train 50
