#!/bin/bash
# Jean Zay, A100, IDRIS. 8 processes on 1 node, plan: replicate=8
# 8 GPUs for at most 00:30:00: 4 GPU-hours, for each of 20 tasks
# Unconfirmed, job.modules: the version is that of users' scripts of 2026: module avail pytorch-gpu
# Unconfirmed, job.mps: seen in users' scripts only
# Unconfirmed, queue: only users' scripts of 2026 have the names and hours; the numbers of GPUs are those of V100 in IDRIS's older pages
# Unconfirmed, node.cores_per_gpu: seen in users' scripts only
# Unconfirmed, node.cores: seen in users' scripts only
#SBATCH --job-name=digits-1
#SBATCH --account=abc@a100
#SBATCH --constraint=a100
#SBATCH --hint=nomultithread
#SBATCH --qos=qos_gpu_a100-t3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:8
#SBATCH --time=00:30:00
#SBATCH --signal=B:USR2@90
#SBATCH --output=/scratch/me/runs/digits-1/task-%4a/logs/job-%A_%a.out
#SBATCH --open-mode=append
#SBATCH --array=1-20%4
#SBATCH --requeue

set -u
cd -- /scratch/me || exit 1
run=/scratch/me/runs/digits-1
# Passes signals on to the processes, puts the job back into the queue: grappe submit writes the file.
# From here on $run is the run of the task.
source "$run/logs/job.sh" task || exit 1

unset PYTHONPATH PYTHONHOME; export PYTHONNOUSERSITE=1 # no packages of another Python
module purge
module load arch/a100 pytorch-gpu/py3/2.8.0
export WANDB_MODE=offline HF_HUB_OFFLINE=1 # compute nodes have no internet here
env="${TMPDIR:-/tmp}/grappe-$UID/0123456789ab"
on_each_node make_environment "$env" module python --no-deps
python=$env/bin/python

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits seed="${SLURM_ARRAY_TASK_ID:?is empty on this node, and an argument of the job needs it}" --job --plan replicate=8 --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label --gpu-bind=none "$python" -m grappe train digits seed="${SLURM_ARRAY_TASK_ID:?is empty on this node, and an argument of the job needs it}" --run "$run" --data data
}
keep_going
finish train 50
