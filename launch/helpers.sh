# Sourced first by common.sh and by the scripts that need no Python: folders and messages.
# shellcheck shell=bash

set -euo pipefail

EGMLA_CALLER="$PWD"
EGMLA_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
export EGMLA_ROOT EGMLA_CALLER

egmla_die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

egmla_say() { printf '%s\n' "$*" >&2; }

# A path as the caller wrote it, made absolute from the folder it was written in.
egmla_path() {
    case "$1" in
        /*) printf '%s\n' "$1" ;;
        *) printf '%s\n' "$EGMLA_CALLER/$1" ;;
    esac
}

# Ends the script unless $2, the value of the variable $1, is a whole number from 1 to 9999.
egmla_count() {
    [[ "$2" =~ ^[1-9][0-9]{0,3}$ ]] ||
        egmla_die "$1: got $2, allowed a whole number from 1 to 9999; set it to the number of processes, or unset it"
}
