#!/bin/bash
# Made by: grappe submit --site narval -- train digits epochs=3
# Narval, Digital Research Alliance of Canada. 4 processes on 1 node, plan: replicate=4
# 4 GPUs for at most 00:30:00: 2 GPU-hours, 8.01 RGU-hours
# Unconfirmed, detect: from memory: the variable CC_CLUSTER
#SBATCH --job-name=digits-1
#SBATCH --account=def-abc
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=12
#SBATCH --gpus-per-node=a100:4
#SBATCH --mem=498G
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
export WANDB_MODE=offline HF_HUB_OFFLINE=1 # compute nodes have no internet here
env="$SLURM_TMPDIR/grappe-$UID/0123456789ab"
on_each_node unpack_environment "$env" /scratch/me/.grappe-environments/0123456789ab.tar.zst
export PATH="$env/bin:$PATH" VIRTUAL_ENV="$env"
python=$env/bin/python

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits epochs=3 --job --plan replicate=4 --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label --gpu-bind=none "$python" -m grappe train digits epochs=3 --plan replicate=4 --run "$run" --data data
}
keep_going
finish train 50
