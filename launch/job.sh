# Sourced by the scripts that run as jobs, instead of common.sh: the same file works under sbatch, in salloc, and as
# `bash launch/X.sh` on one machine. Under Slurm every node gets one task, which starts the node's ranks.
# EGMLA_NPROC is the number of ranks of a node (default: its GPUs); EGMLA_REQUEUE=no: never start again by itself.
# shellcheck shell=bash

# shellcheck disable=SC2034 # read by site_settings.sh
EGMLA_JOB_SCRIPT=yes
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$EGMLA_CALLER"
[[ ":${PYTHONPATH:-}:" == *":$EGMLA_ROOT:"* ]] || export PYTHONPATH="$EGMLA_ROOT${PYTHONPATH:+:$PYTHONPATH}"

egmla_signal=0       # that this script got
EGMLA_JOB=           # as Slurm's commands take it: the bare number of an array's last task means all of its tasks
egmla_child=         # step that a signal goes on to
EGMLA_NODES=()       # of the job; one without Slurm
EGMLA_RANKS=1        # of each node
EGMLA_SRUN=(srun)    # with what every step needs
EGMLA_INSIDE=()      # starts a command in the container, on a node
EGMLA_WORDS=()       # the script's arguments

EGMLA_INTERACTIVE=4294967290 # step of the shell that salloc opens on the first node of many sites

# A job of this script, or an allocation (salloc) that it is started in; not a shell inside a step. A job that was
# submitted from such a shell inherits its step's variables: there the copy that Slurm runs tells.
egmla_under_slurm() {
    [ -n "${SLURM_JOB_ID:-}" ] && case "${SLURM_STEP_ID:-}" in
        '' | "$EGMLA_INTERACTIVE") ;;
        *) [ "${0##*/}" = slurm_script ] ;;
    esac
}

# CPUs that the job has on every node, where they differ on the poorest: "72(x2),36" are 36.
egmla_cpus_of_node() {
    local cpus="${SLURM_JOB_CPUS_PER_NODE:-${SLURM_CPUS_ON_NODE:-1}}"
    tr ',' '\n' <<<"$cpus" | sed 's/(.*//' | sort -n | sed -n 1p
}

# GPUs that the job has on its first node; a login node, where salloc may leave its shell, is told of none.
egmla_gpus_of_node() {
    # shellcheck disable=SC2016 # expanded on the node
    if [ -n "${SLURM_GPUS_ON_NODE:-}" ] || egmla_on_first_node; then
        printf '%s\n' "${SLURM_GPUS_ON_NODE:-0}"
    else
        srun --nodes=1 --ntasks=1 --nodelist="${EGMLA_NODES[0]}" bash -c 'echo "${SLURM_GPUS_ON_NODE:-0}"'
    fi
}

# Whether this script runs on the job's first node, as batch scripts do.
egmla_on_first_node() { [ "${SLURMD_NODENAME:-}" = "${EGMLA_NODES[0]}" ]; }

# A job that is submitted from inside another one inherits what that one is: Slurm's record tells what this one is.
egmla_forget_other_job() {
    local record
    [ -n "${SLURM_ARRAY_TASK_ID:-}${SLURM_HET_SIZE:-}" ] || return 0
    record="$(scontrol show job "$SLURM_JOB_ID")" || egmla_die "Slurm: scontrol shows no job $SLURM_JOB_ID; is Slurm working?"
    grep -q "JobId=$SLURM_JOB_ID ArrayJobId=${SLURM_ARRAY_JOB_ID:-} ArrayTaskId=${SLURM_ARRAY_TASK_ID:-} " <<<"$record" ||
        unset SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_ARRAY_TASK_COUNT
    grep -q "JobId=$SLURM_JOB_ID HetJobId=" <<<"$record" || unset SLURM_HET_SIZE
}

# Sets EGMLA_WORDS to "$@" with the task's number of a job array for %a, as in Slurm's own file names.
egmla_array_words() {
    local task=''
    EGMLA_WORDS=("$@")
    if egmla_under_slurm; then
        egmla_forget_other_job
        task="${SLURM_ARRAY_TASK_ID:-}"
    fi
    if [ -n "$task" ]; then
        EGMLA_WORDS=("${@//\%a/$task}")
    elif [[ "$*" == *%a* ]]; then
        egmla_die "command line: got %a, allowed in job arrays only, where it is the task's number; use sbatch --array, or write the number"
    fi
}

