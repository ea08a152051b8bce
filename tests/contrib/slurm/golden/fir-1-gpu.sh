#!/bin/bash
# Made by: grappe submit --site fir -- train digits epochs=3
# Fir, Digital Research Alliance of Canada. 1 process on 1 node
# 1 GPU for at most 00:30:00: 0.5 GPU-hours, 6.12 RGU-hours
# Unconfirmed, detect: from memory: the variable CC_CLUSTER
#SBATCH --job-name=digits-1
#SBATCH --account=def-abc
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=12
#SBATCH --gpus-per-node=h100:1
#SBATCH --mem=280G
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
env="$SLURM_TMPDIR/grappe-$UID/0123456789ab"
on_each_node make_environment "$env" virtualenv python --no-deps
python=$env/bin/python

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits epochs=3 --job --plan '' --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label --gpu-bind=none "$python" -m grappe train digits epochs=3 --run "$run" --data data
}
keep_going
finish train 50
