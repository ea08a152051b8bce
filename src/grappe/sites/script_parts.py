"""Holds the bash parts that are the same in every job's script."""

from __future__ import annotations

FINISHED = """\
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
export GRAPPE_FAILURE=$run/logs/job-$job.failed

# A finished run ends at once, however often it is started.
if [ -e "$run/done" ]; then
    echo "$run is finished: nothing to do"
    rm -f "$run/logs/job-$job.end" # it may be a link of somebody else's
    echo 0 > "$run/logs/job-$job.end"
    exit 0
fi"""

FRESH = """
rm -f "$run/logs/job-$job.end" "$GRAPPE_FAILURE" "$run/logs/job-$job.why\""""

CHAINED = """
# A chain whose job failed by itself is over.
if [ -e "$run/logs/job-$job.failed" ]; then
    echo "an earlier job of this chain failed: nothing to do"
    exit "$(cat "$run/logs/job-$job.failed")"
fi
# The job before may have died without giving the run back: its lease ends a minute after its last sign of life.
while [ -e "$run/lease.json" ] && [ $(($(date +%s) - $(stat -c %Y "$run/lease.json"))) -lt 65 ]; do
    sleep 5
done"""

STEPS = """\
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
}"""

ONCE = """\
# Once on every node, on its local scratch.
read -r -d '' once <<'END'
set -u
{body}
END
"""

ON_EACH_NODE = """\
run_step --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 bash -c "$once\""""

# What is wrong with these nodes is said now, in seconds.
DOCTOR = (
    "run_step --kill-on-bad-exit=1 --wait=60 "
    '"${{grappe[@]}}" doctor{task} --job --plan "$plan" --folder "$run"'
)

FAILED = """\
# srun ends the others when one fails, and then says that they were killed: what failed first has left its code.
[ ! -e "$GRAPPE_FAILURE" ] || end "$(cat "$GRAPPE_FAILURE")\""""

MEET = """\
# Where the script's processes meet: on this node, that of process 0, at a port that is free now.
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK PYTHONUNBUFFERED=1
meet() {
    MASTER_ADDR=$(hostname)
    MASTER_PORT=$("${python[@]}" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
    export MASTER_ADDR MASTER_PORT
    [ -n "$MASTER_PORT" ]
}
"""

START = """\
# What each process runs. Its first failure leaves its code; after 75 srun must not end the others, which may be saving.
export first=$run/logs/job-$job.first
rm -f "$first"
read -r -d '' start <<'END'
{torchrun}trap : USR2 # which is for the program
"$@" {words}
code=$?
if [ "$code" != 0 ] && [ "$(cat "$first" 2>/dev/null || echo 75)" = 75 ]; then
    echo "$code" > "$first"
fi
[ "$code" != 75 ] || code=0
exit "$code"
END
"""

TORCHRUN = """\
# As torchrun says it.
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE GROUP_RANK=$SLURM_NODEID
"""

FIRST = """\
[ ! -e "$first" ] || code=$(cat "$first")
"""

IS_DONE = """\
[ "$code" != 0 ] || : > "$run/done"
"""

CHAIN_END = """\
# The next job of the chain goes on, if this one saved, or if something was killed.
if {{ [ "$code" = 75 ] || [ "$code" -gt 128 ]; }} && [ "$SLURM_ARRAY_TASK_ID" -lt {chain} ]; then
    exit "$code"
fi
end "$code\""""

CHAIN_END_SAVED = """\
# The next job of the chain goes on, if this one saved and ended with 75.
if [ "$code" = 75 ] && [ "$SLURM_ARRAY_TASK_ID" -lt {chain} ]; then
    exit "$code"
fi
end "$code\""""

AGAIN = """\
# 75: saved, and there is more to do. Above 128: killed, three times at most; 140 is USR2 before training began.
again=no
if [ "$code" = 75 ] || [ "$code" = 140 ]; then
    again=yes
elif [ "$code" -gt 128 ]; then
    echo "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}: exit code $code" >> "$run/logs/killed"
    [ "$(grep -c "^job $SLURM_JOB_ID," "$run/logs/killed")" -gt 3 ] || again=yes
fi
"""

AGAIN_SAVED = """\
# 75: saved, and there is more to do. All else would begin anew.
again=no
[ "$code" != 75 ] || again=yes
"""

REQUEUE = """\
# A job that is being cancelled, or requeued by Slurm itself, is not running any more.
if [ "$again" = yes ] && [ "$ended" = 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ] &&
    [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
    echo "back into the queue after restart ${{SLURM_RESTART_COUNT:-0}}, exit code $code"
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
end "$code\""""
