"""Test every launcher of chapter 03 on the practice cluster: two hosts, ssh, Slurm and MPI."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from cluster.cluster import wait_until
from conftest import ROOT, SCRIPTS, SHORT, curves_of, difference, metrics
from marks import exhaustive
from readme import blocks
from runs import last_logged_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CHAPTER = ROOT / "03-job-launchers"
LONG = [*SHORT, "--seq-length", "32", "--num-steps", "150", "--eval-every", "150"]
LONG += ["--checkpoint-every", "20"]
# This pattern matches the command line of a rank: python, perhaps -u, and the script. It does not
# match launchers, because their command lines have other words before the script.
RANKS = "^[^ ]*python[^ ]* (-u )?[^ ]*train_llm.py"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
# Each command in LAUNCHERS starts two ranks of a script on each of the hosts h1 and h2.
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


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """Train two uninterrupted runs on one host; return each run's metrics by the run's name."""
    runs = {4: {"short": ("03", [])}, 2: {"long": ("03", LONG)}}
    return curves_of(tmp_path_factory.mktemp("one-host"), runs)


class User:
    """Act as a user who launches, watches and signals one run on the hosts of a cluster."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder, self.run_dir = cluster, folder, folder / "run"
        self.env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self.env |= {"RANKS_PER_NODE": "2", "MPI_INTERFACE": "eth0"}
        # Set this variable as train.sbatch does, because a restart by torchrun may fail without it.
        self.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        (folder / "hosts.txt").write_text("# two nodes\nh1 slots=2\nh2 slots=2\n")

    def line(self, typed, *options, script="03", before=()):
        """Return a line of bash that launches a script with this run's folder and name."""
        words = [*before, SCRIPTS.get(script, script), *options, "--save-dir", self.folder]
        words += ["--experiment-name", "run"]
        line = f"{typed.format(chapter=CHAPTER, folder=self.folder)} {shlex.join(map(str, words))}"
        if "deepspeed" in line and not Path(sys.executable).with_name("deepspeed").exists():
            pytest.skip("deepspeed is not installed; run make extras")
        return line

    def type(self, line, host="head", **variables):
        """Start a line of bash on a host; return the process, whose output goes to HOST.log."""
        with open(self.folder / f"{host}.log", "w") as log:
            options = {"cwd": self.folder, "env": self.env | variables, "stdout": log}
            # setsid gives the line a process group of its own, so that a test can signal all its
            # processes at once, as Ctrl-C in a terminal does.
            return self.cluster.popen(host, f"exec setsid {line}", stderr=log, **options)

    def launch(self, line):
        """Run a launcher or a Slurm job until it ends; return whether it succeeded."""
        if not line.startswith("sbatch"):
            return self.type(line).wait(timeout=240) == 0
        return self.end_of(self.submit(line))["JobState"] == "COMPLETED"

    def submit(self, line):
        """Submit a job; return its id."""
        process = self.type(line.replace("sbatch", "sbatch --parsable", 1))
        assert process.wait(timeout=60) == 0, self.output()
        return (self.folder / "head.log").read_text().strip()

    def end_of(self, job):
        """Wait until a job has ended; return Slurm's record of it."""
        wait_until(lambda: self.cluster.job(job)["JobState"] in ENDED, 240, f"job {job} has ended")
        return self.cluster.job(job)

    def output(self):
        """Return the output of all launchers, jobs and ranks."""
        logs = [*sorted(self.folder.rglob("*.log")), *sorted(self.folder.glob("*.out"))]
        return "\n".join(f"== {path}\n{path.read_text()}" for path in logs)

    def wait_for_step(self, step):
        wait_until(lambda: last_logged_step(self.run_dir) >= step, 150, f"step {step}")

    def ranks(self, tool="pgrep"):
        """Run pgrep or pkill on the ranks of h1 and h2; return the tool's output on each host."""
        commands = [(host, [*tool.split(), "-f", RANKS]) for host in ("h1", "h2")]
        return [self.cluster.run(*command, check=False).stdout for command in commands]


