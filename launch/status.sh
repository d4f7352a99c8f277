#!/usr/bin/env bash
# How a run stands: progress, time left, speed, last losses, checkpoints, restarts and why.
#   bash launch/status.sh RUN_DIR [--json]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cd "$EGMLA_CALLER"
export PYTHONPATH="$EGMLA_ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$EGMLA_PY" -m egmla_megatron.launching status "$@"
