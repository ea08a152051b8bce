#!/bin/bash
# Made by: grappe submit --site clariden -- train digits epochs=3
# Clariden, Alps, CSCS. 4 processes on 1 node, plan: replicate=4
# 4 GPUs for at most 00:30:00: 2 GPU-hours, 0.5 node-hours
# Unconfirmed, node: four GH200 are documented; cores, memory of a GPU and network are from memory
# Unconfirmed, charge: inferred: nodes are whole, and debug is limited in node-hours
# Unconfirmed, job.scratch: from memory
#SBATCH --job-name=digits-1
#SBATCH --account=abc
#SBATCH --partition=normal
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=72
#SBATCH --time=00:30:00
#SBATCH --signal=B:USR2@90
#SBATCH --output=/scratch/me/runs/digits-1/logs/job-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --mem=32G
#SBATCH --constraint=a100
#SBATCH --dependency=singleton
#SBATCH --mail-user=me@example.org
#SBATCH --mail-type=END,FAIL,REQUEUE
#SBATCH --exclude=n1
#SBATCH --comment=mine
#SBATCH --hint=compute_bound

set -u
cd -- /scratch/me || exit 1
run=/scratch/me/runs/digits-1
# Passes signals on to the processes, puts the job back into the queue: grappe submit writes the file.
source "$run/logs/job.sh" || exit 1

export MPICH_GPU_SUPPORT_ENABLED=0
export CUDA_CACHE_DISABLE=1
export NCCL_NET='AWS Libfabric'
export NCCL_NET_GDR_LEVEL=PHB
export NCCL_CROSS_NIC=1
export NCCL_PROTO='^LL128'
export FI_CXI_DEFAULT_CQ_SIZE=131072
export FI_CXI_DEFAULT_TX_SIZE=16384
export FI_CXI_DISABLE_HOST_REGISTER=1
export FI_CXI_RX_MATCH_MODE=software
export FI_MR_CACHE_MONITOR=userfaultfd
python=/home/me/.venv/bin/python

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits epochs=3 --job --plan replicate=4 --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label --gpu-bind=none "$python" -m grappe train digits epochs=3 --plan replicate=4 --run "$run" --data data
}
keep_going
finish train 50
