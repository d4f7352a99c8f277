#!/usr/bin/env bash
# Makes the environment and runs the checks and all tests. Arguments go to pytest: bash tests/run.sh tests/unit -k config
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/common.sh"

# shellcheck disable=SC2034 # read by the trap
started=$SECONDS
trap 'printf "tests/run.sh took %d s\n" "$((SECONDS - started))"' EXIT

# One thread a process: the distributed tests start several, and tiny tensors gain nothing from more.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" WANDB_MODE="${WANDB_MODE:-disabled}" TOKENIZERS_PARALLELISM=false

"$EGMLA_PY" -m ruff check .
"$EGMLA_PY" -m ruff format --check .
"$EGMLA_PY" -m mypy egmla_megatron tools
"$EGMLA_PY" -m pytest -q --timeout="${EGMLA_TEST_TIMEOUT:-300}" "$@" </dev/null
