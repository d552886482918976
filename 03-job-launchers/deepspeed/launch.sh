#!/usr/bin/env bash
# Run a chapter with DeepSpeed's launcher, which connects with pdsh to the hosts that a file lists:
#
#   03-job-launchers/deepspeed/launch.sh hosts.txt 03-job-launchers/train_llm.py --num-steps 5000
#
# The file has a line `NAME slots=RANKS` for each host. DeepSpeed only starts the ranks; the script
# itself does not use DeepSpeed. To make all ranks save and stop, create a file `stop` in the run's
# folder.
set -euo pipefail

[[ $# -gt 1 && -r $1 ]] || { echo "usage: $0 HOSTS_FILE SCRIPT [ARGUMENTS]" >&2; exit 2; }
hosts_file=$1
shift
first_host=$(sed 's/#.*//' "$hosts_file" | awk 'NF { print $1; exit }')

# DeepSpeed passes only a few variables to the ranks, such as the variables whose names begin with
# PYTHON. It also passes the variables in the file that DS_ENV_FILE names.
env_file=$(mktemp)
trap 'rm -f "$env_file"' EXIT
for name in OMP_NUM_THREADS HF_HOME HF_HUB_OFFLINE GLOO_SOCKET_IFNAME \
    "${!NCCL_@}" "${!TORCH_NCCL_@}" "${!FI_@}"; do
    [[ -z ${!name+set} ]] || echo "$name=${!name}" >>"$env_file"
done
export DS_ENV_FILE=$env_file
# -tt gives each connection a terminal. When the connection is lost, the terminal hangs up, and the
# ranks end.
export PDSH_SSH_ARGS_APPEND="-tt -o BatchMode=yes ${PDSH_SSH_ARGS_APPEND:-}"

deepspeed --hostfile "$hosts_file" --force_multi --master_addr "$first_host" \
    --master_port "${MASTER_PORT:-29400}" --no_local_rank "$@"
