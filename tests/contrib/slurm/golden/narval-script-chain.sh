#!/bin/bash
# Made by: grappe submit -- mine.py
# Narval, Digital Research Alliance of Canada. 4 processes on 1 node, plan: replicate=4
# 4 GPUs for at most 00:30:00: 2 GPU-hours, 8.01 RGU-hours, 3 times
# Unconfirmed, detect: from memory: the variable CC_CLUSTER
#SBATCH --job-name=other-1
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
#SBATCH --array=1-3%1

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

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor --script mine.py --job --plan replicate=4 --runs "$run"
process() {
    torchrun_variables
    program "$python" mine.py
}
on_each_process --gpu-bind=none
finish script 50
