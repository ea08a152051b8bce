#!/bin/bash
# Made by: grappe submit --site killarney -- train digits epochs=3
# Killarney, L40S, Digital Research Alliance of Canada. 4 processes on 1 node, plan: replicate=4
# 4 GPUs for at most 00:30:00: 2 GPU-hours
# Unconfirmed, detect: from memory: the variable CC_CLUSTER
# Unconfirmed, ask.max_hours: not stated: that of the other clusters
# Unconfirmed, ask.min_minutes: not stated: that of the other clusters
# Unconfirmed, node.cores_per_gpu: in proportion
# Unconfirmed, node.memory_per_gpu_gb: in proportion
# Unconfirmed, job.internet: from a partner's handbook
#SBATCH --job-name=digits-1
#SBATCH --account=aip-abc
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=l40s:4
#SBATCH --mem=512G
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

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits epochs=3 --job --plan replicate=4 --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label --gpu-bind=none "$python" -m grappe train digits epochs=3 --plan replicate=4 --run "$run" --data data
}
keep_going
finish train 50
