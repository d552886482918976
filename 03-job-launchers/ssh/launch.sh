#!/usr/bin/env bash
# Run a chapter over ssh, with one torchrun on each host that a file lists, one host per line:
#
#   RANKS_PER_NODE=8 03-job-launchers/ssh/launch.sh hosts.txt 03-job-launchers/train_llm.py --num-steps 5000
#
# All hosts need this folder and this Python environment at the same paths. The output of all hosts
# comes to this terminal, each line marked with its host. Ctrl-C asks all ranks to save and stop, and
# so does closing the terminal. If a host fails, this script asks the other hosts to stop, unless
# MIN_NODES gives the number of hosts that are enough to continue. The exit status is the highest exit
# status of all hosts.
#
# These options go before the file's name:
#   --pdsh  connect to the hosts with pdsh, instead of one ssh for each host
#   --tmux  run in a session of tmux, which outlives this terminal and writes a log
set -uo pipefail

usage() {
    echo "usage: $0 [--pdsh] [--tmux] HOSTS_FILE SCRIPT [ARGUMENTS]" >&2
    exit 2
}
fail() {
    echo "$0: error: $*" >&2
    exit 2
}
transport=ssh
inner_command=("$0")
while [[ ${1:-} == --* ]]; do
    case $1 in
        --pdsh) transport=pdsh inner_command+=(--pdsh) ;;
        --tmux) detach=yes ;;
        *) usage ;;
    esac
    shift
done
[[ $# -gt 1 && -r $1 ]] || usage
mapfile -t hosts < <(sed 's/#.*//' "$1" | awk 'NF { print $1 }')
[[ ${#hosts[@]} -gt 0 ]] || fail "$1: no host in this file; write one host per line"
for program in torchrun "$transport" ${detach:+tmux}; do
    hash "$program" 2>/dev/null || fail "$program: command not found; install it on this machine"
done
id=run-$(date +%s)-$$

# keep_variables NAMES...: append NAME=VALUE to `variables` for each name that is set.
keep_variables() {
    for name in "$@"; do
        [[ -z ${!name+set} ]] || variables+=("$name=${!name}")
    done
}
# Give the ranks a store of their own. If torchrun shares its store with them, a restart may fail.
variables=(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
keep_variables OMP_NUM_THREADS HF_HOME HF_HUB_OFFLINE GLOO_SOCKET_IFNAME TORCH_ELASTIC_SHUTDOWN_TIMEOUT
# Keep all variables whose names begin with NCCL_, TORCH_NCCL_ or FI_.
keep_variables "${!NCCL_@}" "${!TORCH_NCCL_@}" "${!FI_@}"

if [[ ${detach:-} ]]; then
    mkdir -p logs
    # A running tmux server has an environment of its own, so also pass the variables that the inner
    # script reads.
    keep_variables PATH RANKS_PER_NODE MIN_NODES MAX_RESTARTS MASTER_PORT SSH_AUTH_SOCK
    printf -v command '%q ' env "${variables[@]}" "${inner_command[@]}" "$@"
    # Ctrl-C in the session must reach only the inner script, so the shell and tee ignore it.
    session="{ trap : INT; $command; echo ended with status \$?; } 2>&1 | tee -i logs/$id.log"
    tmux new-session -d -s "$id" "$session"
    echo "started in tmux; the output also goes to logs/$id.log"
    echo "watch: tmux attach -t $id    (Ctrl-b d leaves it running)"
    echo "stop:  tmux send-keys -t $id C-c"
    exit
fi
shift

printf -v command '%q ' env "${variables[@]}" "$(command -v torchrun)" \
    --nnodes "${MIN_NODES:+$MIN_NODES:}${#hosts[@]}" \
    --nproc-per-node "${RANKS_PER_NODE:-gpu}" --max-restarts "${MAX_RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-id "$id" --rdzv-endpoint "${hosts[0]#*@}:${MASTER_PORT:-29400}" "$@"
printf -v folder '%q' "$PWD"
command="cd $folder && exec $command"

# quiet_ssh HOST COMMAND: run a command on a host; fail instead of asking for a password.
quiet_ssh() {
    ssh -n -o BatchMode=yes -o ConnectTimeout=10 "$@"
}
declare -A login_pids
for host in "${hosts[@]}"; do
    quiet_ssh "$host" "cd $folder" &
    login_pids[$host]=$!
done
for host in "${hosts[@]}"; do
    wait "${login_pids[$host]}"
    # ssh exits with 255 if it cannot connect, and otherwise with the status of cd.
    case $? in
        0) ;;
        255) fail "no ssh to $host; make 'ssh $host' work without a password or a question" ;;
        *) fail "no folder $PWD on $host; share it, or copy it there" ;;
    esac
done

# shellcheck disable=SC2329  # the trap calls it
stop() {
    [[ -z ${stopping:-} ]] || return 0
    stopping=yes
    # Ignore further signals, because the shell of a closing terminal may send a second signal. The
    # ssh processes below then ignore these signals, too.
    trap '' INT HUP
    echo "launch.sh: asking all ranks to save and stop"
    for host in "${hosts[@]}"; do
        # The brackets keep the pattern from matching the remote shell that runs pkill.
        quiet_ssh "$host" "pkill -TERM -f '[r]dzv-id $id'" &
    done
}
trap stop INT TERM HUP USR2

# run_marked MARK COMMAND...: run ssh or pdsh, mark each line of its output, and save its status.
run_marked() {
    local mark=$1
    shift
    trap '' INT HUP
    # setsid keeps Ctrl-C away from ssh, so that only this script handles it. If the terminal is
    # closed, sed fails, and cat reads the rest of the output, so that the ranks can save.
    setsid "$@" </dev/null 2>&1 | { sed -u "s/^/$mark/; s/\r$//" 2>/dev/null || cat >/dev/null; }
    local status=${PIPESTATUS[0]}
    echo "$status" >>"$status_file"
    # For pdsh, the mark is empty. pdsh returns only when the command has ended on all hosts, so no
    # host is left to stop.
    if [[ $status != 0 && $mark && ! ${MIN_NODES:-} ]]; then
        echo "launch.sh: ${mark}ended with status $status"
        kill -USR2 $$
    fi
}
status_file=$(mktemp)
trap 'rm -f "$status_file"' EXIT
pids=()
# -tt gives torchrun a terminal. When the connection is lost, the terminal hangs up, and torchrun
# ends.
if [[ $transport == pdsh ]]; then
    export PDSH_SSH_ARGS_APPEND="-tt -o BatchMode=yes ${PDSH_SSH_ARGS_APPEND:-}"
    # -f connects to all hosts at the same time, and -S returns the highest status. pdsh replaces
    # %h and the like in the command, so double each % of the command.
    host_list=$(IFS=, && echo "${hosts[*]}")
    run_marked "" pdsh -R ssh -f "${#hosts[@]}" -S -w "$host_list" "${command//%/%%}" &
    pids+=($!)
else
    for host in "${hosts[@]}"; do
        run_marked "$host: " ssh -tt -o BatchMode=yes "$host" "$command" &
        pids+=($!)
    done
fi

for pid in "${pids[@]}"; do
    # A trapped signal interrupts `wait`, but the process keeps running.
    while kill -0 "$pid" 2>/dev/null; do
        wait "$pid"
    done
done
exit "$(sort -n "$status_file" | tail -n 1)"
