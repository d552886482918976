#!/usr/bin/env bash
# Run a chapter with Open MPI's mpirun, which starts every rank itself:
#
#   03-job-launchers/mpi/launch.sh h1:8,h2:8 03-job-launchers/train_llm.py --num-steps 5000
#
# The first argument lists the hosts and the number of ranks on each host, as mpirun's option -H
# does. Rank 0 runs on the first host. The command for MPICH is
#   mpiexec -hosts h1,h2 -ppn 8 -genv MASTER_ADDR h1 -genv MASTER_PORT 29400 python ...
set -euo pipefail

[[ $# -gt 1 ]] || { echo "usage: $0 HOST:RANKS[,HOST:RANKS...] SCRIPT [ARGUMENTS]" >&2; exit 2; }
hosts=$1
shift

# Drop variables that an earlier launcher has left in your shell. Otherwise, the ranks on this
# machine would use these variables instead of mpirun's variables.
unset RANK WORLD_SIZE LOCAL_RANK

options=(-H "$hosts" --bind-to none)
[[ $(id -u) != 0 ]] || options+=(--allow-run-as-root)
# Pass these variables to all ranks, if they are set. The last line of the list stands for all
# variables whose names begin with NCCL_, TORCH_NCCL_ or FI_.
for name in OMP_NUM_THREADS HF_HOME HF_HUB_OFFLINE GLOO_SOCKET_IFNAME \
    "${!NCCL_@}" "${!TORCH_NCCL_@}" "${!FI_@}"; do
    [[ -z ${!name+set} ]] || options+=(-x "$name")
done
# MPI only starts the ranks, but even starting them needs a network. MPI_INTERFACE selects the
# network interface.
[[ -z ${MPI_INTERFACE:-} ]] ||
    options+=(--mca oob_tcp_if_include "$MPI_INTERFACE" --mca btl_tcp_if_include "$MPI_INTERFACE")
exec mpirun "${options[@]}" -x PATH \
    -x MASTER_ADDR="${hosts%%:*}" -x MASTER_PORT="${MASTER_PORT:-29400}" python "$@"
