#!/usr/bin/env bash
# Run a chapter on the hosts of a file, one per line, over ssh: one torchrun on each.
#
#   RANKS_PER_NODE=8 03-job-launchers/ssh/launch.sh hosts.txt 03-job-launchers/train_llm.py --num-steps 5000
#
# All hosts must have this folder and this environment at the same paths. What the hosts print comes
# here, marked with their names. Ctrl-C asks all ranks to save and stop. The exit status is the
# worst of all hosts. If one fails, ssh asks the others to stop, unless MIN_NODES says how many are
# enough to go on with. Before the hosts' file may come
#   --pdsh  to let pdsh reach the hosts, instead of one ssh for each
#   --tmux  to run in a session of tmux that outlives this terminal, with a log of its own
set -uo pipefail

usage() {
    echo "usage: $0 [--pdsh] [--tmux] HOSTS_FILE SCRIPT [ARGUMENTS]" >&2
    exit 2
}
with=ssh
again=("$0")
while [[ ${1:-} == --* ]]; do
    case $1 in
        --pdsh) with=pdsh again+=(--pdsh) ;;
        --tmux) detach=yes ;;
        *) usage ;;
    esac
    shift
done
[[ $# -gt 1 && -r $1 ]] || usage
mapfile -t hosts < <(sed 's/#.*//' "$1" | awk 'NF { print $1 }')
[[ ${#hosts[@]} -gt 0 ]] || { echo "$0: error: $1 names no host" >&2; exit 2; }
for program in torchrun "$with" ${detach:+tmux}; do
    hash "$program" 2>/dev/null || { echo "$0: error: there is no $program here" >&2; exit 2; }
done
id=run-$(date +%s)-$$

# keep NAMES...: add those that are set to `settings`, as NAME=VALUE.
keep() {
    for name in "$@"; do
        [[ -z ${!name+set} ]] || settings+=("$name=${!name}")
    done
}
settings=(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
keep OMP_NUM_THREADS HF_HOME HF_HUB_OFFLINE GLOO_SOCKET_IFNAME TORCH_ELASTIC_SHUTDOWN_TIMEOUT \
    "${!NCCL_@}" "${!TORCH_NCCL_@}" "${!FI_@}" # all that begin so

if [[ ${detach:-} ]]; then
    mkdir -p logs
    keep PATH RANKS_PER_NODE MIN_NODES MAX_RESTARTS MASTER_PORT SSH_AUTH_SOCK # tmux has its own otherwise
    printf -v command '%q ' env "${settings[@]}" "${again[@]}" "$@"
    # Ctrl-C in the session is for the script alone
    session="{ trap : INT; $command; echo ended with status \$?; } 2>&1 | tee -i logs/$id.log"
    tmux new-session -d -s "$id" "$session"
    echo "started in tmux; what it prints is in logs/$id.log too"
    echo "watch: tmux attach -t $id    (Ctrl-b d leaves it running)"
    echo "stop:  tmux send-keys -t $id C-c"
    exit
fi
shift

printf -v command '%q ' env "${settings[@]}" "$(command -v torchrun)" \
    --nnodes "${MIN_NODES:+$MIN_NODES:}${#hosts[@]}" \
    --nproc-per-node "${RANKS_PER_NODE:-gpu}" --max-restarts "${MAX_RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-id "$id" --rdzv-endpoint "${hosts[0]#*@}:${MASTER_PORT:-29400}" "$@"
printf -v folder '%q' "$PWD"
command="cd $folder && exec $command"

# reach HOST COMMAND: run it there, with no question asked.
reach() {
    ssh -n -o BatchMode=yes -o ConnectTimeout=10 "$@"
}
declare -A tries
for host in "${hosts[@]}"; do
    reach "$host" "cd $folder" &
    tries[$host]=$!
done
for host in "${hosts[@]}"; do
    wait "${tries[$host]}" || { echo "$0: error: no ssh to $host, or no $PWD there" >&2; exit 2; }
done

# shellcheck disable=SC2329  # the trap calls it
stop() {
    [[ -z ${stopping:-} ]] || return 0
    stopping=yes
    echo "launch.sh: asking all ranks to save and stop"
    for host in "${hosts[@]}"; do
        # the brackets keep the pattern from finding the shell that looks for it
        reach "$host" "pkill -TERM -f '[r]dzv-id $id'" &
    done
}
trap stop INT TERM USR2

# on MARK COMMAND...: run what reaches a host, or all, and mark its lines. A terminal there, as -tt
# gives, lets a lost connection hang up on torchrun. setsid: Ctrl-C here is for this script.
on() {
    trap '' INT
    setsid "${@:2}" </dev/null 2>&1 | sed -u "s/^/$1/; s/\r$//"
    local status=${PIPESTATUS[0]}
    echo "$status" >>"$ended"
    if [[ $status != 0 && $1 && ! ${MIN_NODES:-} ]]; then # pdsh does not tell before all have ended
        echo "launch.sh: ${1}ended with status $status"
        kill -USR2 $$
    fi
}
ended=$(mktemp)
trap 'rm -f "$ended"' EXIT
jobs=()
if [[ $with == pdsh ]]; then
    export PDSH_SSH_ARGS_APPEND="-tt -o BatchMode=yes ${PDSH_SSH_ARGS_APPEND:-}"
    # -f: all at once; -S: the worst status; %%: one that it does not take for its own
    on "" pdsh -R ssh -f "${#hosts[@]}" -S -w "$(IFS=, && echo "${hosts[*]}")" "${command//%/%%}" &
    jobs+=($!)
else
    for host in "${hosts[@]}"; do
        on "$host: " ssh -tt -o BatchMode=yes "$host" "$command" &
        jobs+=($!)
    done
fi

for job in "${jobs[@]}"; do
    while kill -0 "$job" 2>/dev/null; do # a trapped signal ends wait, and not what it waits for
        wait "$job"
    done
done
exit "$(sort -n "$ended" | tail -n 1)"
