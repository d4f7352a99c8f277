# Sourced by common.sh: how a Python environment is found, or made in .venv by one script at a time.
# shellcheck shell=bash

EGMLA_STATE="$EGMLA_ROOT/.dev" # lock and log; not in the environment, which may be made anew

# Only running it tells: version managers leave shims that exist and fail.
egmla_python_works() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# Prints every place where a Python may be, best first, one a line.
egmla_python_candidates() {
    local name base
    for name in python3.12 python3.13 python3.14 python3 python; do
        type -aP "$name" 2>/dev/null || true
    done
    for base in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do printf '%s\n' "$base"; done
    uv python find --no-python-downloads '>=3.12' 2>/dev/null || true
    base="$(conda info --base 2>/dev/null || true)"
    for base in "${CONDA_PREFIX:-}" "$base" "$HOME"/{miniconda3,anaconda3,miniforge3,mambaforge} /opt/conda; do
        [ -n "$base" ] || continue
        for name in "$base/bin/python" "$base"/envs/*/bin/python; do printf '%s\n' "$name"; done
    done
}

# Prints the first of the lines on stdin that is a working Python; EGMLA_PYTHON alone where it is set.
egmla_find_python() {
    local candidate
    if [ -n "${EGMLA_PYTHON:-}" ]; then
        egmla_python_works "$EGMLA_PYTHON" ||
            egmla_die "EGMLA_PYTHON: got $EGMLA_PYTHON, which is no working Python >= 3.12; set it to one, or unset it"
        printf '%s\n' "$EGMLA_PYTHON"
        return
    fi
    while IFS= read -r candidate; do
        if egmla_python_works "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    egmla_die "no working Python >= 3.12 found (PATH, pyenv, uv, conda); install one, for example with" \
        "\`uv python install 3.12\` or \`pyenv install 3.12\`, or set EGMLA_PYTHON to its path"
}

# Prints the installed Python behind $1: an active environment may be the very one that is made anew.
egmla_base_python() {
    "$1" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))'
}

# Prints what an environment built by Python $1 must carry: it changes whenever the packages would.
egmla_fingerprint() {
    "$1" - "$EGMLA_ROOT" "$EGMLA_EXTRAS" <<'PYTHON'
import hashlib, pathlib, platform, sys
root = pathlib.Path(sys.argv[1])
parts = [(root / name).read_bytes() for name in ("pyproject.toml", "launch/constraints.txt")]
parts += [text.encode() for text in (*sys.argv[1:], platform.python_version())]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
PYTHON
}

egmla_venv_ready() {
    local python="$EGMLA_VENV/bin/python" stamp="$EGMLA_VENV/egmla_stamp"
    [ -f "$stamp" ] && egmla_python_works "$python" || return 1
    [ "$(cat "$stamp")" = "$(egmla_fingerprint "${EGMLA_PYTHON:-$python}" 2>/dev/null)" ]
}

# Makes the folder of the environment. One whose installation was cut short is made anew.
egmla_make_venv() {
    local base="$1"
    if [ -e "$EGMLA_VENV" ] && [ ! -f "$EGMLA_VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$EGMLA_VENV")" ]; then
        egmla_die "$EGMLA_VENV is there and is no Python environment; move it away or set EGMLA_VENV to another folder"
    fi
    if [ ! -e "$EGMLA_VENV/egmla_unfinished" ] && egmla_python_works "$EGMLA_VENV/bin/python" &&
        [ "$(egmla_fingerprint "$EGMLA_VENV/bin/python")" = "$(egmla_fingerprint "$base")" ]; then
        return
    fi
    egmla_say "making $EGMLA_VENV with $base"
    rm -rf "$EGMLA_VENV"
    uv venv --quiet --python "$base" "$EGMLA_VENV" >"$EGMLA_LOG" 2>&1 ||
        "$base" -m venv "$EGMLA_VENV" >>"$EGMLA_LOG" 2>&1 ||
        egmla_die "$base cannot make an environment; install uv, or Python's venv module (package python3-venv)"
}

# Runs "$@" with its output in the log and a sign of life every 10 s.
egmla_quietly() {
    local heartbeat rc=0
    (
        seconds=0
        while sleep 10 >/dev/null 2>&1 && kill -0 "$$" 2>/dev/null; do
            seconds=$((seconds + 10))
            egmla_say "  installing for $seconds s: $(tail -n 1 "$EGMLA_LOG" | cut -c 1-80)"
        done
    ) &
    heartbeat=$!
    "$@" >>"$EGMLA_LOG" 2>&1 || rc=$?
    kill "$heartbeat" 2>/dev/null || true
    wait "$heartbeat" 2>/dev/null || true
    return "$rc"
}

egmla_pip() {
    "$EGMLA_VENV/bin/python" -m pip --version || "$EGMLA_VENV/bin/python" -m ensurepip --upgrade || return 1
    "$EGMLA_VENV/bin/python" -m pip install --quiet --progress-bar off "$@"
}

egmla_install() {
    local base package="${EGMLA_ROOT}[$EGMLA_EXTRAS]" constraints="$EGMLA_ROOT/launch/constraints.txt"
    egmla_venv_ready && return # another script was faster
    base="$(egmla_find_python < <(egmla_python_candidates))" || exit 2
    base="$(egmla_base_python "$base")" || exit 2
    EGMLA_LOG="$EGMLA_STATE/install.log"
    : >"$EGMLA_LOG"
    egmla_make_venv "$base"
    : >"$EGMLA_VENV/egmla_unfinished"
    rm -f "$EGMLA_VENV/egmla_stamp"
    egmla_say "installing egmla_megatron[$EGMLA_EXTRAS], several minutes the first time; log: $EGMLA_LOG"
    # pip second: it reads the site's pip.conf, which uv does not.
    egmla_quietly uv pip install --python "$EGMLA_VENV/bin/python" -c "$constraints" -e "$package" ||
        egmla_quietly egmla_pip -c "$constraints" -e "$package" || egmla_install_failed
    { egmla_fingerprint "$EGMLA_VENV/bin/python" >"$EGMLA_VENV/egmla_stamp.new" &&
        rm -f "$EGMLA_VENV/egmla_unfinished" &&
        mv "$EGMLA_VENV/egmla_stamp.new" "$EGMLA_VENV/egmla_stamp"; } || egmla_die "$EGMLA_VENV cannot be written; free some space and run again"
}

egmla_install_failed() {
    local reason
    local network='network is unreachable|dns error|resolve host|name resolution|name or service not known|timed out'
    network+='|connection (refused|reset|error|aborted)|new connection|error sending request|failed to fetch'
    if grep -qiE "$network" "$EGMLA_LOG"; then
        egmla_die "packages cannot be fetched: the network or the package index does not answer; try again (where nodes have no" \
            "network: bash launch/pretrain_base.sh --check on the login node, before the job), point UV_INDEX_URL or PIP_INDEX_URL to a mirror, or set EGMLA_VENV=none to use the active environment; log: $EGMLA_LOG"
    fi
    reason="$(grep -iE 'error|no space|no solution' "$EGMLA_LOG" | tail -n 1 | cut -c 1-160)"
    egmla_die "installation failed: ${reason:-see the log}; mend that and run again; log: $EGMLA_LOG"
}

# Runs "$@" while no other script of this checkout does. Locks end with their process.
egmla_locked() {
    mkdir -p "$EGMLA_STATE" 2>/dev/null && [ -w "$EGMLA_STATE" ] ||
        egmla_die "$EGMLA_ROOT cannot be written; make it writable, or set EGMLA_VENV=none to use the active environment"
    if ! command -v flock >/dev/null; then
        egmla_locked_by_folder "$@"
        return
    fi
    (
        flock -n 8 || { egmla_say "waiting for another installation in $EGMLA_ROOT" && flock 8; }
        "$@" 8>&-
    ) 8>"$EGMLA_STATE/install.lock" || exit "$?"
}

# The same without flock (macOS): a folder that names its owner, ignored when the owner is gone.
egmla_locked_by_folder() {
    local lock="$EGMLA_STATE/install.lock.d" owner
    until mkdir "$lock" 2>/dev/null; do
        owner="$(cat "$lock/pid" 2>/dev/null || true)"
        if [ -n "$owner" ] && ! kill -0 "$owner" 2>/dev/null; then rm -rf "$lock"; else sleep 1; fi
    done
    printf '%s\n' "$$" >"$lock/pid"
    (
        trap 'rm -rf "$lock"' EXIT
        "$@"
    ) || exit "$?"
}

# EGMLA_VENV=none: nothing is installed, so say what is missing.
egmla_use_active_python() {
    local missing
    EGMLA_PY="$(egmla_find_python < <(type -aP python python3 python3.12 python3.13 python3.14))" || exit 2
    missing="$("$EGMLA_PY" -c '
from importlib.util import find_spec
names = ("torch", "megatron", "transformers", "safetensors", "datasets", "yaml", "psutil", "tqdm", "matplotlib")
print(" ".join(name for name in names if find_spec(name) is None))')"
    [ -z "$missing" ] ||
        egmla_die "EGMLA_VENV=none: $EGMLA_PY lacks: $missing; install them there, set EGMLA_PYTHON, or unset EGMLA_VENV"
    export PYTHONPATH="$EGMLA_ROOT${PYTHONPATH:+:$PYTHONPATH}"
}
