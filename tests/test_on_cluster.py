"""Every launcher of chapter 03 on the practice cluster: two hosts, real ssh, Slurm and MPI."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from cluster.cluster import wait_until
from conftest import ROOT, SCRIPTS, SHORT, difference, has_logged, metrics, run_or_fail
from readme import blocks
from runs import wait_for_verdict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CHAPTER = ROOT / "03-job-launchers"
LAB = ROOT / "diagnosing-errors"
LONG = [*SHORT, "--seq-length", "32", "--num-steps", "150", "--eval-every", "150"]
LONG += ["--checkpoint-every", "20"]
# The processes that train; the command lines of launchers begin with a different word.
RANKS = "^[^ ]*python[^ ]* (-u )?[^ ]*train_llm.py"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
# What a user types before a script to start two ranks on each of the hosts h1 and h2.
SBATCH = "sbatch --nodes=2 --gpus-per-node=2 "
LAUNCHERS = {
    "ssh": "{chapter}/ssh/launch.sh {folder}/hosts.txt",
    "sbatch": SBATCH + "{chapter}/slurm/train.sbatch",
    "srun": SBATCH + "--ntasks-per-node=2 {chapter}/slurm/srun-direct.sbatch",
    "Open MPI": "{chapter}/mpi/launch.sh h1:2,h2:2",
    "pdsh": "{chapter}/ssh/launch.sh --pdsh {folder}/hosts.txt",
    "salloc": "salloc --nodes 2 --gpus-per-node 2 --ntasks-per-node 2 srun python",
    "MPICH": "mpiexec.hydra -hosts h1,h2 -ppn 2 -genvall -genv MASTER_ADDR h1 "
    "-genv MASTER_PORT 29400 python",
    "deepspeed": "{chapter}/deepspeed/launch.sh {folder}/hosts.txt",
    "by hand": "bash -c 'for n in 0 1; do ssh h$((n + 1)) PATH=$PATH HF_HUB_OFFLINE=1 torchrun "
    '--nnodes 2 --nproc-per-node 2 --master-addr h1 --node-rank $n "$@" & done; wait\' -',
}


def rarely(*values):
    """Return the values of a test as a parameter that only exhaustive tests have."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def curve_on_one_host(ranks, options, root):
    run_or_fail(ranks, [("03", [*options, "--save-dir", root, "-e", "run"])], root / "ranks")
    return metrics(root / "run")


@pytest.fixture(scope="module")
def curve(tmp_path_factory):
    return curve_on_one_host(4, SHORT, tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="module")
def long_curve(tmp_path_factory):
    return curve_on_one_host(2, LONG, tmp_path_factory.mktemp("long"))


