#!/bin/bash
# Made by: grappe submit --site perlmutter -- train digits epochs=3
# Perlmutter, NERSC. 8 processes on 2 nodes, plan: replicate=8
# 8 GPUs for at most 00:30:00: 4 GPU-hours, 1 node-hours
# Unconfirmed, ask.gpu_cores: the scheduler's message for the queue shared, which a user showed in 2025-11
# Unconfirmed, charge.gpu: the unit is documented; the price of a part of a node is inferred
# Unconfirmed, charge.cores_per_unit: inferred: the share of a node
# Unconfirmed, detect: from memory
# Unconfirmed, queue: the limits are from memory: see docs.nersc.gov/jobs/policy
# Unconfirmed, job.modules: from memory: module avail pytorch
# Unconfirmed, job.scratch: from memory
# Unconfirmed, node.network: from memory
# Unconfirmed, node.network_gbit: from memory
#SBATCH --job-name=digits-1
#SBATCH --account=abc_g
#SBATCH --constraint=gpu
#SBATCH --qos=regular
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
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
module load pytorch
env="${TMPDIR:-/tmp}/grappe-$UID/0123456789ab"
on_each_node make_environment "$env" module python --no-deps
python=$env/bin/python

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits epochs=3 --job --plan replicate=8 --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label --gpu-bind=none "$python" -m grappe train digits epochs=3 --plan replicate=8 --run "$run" --data data
}
keep_going
finish train 50