@pytest.fixture
def user(cluster, tmp_path):
    user = User(cluster, tmp_path)
    yield user
    # Print the end of each log, because pytest shows the printed text if the test has failed.
    for log in user.output().split("\n== "):
        print("==", log.splitlines()[0], log[-3000:], sep="\n")


# ---- the same losses under every launcher ------------------------------------------------------


QUICK = ["ssh", "srun", "Open MPI"]


@pytest.mark.parametrize("launcher", [*QUICK, *map(exhaustive, sorted(LAUNCHERS.keys() - QUICK))])
def test_launcher_starts_two_ranks_per_host_with_the_losses_of_one_host(user, curves, launcher):
    """Launch the script under watched.py, which records where each rank runs."""
    watched = [ROOT / "diagnosing-errors/watched.py", "--into", user.run_dir]
    assert user.launch(user.line(LAUNCHERS[launcher], *SHORT, before=watched))
    assert difference(curves["short"], metrics(user.run_dir)) < 1e-5
    beats = [json.loads(path.read_text()) for path in sorted(user.run_dir.glob("ranks/*.json"))]
    found = [(beat["rank"], beat["world_size"], beat["host"], beat["end"]) for beat in beats]
    assert found == [(rank, 4, f"h{rank // 2 + 1}", "finished") for rank in range(4)]
    if launcher in ("ssh", "pdsh"):
        assert "h1: finished: " in user.output(), "no line is marked with its host"


@pytest.mark.parametrize("launcher", ["ssh", "Open MPI", exhaustive("deepspeed")])
def test_launcher_passes_variables_of_the_network_to_all_ranks(user, launcher):
    given = {"NCCL_IB_HCA": "mlx5_0,mlx5_1", "TORCH_NCCL_TRACE": "a b", "FI_PROVIDER": "efa"}
    script, user.env = user.folder / "variables.py", user.env | given
    script.write_text(f"import os; print([os.environ.get(name) for name in {[*given]}])")
    assert user.launch(user.line(LAUNCHERS[launcher], script=script))
    assert user.output().count(str([*given.values()])) == 4


# ---- jobs that are stopped, requeued, killed and continued -------------------------------------


def submit_long(user, file=CHAPTER / "slurm/train.sbatch", nodes=2):
    """Submit a job with one rank per host, wait until it is at step 20, and return the job's id.

    An uninterrupted job runs for about half a minute.
    """
    user.env["RANKS_PER_NODE"] = "1"
    typed = f"sbatch --time=60 --nodes={nodes} --gpus-per-node=1 --ntasks-per-node=1 {file}"
    job = user.submit(user.line(typed, *LONG))
    user.wait_for_step(20)
    return job


def wait_for_request(user):
    wait_until(lambda: "asking all ranks to save and stop" in user.output(), 90, "the request")


def run_out_of_time(user, job):
    """Shorten a job's time limit, wait until Slurm sends the stop signal, and restore the limit."""
    minutes = int(user.cluster.job(job)["RunTime"].split(":")[1])
    user.cluster.run("head", f"scontrol update JobId={job} TimeLimit={minutes + 2}")
    wait_for_request(user)
    user.cluster.run("head", f"scontrol update JobId={job} TimeLimit=60")


def preempt(user, job):
    user.submit("sbatch --partition=urgent --nodes=2 --cpus-per-task=4 --time=1 --wrap=true")
    wait_until(lambda: user.cluster.job(job)["PreemptTime"] != "None", 60, "the preemption")


def kill_and_revive(user, job):
    user.cluster.kill_host("h2")
    wait_until(lambda: user.cluster.job(job)["Restarts"] == "1", 90, "the job is requeued")
    user.cluster.revive("h2")


def cancel(user, job):
    user.cluster.run("head", f"scancel {job}")
    wait_for_request(user)


def disturb(user, job, event):
    """Call `event` while the ranks are suspended, so that no rank finishes before the event.

    Then wait until the job has ended, and return Slurm's record of the job.
    """
    user.ranks("pkill -STOP")
    event(user, job)
    user.ranks("pkill -CONT")
    return user.end_of(job)


