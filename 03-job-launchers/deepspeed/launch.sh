#!/usr/bin/env bash
# Run a chapter with DeepSpeed's launcher, which reaches the hosts of a file with pdsh.
#
#   03-job-launchers/deepspeed/launch.sh hosts.txt 03-job-launchers/train_llm.py --num-steps 5000
#
# The file has a line `NAME slots=RANKS` for each host. DeepSpeed only starts the ranks: the script
# is the same as ever, and uses nothing else of it. `touch` the file `stop` in the run's
# folder to have all ranks save and stop.
set -euo pipefail

[[ $# -gt 1 && -r $1 ]] || { echo "usage: $0 HOSTS_FILE SCRIPT [ARGUMENTS]" >&2; exit 2; }
hosts=$1
shift
first=$(sed 's/#.*//' "$hosts" | awk 'NF { print $1; exit }')

# It passes on few variables, such as those whose names begin with PYTHON, and those in this file.
settings=$(mktemp)
trap 'rm -f "$settings"' EXIT
for name in OMP_NUM_THREADS HF_HOME HF_HUB_OFFLINE GLOO_SOCKET_IFNAME \
    "${!NCCL_@}" "${!TORCH_NCCL_@}" "${!FI_@}"; do
    [[ -z ${!name+set} ]] || echo "$name=${!name}" >>"$settings"
done
export DS_ENV_FILE=$settings
# A terminal there, so that a lost connection hangs up on what was started over it.
export PDSH_SSH_ARGS_APPEND="-tt -o BatchMode=yes ${PDSH_SSH_ARGS_APPEND:-}"

deepspeed --hostfile "$hosts" --force_multi --master_addr "$first" \
    --master_port "${MASTER_PORT:-29400}" --no_local_rank "$@"
