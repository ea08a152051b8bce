#!/bin/bash
# Made by: grappe submit --site jean-zay-v100 -- train digits epochs=3
# Jean Zay, V100, four a node, IDRIS. 8 processes on 2 nodes, plan: replicate=8
# 8 GPUs for at most 00:30:00: 4 GPU-hours
# Unconfirmed, job.modules: the version is that of users' scripts of 2026: module avail pytorch-gpu
# Unconfirmed, job.mps: seen in users' scripts only
# Unconfirmed, queue: only users' scripts of 2026 have the names and hours; the numbers of GPUs are those of V100 in IDRIS's older pages
#SBATCH --job-name=digits-1
#SBATCH --account=abc@v100
#SBATCH --hint=nomultithread
#SBATCH --qos=qos_gpu-t3
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=10
#SBATCH --gres=gpu:4
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
module load pytorch-gpu/py3/2.8.0
export WANDB_MODE=offline HF_HUB_OFFLINE=1 # compute nodes have no internet here
env="${TMPDIR:-/tmp}/grappe-$UID/0123456789ab"
on_each_node make_environment "$env" module python --no-deps
python=$env/bin/python

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits epochs=3 --job --plan replicate=8 --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label --gpu-bind=none "$python" -m grappe train digits epochs=3 --plan replicate=8 --run "$run" --data data
}
keep_going
finish train 50
