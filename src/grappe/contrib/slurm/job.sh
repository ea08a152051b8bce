# Functions of a job's script, which sources this file from its run's logs, where `grappe submit` puts it.
#
#   step COMMAND …           runs srun, passes Slurm's signals on to it, and is skipped after a step that failed
#   on_each_node FUNCTION …  runs one of the functions below once on every node, as a step
#   on_each_process OPTION … runs the script's function `process` once for each process, as a step
#   keep_going               runs the script's function `work`, and again where a process was killed or a node went down
#   finish COMMAND RESTARTS  ends the job with the exit code of its steps, or puts it back into the queue
#
# shellcheck shell=bash

files=${BASH_SOURCE[0]%/*} # of an array those of all its tasks
base=${files%/*/logs}

# ---- once on each node ----

own_folder() {
    (umask 077 && mkdir -p "$1")
    [ -O "$1" ] || { echo "$1 is not yours: give another folder as TMPDIR" >&2; return 1; }
}

# make_environment FOLDER KIND PYTHON [OPTION OF PIP …]: a Python environment of the wheels in the run's logs, complete or
# not there. It is made once for a folder's name, which is a hash of all packages; the first is kept for later jobs.
make_environment() {
    local env=$1 kind=$2 python=$3 key=${1##*/}
    shift 3
    local kept=$base/.environments/$key.tar packages=$files/environment-$key new=$env.$SLURM_JOB_ID.$$
    own_folder "${env%/*}" || return 1
    [ ! -e "$env" ] || return 0
    [ -d "$packages" ] || { echo "there is no $packages: grappe submit writes it" >&2; return 1; }
    mkdir "$new" || return 1
    if [ ! -e "$kept" ] || ! tar -xf "$kept" -C "$new"; then
        rm -rf -- "$new"
        if [ "$kind" = module ]; then # on top of what the modules hold
            "$python" -m venv --system-site-packages "$new"
        elif command -v virtualenv >/dev/null; then # as the Alliance asks
            virtualenv --quiet --no-download "$new"
        else
            "$python" -m venv "$new"
        fi
        "$new/bin/python" -m pip install --quiet --no-index "$@" -r "$packages/requirements.txt" || return 1
        "$new/bin/python" -m pip install --quiet --no-index --no-deps "$packages"/grappe-*.whl || return 1
        if [ "${SLURM_NODEID:-0}" = 0 ]; then
            mkdir -p "${kept%/*}"
            tar -cf "$kept.$SLURM_JOB_ID" -C "$new" . && mv -- "$kept.$SLURM_JOB_ID" "$kept"
            rm -f -- "$kept.$SLURM_JOB_ID"
        fi
    fi
    mv -T -- "$new" "$env" 2>/dev/null || rm -rf -- "$new" # another job on this node was first
    [ -e "$env" ]
}

# unpack_environment FOLDER FILE: a packed environment on this node's disk, complete or not there; later jobs find it.
unpack_environment() {
    local env=$1 file=$2 answer why=""
    own_folder "${env%/*}" || return 1
    exec 9> "$env.lock" && flock 9 # another job may be unpacking it here
    [ ! -e "$env/.unpacked" ] || return 0
    rm -rf -- "$env"
    if [ ! -r "$file" ]; then
        why="there is no such file: submit again, which packs it"
    elif [[ $file == *.zst ]] && ! command -v zstd >/dev/null; then
        why="there is no zstd here: zstd -d --rm $file on a login node, and submit again"
    elif ! { answer=$(mkdir "$env" 2>&1) && answer=$(tar -xf "$file" -C "$env" 2>&1); }; then
        why="it is damaged: rm $file, and submit again, which packs it anew (${answer%%$'\n'*})"
        case $answer in *"No space left"* | *"uota exceeded"*)
            why="no room in ${env%/*}, $(df -h --output=avail "${env%/*}" | tail -n 1 | tr -d " ") free: ask for more local disk (--sbatch --tmp=20G)" ;;
        esac
    elif ! answer=$("$env/bin/python" -c "" 2>&1); then
        why="its interpreter $(readlink "$env/bin/python") does not run here: load its module (--modules), or make it with one of the nodes"
    elif [ -e "$env/bin/conda-unpack" ] && ! answer=$("$env/bin/python" "$env/bin/conda-unpack" 2>&1); then
        why="conda-unpack: ${answer##*$'\n'}"
    else
        # What names the folder in which it was made: scripts of Python, and of activation, which a job has no need of.
        rm -f -- "$env"/bin/*activate*
        grep -lIEsZ "^(#!|'''exec' \"?)/.*/python" "$env"/bin/* | xargs -0r sed -i -E -e "1s|^#!/.*/(python[0-9.]*)|#!$env/bin/\1|" \
            -e "2s|^'''exec' .*/(python[0-9.]*)\"? |'''exec' \"$env/bin/\1\" |"
        : > "$env/.unpacked"
        return
    fi
    echo "$(hostname): the environment $file cannot be unpacked: $why" >&2
    rm -rf -- "$env"
    return 1
}

# unpack ARCHIVE FOLDER
unpack() {
    mkdir -p "$2" && tar -xf "$1" -C "$2"
}

# ---- once for each process, in the script's function `process` ----

# The variables that torchrun sets.
torchrun_variables() {
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
    export LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE GROUP_RANK=$SLURM_NODEID
}

# program COMMAND …: the first failure leaves its code; after 75 srun must not end the others, which may be saving.
program() {
    local code
    trap : USR2 # which is for the program
    "$@"
    code=$?
    if [ "$code" != 0 ] && [ "$(cat "$first" 2>/dev/null || echo 75)" = 75 ]; then
        echo "$code" > "$first"
    fi
    [ "$code" != 75 ] || code=0
    exit "$code"
}

# ---- steps of the job ----

# bash runs a trap only between commands, so the step runs in the background; a wait that a signal ended begins again.
step() {
    [ "$code" = 0 ] || return
    if [ "$told" = 1 ]; then
        code=75
        return
    fi
    "$@" &
    step=$!
    while :; do
        wait "$step"
        kill -0 "$step" 2>/dev/null || break
    done
    wait "$step"
    code=$?
    step=
}

# size NODES PROCESSES PLAN: one that the job may have, the largest first.
size() {
    sizes+=("$1 $2 $3")
}

# fit IDLE: the largest size for the nodes that the job has, with IDLE of them idle, the worst.
fit() {
    local held_nodes line nodes processes
    mapfile -t held_nodes < <(best_first)
    if [ "${#sizes[@]}" = 0 ]; then
        [ $((${#held_nodes[@]} - $1)) -ge "$SLURM_NNODES" ]
        return
    fi
    for line in "${sizes[@]}"; do
        read -r nodes processes plan <<< "$line"
        [ "$nodes" -le $((${#held_nodes[@]} - $1)) ] || continue
        of_size=("--nodes=$nodes" "--ntasks=$processes" "--ntasks-per-node=$((processes / nodes))")
        of_size+=("--nodelist=$(printf "%s\n" "${held_nodes[@]:0:nodes}" | paste -sd ,)")
        export GRAPPE_IDLE_NODES=$((${#held_nodes[@]} - nodes))
        echo "nodes: ${#held_nodes[@]}, $GRAPPE_IDLE_NODES idle; processes: $processes; plan: ${plan:-one process}"
        return
    done
    return 1
}

# Without the queue, from the last checkpoint; three times in a job at most, with those that went through the queue.
keep_going() {
    local skipped=$code failed
    work
    while [ "$skipped" = 0 ] && lost; do
        note_death
        held=$(squeue -h -j "$id" -o %N)
        left_out=$(failed_nodes "$failures")
        failed=$(scontrol show hostnames "$held" | grep -cxF "${left_out//,/$'\n'}")
        [ "$(kills)" -lt 3 ] && fit "$failed" || return
        note_kill
        echo "this job goes on at once, without the queue, on $held"
        [ "$failed" = 0 ] || echo "used last, or not at all: $left_out (noted in two starts, or computed wrongly)"
        GRAPPE_START=$((GRAPPE_START + 1)) code=0
        unset GRAPPE_WAITED
        export SLURM_OVERLAP=1 # a step that has lost a node may never end for Slurm, and hold the others
        log_size=$(stat -c %s "$log" 2>/dev/null || echo 0)
        work
    done
}

on_each_node() {
    step srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 bash "$files/job.sh" "$@"
}

# The processes meet on this node, that of process 0, at a port that is free now.
on_each_process() {
    [ "$code" = 0 ] || return
    MASTER_ADDR=$(hostname)
    MASTER_PORT=$("${python[@]}" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
    export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK PYTHONUNBUFFERED=1
    [ -n "$MASTER_PORT" ] || code=1
    step srun --label --kill-on-bad-exit=1 --wait=60 "$@" \
        bash -c "$(declare -p first python; declare -f torchrun_variables program process); process"
}

# ---- nodes that fail ----

# note_node NODE EVIDENCE [TIME]: against a node, the same once for each start of a job, beside all runs of the folder.
note_node() {
    local start=$SLURM_JOB_ID.$GRAPPE_START
    grep -s "^[0-9]* $1 $start " "$failures" | cut -d " " -f 5- | grep -qxFe "$2" && return
    echo "${3:-$(date +%s)} $1 $start ${run#"$base"/}: $2" >> "$failures"
    echo "noted against node $1, in $failures: $2"
}

# failed_nodes FILE: the nodes with notes of two starts within a week, or one that is proven; the four noted last, joined
# by commas. grappe submit calls it, too.
failed_nodes() {
    [ ! -e "$1" ] || awk -v now="$(date +%s)" '$1 > now - 604800 { starts[$2] += !seen[$2, $3]++; if (starts[$2] > 1 || $5 == "proven:") last[$2] = $1 }
        END { for (node in last) print last[node], node }' "$1" | sort -rn | head -n 4 | cut -d " " -f 2 | paste -sd , -
}

# The nodes that the job has: those with a note of this job come late, those left out come last.
best_first() {
    local node
    for node in $(scontrol show hostnames "$held"); do
        case ,$left_out, in *,"$node",*) echo -n 999 ;; *) grep -cs " $node $SLURM_JOB_ID\." "$failures" | tr -d "\n" ;; esac
        echo " $node"
    done | sort -s -n -k 1,1 | cut -d " " -f 2
}

# What srun said of the first node or process that died in this start: "srun: error: n1: task 3: Killed".
died() {
    tail -c "+$((log_size + 1))" "$log" 2>/dev/null |
        sed -nE 's/^srun: error: Node failure on ([A-Za-z0-9._-]+)$/\1 the node failed/p
            s/^srun: error: ([A-Za-z0-9._-]+): tasks? [0-9,-]+: (Killed|Exited with exit code 137|Aborted|Bus error|Segmentation fault|Illegal instruction).*/\1 a process was ended: \2/p' |
        sort -s -k 2,2r | head -n 1 # the node's failure before the end of its processes
}

# Once for each start: a process that was ended since another one stood still speaks against no node.
note_death() {
    local first_death
    [ "$noted" != "$GRAPPE_START" ] || return 0
    noted=$GRAPPE_START
    ! note_left wrong || return 0
    first_death=$(died)
    [ -z "$first_death" ] || note_node "${first_death%% *}" "${first_death#* }"
}

# note_left KIND: what processes have left against nodes. wrong: a process that ended; doubt: the doctor and a training's
# end, faults of a GPU and slow processes, with which a job may well finish.
note_left() {
    local at node evidence left=("$run/logs/job-$job.$1"-*)
    [ -e "${left[0]}" ] || return
    while read -r at node evidence; do # of a wrong loss, the same again is the samples' doing, not the node's
        if [ "$1" = doubt ] || ! grep -qsF ": $evidence" "$failures"; then note_node "$node" "$evidence" "$at"; fi
    done < <(sort -s -n "${left[@]}")
    rm -f "${left[@]}"
}

# Whether a process was killed or a node went down, and no process has failed by itself.
lost() {
    [ "$told" = 0 ] && [ "$code" != 0 ] && [ ! -e "$GRAPPE_FAILURE" ] || return
    [[ $(died) != *" the node failed" ]] || code=137
    [ "$code" -gt 128 ] && [ "$code" != 140 ] # USR2 before training began
}

kills() {
    grep -cs "^job $SLURM_JOB_ID," "$run/logs/killed" || [ -e "$run/logs/killed" ] || echo 0
}

note_kill() {
    echo "job $SLURM_JOB_ID, start $GRAPPE_START: exit code $code" >> "$run/logs/killed"
}

# The nodes of the start before, if Slurm itself has put the job back: one of them may have failed.
note_lost_nodes() {
    local node state reason
    [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -e "$nodes_file" ] || return 0
    while read -r node state reason; do
        case $state in down* | drain* | drng* | fail* | *\*) note_node "$node" "Slurm: $state, $reason" ;; esac
    done < <(sinfo -h -N -n "$(cat "$nodes_file")" -o "%N %t %E" 2>/dev/null | sort -u)
}

# Of the job, which is in the queue again.
leave_out() {
    local own
    own=$(scontrol show job "$id" | sed -nE 's/.*ExcNodeList=([^ ]+).*/\1/p' | head -n 1)
    [ "$own" != "(null)" ] || own=
    if scontrol update "JobId=$id" "ExcNodeList=${own:+$own,}$1"; then
        echo "the next start leaves out $1, which was noted twice within a week or computed wrongly ($failures)"
    fi
}

# Leaves the exit code for grappe wait; of a job that Slurm ended, Slurm knows the reason.
end() {
    [ "$ended" = 1 ] || { rm -f "$run/logs/job-$job.end" && echo "$1" > "$run/logs/job-$job.end"; }
    exit "$1"
}

# USR2 comes before the time limit and on preemption. Every process gets it, saves, and process 0 ends with 75.
# TERM comes when Slurm ends the job: there is a moment left to save.
pass_on() {
    told=1
    [ -z "$step" ] || kill -USR2 "$step" 2>/dev/null
}

begin() {
    code=0 told=0 ended=0 noted="" sizes=() of_size=() held=${SLURM_JOB_NODELIST:-} step=
    export GRAPPE_START=$((10 * ${SLURM_RESTART_COUNT:-0})) # and one more for each start within this one
    run=${files%/logs} id=$SLURM_JOB_ID chain=${SLURM_ARRAY_JOB_ID:-}
    if [ -n "${1:-}" ]; then # a task of an array. Slurm takes the bare id of the last one for all of them
        printf -v run "%s/$1-%04d" "$run" "$SLURM_ARRAY_TASK_ID"
        id=${chain}_$SLURM_ARRAY_TASK_ID chain=
    fi
    log=$run/logs/job-$id.out job=${chain:-$id}
    first=$run/logs/job-$job.first
    failures=$base/.failed-nodes nodes_file=$run/logs/job-$job.nodes
    log_size=$(stat -c %s "$log" 2>/dev/null || echo 0)
    export GRAPPE_FAILURE=$run/logs/job-$job.failed
    # srun of Slurm 22.05 and later does not take --cpus-per-task from the job by itself.
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    if [ -e "$run/done" ]; then # however often it is started
        echo "$run is finished: nothing to do"
        end 0 # the file may be a link of somebody else's
    fi
    if [ -z "$chain" ]; then
        rm -f "$run/logs/job-$job.end" "$GRAPPE_FAILURE" "$run/logs/job-$job.why"
    elif [ -e "$GRAPPE_FAILURE" ]; then # a chain whose job failed by itself is over
        echo "an earlier job of this chain failed: nothing to do"
        exit "$(cat "$GRAPPE_FAILURE")"
    fi
    rm -f "$first"
    # The job before may have died without giving the run back: its lease ends a minute after its last sign of life.
    while [ -n "$chain" ] && [ -e "$run/lease.json" ] &&
        [ $(($(date +%s) - $(stat -c %Y "$run/lease.json"))) -lt 65 ]; do
        sleep 5
    done
    local submitted started
    read -r submitted started < <(squeue -h -j "$id" -o "%V %S" 2>/dev/null)
    if submitted=$(date -d "${submitted:-?}" +%s 2>/dev/null) && started=$(date -d "${started:-?}" +%s 2>/dev/null); then
        export GRAPPE_WAITED=$((started - submitted)) # seconds in the queue
    fi
    note_lost_nodes
    left_out=$(failed_nodes "$failures")
    echo "${SLURM_JOB_NODELIST:-}" > "$nodes_file"
    trap pass_on USR2
    trap 'ended=1; pass_on' TERM
}

finish() {
    local again=no resumes=no refused=0
    # Notes decide nothing here: what computed wrongly ends with 75 by itself.
    if [ -e "$GRAPPE_FAILURE" ] || [ "$code" -le 128 ]; then note_left wrong; fi
    note_left doubt
    case $1 in train | tune | launch) resumes=yes ;; esac # the others would begin again
    rm -rf -- "${run%/*}/.launch-$SLURM_JOB_ID"-* # of a script's processes that were killed
    # srun ends the others when one fails, and then says that they were killed: what failed first has left its code.
    [ ! -e "$first" ] || code=$(cat "$first")
    [ "$1" = train ] || [ "$code" != 0 ] || : > "$run/done"
    [ ! -e "$run/done" ] || end 0
    # No job is COMPLETED, and no job after it begins, for a run that is not.
    if [ "$code" = 0 ]; then
        echo "the training ended with exit code 0 and is not finished, as after os._exit(0) in the task"
        code=1
    fi
    [ ! -e "$GRAPPE_FAILURE" ] || end "$(cat "$GRAPPE_FAILURE")"

    # 75: saved, and there is more to do. Above 128: killed; 140 is USR2 before training began.
    if [ "$code" = 75 ]; then
        again=yes
    elif [ "$resumes" = yes ] && [ "$code" -gt 128 ]; then
        again=yes
        # Three times at most; what Slurm ends itself, to requeue it, is no kill.
        if [ "$code" != 140 ] && [ "$ended" = 0 ] && [ -z "$chain" ]; then
            note_kill
            [ "$(kills)" -le 3 ] || again=no
            note_death
        fi
    fi
    [ "$again" = yes ] || end "$code"
    if [ -n "$chain" ]; then # the next job goes on
        [ "$SLURM_ARRAY_TASK_ID" -ge "$SLURM_ARRAY_TASK_MAX" ] || exit "$code"
        end "$code"
    fi
    # A job that is being cancelled, or requeued by Slurm itself, is not running any more.
    if [ "$ended" = 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$2" ] &&
        [ "$(squeue -h -j "$id" -o %T)" = RUNNING ]; then
        echo "back into the queue after restart ${SLURM_RESTART_COUNT:-0}, exit code $code"
        left_out=$(failed_nodes "$failures")
        rm -f "$nodes_file"
        trap - TERM
        [ -z "$left_out" ] || trap '' TERM # there are seconds left once it is in the queue
        scontrol requeue "$id" || refused=$?
        # Slurm ends this script now, one process after the other: it leaves no exit code.
        # A code above 128: scontrol was ended first.
        if [ "$refused" = 0 ] || [ "$refused" -gt 128 ]; then
            if [ -n "$left_out" ]; then leave_out "$left_out"; else sleep 60; fi
            exit "$code"
        fi
    fi
    end "$code"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then # on_each_node
    set -u
    "$@"
else
    begin "$@"
fi
