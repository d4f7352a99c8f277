#!/usr/bin/env bash
# Sourced first by every script here and by tests/run.sh: finds Python, makes the environment, enters the repository.
#
#   source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
#
# Afterwards the current folder is the repository, `python` on PATH is the environment's, and these are set:
#   EGMLA_ROOT    the repository             EGMLA_PY  the environment's Python
#   EGMLA_CALLER  the folder of the caller; `egmla_path NAME` makes a path given by the user absolute from there
#   egmla_gpus    prints the number of GPUs
# Settings of the site come from launch/site.sh (see site.sh.example), and from the caller's environment:
#   EGMLA_PYTHON  the Python (>= 3.12) to use, instead of the first that is found
#   EGMLA_VENV    folder of the environment (default .venv), or `none`: the active Python has the packages (containers)
#   EGMLA_EXTRAS  extras of pyproject.toml to install, comma separated (default dev; add te for Transformer Engine)
#   EGMLA_NPROC   ranks to start on this machine (default: one for each GPU)
# A user's mistake ends the script with one line `error: ...` and exit code 2.
# shellcheck source=launch/helpers.sh
source "$(dirname "${BASH_SOURCE[0]}")/helpers.sh"
source "$EGMLA_ROOT/launch/site_settings.sh"
source "$EGMLA_ROOT/launch/environment.sh"

EGMLA_VENV="${EGMLA_VENV:-$EGMLA_ROOT/.venv}"
EGMLA_EXTRAS="${EGMLA_EXTRAS:-dev}"

# Number of GPUs of this machine, of those that CUDA_VISIBLE_DEVICES leaves.
egmla_gpus() {
    local listed gpus visible
    if ! listed="$(nvidia-smi --list-gpus 2>&1)" && command -v nvidia-smi >/dev/null; then
        egmla_say "warning: nvidia-smi fails (${listed%%$'\n'*}), so no GPU is used; mend the driver if there is one"
        listed=
    fi
    gpus="$(grep -c '^GPU ' <<<"$listed" || true)" # not their MIG devices, which follow indented
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then # as CUDA reads it: up to the first that is none
        visible="$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed -n '/^ *\([0-9]\|GPU-\|MIG-\)/!q;p' | grep -c . || true)"
        gpus=$((visible < gpus ? visible : gpus))
    fi
    printf '%s\n' "$gpus"
}

egmla_enter() {
    if [ "$SITE_CONTAINER" != none ]; then
        EGMLA_PY="$SITE_PYTHON" # of the image
        export PYTHONPATH="$EGMLA_ROOT${PYTHONPATH:+:$PYTHONPATH}"
    elif [ "$EGMLA_VENV" = none ]; then
        egmla_use_active_python
    else
        EGMLA_VENV="$(egmla_path "$EGMLA_VENV")"
        egmla_venv_ready || egmla_locked egmla_install
        EGMLA_PY="$EGMLA_VENV/bin/python"
        export VIRTUAL_ENV="$EGMLA_VENV" PATH="$EGMLA_VENV/bin:$PATH"
    fi
    export EGMLA_PY EGMLA_VENV
    cd "$EGMLA_ROOT"
}

# What the caller's environment or the site says wrong is said at once, not after an installation of minutes.
egmla_check_variables() {
    local extra extras
    [ -z "${EGMLA_NPROC:-}" ] || egmla_count EGMLA_NPROC "$EGMLA_NPROC"
    IFS=', ' read -ra extras <<<"$EGMLA_EXTRAS"
    for extra in "${extras[@]}"; do
        [[ "$extra" =~ ^(dev|te|eval)$ ]] ||
            egmla_die "EGMLA_EXTRAS: got $EGMLA_EXTRAS, allowed dev, te, eval, comma separated; write some of them, or unset it"
    done
}

egmla_read_site
egmla_apply_site
egmla_check_variables
egmla_enter
