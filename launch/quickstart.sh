#!/usr/bin/env bash
# From a bare clone to a trained, exported and generating EG-MLA on real text, with two CPU cores or any GPUs:
#   bash launch/quickstart.sh [--out DIR] [section.key=value ...]
# Progress goes to stderr; the last line of stdout is one JSON object with the results.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

arguments=()
while [ $# -gt 0 ]; do
    case "$1" in
        --out)
            [ $# -ge 2 ] && [ -n "$2" ] || egmla_die "--out: got nothing; give a folder"
            arguments+=(--out "$(egmla_path "$2")")
            shift
            ;;
        --out=) egmla_die "--out: got nothing; give a folder" ;;
        --out=*) arguments+=(--out "$(egmla_path "${1#--out=}")") ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
exec "$EGMLA_PY" -m egmla_megatron.quickstart ${arguments[@]+"${arguments[@]}"}
