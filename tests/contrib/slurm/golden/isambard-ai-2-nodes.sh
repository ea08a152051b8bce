#!/bin/bash
# Made by: grappe submit --site isambard-ai -- train digits epochs=3
# Isambard-AI, Bristol. 8 processes on 2 nodes, plan: replicate=8
# 8 GPUs for at most 00:30:00: 4 GPU-hours, 1 node-hours
# Unconfirmed, node.network: from memory
# Unconfirmed, node.gpu: four GH200 are documented; the memory of one is from memory
# Unconfirmed, node.capability: from memory: that of Hopper
# Unconfirmed, ask.gpus: the site documents --gpus=N; the number on each node is in users' scripts only
# Unconfirmed, ask.max_hours: 24 h are documented, and 23:59:00 is what users found accepted (2026-09-15)
# Unconfirmed, ask.account: not stated
# Unconfirmed, job.variables.GLOO_SOCKET_IFNAME: seen in users' scripts only
# Unconfirmed, charge.cores_per_unit: the share of a node's cores counts, as documented; the share of its memory counts, too, but the node's memory is not stated
#SBATCH --job-name=digits-1
#SBATCH --account=abc
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=72
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

export NCCL_SOCKET_IFNAME=hsn
export FI_CXI_DEFAULT_TX_SIZE=2048
export FI_CXI_RX_MATCH_MODE=hybrid
export GLOO_SOCKET_IFNAME=hsn0
python=/home/me/.venv/bin/python

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits epochs=3 --job --plan replicate=8 --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label --gpu-bind=none "$python" -m grappe train digits epochs=3 --plan replicate=8 --run "$run" --data data
}
keep_going
finish train 50