def job_script(user, name):
    """Return the path of the job script `name`.

    For "own", write the script that slurm/README.md shows, but with one rank per node.
    """
    if name != "own":
        return CHAPTER / f"slurm/{name}.sbatch"
    page = blocks(CHAPTER / "slurm/README.md")
    [text] = [block.text for block in page if "#SBATCH" in block.text]
    changes = {" 8 ": " 1 ", "=12 ": "=1 ", "train.py": '"$@"', " --cpus-per-task=96": ""}
    for old, new in changes.items():
        text = text.replace(old, new)
    path = user.folder / "own.sbatch"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "name, event",
    [
        ("train", run_out_of_time),
        exhaustive("srun-direct", run_out_of_time),
        exhaustive("own", run_out_of_time),
        exhaustive("train", preempt),
        exhaustive("srun-direct", preempt),
        exhaustive("train", kill_and_revive),
    ],
)
def test_job_that_is_requeued_has_the_losses_of_an_uninterrupted_run(user, curves, name, event):
    end = disturb(user, submit_long(user, job_script(user, name)), event)
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "1")
    check_step_of_restart(user, was_asked=event is not kill_and_revive)
    assert difference(curves["long"], metrics(user.run_dir)) == 0.0


def check_step_of_restart(user, was_asked=True):
    """Check that a run continued exactly once; return the step of the checkpoint that it read.

    With `was_asked`, the run must have reported that it stopped at this step.
    """
    [step] = re.findall(r"^continuing from \S+/step-0*(\d+)$", user.output(), re.M)
    assert not was_asked or f"\nstopped at step {step};" in user.output()
    return int(step)


def check_continued_curve(user, curves, was_asked=True):
    """Check that a run has the uninterrupted run's losses, although its number of ranks changed."""
    near = range(check_step_of_restart(user, was_asked) + 21)
    full = curves["long"], metrics(user.run_dir)
    first_steps = ({step: curve[step] for step in near} for curve in full)
    assert difference(*first_steps, names=["loss", "val_loss"]) < 1e-5
    # Allow a larger difference over the entire run, because rounding errors grow with each step.
    assert difference(*full, names=["loss", "val_loss"]) < 1e-3


def crash(user):
    """Kill the ranks on h2; with MAX_RESTARTS=0, torchrun does not restart them."""
    user.cluster.run("h2", ["pkill", "-KILL", "-f", RANKS])


def test_job_that_has_used_up_its_restarts_requeues_itself(user, curves):
    """Kill a rank of a job that has no restarts left: the job must requeue itself and finish."""
    # Allow two requeues, although the test needs one. On a busy machine, a torchrun has failed
    # after its ranks had finished, for a reason that we do not know. The job then requeued itself
    # once more, and found a finished run.
    user.env |= {"MAX_RESTARTS": "0", "MAX_REQUEUES": "2"}
    job = submit_long(user)
    crash(user)
    wait_until(lambda: user.cluster.job(job)["Restarts"] == "1", 90, "the job is requeued")
    assert user.end_of(job)["JobState"] == "COMPLETED"
    assert f"job {job}: all restarts failed; requeue 1 of 2" in user.output()
    check_step_of_restart(user, was_asked=False)
    assert difference(curves["long"], metrics(user.run_dir)) == 0.0


@pytest.mark.parametrize("requeues", ["0", exhaustive("5")])
def test_job_that_cannot_train_is_not_requeued(user, requeues):
    """Crash a job that may not requeue itself, or start a job that may, with a wrong flag."""
    user.env |= {"MAX_RESTARTS": "0", "MAX_REQUEUES": requeues}
    if requeues == "0":
        job = submit_long(user)
        crash(user)
    else:
        job = user.submit(user.line(LAUNCHERS["sbatch"], "--nosuch", "1"))
    end = user.end_of(job)
    assert (end["JobState"], end["Restarts"]) == ("FAILED", "0")
    assert re.search(rf"job {job} ended with status \d+; the last errors", user.output())


