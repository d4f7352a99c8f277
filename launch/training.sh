# Sourced by the scripts that train: egmla_train CONFIG [section.key=value ...] is one launch of a run, from the checks
# to its end. Under Slurm the job starts itself again until the run is complete; see launching/verdict.py for when not.
# shellcheck shell=bash

source "$(dirname "${BASH_SOURCE[0]}")/job.sh"

EGMLA_AGAIN=75 # exit code of `launching end`: start the job again

# Prints the text at the head of the script that was started.
egmla_usage() {
    sed -n '2,/^#SBATCH/{/^#SBATCH/d;s/^# \{0,1\}//p;}' "$1"
    printf '%s\n' "every section.key of egmla_megatron/config/schema.py can be set; --check: only check, start nothing"
}

# Asks the Python side; $1 is the command, the rest its own options.
egmla_ask() {
    egmla_once -m egmla_megatron.launching "$1" "${EGMLA_FACTS[@]}" "${@:2}" "${EGMLA_SETTINGS[@]}"
}

egmla_train() {
    local argument adapted check='' began=''
    egmla_array_words "$@"
    EGMLA_SETTINGS=("${EGMLA_WORDS[0]}")
    for argument in "${EGMLA_WORDS[@]:1}"; do
        case "$argument" in
            --check) check=--check ;;
            -*) egmla_die "command line: got $argument, allowed section.key=value, --check, --help; give options of sbatch before the script" ;;
            *) EGMLA_SETTINGS+=("$argument") ;;
        esac
    done
    egmla_open_job
    if egmla_under_slurm && [ "${SLURM_ARRAY_TASK_COUNT:-1}" -gt 1 ] && [ "${EGMLA_WORDS[*]}" = "$*" ]; then
        egmla_say "warning: all $SLURM_ARRAY_TASK_COUNT tasks of this array have one run folder, so only one of them can train at a time" \
            "(sbatch --array=...%1); for a run of each: run.dir=runs/seed%a run.seed=%a, %a being the task's number"
    fi
    if egmla_under_slurm && [ -z "$check" ]; then
        trap 'egmla_catch 10' USR1
        trap 'egmla_catch 15' TERM
        trap 'egmla_catch 2' INT
        trap 'egmla_catch 1' HUP
        trap 'egmla_catch 3' QUIT
        EGMLA_LOG="$(egmla_find_log)"
        EGMLA_LOG_FROM=$(($(wc -l 2>/dev/null <"${EGMLA_LOG:-/dev/null}" || echo 0) + 1))
    fi
    EGMLA_FACTS=(--nodes "${EGMLA_NODES[*]}" --ranks "$EGMLA_RANKS" --job "${EGMLA_JOB:-$$}" --restart "${SLURM_RESTART_COUNT:-0}")
    if egmla_under_slurm && [ -z "$check" ]; then
        EGMLA_FACTS+=(--log "$EGMLA_LOG")
        if [ "${SLURM_RESTART_COUNT:-0}" != 0 ]; then # nobody watches a restart: what goes wrong in it is counted
            egmla_ask begin || egmla_refused "$?"
            began=yes
        fi
    fi
    adapted="$(egmla_ask fit)" || egmla_end "$?" "$began"
    # shellcheck disable=SC2206 # words without spaces
    EGMLA_SETTINGS+=($adapted)
    if [ -n "$check" ]; then
        egmla_say "ok: ${#EGMLA_NODES[@]} nodes with $EGMLA_RANKS ranks each"
    elif egmla_under_slurm; then
        egmla_train_under_slurm "$began"
    else
        egmla_on_ranks -m egmla_megatron.train "${EGMLA_SETTINGS[@]}"
    fi
}