# Fills the other variables above. Called once.
egmla_open_job() {
    local node gpus
    [[ "${EGMLA_REQUEUE:-yes}" =~ ^(yes|no)$ ]] ||
        egmla_die "EGMLA_REQUEUE: got $EGMLA_REQUEUE, allowed yes, no; set it to no for a job that never starts again by itself"
    if egmla_under_slurm; then
        [ "${SLURM_HET_SIZE:-1}" -le 1 ] ||
            egmla_die "Slurm: got a heterogeneous job of $SLURM_HET_SIZE components, allowed one: the others would stand idle; submit" \
                "it without ' : ' (nodes of one job may differ, for example with --constraint='a|b')"
        EGMLA_JOB="${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID:-}_$SLURM_ARRAY_TASK_ID}"
        EGMLA_JOB="${EGMLA_JOB:-$SLURM_JOB_ID}"
        unset SLURM_CPU_BIND SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_LIST SLURM_CPU_BIND_VERBOSE # of a shell inside a step
        unset SLURM_EXPORT_ENV # of sbatch --export=NONE: tasks need what is exported here
        unset SLURM_CPUS_PER_TASK SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK # one task gets all that a node has
        while IFS= read -r node; do EGMLA_NODES+=("$node"); done < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
        [ "${#EGMLA_NODES[@]}" -gt 0 ] || egmla_die "Slurm: scontrol names no nodes for job $SLURM_JOB_ID; is Slurm working?"
        gpus="$(egmla_gpus_of_node)" || egmla_die "Slurm: no step starts on ${EGMLA_NODES[0]}; try: srun hostname"
        # since 22.05 srun does not take it from the job, and a task would get one core
        EGMLA_SRUN+=(--cpus-per-task="$(egmla_cpus_of_node)")
    else
        [ "${SLURM_JOB_NUM_NODES:-1}" = 1 ] ||
            egmla_say "warning: a shell inside a step uses this machine alone, not the job's $SLURM_JOB_NUM_NODES nodes; use sbatch, or the shell of salloc"
        EGMLA_NODES=("$(hostname)")
        gpus="$(egmla_gpus)"
    fi
    EGMLA_RANKS="${EGMLA_NPROC:-$((gpus > 0 ? gpus : 1))}"
    egmla_open_container
    egmla_check_partition
}

# What the image itself sets would win over what is exported here, so that the command is started by env in it.
egmla_open_container() {
    local mounts="$EGMLA_ROOT:$EGMLA_ROOT" variables=(env "PYTHONPATH=${PYTHONPATH:-}")
    [ "$SITE_CONTAINER" != none ] || return 0
    [[ "$EGMLA_ROOT$EGMLA_CALLER" != *[:,]* ]] ||
        egmla_die "SITE_CONTAINER=$SITE_CONTAINER: got $EGMLA_ROOT and $EGMLA_CALLER, allowed paths without : and , to be mounted; move them"
    [ "$EGMLA_CALLER" = "$EGMLA_ROOT" ] || mounts+=",$EGMLA_CALLER:$EGMLA_CALLER"
    mounts+="${SITE_MOUNTS:+,$SITE_MOUNTS}"
    [ -z "$SITE_INTERFACE" ] || variables+=(NCCL_SOCKET_IFNAME="$SITE_INTERFACE" GLOO_SOCKET_IFNAME="$SITE_INTERFACE")
    variables+=(${SITE_ENVIRONMENT[@]+"${SITE_ENVIRONMENT[@]}"})
    case "$SITE_CONTAINER" in
        apptainer)
            command -v apptainer >/dev/null || egmla_die "SITE_CONTAINER=apptainer: the command is not here; load its module"
            EGMLA_INSIDE=(apptainer exec --nv --bind "$mounts" --pwd "$EGMLA_CALLER" "$SITE_IMAGE" "${variables[@]}")
            ;;
        pyxis)
            egmla_under_slurm || egmla_die "SITE_CONTAINER=pyxis: allowed under Slurm only; use sbatch, or another container"
            EGMLA_SRUN+=(--container-image="$SITE_IMAGE" --container-mounts="$mounts" --container-workdir="$EGMLA_CALLER")
            EGMLA_INSIDE=("${variables[@]}")
            ;;
    esac
}

egmla_check_partition() {
    if [ -n "$SITE_PARTITION" ] && [ -n "${SLURM_JOB_PARTITION:-}" ] &&
        [[ ",$SITE_PARTITION," != *",$SLURM_JOB_PARTITION,"* ]]; then # sbatch takes several
        egmla_say "warning: this job runs in partition $SLURM_JOB_PARTITION, site.sh says $SITE_PARTITION; bash launch/submit.sh applies it"
    fi
}