@pytest.mark.parametrize(
    "minutes, seconds, message",
    [(9, 300, "must stop 300 s before its end; submit it with a longer --time"), (9, 60, "")],
)
def test_job_without_time_for_a_stop_is_refused(user, minutes, seconds, message):
    """Submit a job of 9 minutes; its stop signal comes 300 s or 60 s before its end.

    With 300 s, train.sbatch refuses the job. With 60 s, the ranks have 40 s to save and stop.
    """
    user.env |= {"SBATCH_SIGNAL": f"B:USR1@{seconds}", "RANKS_PER_NODE": "1"}
    script = user.folder / "limit.py"
    script.write_text("import os; print('limit', os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT'])")
    typed = LAUNCHERS["sbatch"].replace("--nodes=2", f"--nodes=1 --time={minutes}")
    end = user.end_of(user.submit(user.line(typed, script=script)))
    assert end["JobState"] == ("FAILED" if message else "COMPLETED")
    assert message in user.output()
    assert ("limit 40" in user.output()) != bool(message)


def test_ranks_that_are_killed_before_they_have_saved_are_reported(user):
    user.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "1"
    job = submit_long(user)
    # Suspend the ranks, so that they cannot save.
    user.ranks("pkill -STOP")
    user.cluster.run("head", f"scancel --signal=USR1 --batch {job}")
    wait_until(lambda: "after 1 s, the ranks had not saved" in user.output(), 90, "the report")
    user.cluster.run("head", f"scancel {job}")


@pytest.mark.parametrize("before, after", [(2, 1), exhaustive(1, 2)])
def test_cancelled_job_saves_and_continues_on_other_nodes(user, curves, before, after):
    job = submit_long(user, nodes=before)
    assert disturb(user, job, cancel)["JobState"] == "CANCELLED"
    wait_until(lambda: not any(user.ranks()), 60, "all ranks have saved and ended")
    assert user.end_of(submit_long(user, nodes=after))["JobState"] == "COMPLETED"
    check_continued_curve(user, curves)
    assert user.cluster.job(job)["JobState"] == "CANCELLED", "the cancelled job was requeued"


# Both hosts run this command. If h2 dies, the torchrun on h1 continues alone. If h1 dies, the
# torchrun on h2 ends, because the rendezvous is on h1.
ELASTIC = "torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d"
ELASTIC += " --rdzv-id elastic --rdzv-endpoint h1:29400 --rdzv-conf last_call_timeout=10"


@pytest.mark.exhaustive
def test_torchrun_continues_without_a_dead_host(user, curves):
    first, _ = [user.type(user.line(ELASTIC, *LONG), host) for host in ("h1", "h2")]
    user.wait_for_step(50)
    user.cluster.kill_host("h2", silently=False)
    assert first.wait(timeout=300) == 0
    check_continued_curve(user, curves, was_asked=False)


@pytest.mark.exhaustive
def test_torchrun_continues_with_a_host_that_joins(user, curves):
    """Let a host join: the first host's rank saves and stops; then each host starts a rank."""
    line = user.line(ELASTIC, *LONG)
    # With LOGLEVEL=INFO, torchrun reports a host that joins.
    first = user.type(line, "h1", LOGLEVEL="INFO")
    user.wait_for_step(20)
    # Suspend the rank, so that it does not finish before the second host joins.
    user.ranks("pkill -STOP")
    second = user.type(line, "h2")
    wait_until(lambda: "Detected 1 new nodes" in user.output(), 90, "h1 detects h2")
    user.ranks("pkill -CONT")
    assert [process.wait(timeout=300) for process in (first, second)] == [0, 0]
    check_continued_curve(user, curves)


# For each way to stop a run, name the launcher of the run, and a command that stops the run in this
# way when the test runs it on the host `head`.
STOPS = {
    # Signal the launcher's process group, as a terminal does on Ctrl-C.
    "Ctrl-C": ("ssh", "kill -INT -- -$(pgrep -o -f ssh/launch.sh)"),
    "lost connection": ("ssh", "pkill -KILL -f 'launch.sh|ssh -tt'"),
    # `script` provides a terminal to its command, so killing `script` closes the terminal.
    "closed terminal": ("ssh", "pkill -KILL -x script"),
    # Run the stop command that launch.sh --tmux prints.
    "tmux": ("tmux", "eval $(sed -n 's/^stop: *//p' head.log)"),
    "signal": ("Open MPI", "pkill -USR1 -x mpirun"),
    "file": ("deepspeed", "touch run/stop"),
}


