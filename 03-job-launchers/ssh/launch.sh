#!/usr/bin/env bash
# Run a chapter on the hosts of a file, one per line, over ssh: one torchrun on each.
#
#   RANKS_PER_NODE=8 03-job-launchers/ssh/launch.sh hosts.txt 03-job-launchers/train_llm.py --num-steps 5000
#
# All hosts must have this folder and this environment at the same paths. What the hosts print comes
# here, marked with their names. Ctrl-C asks all ranks to save and stop. The exit status is the
# worst of all hosts.
set -uo pipefail

[[ $# -gt 1 && -r $1 ]] || { echo "usage: $0 HOSTS_FILE SCRIPT [ARGUMENTS]" >&2; exit 2; }
mapfile -t hosts < <(sed 's/#.*//' "$1" | awk 'NF { print $1 }')
[[ ${#hosts[@]} -gt 0 ]] || { echo "$0: error: $1 names no host" >&2; exit 2; }
shift

port=${MASTER_PORT:-29400}
id=run-$(date +%s)-$$
torchrun=$(command -v torchrun) || { echo "$0: error: torchrun is not on the PATH" >&2; exit 2; }
kept=(OMP_NUM_THREADS HF_HOME HF_HUB_OFFLINE NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT)
settings=(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
for name in "${kept[@]}"; do
    [[ -z ${!name+set} ]] || settings+=("$name=${!name}")
done
printf -v command '%q ' env "${settings[@]}" "$torchrun" --nnodes "${#hosts[@]}" \
    --nproc-per-node "${RANKS_PER_NODE:-gpu}" --max-restarts "${MAX_RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-id "$id" --rdzv-endpoint "${hosts[0]}:$port" "$@"
printf -v folder '%q' "$PWD"

# shellcheck disable=SC2329  # the trap calls it
stop() {
    echo "launch.sh: asking all ranks to save and stop"
    for host in "${hosts[@]}"; do
        # the brackets keep the pattern from finding the shell that looks for it
        ssh -o BatchMode=yes -n "$host" "pkill -TERM -f '[r]dzv-id $id'" &
    done
}
trap stop INT TERM

# -tt: a terminal there, so that a lost connection hangs up on torchrun, which then ends its ranks.
# setsid: Ctrl-C here is for this script, which passes it on.
for host in "${hosts[@]}"; do
    setsid ssh -tt -o BatchMode=yes "$host" "cd $folder && exec $command" </dev/null 2>&1 |
        sed -u "s/^/$host: /; s/\r$//" &
done

worst=0
for job in $(jobs -p); do
    wait "$job"
    status=$?
    while kill -0 "$job" 2>/dev/null; do # a trapped signal ends wait, and not what it waits for
        wait "$job"
        status=$?
    done
    ((status > worst)) && worst=$status
done
exit "$worst"
