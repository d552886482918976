#!/usr/bin/env bash
# Run a command in an Apptainer image:
#
#   03-job-launchers/containers/apptainer.sh train.sif torchrun ... 02-ddp/train_llm.py
#
# The script mounts the repository, the current folder and the folder HF_HOME under the same paths
# as outside the container, so that the command can use the paths that you know. It also mounts the
# folders that these variables name, if they are set:
#   OUTPUTS    a folder outside the repository, for the runs
#   DATA       a folder with data
#   WANDB_DIR  the folder for wandb's files
set -euo pipefail

repository=$(cd "$(dirname "$0")/../.." && pwd -P)
export HF_HOME=${HF_HOME:-$HOME/.cache/huggingface}

fail() {
    echo "apptainer.sh: error: $*" >&2
    exit 2
}

[[ $# -ge 2 ]] || fail "give an image and a command, such as: apptainer.sh train.sif torchrun ..."
image=$1
shift
[[ -e $image ]] || fail "$image: no such image; the first line of train.def shows how to build it"
apptainer=$(command -v apptainer || command -v singularity) ||
    fail "apptainer: command not found; install it, or load its module"
[[ -z ${DATA:-} || -e $DATA ]] || fail "DATA=$DATA: no such folder; set DATA to a folder with data"

options=(--pwd "$PWD")
for folder in "$repository" "$PWD" "$HF_HOME" "${OUTPUTS:-}" "${DATA:-}" "${WANDB_DIR:-}"; do
    [[ -z $folder ]] && continue
    [[ $folder == "${DATA:-}" ]] || mkdir -p "$folder"
    options+=(--bind "$(cd "$folder" && pwd)")
done
# Give the command access to the GPUs, if the node has an NVIDIA driver.
[[ -e /dev/nvidiactl ]] && options+=(--nv)

exec "$apptainer" exec "${options[@]}" "$image" "$@"
