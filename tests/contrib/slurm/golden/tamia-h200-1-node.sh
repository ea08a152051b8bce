#!/bin/bash
# Made by: grappe submit --site tamia-h200 -- train digits epochs=3
# TamIA, H200, Digital Research Alliance of Canada. 8 processes on 1 node, plan: replicate=8
# 8 GPUs for at most 00:30:00: 4 GPU-hours
# Unconfirmed, detect: from memory: the variable CC_CLUSTER
# Unconfirmed, node.cores_per_gpu: in proportion; whole nodes only
# Unconfirmed, node.memory_per_gpu_gb: in proportion; whole nodes only
#SBATCH --job-name=digits-1
#SBATCH --account=aip-abc
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=h200:8
#SBATCH --mem=1024G
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
module load python/3.11
export WANDB_MODE=offline HF_HUB_OFFLINE=1 # compute nodes have no internet here
env="$SLURM_TMPDIR/grappe-$UID/0123456789ab"
on_each_node make_environment "$env" virtualenv python --no-deps
python=$env/bin/python

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits epochs=3 --job --plan replicate=8 --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label --gpu-bind=none "$python" -m grappe train digits epochs=3 --plan replicate=8 --run "$run" --data data
}
keep_going
finish train 50
