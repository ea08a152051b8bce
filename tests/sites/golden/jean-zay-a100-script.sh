#!/bin/bash
# Made by: grappe submit -- mine.py
# Jean Zay, A100, IDRIS. 8 processes on 1 node, plan: replicate=8
# 8 GPUs for at most 00:30:00: 4 GPU-hours
# Unconfirmed, job.mps: seen in users' scripts only
# Unconfirmed, job.modules: the version is from memory: module avail pytorch-gpu
# Unconfirmed, queue: seen in users' scripts only
# Unconfirmed, node.cores: seen in users' scripts only
#SBATCH --job-name=other-1
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
#SBATCH --output=/scratch/me/runs/digits-1/logs/job-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue

set -u

cd -- /scratch/me || exit 1

run=/scratch/me/runs/digits-1

job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
export GRAPPE_FAILURE=$run/logs/job-$job.failed

# A finished run ends at once, however often it is started.
if [ -e "$run/done" ]; then
    echo "$run is finished: nothing to do"
    rm -f "$run/logs/job-$job.end" # it may be a link of somebody else's
    echo 0 > "$run/logs/job-$job.end"
    exit 0
fi
rm -f "$run/logs/job-$job.end" "$GRAPPE_FAILURE" "$run/logs/job-$job.why"

# Neither the user's own packages nor those of another Python.
unset PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE=1
module purge
module load arch/a100 pytorch-gpu/py3/2.8.0
# Compute nodes here have no way to the internet.
export WANDB_MODE=offline HF_HUB_OFFLINE=1
python=("${TMPDIR:-/tmp}/grappe-$UID/0123456789ab/bin/python")
grappe=("${python[@]}" -m grappe)

# srun of Slurm 22.05 and later does not take --cpus-per-task from the job by itself.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# USR2 comes before the time limit and on preemption. Every process gets it, saves, and process 0 ends with 75.
# TERM comes when Slurm ends the job: there is a moment left to save.
told=0 ended=0 step=
# shellcheck disable=SC2317
pass_on() {
    told=1
    [ -z "$step" ] || kill -USR2 "$step" 2>/dev/null
}
trap pass_on USR2
trap 'ended=1; pass_on' TERM

# bash runs a trap only between commands, so srun runs behind it; a wait that a signal ended begins again.
run_step() {
    [ "$told" = 0 ] || return 75
    srun "$@" &
    step=$!
    while :; do
        wait "$step"
        kill -0 "$step" 2>/dev/null || break
    done
    wait "$step"
    code=$?
    step=
    return "$code"
}

# Leaves the exit code for grappe wait; of a job that Slurm ended, Slurm knows the reason.
end() {
    [ "$ended" = 1 ] || { rm -f "$run/logs/job-$job.end" && echo "$1" > "$run/logs/job-$job.end"; }
    exit "$1"
}

plan=replicate=8

# Where the script's processes meet: on this node, that of process 0, at a port that is free now.
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK PYTHONUNBUFFERED=1
meet() {
    MASTER_ADDR=$(hostname)
    MASTER_PORT=$("${python[@]}" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
    export MASTER_ADDR MASTER_PORT
    [ -n "$MASTER_PORT" ]
}
# What each process runs. Its first failure leaves its code; after 75 srun must not end the others, which may be saving.
export first=$run/logs/job-$job.first
rm -f "$first"
read -r -d '' start <<'END'
# As torchrun says it.
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE GROUP_RANK=$SLURM_NODEID
trap : USR2 # which is for the program
"$@" mine.py --lr 0.1
code=$?
if [ "$code" != 0 ] && [ "$(cat "$first" 2>/dev/null || echo 75)" = 75 ]; then
    echo "$code" > "$first"
fi
[ "$code" != 75 ] || code=0
exit "$code"
END
# Once on every node, on its local scratch.
read -r -d '' once <<'END'
set -u
# An environment with these packages is made once on a node. The first is kept beside the runs for later jobs.
env="${TMPDIR:-/tmp}/grappe-$UID/0123456789ab"
kept=/scratch/me/runs/.environments/0123456789ab.tar
packages=/scratch/me/runs/digits-1/logs/environment-0123456789ab
(umask 077 && mkdir -p "${env%/*}")
[ -O "${env%/*}" ] || { echo "${env%/*} is not yours: give another folder as TMPDIR" >&2; exit 1; }
if [ ! -e "$env" ]; then
    [ -d "$packages" ] || { echo "there is no $packages: grappe submit without --show writes it" >&2; exit 1; }
    new=$env.$SLURM_JOB_ID.$$
    mkdir "$new" || exit 1
    if [ ! -e "$kept" ] || ! tar -xf "$kept" -C "$new"; then
        rm -rf -- "$new"
        python -m venv --system-site-packages "$new"
        "$new/bin/python" -m pip install --quiet --no-index --no-deps -r "$packages/requirements.txt" || exit 1
        "$new/bin/python" -m pip install --quiet --no-index --no-deps "$packages"/grappe-*.whl || exit 1
        if [ "${SLURM_NODEID:-0}" = 0 ]; then
            mkdir -p "${kept%/*}"
            tar -cf "$kept.$SLURM_JOB_ID" -C "$new" . && mv -- "$kept.$SLURM_JOB_ID" "$kept"
            rm -f -- "$kept.$SLURM_JOB_ID"
        fi
    fi
    mv -T -- "$new" "$env" 2>/dev/null || rm -rf -- "$new" # another job on this node was first
    [ -e "$env" ] || exit 1
fi
END
run_step --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 bash -c "$once" &&
    run_step --kill-on-bad-exit=1 --wait=60 "${grappe[@]}" doctor --script mine.py --job --plan "$plan" --folder "$run" &&
    meet &&
    run_step --label --kill-on-bad-exit=1 --wait=60 --gpu-bind=none bash -c "$start" start "${python[@]}"
code=$?
[ ! -e "$first" ] || code=$(cat "$first")
[ "$code" != 0 ] || : > "$run/done"
[ ! -e "$run/done" ] || end 0
# srun ends the others when one fails, and then says that they were killed: what failed first has left its code.
[ ! -e "$GRAPPE_FAILURE" ] || end "$(cat "$GRAPPE_FAILURE")"

# 75: saved, and there is more to do. All else would begin again.
again=no
[ "$code" != 75 ] || again=yes
# A job that is being cancelled, or requeued by Slurm itself, is not running any more.
if [ "$again" = yes ] && [ "$ended" = 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 50 ] &&
    [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
    echo "back into the queue after restart ${SLURM_RESTART_COUNT:-0}, exit code $code"
    trap - TERM
    refused=0
    scontrol requeue "$SLURM_JOB_ID" || refused=$?
    # Slurm ends this script now, one process after the other: it leaves no exit code.
    # A code above 128: scontrol was ended first.
    if [ "$refused" = 0 ] || [ "$refused" -gt 128 ]; then
        sleep 60
        exit "$code"
    fi
fi
end "$code"
