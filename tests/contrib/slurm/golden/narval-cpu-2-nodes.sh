#!/bin/bash
# Made by: grappe submit --site narval-cpu -- train digits epochs=3
# Narval, CPU nodes, Digital Research Alliance of Canada. 128 processes on 2 nodes, plan: device=cpu,replicate=128
# 128 cores for at most 00:30:00: 64 core-hours
# Unconfirmed, node: from memory: cores and memory of the most common node
#SBATCH --job-name=digits-1
#SBATCH --account=def-abc
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=64
#SBATCH --cpus-per-task=1
#SBATCH --mem=249G
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

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits epochs=3 --job --plan 'device=cpu,replicate=128' --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label "$python" -m grappe train digits epochs=3 --plan 'device=cpu,replicate=128' --run "$run" --data data
}
keep_going
finish train 50
