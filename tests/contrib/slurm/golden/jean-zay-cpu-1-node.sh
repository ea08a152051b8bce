#!/bin/bash
# Made by: grappe submit --site jean-zay-cpu -- train digits epochs=3
# Jean Zay, CPU nodes, IDRIS. 40 processes on 1 node, plan: device=cpu,replicate=40
# 40 cores for at most 00:30:00: 20 core-hours
# Unconfirmed, job.modules: from memory: the module for GPUs, which computes on CPUs as well
# Unconfirmed, node.cores: from memory
# Unconfirmed, queue: the limits are from memory
# Unconfirmed, ask.max_hours: from memory: that of the longest queue
#SBATCH --job-name=digits-1
#SBATCH --account=abc@cpu
#SBATCH --hint=nomultithread
#SBATCH --qos=qos_cpu-t3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=40
#SBATCH --cpus-per-task=1
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

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits epochs=3 --job --plan 'device=cpu,replicate=40' --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label "$python" -m grappe train digits epochs=3 --plan 'device=cpu,replicate=40' --run "$run" --data data
}
keep_going
finish train 50