@pytest.mark.parametrize("stop", ["Ctrl-C", *map(exhaustive, sorted(STOPS.keys() - {"Ctrl-C"}))])
def test_launcher_that_is_stopped_saves_and_leaves_no_rank(user, stop):
    launcher, command = STOPS[stop]
    typed = LAUNCHERS.get(launcher, "{chapter}/ssh/launch.sh --tmux {folder}/hosts.txt")
    user.env["RANKS_PER_NODE"] = "1"
    (user.folder / "hosts.txt").write_text("h1 slots=1\nh2 slots=1\n")
    line = user.line(typed.replace(":2", ":1"), *LONG, "--checkpoint-every", 1000)
    if stop == "closed terminal":
        line = shlex.join(["script", "--quiet", "--command", line, "terminal.log"])
    user.type(line)
    user.wait_for_step(20)
    assert all(user.ranks()), "a host has no rank"
    user.cluster.run("head", command, cwd=user.folder, env=user.env)
    wait_until(lambda: not any(user.ranks()), 60, "all ranks have ended")
    assert any(user.run_dir.glob("checkpoints/step-*")), "the ranks have saved nothing"
    assert not (user.run_dir / "model").exists(), "the run has finished; nothing stopped it"


# ---- what is wrong with a cluster --------------------------------------------------------------


def test_folder_that_is_not_shared_is_reported_with_the_host(user):
    """On each host, mount a separate file system in place of the folder that all should share."""
    for host in ("h1", "h2"):
        user.cluster.run(host, f"mount -t tmpfs tmpfs {user.folder}")
    user.launch(user.line(LAUNCHERS["by hand"].replace("node 2", "node 1"), *SHORT))
    assert "--save-dir: h2 cannot see " in user.output()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "launcher, variable, expected",
    [
        ("srun", "GLOO_SOCKET_IFNAME=eth9", "Error: .*eth9"),
        ("salloc", "MASTER_ADDR=h9", r"Error: .*\(h9, "),
        ("salloc", "MASTER_PORT=23456", r"Error: .*\(h1, 23456\)"),
        ("ssh", "MASTER_PORT=23456", r"h2: .*DistNetworkError: .*\(h1, 23456\)"),
    ],
)
def test_ranks_that_cannot_meet_report_the_reason(user, launcher, variable, expected):
    """Check that the errors name the wrong interface, host or port.

    If a job script prints the last errors of its ranks, look only at these errors.
    """
    user.cluster.block_port("h1", 23456)
    user.env |= [variable.split("="), ("RANKS_PER_NODE", "1")]
    typed = LAUNCHERS[launcher].replace("per-node=2", "per-node=1")
    assert not user.launch(user.line(typed, *SHORT, "--dist-timeout", 10))
    assert re.search(expected, user.output().rpartition("the last errors of its ranks:")[2])


@pytest.mark.exhaustive
def test_job_waits_until_earlier_jobs_of_its_name_have_ended(user):
    """Let the first job requeue itself: the second job must wait, although a host is free."""
    script, starts = user.folder / "starts.py", user.folder / "starts.txt"
    script.write_text(
        "import os, sys, time\n"
        f"open('{starts}', 'a').write(os.environ['SLURM_JOB_ID'] + ' ')\n"
        "time.sleep(600 * ('--wait' in sys.argv and 'SLURM_RESTART_COUNT' not in os.environ))"
    )
    user.env["RANKS_PER_NODE"] = "1"
    typed = "sbatch --job-name=run --dependency=singleton {chapter}/slurm/train.sbatch"
    lines = [user.line(typed, *options, script=script) for options in (["--wait"], [])]
    first, second = map(user.submit, lines)
    wait_until(starts.exists, 150, "the first job has started")
    user.cluster.run("head", f"scancel --signal=USR1 --batch {first}")
    assert user.end_of(second)["JobState"] == "COMPLETED"
    assert starts.read_text().split() == [first, first, second]
