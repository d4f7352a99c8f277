#!/usr/bin/env bash
# Evaluates a checkpoint, by default the newest complete one of a run:
#   sbatch [--nodes=N ...] launch/evaluate.sh ppl RUN_DIR --data PREFIX [PREFIX ...] [options] [section.key=value ...]
#   sbatch --gpus-per-node=1 launch/evaluate.sh tasks RUN_DIR --tasks NAME[,NAME ...] [options]   one process: lm_eval
#   bash launch/evaluate.sh ppl|tasks RUN_DIR ...                            this machine, with 0 to 8 GPUs
# Options are those of tools/evaluate.py (--help). A cluster without GPUs: sbatch --gpus-per-node=0. EGMLA_NPROC is the
# number of ranks of a node (default: its GPUs). Relative paths start from the folder the job was submitted in.
#SBATCH --job-name=evaluate
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --output=%x_%j.out

# sbatch runs a copy of this file: Slurm knows where the original is.
here="$(dirname "${BASH_SOURCE[0]}")"
if [ ! -f "$here/common.sh" ]; then
    here="$(scontrol show job "${SLURM_JOB_ID:-0}" 2>/dev/null | sed -n 's/^ *Command=//p')"
    here="${here%%/evaluate.sh*}"
    [ -f "$here/common.sh" ] || here="${EGMLA_ROOT:-${SLURM_SUBMIT_DIR:-.}}/launch"
fi
[ -f "$here/common.sh" ] || { echo "error: evaluate.sh: the repository was not found; set EGMLA_ROOT to its folder" >&2 && exit 2; }
source "$here/job.sh"

tool="$EGMLA_ROOT/tools/evaluate.py"
case " $* " in *' -h '* | *' --help '*) exec "$EGMLA_PY" "$tool" "$@" ;; esac

egmla_array_words "$@"
egmla_open_job
if [ "${1:-}" = tasks ]; then # lm_eval runs the model in one process
    egmla_once "$tool" "${EGMLA_WORDS[@]}"
    exit
fi
if egmla_under_slurm; then egmla_find_port; fi
egmla_on_ranks "$tool" ${EGMLA_WORDS[@]+"${EGMLA_WORDS[@]}"}
