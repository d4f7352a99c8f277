#!/usr/bin/env bash
# Pretrains EG-MLA-1.2B (configs/run/pretrain_1b2.yaml):
#   sbatch [--nodes=N ...] launch/pretrain_1b2.sh [section.key=value ...]    any number of nodes
#   bash launch/pretrain_1b2.sh [section.key=value ...]                      this machine, with 0 to 8 GPUs
# The same command again resumes; under Slurm the job starts itself again until the run is complete. Where the ranks
# cannot use the settings, the micro-batch or the gate group becomes smaller, and that is said. Options of sbatch win
# over those below: --gpus-per-node=4 for nodes with four GPUs (0: without), --time=1-00:00:00 where the partition allows
# no more; --nodes=2-4 lets every start take what there is. In a job array %a is the task's number:
#   sbatch --array=1-3 launch/pretrain_1b2.sh run.dir=runs/seed%a run.seed=%a
#SBATCH --job-name=pretrain_1b2
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=2-00:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.out

# sbatch runs a copy of this file: Slurm knows where the original is.
here="$(dirname "${BASH_SOURCE[0]}")"
if [ ! -f "$here/common.sh" ]; then
    here="$(scontrol show job "${SLURM_JOB_ID:-0}" 2>/dev/null | sed -n 's/^ *Command=//p')"
    here="${here%%/pretrain_1b2.sh*}"
    [ -f "$here/common.sh" ] || here="${EGMLA_ROOT:-${SLURM_SUBMIT_DIR:-.}}/launch"
fi
[ -f "$here/common.sh" ] || { echo "error: pretrain_1b2.sh: the repository was not found; set EGMLA_ROOT to its folder" >&2 && exit 2; }
source "$here/training.sh"

case "${1:-}" in -h | --help) egmla_usage "$here/pretrain_1b2.sh" && exit 0 ;; esac
egmla_train pretrain_1b2 parallel.gate_group=8 "$@" # tables over the GPUs of a node
