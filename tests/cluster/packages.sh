#!/usr/bin/env bash
# Install the Debian packages that the small cluster needs. No service is started by it.
set -euo pipefail

packages=(
    slurmd slurmctld slurm-client slurm-wlm-basic-plugins munge
    openssh-server openssh-client pdsh openmpi-bin mpich
    iproute2 nftables procps util-linux tmux
)
policy=/usr/sbin/policy-rc.d
aside=$policy.before-cluster

# installed: whether all packages are there.
installed() {
    local states
    # shellcheck disable=SC2016  # dpkg-query fills this in
    states=$(dpkg-query --show --showformat='${db:Status-Status}\n' "${packages[@]}" 2>/dev/null) \
        && ! grep -qvx installed <<<"$states"
}

# restore: put the machine's own policy back, or none if it had none.
restore() {
    rm -f "$policy"
    [[ ! -e $aside ]] || mv "$aside" "$policy"
}

! installed || exit 0
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "packages.sh: error: needs root, and a Debian or Ubuntu" >&2
    exit 2
fi
# What was set aside by a run that was killed is the machine's own: keep it.
[[ ! -e $policy || -e $aside ]] || mv "$policy" "$aside"
trap restore EXIT
# Packages ask this script whether they may start their daemons; 101 says no.
printf '#!/bin/sh\nexit 101\n' >"$policy"
chmod +x "$policy"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"
