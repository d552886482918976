"""What each launcher of chapter 03 tells its ranks: on two hosts with two ranks each, for real.

Here:  make environments     write benchmarks/results/environments.json, which environments.md shows

Needs root, the packages of tests/cluster/packages.sh, and DeepSpeed.
"""

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

from chapters import ROOT, chapters

if __name__ == "__main__":
    sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from cluster.cluster import Cluster
from harness import in_rows

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


TWO = "--nodes=2 --gpus-per-node=2"
TYPED = {  # the variable with the rank, and what is typed before a script to start four ranks
    "ssh/launch.sh": ("RANK", "{chapter}/ssh/launch.sh {folder}/hosts.txt"),
    "slurm/train.sbatch": ("RANK", f"sbatch {TWO} {{chapter}}/slurm/train.sbatch"),
    "slurm/srun-direct.sbatch": (
        "SLURM_PROCID",
        f"sbatch {TWO} --ntasks-per-node=2 {{chapter}}/slurm/srun-direct.sbatch",
    ),
    "mpi/launch.sh": ("OMPI_COMM_WORLD_RANK", "{chapter}/mpi/launch.sh h1:2,h2:2"),
    "MPICH's mpiexec": (
        "PMI_RANK",
        "mpiexec.hydra -hosts h1,h2 -ppn 2 -genv MASTER_ADDR h1 -genv MASTER_PORT 29400 python",
    ),
    "deepspeed/launch.sh": ("RANK", "{chapter}/deepspeed/launch.sh {folder}/slots.txt"),
}


def names_of_launchers():
    """Return each launcher's variables by the name of the variable that has the rank."""
    spec = importlib.util.spec_from_file_location("chapter", chapters()["03"])
    chapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chapter)
    return {names[0]: names for names in chapter.LAUNCHER_VARIABLES.values()}


def launch(cluster, folder, typed, words, env):
    """Type this before a script and its arguments; return what is printed, of sbatch the job."""
    (folder / "hosts.txt").write_text("# two nodes\nh1\nh2\n")
    (folder / "slots.txt").write_text("h1 slots=2\nh2 slots=2\n")
    typed = typed.format(chapter=FOLDER, folder=folder).split()
    if typed[0] != "sbatch":
        return cluster.run("head", [*typed, *words], cwd=folder, env=env, timeout=240).stdout
    job = cluster.sbatch(*typed[1:], *map(str, words), cwd=folder, env=env)
    finished(cluster, job, folder)
    return job


def finished(cluster, job, folder, seconds=240):
    """Wait until a job has ended; it must have ended well. Return what Slurm knows of it."""
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
    found = cluster.wait_for_job(job, *ended, seconds=seconds)
    assert found["JobState"] == "COMPLETED", report(folder)
    return found


def report(folder):
    """Return all that jobs have written, for the message of a failure."""
    logs = [*sorted(folder.rglob("*.log")), *sorted(folder.glob("*.out"))]
    return "\n".join(f"{path}:\n{path.read_text()}" for path in logs)[-6000:]


def collect(cluster, folder):
    """Return, for each launcher, what it told the ranks, in their order: hosts and variables."""
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RANKS_PER_NODE": "2"}
    env |= {"MPI_INTERFACE": "eth0"}
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
    (folder / "probe.py").write_text(PROBE)
    launchers, results = names_of_launchers(), {}
    for name, (rank_in, typed) in TYPED.items():
        found = folder / name.replace("/", "-")
        found.mkdir()
        launch(cluster, folder, typed, [folder / "probe.py", found], env)
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