class User:
    """A user who types commands on the hosts of a cluster, all about one run in one folder."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder, self.run_dir = cluster, folder, folder / "run"
        self.env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "RANKS_PER_NODE": "2",
            "MPI_INTERFACE": "eth0",
            # As train.sbatch sets it: without it, a restart by torchrun may fail.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        (folder / "hosts.txt").write_text("# two nodes\nh1 slots=2\nh2 slots=2\n")

    def line(self, typed, *options, script="03", before=()):
        """Return a line of bash that starts a script of this run."""
        words = [*before, SCRIPTS.get(script, script), *options]
        words = [*words, "--save-dir", self.folder, "--experiment-name", "run"]
        line = f"{typed.format(chapter=CHAPTER, folder=self.folder)} {shlex.join(map(str, words))}"
        for program in ("deepspeed", "accelerate"):
            if program in line and not Path(sys.executable).with_name(program).exists():
                pytest.skip(f"{program} is not installed; run make extras")
        return line

    def type(self, line, host="head", **variables):
        """Start a line on a host; return the process, whose output goes to HOST.log."""
        with open(self.folder / f"{host}.log", "w") as log:
            options = {"cwd": self.folder, "env": self.env | variables, "stdout": log}
            options |= {"stderr": log, "start_new_session": True}
            return self.cluster.popen(host, line, **options)

    def launch(self, line):
        """Run a launcher to its end, or submit a job and wait for it; return whether it worked."""
        if not line.startswith("sbatch"):
            return self.type(line).wait(timeout=240) == 0
        return self.end_of(self.submit(line))["JobState"] == "COMPLETED"

    def submit(self, line):
        """Submit a job; return its id."""
        process = self.type(line.replace("sbatch", "sbatch --parsable", 1))
        assert process.wait(timeout=60) == 0, self.output()
        return (self.folder / "head.log").read_text().strip()

    def end_of(self, job):
        return self.cluster.wait_for_job(job, *ENDED, seconds=240)

    def output(self):
        """Return all that launchers, jobs and ranks have printed."""
        logs = [*sorted(self.folder.rglob("*.log")), *sorted(self.folder.glob("*.out"))]
        return "\n".join(f"== {path}\n{path.read_text()}" for path in logs)

    def wait_for_step(self, step):
        wait_until(lambda: has_logged(self.run_dir, step), 150, f"step {step}")

    def signal_ranks(self, name):
        for host in ("h1", "h2"):
            self.cluster.run(host, ["pkill", f"-{name}", "-f", RANKS], check=False)

    def number_of_ranks(self):
        count = ["pgrep", "--count", "-f", RANKS]
        return sum(int(self.cluster.run(host, count, check=False).stdout) for host in ("h1", "h2"))


@pytest.fixture
def user(cluster, tmp_path):
    user = User(cluster, tmp_path)
    yield user
    # pytest shows this if the test has failed.
    print(user.output()[-8000:])


# ---- the same losses under every launcher ------------------------------------------------------


QUICK = ["ssh", "sbatch", "srun", "Open MPI"]


@pytest.mark.parametrize("launcher", [*QUICK, *map(rarely, sorted(LAUNCHERS.keys() - QUICK))])
def test_launcher_starts_two_ranks_per_host_with_the_losses_of_one_host(user, curve, launcher):
    """The launcher starts the script under watched.py, which records where each rank runs."""
    watched = [LAB / "watched.py", "--into", user.run_dir]
    assert user.launch(user.line(LAUNCHERS[launcher], *SHORT, before=watched))
    assert difference(curve, metrics(user.run_dir)) < 1e-5
    beats = [json.loads(path.read_text()) for path in sorted(user.run_dir.glob("ranks/*.json"))]
    found = [(beat["rank"], beat["world_size"], beat["host"], beat["end"]) for beat in beats]
    assert found == [(rank, 4, f"h{rank // 2 + 1}", "finished") for rank in range(4)]
    if "launch.sh" in LAUNCHERS[launcher] and "ssh" in LAUNCHERS[launcher]:
        assert "h1: finished: " in user.output(), "no line is marked with its host"
    if launcher in ("sbatch", "srun"):
        logs = user.folder.glob("logs/job-*/*")
        assert sorted(path.name for path in logs) == ["h1.log", "h2.log"]


PROBE = """
import json, os, pathlib, socket, sys
path = pathlib.Path(sys.argv[2], f"{socket.gethostname()}-{os.getpid()}.json")
path.write_text(json.dumps(dict(os.environ)))
"""


@pytest.mark.parametrize("launcher", ["ssh", "Open MPI", "deepspeed"])
def test_launcher_passes_variables_of_the_network_to_all_ranks(user, launcher):
    given = {"NCCL_IB_HCA": "mlx5_0,mlx5_1", "TORCH_NCCL_TRACE": "a b", "FI_PROVIDER": "efa"}
    probe, user.env = user.folder / "probe.py", user.env | given
    probe.write_text(PROBE)
    assert user.launch(user.line(LAUNCHERS[launcher], script=probe))
    received = [json.loads(path.read_text()) for path in user.folder.glob("h*.json")]
    assert len(received) == 4
    assert all(given.items() <= variables.items() for variables in received)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "launcher, script", [("sbatch", "deepspeed"), ("deepspeed", "deepspeed"), ("ssh", "accelerate")]
)
def test_framework_trains_on_both_hosts(user, curve, launcher, script):
    assert user.launch(user.line(LAUNCHERS[launcher], *SHORT, script=script))
    # The gradient norms are up to 3.
    assert difference(curve, metrics(user.run_dir)) < 1e-4


@pytest.mark.parametrize("replicas", [1, rarely(2)])
def test_array_job_prepares_data_while_chapter_04_trains_across_hosts(user, replicas):
    """Each task of the array writes a part. The training starts when the folder exists."""
    data = user.folder / "web.tokens"
    tool = [sys.executable, ROOT / "preparing-data/prepare.py", "-o", data, "--piece", 4000]
    wrapped = shlex.join(map(str, [*tool, "--workers", 1, "pydoc"]))
    user.submit(f"sbatch --array=0-1 --wrap {shlex.quote(wrapped)}")
    wait_until((data / "index.json").exists, 60, "index.json")
    options = [*SHORT, "-d", data, "--replicas", replicas]
    assert user.launch(user.line(LAUNCHERS["sbatch"], *options, script="04"))

    def parts():
        return [json.loads(path.read_text()) for path in data.glob("part-*.json")]

    wait_until(lambda: [part["ended"] for part in parts()] == [True, True], 60, "both parts")
    assert sum(part["pieces"] for part in parts()) > 60
    words = [*options, "--save-dir", user.folder, "-e", "one-host"]
    run_or_fail(4, [("04", words)], user.folder / "ranks")
    assert difference(metrics(user.folder / "one-host"), metrics(user.run_dir)) < 1e-5
    shards = (user.run_dir / "checkpoints/step-00000020").glob("*.distcp")
    assert {path.name for path in shards} == {f"__{rank}_0.distcp" for rank in range(4)}


# ---- jobs that are stopped, requeued, killed and continued -------------------------------------


def submit_long(user, file="{chapter}/slurm/train.sbatch", nodes=2):
    """Submit half a minute of training, with one rank per host; return the job, in step 20."""
    user.env["RANKS_PER_NODE"] = "1"
    typed = f"sbatch --time=60 --nodes={nodes} --gpus-per-node=1 --ntasks-per-node=1 "
    job = user.submit(user.line(typed + file, *LONG))
    user.wait_for_step(20)
    return job


def is_told(user):
    return "asking all ranks to save and stop" in user.output()


def run_out_of_time(user, job):
    """Leave the job one to two minutes. It has asked for a signal 120 s before its end."""
    minutes = int(user.cluster.job(job)["RunTime"].split(":")[1])
    user.cluster.run("head", f"scontrol update JobId={job} TimeLimit={minutes + 2}")
    wait_until(lambda: is_told(user), 90, "Slurm has told the job that its time is up")
    user.cluster.run("head", f"scontrol update JobId={job} TimeLimit=60")


def preempt(user, job):
    user.submit("sbatch --partition=urgent --nodes=2 --cpus-per-task=4 --time=1 --wrap=true")
    wait_until(lambda: user.cluster.job(job)["PreemptTime"] != "None", 60, "the preemption")


def cancel(user, job):
    user.cluster.run("head", f"scancel {job}")
    wait_until(lambda: is_told(user), 30, "the job is cancelled")


def while_suspended(user, job, event):
    """Suspend the ranks during an event, so that even on a fast machine no rank finishes first."""
    user.signal_ranks("STOP")
    event(user, job)
    user.signal_ranks("CONT")


def kill_and_revive(user, job):
    user.cluster.kill_host("h2")
    wait_until(lambda: user.cluster.job(job)["Restarts"] == "1", 90, "the job is requeued")
    user.cluster.revive("h2")


@pytest.mark.parametrize(
    "file, event",
    [
        ("train", run_out_of_time),
        rarely("srun-direct", run_out_of_time),
        rarely("own", run_out_of_time),
        rarely("train", preempt),
        rarely("srun-direct", preempt),
        rarely("train", kill_and_revive),
    ],
)
def test_job_that_is_requeued_has_the_losses_of_an_uninterrupted_run(user, long_curve, file, event):
    if file == "own":
        # The job script in the README.
        readme = blocks(CHAPTER / "slurm/README.md")
        [text] = [block.text for block in readme if "#SBATCH" in block.text]
        changes = {" 8 ": " 1 ", "=12 ": "=1 ", "train.py": '"$@"', " --cpus-per-task=96": ""}
        for old, new in changes.items():
            text = text.replace(old, new)
        (user.folder / "own.sbatch").write_text(text)
    folder = "{folder}" if file == "own" else "{chapter}/slurm"
    job = submit_long(user, f"{folder}/{file}.sbatch")
    if event is kill_and_revive:
        event(user, job)
    else:
        while_suspended(user, job, event)
    end = user.end_of(job)
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "1")
    [start] = re.findall(r"^continuing from \S+/step-0*(\d+)$", user.output(), re.M)
    if event is not kill_and_revive:
        assert f"\nstopped at step {start};" in user.output()
    assert difference(long_curve, metrics(user.run_dir)) == 0.0


def check_continued_curve(user, long_curve):
    """Check the losses of a run that a different number of ranks has continued."""
    [start] = re.findall(r"^continuing from \S+/step-0*(\d+)$", user.output(), re.M)
    continued = metrics(user.run_dir)
    near = range(int(start) + 21)
    curves = ({step: rows[step] for step in near} for rows in (long_curve, continued))
    assert difference(*curves, names=["loss", "val_loss"]) < 1e-5
    # The differences by rounding grow over many steps.
    assert difference(long_curve, continued, names=["loss", "val_loss"]) < 1e-3
    return start


@pytest.mark.parametrize("before, after", [(2, 1), rarely(1, 2)])
def test_cancelled_job_saves_and_continues_on_other_nodes(user, long_curve, before, after):
    job = submit_long(user, nodes=before)
    while_suspended(user, job, cancel)
    assert user.end_of(job)["JobState"] == "CANCELLED"
    wait_until(lambda: not user.number_of_ranks(), 60, "all ranks have saved and ended")
    assert user.end_of(submit_long(user, nodes=after))["JobState"] == "COMPLETED"
    start = check_continued_curve(user, long_curve)
    assert f"\nstopped at step {start};" in user.output()
    assert user.cluster.job(job)["JobState"] == "CANCELLED", "the job came back"


# A torchrun that continues with the hosts that are there.
ELASTIC = "torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d"
ELASTIC += " --rdzv-id elastic --rdzv-endpoint h1:29400 --rdzv-conf last_call_timeout=10"


@pytest.mark.exhaustive
def test_torchrun_continues_without_a_dead_host(user, long_curve):
    first, _ = [user.type(user.line(ELASTIC, *LONG), host) for host in ("h1", "h2")]
    user.wait_for_step(50)
    user.cluster.kill_host("h2", silently=False)
    assert first.wait(timeout=300) == 0
    check_continued_curve(user, long_curve)


@pytest.mark.exhaustive
def test_torchrun_continues_with_a_host_that_joins(user, long_curve):
    """torchrun stops the rank of the first host, which saves, and then starts both ranks."""
    line = user.line(ELASTIC, *LONG)
    # With this level, torchrun reports a new host.
    first = user.type(line, "h1", LOGLEVEL="INFO")
    user.wait_for_step(20)
    # Suspend the rank, so that it does not finish before the second host is there.
    user.signal_ranks("STOP")
    second = user.type(line, "h2")
    wait_until(lambda: "Detected 1 new nodes" in user.output(), 90, "h1 detects h2")
    user.signal_ranks("CONT")
    assert [process.wait(timeout=300) for process in (first, second)] == [0, 0]
    start = check_continued_curve(user, long_curve)
    assert f"\nstopped at step {start};" in user.output()
    # Two ranks share the 8 samples of a step.
    assert "micro_batch_size was 8, is now 4" in user.output()


# A launcher, and what a user does on its host to stop it.
STOPS = {
    # A terminal signals the launcher's group of processes.
    "Ctrl-C": ("ssh", "kill -INT -- -$(pgrep -o -f ssh/launch.sh)"),
    "lost connection": ("ssh", "pkill -KILL -f 'launch.sh|ssh -tt'"),
    # launch.sh --tmux prints the command.
    "tmux": ("tmux", "eval $(sed -n 's/^stop: *//p' head.log)"),
    "signal": ("Open MPI", "pkill -USR1 -x mpirun"),
    "file": ("deepspeed", "touch run/stop"),
}


@pytest.mark.parametrize("stop", ["Ctrl-C", *map(rarely, sorted(STOPS.keys() - {"Ctrl-C"}))])
def test_launcher_that_is_stopped_saves_and_leaves_no_rank(user, stop):
    launcher, command = STOPS[stop]
    typed = LAUNCHERS.get(launcher, "{chapter}/ssh/launch.sh --tmux {folder}/hosts.txt")
    user.env["RANKS_PER_NODE"] = "1"
    (user.folder / "hosts.txt").write_text("h1 slots=1\nh2 slots=1\n")
    user.type(user.line(typed.replace(":2", ":1"), *LONG, "--checkpoint-every", 1000))
    user.wait_for_step(20)
    assert user.number_of_ranks() == 2
    user.cluster.run("head", command, cwd=user.folder, env=user.env)
    wait_until(lambda: not user.number_of_ranks(), 60, "all ranks have ended")
    assert any(user.run_dir.glob("checkpoints/step-*"))
    assert not (user.run_dir / "model").exists(), "the run has finished; nothing stopped it"


# ---- what is wrong with a cluster --------------------------------------------------------------


def test_folder_that_is_not_shared_is_reported_with_the_host(user):
    """Each host has its own disk where the folder of the run should be."""
    for host in ("h1", "h2"):
        user.cluster.run(host, f"mount -t tmpfs tmpfs {user.folder}")
    user.launch(user.line(LAUNCHERS["by hand"].replace("node 2", "node 1"), *SHORT))
    assert "--save-dir: h2 cannot see what rank 0 writes to" in user.output()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "launcher, variable, second_host, expected",
    [
        ("srun", "GLOO_SOCKET_IFNAME=eth9", "h2", "Error: .*eth9"),
        ("srun", "MASTER_ADDR=h9", "h2", r"Error: .*\(h9, "),
        ("srun", "MASTER_PORT=23456", "h2", r"Error: .*\(h1, 23456\)"),
        ("ssh", "MASTER_PORT=23456", "h2", r"h2: .*DistNetworkError: .*\(h1, 23456\)"),
        ("ssh", "MASTER_PORT=23456", "h9", "error: no ssh to h9"),
    ],
)
def test_ranks_that_cannot_meet_report_the_reason(user, launcher, variable, second_host, expected):
    """A wrong interface, host or port is in the last words of the job, or of the launcher."""
    user.cluster.block_port("h1", 23456)
    user.env |= [variable.split("=")]
    (user.folder / "hosts.txt").write_text(f"h1\n{second_host}\n")
    typed = LAUNCHERS[launcher].replace("per-node=2", "per-node=1")
    assert not user.launch(user.line(typed, *SHORT, "--dist-timeout", 10))
    printed = user.output() if launcher == "ssh" else last_words(user)
    assert re.search(expected, printed)


def last_words(user):
    [path] = user.folder.glob("slurm-*.out")
    return path.read_text().partition("the last errors of its ranks:")[2]


@pytest.mark.exhaustive
def test_stopped_process_of_a_slurm_job_is_named(user):
    """whats_wrong.py looks at the hosts of a job with srun, beside the ranks that run there."""
    line = user.line(
        LAUNCHERS["srun"], *SHORT,
        before=[
            LAB / "watched.py", "--into", user.run_dir,
            LAB / "inject.py", "stop-process@rank3:step10",
        ],
    )  # fmt: skip
    job = user.submit(line)
    user.wait_for_step(9)
    where = user.cluster, user.run_dir, user.env
    verdict = wait_for_verdict(*where, ["stopped-process"], "--slurm-job", job)
    assert verdict["ranks"] == [3] and verdict["hosts"] == ["h2"], verdict
    assert "train_llm.py" in verdict["reason"]