# $1: this launch is recorded already.
egmla_train_under_slurm() {
    local code=0 began="$1"
    egmla_find_port
    EGMLA_FACTS+=(--port "$EGMLA_PORT")
    egmla_say "launcher: job $EGMLA_JOB, restart ${SLURM_RESTART_COUNT:-0}, ${#EGMLA_NODES[@]} nodes with $EGMLA_RANKS ranks each, meeting at ${EGMLA_NODES[0]}:$EGMLA_PORT"
    egmla_check_nodes || egmla_end "$?" "$began" --checks
    [ -n "$began" ] || egmla_ask begin || egmla_refused "$?"
    egmla_on_ranks -m egmla_megatron.train "${EGMLA_SETTINGS[@]}" || code=$?
    egmla_end "$code" yes
}

egmla_check_nodes() {
    [ "$SITE_PREFLIGHT" != off ] || return 0
    egmla_on_nodes 60 "$EGMLA_PY" -m egmla_megatron.launching nodes "${EGMLA_FACTS[@]}" "${EGMLA_SETTINGS[@]}" || return
    [ "$SITE_PREFLIGHT" = full ] && [ $((${#EGMLA_NODES[@]} * EGMLA_RANKS)) -gt 1 ] || return 0
    egmla_on_ranks -m egmla_megatron.launching.links
}

# One field of Slurm's record of this job.
egmla_job_field() { scontrol show job "$EGMLA_JOB" 2>/dev/null | sed -n "s/^ *\(.* \)\{0,1\}$1=\([^ ].*\)\$/\2/p"; }

# The file that this script's stderr is. Slurm's record comes second: newer versions leave its %j and %x as they are.
egmla_find_log() {
    local log
    log="$(readlink "/proc/$$/fd/2" 2>/dev/null || true)"
    if [ -f "$log" ]; then printf '%s\n' "$log"; else egmla_job_field StdErr; fi
}

# Ends the script with $1, unless a signal was the reason: then there is nothing to save yet, and the job starts again.
# Somebody who sends SIGINT wants it to end.
egmla_refused() {
    case "$egmla_signal" in
        0) exit "$1" ;;
        2) egmla_say "launcher: stopped by SIGINT before training; submit it again to resume" && exit 130 ;;
        *) egmla_start_again ;;
    esac
}

# What the end of a step with exit code $1 means. $2: the launch was recorded. The rest goes to `launching end`.
egmla_end() {
    local verdict=0 code="$1"
    [ -n "$2" ] || egmla_refused "$1"
    if egmla_log | grep -q 'DUE TO NODE FAILURE'; then code=1 egmla_signal=0; fi # Slurm's SIGTERM is not the cause
    egmla_ask end --code "$code" --signal "$egmla_signal" "${@:3}" || verdict=$?
    [ "$verdict" != "$EGMLA_AGAIN" ] || egmla_start_again
    exit "$verdict"
}

# What the job's log says of this start.
egmla_log() { tail -n "+$EGMLA_LOG_FROM" "${EGMLA_LOG:-/dev/null}" 2>/dev/null || true; }

# Whether Slurm itself is ending the job, and not because of its time or a preemption: somebody has cancelled it.
egmla_cancelled() {
    case "$(egmla_job_field JobState)" in
        COMPLETING* | CANCELLED*) ! egmla_log | grep -qE 'CANCELLED AT .* DUE TO (TIME LIMIT|PREEMPTION)' ;;
        *) return 1 ;;
    esac
}

# Puts the job back into the queue, as it was submitted. Slurm then ends this script.
egmla_start_again() {
    if egmla_log | grep -q 'CANCELLED AT .* DUE TO NODE FAILURE'; then
        egmla_say "launcher: a node is lost; Slurm starts the job again by itself"
        exit 143
    fi
    if egmla_cancelled; then
        egmla_say "launcher: the job was cancelled; submit it again to resume"
        exit 143
    fi
    if [ "${EGMLA_REQUEUE:-yes}" != no ] && scontrol requeue "$EGMLA_JOB"; then
        egmla_say "launcher: the job starts again by itself"
        sleep 60 # until Slurm ends this script
        exit 143
    fi
    egmla_say "launcher: this job cannot start itself again; submit it once more to resume"
    exit 1
}
