#!/usr/bin/env bash
# Trains one configuration on this machine, on all its GPUs, or on EGMLA_NPROC ranks (default without a GPU: 1):
#   bash launch/train.sh CONFIG [section.key=value ...]
# The same command again resumes. Paths are relative to the folder it is called from, except those in YAML files.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[ $# -ge 1 ] || egmla_die "launch/train.sh: got no CONFIG; usage: bash launch/train.sh CONFIG [section.key=value ...]"
cd "$EGMLA_CALLER"
export PYTHONPATH="$EGMLA_ROOT${PYTHONPATH:+:$PYTHONPATH}"
gpus="$(egmla_gpus)"
ranks="${EGMLA_NPROC:-$((gpus > 0 ? gpus : 1))}"
exec "$EGMLA_PY" -m egmla_megatron.launch --standalone --nproc-per-node "$ranks" -m egmla_megatron.train "$@"