# Runs "$@" once: here, or in pyxis or from a login node as a step on the first node.
egmla_once() {
    if egmla_under_slurm && { [ "$SITE_CONTAINER" = pyxis ] || ! egmla_on_first_node; }; then
        "${EGMLA_SRUN[@]}" --nodes=1 --ntasks=1 --nodelist="${EGMLA_NODES[0]}" \
            ${EGMLA_INSIDE[@]+"${EGMLA_INSIDE[@]}"} "$EGMLA_PY" "$@"
    else
        ${EGMLA_INSIDE[@]+"${EGMLA_INSIDE[@]}"} "$EGMLA_PY" "$@"
    fi
}

# What a task does first: a node that does not see the environment or the folder of the job says so by its name.
# shellcheck disable=SC2016 # expanded on the node
EGMLA_TASK='
cd "$EGMLA_CALLER" 2>/dev/null || missing="$EGMLA_CALLER"
[ -r "$EGMLA_ROOT/launch/common.sh" ] || missing="$EGMLA_ROOT"
command -v "$1" >/dev/null || missing="$1"
[ "$1" != env ] || command -v "$EGMLA_PY" >/dev/null || missing="$EGMLA_PY" # in the image
if [ -n "${missing:-}" ]; then
    echo "error: node $SLURMD_NODENAME: $missing is not there; put it on a disk that all nodes see, or leave the node out" >&2
    exit 2
fi
# torchrun would guess both by looking up names, which differ between networks
export PET_RDZV_CONF="is_host=$((SLURM_NODEID == 0))" PET_LOCAL_ADDR="$SLURMD_NODENAME"
exec "$@"'

# Runs "$@" on every node, one task each. Ends $1 seconds after the first task has ended.
egmla_on_nodes() {
    local patience="$1"
    shift
    egmla_follow "${EGMLA_SRUN[@]}" --nodes="${#EGMLA_NODES[@]}" --ntasks="${#EGMLA_NODES[@]}" --ntasks-per-node=1 \
        --kill-on-bad-exit=0 --wait="$patience" bash -c "$EGMLA_TASK" task ${EGMLA_INSIDE[@]+"${EGMLA_INSIDE[@]}"} "$@"
}

# Runs the Python program "$@" on all ranks of all nodes, or of this machine.
egmla_on_ranks() {
    local launcher=("$EGMLA_PY" -m egmla_megatron.launch --nproc-per-node "$EGMLA_RANKS")
    if ! egmla_under_slurm; then
        exec ${EGMLA_INSIDE[@]+"${EGMLA_INSIDE[@]}"} "${launcher[@]}" --standalone "$@"
    fi
    launcher+=(--nnodes "${#EGMLA_NODES[@]}" --rdzv-backend c10d --rdzv-endpoint "${EGMLA_NODES[0]}:$EGMLA_PORT"
        --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}")
    # Ranks that lose another need train.peer_timeout_s (40 s) to notice and to name it. Not --kill-on-bad-exit: after a
    # signal every node ends with 128 + signal, and the first one would cut off the checkpoint's marker on another.
    egmla_on_nodes 90 "${launcher[@]}" "$@"
}

# Sets EGMLA_PORT to one that is free on the first node, by the job's number: two jobs on a node do not meet.
egmla_find_port() {
    local tries
    for tries in {0..99}; do
        EGMLA_PORT=$((20000 + (SLURM_JOB_ID + 131 * tries) % 12000)) # below the ports that systems hand out
        (: <"/dev/tcp/${EGMLA_NODES[0]}/$EGMLA_PORT") 2>/dev/null || return 0
        egmla_say "port $EGMLA_PORT of ${EGMLA_NODES[0]} is in use; taking another"
    done
    egmla_die "ports: 100 of them from 20000 on are in use on ${EGMLA_NODES[0]}; leave that node out"
}

egmla_catch() {
    local before="$egmla_signal"
    egmla_signal="$1"
    case "$1" in
        # srun takes it for a question. Once: in salloc this script may lie in a step, and get what all steps get
        2) [ "$before" = 2 ] || scancel --signal=INT "$EGMLA_JOB" 2>/dev/null || true ;;
        # srun passes USR1 on; at SIGTERM it would kill the ranks after KillWait, whether they have saved or not
        *) [ -z "$egmla_child" ] || kill -s USR1 "$egmla_child" 2>/dev/null || true ;;
    esac
}

# Runs "$@"; a signal that this script gets goes on to it at once, and its end is waited for. Returns its exit code.
egmla_follow() {
    local code
    if [ "$egmla_signal" != 0 ]; then return $((128 + egmla_signal)); fi
    "$@" &
    egmla_child=$!
    while :; do
        code=0
        wait "$egmla_child" || code=$?
        # a signal ends `wait` early; nothing but its child's end ends it otherwise
        if [ "$code" -le 128 ] || ! kill -0 "$egmla_child" 2>/dev/null; then break; fi
    done
    egmla_child=
    return "$code"
}
