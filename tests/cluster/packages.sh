#!/usr/bin/env bash
# Install the Debian packages that the small cluster and some tests need, without starting their
# services.
set -euo pipefail

packages=(
    slurmd slurmctld slurm-client slurm-wlm-basic-plugins munge
    openssh-server openssh-client pdsh openmpi-bin mpich
    iproute2 nftables procps util-linux tmux
    bzip2 gzip xz-utils zstd
)
# In CI, the tests of the site need a browser. Ubuntu has no package of this one.
[[ ${CI:-} != true ]] || ! grep -qx ID=debian /etc/os-release || packages+=(chromium)
policy=/usr/sbin/policy-rc.d
saved_policy=$policy.before-cluster

# Succeed if all packages are installed.
all_installed() {
    local states
    # shellcheck disable=SC2016  # dpkg-query expands it
    states=$(dpkg-query --show --showformat='${db:Status-Status}\n' "${packages[@]}" 2>/dev/null) \
        && ! grep -qvx installed <<<"$states"
}

# Restore the policy that the machine had before, if it had one.
restore_policy() {
    rm -f "$policy"
    [[ ! -e $saved_policy ]] || mv "$saved_policy" "$policy"
}

! all_installed || exit 0
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "packages.sh: error: not root, or no apt-get; run it as root on Debian or Ubuntu" >&2
    exit 2
fi
# Do not overwrite a saved policy, because a killed run may have saved the machine's policy already.
[[ ! -e $policy || -e $saved_policy ]] || mv "$policy" "$saved_policy"
trap restore_policy EXIT
# Forbid the start of daemons with status 101: a package runs this policy before it starts its daemon.
printf '#!/bin/sh\nexit 101\n' >"$policy"
chmod +x "$policy"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"
