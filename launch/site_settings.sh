# Sourced by common.sh: reads launch/site.sh (or the file that EGMLA_SITE names) and applies what it says.
# shellcheck shell=bash

EGMLA_SITE_KEYS=(SITE_ACCOUNT SITE_PARTITION SITE_QOS SITE_RESERVATION SITE_CONSTRAINT SITE_MODULES SITE_ENVIRONMENT
    SITE_INTERFACE SITE_CONTAINER SITE_IMAGE SITE_MOUNTS SITE_PYTHON SITE_PREFLIGHT SITE_LEAST_GB_PER_S)

# Ends the script unless the value of $1 is one of the others.
egmla_one_of() {
    local name="$1" allowed="${*:2}"
    [[ " $allowed " == *" ${!name} "* ]] ||
        egmla_die "$EGMLA_SITE: $name: got ${!name}, allowed ${allowed// /, }; set it to one of them, or leave it out"
}

# A shell that knows nothing else tells which variables a site file sets.
egmla_site_keys() {
    # shellcheck disable=SC2016 # expanded by the other shell
    env -i HOME="${HOME:-/}" PATH="$PATH" "$BASH" --noprofile --norc -c '
        set -u
        before=" name before $(compgen -v | tr "\n" " ")"
        source "$1" >&2 || exit 1
        for name in $(compgen -v); do
            case "$before BASH_REMATCH FUNCNAME PIPESTATUS " in *" $name "*) ;; *) printf "%s\n" "$name" ;; esac
        done' site "$EGMLA_SITE"
}

egmla_read_site_file() {
    local keys key said
    [ -r "$EGMLA_SITE" ] || egmla_die "EGMLA_SITE: got $EGMLA_SITE, which cannot be read; name a copy of launch/site.sh.example"
    said="$("$BASH" -n "$EGMLA_SITE" 2>&1)" ||
        egmla_die "$EGMLA_SITE: no valid bash (${said%%$'\n'*}); see launch/site.sh.example"
    keys="$(egmla_site_keys 2>/dev/null)" || egmla_die "$EGMLA_SITE: a command in it fails; try: bash -eu $EGMLA_SITE"
    for key in $keys; do
        [[ " ${EGMLA_SITE_KEYS[*]} " == *" $key "* ]] ||
            egmla_die "$EGMLA_SITE: unknown key $key; allowed ${EGMLA_SITE_KEYS[*]}; variables for the job belong into" \
                "SITE_ENVIRONMENT=($key=...)"
    done
    # shellcheck disable=SC1090 # the site's own file
    source "$EGMLA_SITE" >&2
}

# The command is a function of login shells, which batch jobs are not, and modules read variables that are not set.
egmla_load_modules() {
    local init
    set +u
    for init in "${EGMLA_PROFILES:-/etc/profile.d}"/{z00_lmod,lmod,modules}.sh; do
        # shellcheck disable=SC1090 # the site's own file
        type module >/dev/null 2>&1 || [ ! -r "$init" ] || source "$init" >&2 || true
    done
    type module >/dev/null 2>&1 ||
        egmla_die "$EGMLA_SITE: SITE_MODULES: there is no command module here; leave it out, or define that function in site.sh"
    # shellcheck disable=SC2086 # several names
    module load $SITE_MODULES >&2 ||
        egmla_die "$EGMLA_SITE: SITE_MODULES: module load $SITE_MODULES failed; try module avail"
    set -u
}

# Loads, exports and chooses what they say.
egmla_apply_site() {
    local setting
    for setting in ${SITE_ENVIRONMENT[@]+"${SITE_ENVIRONMENT[@]}"}; do
        [[ "$setting" =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] ||
            egmla_die "$EGMLA_SITE: SITE_ENVIRONMENT: got $setting, allowed NAME=value; write SITE_ENVIRONMENT=(A=1 B=2)"
        export "${setting?}"
    done
    [ -z "$SITE_MODULES" ] || egmla_load_modules
    if [ -n "$SITE_INTERFACE" ]; then
        export NCCL_SOCKET_IFNAME="$SITE_INTERFACE" GLOO_SOCKET_IFNAME="$SITE_INTERFACE"
    fi
    [ -z "$SITE_LEAST_GB_PER_S" ] || export EGMLA_LEAST_GB_PER_S="$SITE_LEAST_GB_PER_S"
}

# Sets every key, to what the site file says or to its default.
egmla_read_site() {
    local key
    for key in "${EGMLA_SITE_KEYS[@]}"; do unset "$key"; done # a setting of another site, exported by another job
    if [ -n "${EGMLA_SITE:-}" ]; then
        EGMLA_SITE="$(egmla_path "$EGMLA_SITE")"
        egmla_read_site_file
    else
        EGMLA_SITE="$EGMLA_ROOT/launch/site.sh"
        [ ! -e "$EGMLA_SITE" ] || egmla_read_site_file
    fi
    : "${SITE_ACCOUNT:=}" "${SITE_PARTITION:=}" "${SITE_QOS:=}" "${SITE_RESERVATION:=}" "${SITE_CONSTRAINT:=}"
    : "${SITE_MODULES:=}" "${SITE_INTERFACE:=}" "${SITE_IMAGE:=}" "${SITE_MOUNTS:=}" "${SITE_PYTHON:=python3}"
    : "${SITE_CONTAINER:=none}" "${SITE_PREFLIGHT:=full}" "${SITE_LEAST_GB_PER_S:=}"
    egmla_one_of SITE_CONTAINER none pyxis apptainer
    egmla_one_of SITE_PREFLIGHT full nodes off
    [[ "$SITE_LEAST_GB_PER_S" =~ ^([0-9]+(\.[0-9]+)?)?$ ]] ||
        egmla_die "$EGMLA_SITE: SITE_LEAST_GB_PER_S: got $SITE_LEAST_GB_PER_S, allowed a number; leave it out for no limit"
    [ "$SITE_CONTAINER" = none ] || [ -n "$SITE_IMAGE" ] ||
        egmla_die "$EGMLA_SITE: SITE_CONTAINER=$SITE_CONTAINER: got no SITE_IMAGE; name the image, or leave both out"
    # scripts that know nothing of containers run where they are
    [ -n "${EGMLA_JOB_SCRIPT:-}" ] || SITE_CONTAINER=none
}
