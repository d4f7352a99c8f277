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
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
#SBATCH --output=%x_%j.out

# sbatch runs a copy of this file: Slurm knows where the original is.
egmla_script="${BASH_SOURCE[0]}"
if [ -n "${SLURM_JOB_ID:-}" ] && [ ! -f "$(dirname "$egmla_script")/common.sh" ]; then
    egmla_script="$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\(.*\/bench_sharding\.sh\).*/\1/p')"
fi
source "$(dirname "$egmla_script")/common.sh"

cd "$EGMLA_CALLER"
export PYTHONPATH="$EGMLA_ROOT${PYTHONPATH:+:$PYTHONPATH}"
tool="$EGMLA_ROOT/tools/bench_sharding.py"
for argument in "$@"; do
    case "$argument" in # both need no ranks from here
        --nodes-on-this-machine | --nodes-on-this-machine=* | -h | --help) exec "$EGMLA_PY" "$tool" "$@" ;;
    esac
done

if [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]; then
    read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    ranks="${EGMLA_NPROC:-${SLURM_GPUS_ON_NODE:-1}}"
    exec srun --kill-on-bad-exit=1 "$EGMLA_PY" -m egmla_megatron.launch \
        --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$((ranks > 0 ? ranks : 1))" \
        --rdzv-backend c10d --rdzv-endpoint "$first:$((20000 + SLURM_JOB_ID % 20000))" --rdzv-id "$SLURM_JOB_ID" \
        "$tool" "$@"
fi

gpus="$(nvidia-smi --list-gpus 2>/dev/null | grep -c . || true)"
ranks="${EGMLA_NPROC:-$((gpus > 0 ? gpus : 2))}"
exec "$EGMLA_PY" -m egmla_megatron.launch --standalone --nproc-per-node "$ranks" "$tool" "$@"
