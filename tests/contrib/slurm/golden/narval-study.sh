#!/bin/bash
# Narval, Digital Research Alliance of Canada. 4 processes on 1 node, plan: replicate=4
# 4 GPUs for at most 00:30:00: 2 GPU-hours, 8.01 RGU-hours, for each of 2 tasks
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
#SBATCH --output=/scratch/me/runs/digits-1/trial-%4a/logs/job-%A_%a.out
#SBATCH --open-mode=append
#SBATCH --array=0-1
#SBATCH --requeue

set -u
cd -- /scratch/me || exit 1
run=/scratch/me/runs/digits-1
# Passes signals on to the processes, puts the job back into the queue: grappe submit writes the file.
# From here on $run is the run of the task.
source "$run/logs/job.sh" trial || exit 1
case $SLURM_ARRAY_TASK_ID in
    0) words=(lr=0.1) ;;
    1) words=(lr=0.2) ;;
esac

unset PYTHONPATH PYTHONHOME; export PYTHONNOUSERSITE=1 # no packages of another Python
module purge
module load python/3.11
export WANDB_MODE=offline HF_HUB_OFFLINE=1 # compute nodes have no internet here
env="$SLURM_TMPDIR/grappe-$UID/0123456789ab"
on_each_node make_environment "$env" virtualenv python --no-deps
python=$env/bin/python

step srun --kill-on-bad-exit=1 --wait=60 "$python" -m grappe doctor digits "${words[@]}" --job --plan replicate=4 --runs "$run"
work() {
    step srun --kill-on-bad-exit=1 --wait=60 --label --gpu-bind=none "$python" -m grappe train digits "${words[@]}" --run "$run" --data data
}
keep_going
finish train 50
