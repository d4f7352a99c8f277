#!/usr/bin/env bash
# Pretrains one row of the ablation tables, any model of configs/model, as pretrain_base is trained, in runs/MODEL:
#   sbatch [--nodes=N ...] launch/ablation.sh MODEL [section.key=value ...]
#   bash launch/ablation.sh MODEL [section.key=value ...]
# The learning rate is the paper's for Base, Large and XLarge, by name. See launch/pretrain_1b2.sh.
#SBATCH --job-name=ablation
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
    here="${here%%/ablation.sh*}"
    [ -f "$here/common.sh" ] || here="${EGMLA_ROOT:-${SLURM_SUBMIT_DIR:-.}}/launch"
fi
[ -f "$here/common.sh" ] || { echo "error: ablation.sh: the repository was not found; set EGMLA_ROOT to its folder" >&2 && exit 2; }
source "$here/training.sh"

case "${1:-}" in -h | --help) egmla_usage "$here/ablation.sh" && exit 0 ;; esac
model="${1:-}"
case "$model" in
    '' | -* | *=*) egmla_die "launch/ablation.sh: got ${model:-no MODEL}, allowed the name of a file in configs/model, or a YAML file, first" ;;
    *xlarge*) rate=2e-4 ;;
    *large*) rate=2.5e-4 ;;
    *) rate=6e-4 ;;
esac
graph=auto
case "$model" in *mha*) graph=false ;; esac # never captured
name="$(basename "$model" .yaml)"
egmla_train "$model" run.name="$name" run.dir="runs/$name" optimizer.lr="$rate" parallel.gate_group=8 \
    train.cuda_graph="$graph" \
    'data.train=[data/climbmix]' 'data.valid=[data/climbmix_val]' data.tokenizer=data/gpt2 \
    parallel.overlap_grad_reduce=true parallel.overlap_param_gather=true "${@:2}"
