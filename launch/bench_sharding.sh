#!/usr/bin/env bash
# Measures replicated against dimension-wise sharded gating tables, variants one after another in one job:
#   sbatch --nodes=2 launch/bench_sharding.sh [options] [section.key=value ...]      2, 4, ... nodes, one GPU of each
#   bash launch/bench_sharding.sh [options] [section.key=value ...]                  this machine, all GPUs
# Options are those of tools/bench_sharding.py (--help). More GPUs of a node: sbatch --gpus-per-node=8. A cluster
# without GPUs: sbatch --gpus-per-node=0. On this machine EGMLA_NPROC is the number of ranks (default: one for each
# GPU, 2 without any). The table comes last on stdout; add --json FILE --plot FILE for more. Relative paths start from
# the folder the job was submitted in.
#SBATCH --job-name=bench_sharding
#SBATCH --nodes=2
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
#SBATCH --output=%x_%j.out

# sbatch runs a copy of this file: Slurm knows where the original is.
here="$(dirname "${BASH_SOURCE[0]}")"
if [ ! -f "$here/common.sh" ]; then
    here="$(scontrol show job "${SLURM_JOB_ID:-0}" 2>/dev/null | sed -n 's/^ *Command=//p')"
    here="${here%%/bench_sharding.sh*}"
    [ -f "$here/common.sh" ] || here="${EGMLA_ROOT:-${SLURM_SUBMIT_DIR:-.}}/launch"
fi
[ -f "$here/common.sh" ] || { echo "error: bench_sharding.sh: the repository was not found; set EGMLA_ROOT to its folder" >&2 && exit 2; }
source "$here/job.sh"

tool="$EGMLA_ROOT/tools/bench_sharding.py"
for argument in "$@"; do
    case "$argument" in # both need no ranks from here
        --nodes-on-this-machine | --nodes-on-this-machine=* | -h | --help) exec "$EGMLA_PY" "$tool" "$@" ;;
    esac
done

egmla_array_words "$@"
egmla_open_job
if egmla_under_slurm; then
    egmla_find_port
elif [ -z "${EGMLA_NPROC:-}" ] && [ "$EGMLA_RANKS" = 1 ]; then
    EGMLA_RANKS=$(($(egmla_gpus) == 1 ? 1 : 2)) # one rank has nothing to share
fi
egmla_on_ranks "$tool" ${EGMLA_WORDS[@]+"${EGMLA_WORDS[@]}"}
