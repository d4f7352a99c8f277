#!/usr/bin/env bash
# sbatch with the account, partition, QOS, reservation and constraint of launch/site.sh:
#   bash launch/submit.sh [options of sbatch] launch/pretrain_1b2.sh [section.key=value ...]
# Options that are given win over site.sh.
source "$(dirname "${BASH_SOURCE[0]}")/helpers.sh"
source "$EGMLA_ROOT/launch/site_settings.sh"

[ $# -ge 1 ] || egmla_die "launch/submit.sh: got nothing; usage: bash launch/submit.sh [options of sbatch] launch/X.sh [section.key=value ...]"
command -v sbatch >/dev/null || egmla_die "launch/submit.sh: sbatch is not here; run it where jobs are submitted, or use bash launch/X.sh"
egmla_read_site
for name in ACCOUNT PARTITION QOS RESERVATION CONSTRAINT; do
    key="SITE_$name"
    [ -z "${!key}" ] || export "SBATCH_$name=${!key}"
done
exec sbatch "$@"
