"""What each launcher of chapter 03 tells its ranks: on two hosts with two ranks each, for real.

Here:  make environments     write benchmarks/results/environments.json, which environments.md shows

Needs root, the packages of packages.sh, and DeepSpeed.
"""

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:1] = [str(ROOT / "tests"), str(ROOT / "tools/maintain"), str(ROOT / "benchmarks")]

from chapters import chapters  # noqa: E402
from cluster.cluster import Cluster  # noqa: E402
from speed import in_rows  # noqa: E402

FOLDER = ROOT / "03-job-launchers"
RESULT = ROOT / "benchmarks/results/environments.json"
# Run by every launcher in place of a chapter.
PROBE = """
import json, os, pathlib, socket, sys
here = {"host": socket.gethostname(), "variables": dict(os.environ)}
path = pathlib.Path(sys.argv[1], f"{here['host']}-{os.getpid()}")
path.write_text(json.dumps(here))
path.rename(path.with_suffix(".json"))
"""
ALSO = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
SRUN = ("SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID")


def names_of_launchers():
    """Return the rows of the chapter's LAUNCHERS by their first variable, which has the rank."""
    spec = importlib.util.spec_from_file_location("chapter", chapters()["03"])
    chapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chapter)
    return {names[0]: names for names in chapter.LAUNCHERS}


def commands(folder):
    """Return how each launcher starts the probe: which variable has the rank, and a command."""
    probe = [str(folder / "probe.py")]
    (folder / "hosts.txt").write_text("h1\nh2\n")
    (folder / "slots.txt").write_text("h1 slots=2\nh2 slots=2\n")
    node = ["--nodes=2", "--gpus-per-node=2"]
    meet = ["-genv", "MASTER_ADDR", "h1", "-genv", "MASTER_PORT", "29400"]
    return {
        "ssh/launch.sh": ("RANK", [FOLDER / "ssh/launch.sh", folder / "hosts.txt", *probe]),
        "slurm/train.sbatch": ("RANK", [*node, FOLDER / "slurm/train.sbatch", *probe]),
        "slurm/srun-direct.sbatch": (
            "SLURM_PROCID",
            [*node, "--ntasks-per-node=2", FOLDER / "slurm/srun-direct.sbatch", *probe],
        ),
        "mpi/launch.sh": (
            "OMPI_COMM_WORLD_RANK",
            [FOLDER / "mpi/launch.sh", "h1:2,h2:2", *probe],
        ),
        "MPICH's mpiexec": (
            "PMI_RANK",
            ["mpiexec.hydra", "-hosts", "h1,h2", "-ppn", "2", *meet, "python", *probe],
        ),
        "deepspeed/launch.sh": (
            "RANK",
            [FOLDER / "deepspeed/launch.sh", folder / "slots.txt", *probe],
        ),
    }


def collect(cluster, folder):
    """Return, for each launcher, what it told the ranks, in their order: hosts and variables."""
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RANKS_PER_NODE": "2"}
    env |= {"MPI_INTERFACE": "eth0"}
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
    (folder / "probe.py").write_text(PROBE)
    launchers, results = names_of_launchers(), {}
    for name, (rank_in, command) in commands(folder).items():
        found = folder / name.replace("/", "-")
        found.mkdir()
        if ".sbatch" in name:
            job = cluster.sbatch(*command, found, env=env, cwd=folder)
            cluster.wait_for_job(job, "COMPLETED", seconds=120)
        else:
            cluster.run("head", [*command, found], env=env, cwd=folder, timeout=120)
        names = launchers[rank_in]
        wanted = [*names, *ALSO, *(SRUN if rank_in == "SLURM_PROCID" else ())]
        ranks = [json.loads(path.read_text()) for path in found.glob("*.json")]
        for rank in ranks:
            known = rank["variables"]
            rank["variables"] = {name: known[name] for name in wanted if name in known}
        ranks.sort(key=lambda rank: int(rank["variables"][rank_in]))
        results[name] = {"names": names, "ranks": ranks}
    return results


def main():
    """Write benchmarks/results/environments.json anew."""
    with Cluster(hosts=2) as cluster, tempfile.TemporaryDirectory() as folder:
        results = collect(cluster, Path(folder))
    RESULT.write_text(in_rows(results, 3) + "\n")


if __name__ == "__main__":
    main()
