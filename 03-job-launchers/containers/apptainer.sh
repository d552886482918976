#!/usr/bin/env bash
# Run a command in an Apptainer image, with the repository, outputs and caches mounted where they
# are outside, so that all paths stay true:
#   03-job-launchers/containers/apptainer.sh train.sif torchrun ... 02-ddp/train_llm.py
# OUTPUTS names a folder outside of the repository that runs are written to, DATA one with data.
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
[[ -e $image ]] || fail "$image: there is no such image; the head of train.def says how to build it"
apptainer=$(command -v apptainer || command -v singularity) || fail "there is no apptainer here"
[[ -z ${DATA:-} || -e $DATA ]] || fail "DATA=$DATA: there is no such folder"

options=(--pwd "$PWD")
for folder in "$repository" "$PWD" "$HF_HOME" "${OUTPUTS:-}" "${DATA:-}" "${WANDB_DIR:-}"; do
    [[ -z $folder ]] && continue
    [[ $folder == "${DATA:-}" ]] || mkdir -p "$folder"
    options+=(--bind "$(cd "$folder" && pwd)")
done
[[ -e /dev/nvidiactl ]] && options+=(--nv)  # the node's driver, where there is one

exec "$apptainer" exec "${options[@]}" "$image" "$@"
