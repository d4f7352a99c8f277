#!/usr/bin/env bash
# Pretrains EG-MLA-Base, 120M active parameters (configs/run/pretrain_base.yaml):
#   sbatch [--nodes=N ...] launch/pretrain_base.sh [section.key=value ...]   any number of nodes
#   bash launch/pretrain_base.sh [section.key=value ...]                     this machine, with 0 to 8 GPUs
# See launch/pretrain_1b2.sh.
#SBATCH --job-name=pretrain_base
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=1-00:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.out

# sbatch runs a copy of this file: Slurm knows where the original is.
here="$(dirname "${BASH_SOURCE[0]}")"
if [ ! -f "$here/common.sh" ]; then
    here="$(scontrol show job "${SLURM_JOB_ID:-0}" 2>/dev/null | sed -n 's/^ *Command=//p')"
    here="${here%%/pretrain_base.sh*}"
    [ -f "$here/common.sh" ] || here="${EGMLA_ROOT:-${SLURM_SUBMIT_DIR:-.}}/launch"
fi
[ -f "$here/common.sh" ] || { echo "error: pretrain_base.sh: the repository was not found; set EGMLA_ROOT to its folder" >&2 && exit 2; }
source "$here/training.sh"

case "${1:-}" in -h | --help) egmla_usage "$here/pretrain_base.sh" && exit 0 ;; esac
egmla_train pretrain_base parallel.gate_group=8 "$@" # tables over the GPUs of a node
