"""Every launcher of chapter 03, for real: on two hosts with two ranks each, under a real Slurm."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import environments
from cluster.cluster import wait_until
from conftest import ROOT, SCRIPTS, SHORT, difference, has_logged, metrics, run_command, run_or_fail
from environments import finished, report
from readme import blocks
from runs import wait_for_verdict

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(600)]
CHAPTER = ROOT / "03-job-launchers"
LAB = ROOT / "diagnosing-errors"
SCRIPT = str(SCRIPTS["03"])
MINUTE = [*SHORT, "--seq-length", 32, "--num-steps", 400, "--eval-every", 400]
MINUTE += ["--checkpoint-every", 350]


@pytest.fixture(scope="module")
def settings(environment):
    """The environment that a user of the cluster has."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "OMP_NUM_THREADS": "1", "RANKS_PER_NODE": "2", "HF_HUB_OFFLINE": "1"}


def on_one_host(ranks, options, root):
    run_or_fail(ranks, [("03", [*options, "--save-dir", root, "-e", "run"])], root / "ranks")
    return metrics(root / "run")


@pytest.fixture(scope="module")
def curve(tmp_path_factory):
    """The metrics of four ranks on one host."""
    return on_one_host(4, SHORT, tmp_path_factory.mktemp("one-host"))


@pytest.fixture(scope="module")
def long_curve(tmp_path_factory):
    """The metrics of a run that takes half a minute and was never stopped, on two ranks."""
    return on_one_host(2, MINUTE, tmp_path_factory.mktemp("long"))


def arguments(tmp_path, options=SHORT, script=SCRIPT):
    return [script, *map(str, options), "--save-dir", str(tmp_path), "-e", "run"]


def has_stopped(folder, job):
    """Return whether the ranks of a job were asked to stop, and have saved."""
    logs = (folder / f"logs/job-{job}").glob("*.log")
    return any("\nstopped at step" in path.read_text() for path in logs)


def sbatch(cluster, folder, settings, *options):
    """Submit a job from a folder; return its id."""
    return cluster.sbatch(*map(str, options), cwd=folder, env=settings)


def wait_for_step(run_dir, step, seconds=150):
    wait_until(lambda: has_logged(run_dir, step), seconds, f"step {step}")


# ---- one curve -------------------------------------------------------------------------------


@pytest.fixture
def hosts(tmp_path):
    """A file with the names of two hosts."""
    path = tmp_path / "hosts.txt"
    path.write_text("# two nodes\nh1\nh2\n")
    return path


needs_deepspeed = pytest.mark.skipif(
    not Path(sys.executable).with_name("deepspeed").exists(),
    reason="no DeepSpeed: pip install -r 03-job-launchers/deepspeed/requirements.txt",
)
needs_accelerate = pytest.mark.skipif(
    not Path(sys.executable).with_name("accelerate").exists(), reason="accelerate is not installed"
)
SALLOC = "salloc --nodes 2 --gpus-per-node 2 --ntasks-per-node 2 srun --kill-on-bad-exit=1 python"
TYPED = {name: typed for name, (_, typed) in environments.TYPED.items()}
TYPED |= {"pdsh": "{chapter}/ssh/launch.sh --pdsh {folder}/hosts.txt", "salloc": SALLOC}
MARKS = {"deepspeed/launch.sh": needs_deepspeed}
LAUNCHERS = [pytest.param(name, marks=MARKS.get(name, ())) for name in TYPED]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_curve(cluster, settings, curve, tmp_path, launcher):
    """Two hosts have the curve of four ranks on one, under every launcher."""
    env = settings | {"MPI_INTERFACE": "eth0"}
    said = environments.launch(cluster, tmp_path, TYPED[launcher], arguments(tmp_path), env)
    assert difference(curve, metrics(tmp_path / "run")) < 1e-5
    assert "h1: finished: " in said or "ssh" not in TYPED[launcher]
    if launcher == "slurm/train.sbatch":
        logs = {path.name for path in (tmp_path / f"logs/job-{said}").iterdir()}
        assert logs == {"h1.log", "h2.log"}


@pytest.mark.parametrize("replicas", [1, 2])
def test_sbatch_of_a_model_split_across_hosts(cluster, settings, curve, tmp_path, replicas):
    """Chapter 04, sharded across both hosts, or inside of each, on the curve of chapter 03."""
    given = arguments(tmp_path, [*SHORT, "--replicas", replicas], str(SCRIPTS["04"]))
    environments.launch(cluster, tmp_path, TYPED["slurm/train.sbatch"], given, settings)
    assert difference(curve, metrics(tmp_path / "run")) < 1e-5
    shards = (tmp_path / "run/checkpoints/step-00000020").glob("*.distcp")
    assert {path.name for path in shards} == {f"__{rank}_0.distcp" for rank in range(4)}


def test_an_array_job_prepares_data_while_chapter_04_trains(cluster, settings, tmp_path):
    """Each task of the array writes a part; the training job starts when the folder exists."""
    folder = tmp_path / "web.tokens"
    tool = [sys.executable, ROOT / "preparing-data/prepare.py", "-o", folder, "--piece", 4000]
    command = shlex.join(map(str, [*tool, "--workers", 1, "pydoc"]))
    sbatch(cluster, tmp_path, settings, "--array=0-1", "--wrap", command)
    wait_until((folder / "index.json").exists, 60, "index.json")
    given = arguments(tmp_path, [*SHORT, "-d", folder], str(SCRIPTS["04"]))
    environments.launch(cluster, tmp_path, TYPED["slurm/train.sbatch"], given, settings)

    def is_complete():
        return "complete" in json.loads((folder / "index.json").read_text())

    wait_until(is_complete, 60, "both parts are complete")
    index = json.loads((folder / "index.json").read_text())
    assert index["parts"] == 2 and index["complete"]["pieces"] > 60
    words = [*SHORT, "-d", folder, "--save-dir", tmp_path, "-e", "one-host"]
    run_or_fail(4, [("04", words)], tmp_path / "ranks")
    assert difference(metrics(tmp_path / "one-host"), metrics(tmp_path / "run")) < 1e-5


def watched(tmp_path, *injector):
    into = [LAB / "watched.py", "--into", tmp_path / "run"]
    return [*into, *injector, *arguments(tmp_path)]


@pytest.mark.parametrize("launcher", ["slurm/srun-direct.sbatch", "mpi/launch.sh"])
def test_watched(cluster, settings, curve, tmp_path, launcher):
    """`watched.py --into FOLDER` before the script's name, and nothing else."""
    env = settings | {"MPI_INTERFACE": "eth0"}
    environments.launch(cluster, tmp_path, TYPED[launcher], watched(tmp_path), env)
    assert difference(curve, metrics(tmp_path / "run")) < 1e-5
    beats = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("run/ranks/*.json"))]
    told = [(beat["rank"], beat["world_size"], beat["host"], beat["end"]) for beat in beats]
    assert told == [(rank, 4, f"h{rank // 2 + 1}", "finished") for rank in range(4)]


def test_what_is_wrong_with_a_slurm_job(cluster, settings, tmp_path):
    """Its hosts are asked by srun, beside the ranks that run there."""
    options = ["--nodes=2", "--gpus-per-node=2", "--ntasks-per-node=2"]
    options += [CHAPTER / "slurm/srun-direct.sbatch"]
    command = watched(tmp_path, LAB / "inject.py", "stop-process@rank3:step10")
    job = sbatch(cluster, tmp_path, settings, *options, *command)
    wait_for_step(tmp_path / "run", 9)
    kinds = ["stopped-process"]
    verdict = wait_for_verdict(cluster, tmp_path / "run", settings, kinds, "--slurm-job", job)
    assert verdict["ranks"] == [3], verdict
    assert verdict["hosts"] == ["h2"] and "train_llm.py" in verdict["reason"]


@pytest.mark.parametrize(
    "launcher", ["ssh", "mpi", pytest.param("deepspeed", marks=needs_deepspeed)]
)
def test_variables_reach_all_ranks(cluster, settings, hosts, tmp_path, launcher):
    """What nccl and libfabric are told where the launcher starts, they are told on all hosts."""
    given = {"NCCL_IB_HCA": "mlx5_0,mlx5_1", "TORCH_NCCL_TRACE": "a b", "FI_PROVIDER": "efa"}
    (tmp_path / "probe.py").write_text(environments.PROBE)
    hosts.write_text("h1 slots=2\nh2 slots=2\n")
    where = "h1:2,h2:2" if launcher == "mpi" else hosts
    command = [CHAPTER / launcher / "launch.sh", where, tmp_path / "probe.py", tmp_path]
    env = settings | given | {"MPI_INTERFACE": "eth0"}
    cluster.run("head", command, timeout=120, env=env)
    told = [json.loads(path.read_text())["variables"] for path in tmp_path.glob("*.json")]
    assert len(told) == 4 and all(given.items() <= variables.items() for variables in told)


@needs_deepspeed
def test_environments(cluster, tmp_path, monkeypatch):
    """What the launchers tell their ranks is in environments.md, but for ports and job ids."""
    monkeypatch.setenv("PATH", os.environ["PATH"])  # and what else is changed comes back
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def comparable(results):
        for launcher in results.values():
            for rank in launcher["ranks"]:
                for name in ("MASTER_PORT", "SLURM_JOB_ID"):
                    rank["variables"].pop(name, None)
        return results

    shown = json.loads(environments.RESULT.read_text())
    assert comparable(environments.collect(cluster, tmp_path)) == comparable(shown)


def by_hand(cluster, settings, tmp_path, ranks):
    """Type torchrun on each of two hosts; return the exit statuses, and what was printed."""
    typed = f"torchrun --nnodes 2 --nproc-per-node {ranks} --master-addr h1 --node-rank".split()
    logs = [open(tmp_path.with_name(f"{tmp_path.name}-h{rank}.log"), "w+") for rank in range(2)]
    processes = [
        cluster.popen(f"h{rank + 1}", [*typed, str(rank), *arguments(tmp_path)],
                      env=settings, stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    statuses = [process.wait(timeout=240) for process in processes]
    return statuses, [Path(log.name).read_text() for log in logs]


def test_by_hand(cluster, settings, curve, tmp_path):
    statuses, said = by_hand(cluster, settings, tmp_path, ranks=2)
    assert statuses == [0, 0], said
    assert difference(curve, metrics(tmp_path / "run")) < 1e-5


def write(folder, line, script=SCRIPT):
    """Have make_config.py write what starts a script on two hosts; return the file."""
    maker, made = ROOT / "alternative-frameworks/make_config.py", folder / "made"
    words = [*line.split(), "--nodes", 2, "--gpus-per-node", 2, "--output", made]
    run_command(maker, *words, "--", *arguments(folder, script=script), check=True, cwd=folder)
    return made


@pytest.mark.exhaustive
def test_a_job_script_that_was_written(cluster, settings, curve, tmp_path):
    """sbatch takes it as it is; the number of ranks is that of the GPUs."""
    made = write(tmp_path, "slurm --time-limit 0:10:00 --cpus-per-node 2 --save-seconds 30")
    env = {name: value for name, value in settings.items() if name != "RANKS_PER_NODE"}
    job = sbatch(cluster, tmp_path, env, made)
    known = finished(cluster, job, tmp_path)
    assert (known["TimeLimit"], known["NumNodes"]) == ("00:10:00", "2")
    assert difference(curve, metrics(tmp_path / "run")) < 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "launcher, script",
    [
        ("torchrun", "03"),
        pytest.param("torchrun", "deepspeed", marks=needs_deepspeed),
        pytest.param("accelerate", "accelerate", marks=needs_accelerate),
    ],
)
def test_commands_that_were_written(cluster, settings, curve, tmp_path, launcher, script):
    """torchrun's is the same on both hosts; accelerate's tells each its number."""
    line = f"launch --hosts h1 h2 --launcher {launcher} --time-limit 0:10:00 --cpus-per-node 2"
    text = write(tmp_path, line, str(SCRIPTS[script])).read_text()
    commands = {
        host: command
        for hosts, command in re.findall("# on (.*)\n(.*)", text)
        for host in hosts.split(", ")
    }
    logs = [open(tmp_path / f"{host}.log", "w+") for host in commands]
    started = [
        cluster.popen(host, ["bash", "-c", command], cwd=tmp_path, env=settings, stdout=log,
                      stderr=log)
        for (host, command), log in zip(commands.items(), logs, strict=True)
    ]  # fmt: skip
    statuses = [process.wait(timeout=240) for process in started]
    assert statuses == [0, 0], report(tmp_path)
    assert difference(curve, metrics(tmp_path / "run")) < 1e-4  # norms of about 3 too


@needs_deepspeed
@pytest.mark.exhaustive
def test_deepspeed_under_its_own_launcher(cluster, settings, curve, tmp_path):
    made = write(tmp_path, "launch --hosts h1 h2 --launcher deepspeed", str(SCRIPTS["deepspeed"]))
    cluster.run("head", ["bash", made], cwd=tmp_path, env=settings, timeout=240)
    assert difference(curve, metrics(tmp_path / "run")) < 1e-4


# ---- stopped, requeued, killed ---------------------------------------------------------------


def two_ranks(cluster, settings, tmp_path, step, *more, file="train", nodes=2):
    """Train on two hosts with a rank each, for half a minute; return the job, in this step."""
    options = ["--time=60", f"--nodes={nodes}", "--gpus-per-node=1", "--ntasks-per-node=1"]
    words = [CHAPTER / "slurm" / f"{file}.sbatch", *arguments(tmp_path, MINUTE), *more]
    job = sbatch(cluster, tmp_path, settings | {"RANKS_PER_NODE": "1"}, *options, *words)
    wait_for_step(tmp_path / "run", step)
    return job


RANKS = "^[^ ]*python[^ ]* (-u )?[^ ]*train_llm.py"  # launchers begin with another word


def out_of_time(cluster, job, folder):
    """Let a job's time run out; return when it is requeued.

    Its ranks are stopped until it is told, so that no machine is so fast that they finish first.
    """
    for host in ("h1", "h2"):
        cluster.run(host, ["pkill", "-STOP", "-f", RANKS])
    # one to two minutes are left from now on, and the job asked for its signal 120 s before the end
    minutes = int(cluster.job(job)["RunTime"].split(":")[1])
    cluster.run("head", ["scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}"])
    asked = "asking all ranks to save and stop; requeue: yes"
    out = folder / f"slurm-{job}.out"
    wait_until(lambda: asked in out.read_text(), 90, "the job is told that its time is up")
    for host in ("h1", "h2"):
        cluster.run(host, ["pkill", "-CONT", "-f", RANKS])
    wait_until(lambda: int(cluster.job(job)["Restarts"]) >= 1, 90, "the job is requeued")
    cluster.run("head", ["scontrol", "update", f"JobId={job}", "TimeLimit=60"])


@pytest.mark.parametrize("file", ["train", "srun-direct"])
def test_out_of_time(cluster, settings, long_curve, tmp_path, file):
    """Signalled before its limit, the job saves, requeues itself, and ends as if it never had."""
    job = two_ranks(cluster, settings, tmp_path, 20, file=file)
    out_of_time(cluster, job, tmp_path)
    finished(cluster, job, tmp_path)
    assert has_stopped(tmp_path, job)
    assert difference(long_curve, metrics(tmp_path / "run")) == 0.0


def test_a_job_script_of_ones_own(cluster, settings, long_curve, tmp_path):
    """That of the README does this, too."""
    (text,) = (block.text for block in blocks(CHAPTER / "slurm/README.md") if "#SB" in block.text)
    changes = {" 8 ": " 1 ", "=12 ": "=1 ", "train.py": '"$@"', " --cpus-per-task=96": ""}
    for old, new in changes.items():
        text = text.replace(old, new)
    (tmp_path / "own.sbatch").write_text(text)
    job = two_ranks(cluster, settings, tmp_path, 20, file=tmp_path / "own")
    out_of_time(cluster, job, tmp_path)
    finished(cluster, job, tmp_path)
    assert "stopped at step" in (tmp_path / f"slurm-{job}.out").read_text()
    assert difference(long_curve, metrics(tmp_path / "run")) == 0.0


@pytest.mark.parametrize("file", ["train", "srun-direct"])
def test_preempted(cluster, settings, long_curve, tmp_path, file):
    """An urgent job needs its nodes: it saves, waits for them, and ends as if it never had."""
    job = two_ranks(cluster, settings, tmp_path, 20, file=file)
    urgent = ["--partition=urgent", "--nodes=2", "--cpus-per-task=4", "--time=1", "--wrap=true"]
    sbatch(cluster, tmp_path, settings, *urgent)
    wait_until(lambda: int(cluster.job(job)["Restarts"]) >= 1, 60, "the job is requeued")
    finished(cluster, job, tmp_path)
    assert has_stopped(tmp_path, job)
    assert difference(long_curve, metrics(tmp_path / "run")) == 0.0


def test_scancel(cluster, settings, tmp_path):
    """It saves and does not come back."""
    job = two_ranks(cluster, settings, tmp_path, 20)
    cluster.run("head", ["scancel", job])
    ended = cluster.wait_for_job(job, "CANCELLED", "COMPLETED", "FAILED", seconds=60)
    assert ended["JobState"] == "CANCELLED"
    wait_until(lambda: list((tmp_path / "run/checkpoints").glob("step-*")), 20, "it has saved")
    time.sleep(8)  # requeued jobs come back within this time
    assert cluster.job(job)["JobState"] == "CANCELLED"
    assert has_stopped(tmp_path, job)


@pytest.mark.parametrize("victim", ["host", "worker"])
def test_a_dead_host_or_worker(cluster, settings, long_curve, tmp_path, victim):
    """A dead host's job is requeued; of a rank's kill -9 all start again, in the same job."""
    job = two_ranks(cluster, settings, tmp_path, 50, "--checkpoint-every", 20)
    if victim == "host":
        cluster.kill_host("h2")
        wait_until(lambda: int(cluster.job(job)["Restarts"]) >= 1, 90, "the job is requeued")
        cluster.revive("h2")
    else:
        cluster.run("h2", ["pkill", "-KILL", "-f", RANKS])
    found = finished(cluster, job, tmp_path, seconds=300)
    assert (found["Restarts"] == "0") == (victim == "worker")
    assert difference(long_curve, metrics(tmp_path / "run")) == 0.0


def elastic(tmp_path, *more):
    """Return what is typed on each of one or two hosts, to train on those that are there."""
    typed = "torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d"
    typed += " --rdzv-id elastic --rdzv-endpoint h1:29400"
    return [*typed.split(), *more, *arguments(tmp_path, MINUTE), "--checkpoint-every", "20"]


def continued(text, whole, curve):
    """Check losses that other ranks continued; return the step, and both curves until then."""
    [start] = re.findall(r"^continuing from \S+/step-(\d+)$", text, re.M)
    steps = range(int(start) + 21)
    one, other = ({step: rows[step] for step in steps} for rows in (whole, curve))
    assert difference(one, other, names=["loss", "val_loss"]) < 1e-5
    # over hundreds of steps rounding adds up
    assert difference(whole, curve, names=["loss", "val_loss"]) < 1e-3
    return int(start), one, other


@pytest.mark.exhaustive
@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_submitted_again_with_other_nodes(cluster, settings, long_curve, tmp_path, before, after):
    """A job is cancelled and has saved; another one goes on with more hosts, or with fewer."""
    job = two_ranks(cluster, settings, tmp_path, 20, nodes=before)
    cluster.run("head", ["scancel", job])
    cluster.wait_for_job(job, "CANCELLED", seconds=60)
    wait_until(lambda: not ranks_of(cluster), 60, "its ranks have saved and ended")
    job = two_ranks(cluster, settings, tmp_path, 30, nodes=after)
    finished(cluster, job, tmp_path)
    text = "".join(path.read_text() for path in (tmp_path / f"logs/job-{job}").glob("*.log"))
    continued(text, long_curve, metrics(tmp_path / "run"))


def test_fewer_hosts(cluster, settings, long_curve, tmp_path):
    """One of two hosts dies, and torchrun goes on with the other, on the same curve."""
    command, env = elastic(tmp_path), settings | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(tmp_path / "h1.log", "w+") as log:
        first = cluster.popen("h1", command, env=env, stdout=log, stderr=log)
        cluster.popen("h2", command, env=env)
        wait_for_step(tmp_path / "run", 50)
        cluster.kill_host("h2", silently=False)
        assert first.wait(timeout=300) == 0, report(tmp_path)
    text, curve = (tmp_path / "h1.log").read_text(), metrics(tmp_path / "run")
    _, one, other = continued(text, long_curve, curve)
    assert difference(one, other, names=["grad_norm"], relative=True) < 1e-5  # norms reach 5 here
    assert difference(long_curve, curve) < 1e-3


def test_more_hosts(cluster, settings, long_curve, tmp_path):
    """A second host joins: torchrun stops the first one's rank, which saves; both go on from there.

    That rank is suspended until the second host is there, so that it does not finish before.
    """
    command = elastic(tmp_path, "--rdzv-conf", "last_call_timeout=1")  # h1 does not wait for h2
    env = settings | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    path = tmp_path / "h1.log"
    with open(path, "w") as log:
        verbose = env | {"LOGLEVEL": "INFO"}  # then torchrun says that it sees a new host
        first = cluster.popen("h1", command, env=verbose, stdout=log, stderr=log)
        wait_for_step(tmp_path / "run", 20)
        cluster.run("h1", ["pkill", "-STOP", "-f", RANKS])
        second = cluster.popen("h2", command, env=env)
        wait_until(lambda: "Detected 1 new nodes" in path.read_text(), 90, "h1 sees h2")
        cluster.run("h1", ["pkill", "-CONT", "-f", RANKS])
        assert [host.wait(timeout=300) for host in (first, second)] == [0, 0], report(tmp_path)
    text = path.read_text()
    [stopped] = re.findall(r"^stopped at step (\d+); ", text, re.M)
    assert continued(text, long_curve, metrics(tmp_path / "run"))[0] == int(stopped), text
    # Two ranks share the 8 samples of a step.
    assert "micro_batch_size was 8, is now 4" in text, text


def test_in_tmux(cluster, settings, hosts, tmp_path):
    """It goes on without its terminal, and is stopped as it said, with the ranks' work saved."""
    command = [CHAPTER / "ssh/launch.sh", "--tmux", hosts, *arguments(tmp_path, MINUTE)]
    one = settings | {"RANKS_PER_NODE": "1"}
    said = cluster.run("head", command, cwd=tmp_path, env=one).stdout
    wait_for_step(tmp_path / "run", 20)
    cluster.run("head", said.split("stop:")[1].strip(), cwd=tmp_path, env=one)
    [log] = (tmp_path / "logs").glob("run-*.log")
    wait_until(lambda: "ended with status" in log.read_text(), 60, "it has stopped")
    assert "h1: stopped at step" in log.read_text()
    assert list((tmp_path / "run/checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    "launcher, number",
    [
        ("ssh", signal.SIGINT),
        ("mpi", signal.SIGUSR1),
        pytest.param("deepspeed", None, marks=needs_deepspeed),  # Ctrl-C may break pdsh too soon
    ],
)
def test_asked_by_hand(cluster, settings, hosts, tmp_path, launcher, number):
    """Ctrl-C, a signal that mpirun passes on, or a file: all ranks save and stop."""
    hosts.write_text("h1 slots=1\nh2 slots=1\n")
    command = [CHAPTER / launcher / "launch.sh", hosts, *arguments(tmp_path, MINUTE)]
    if launcher == "mpi":
        command[1] = "h1:1,h2:1"
    env = settings | {"RANKS_PER_NODE": "1", "MPI_INTERFACE": "eth0"}
    with open(tmp_path / "out.log", "w+") as log:
        process = cluster.popen(
            "head", command, env=env, stdout=log, stderr=log, start_new_session=True
        )
        wait_for_step(tmp_path / "run", 20)
        assert len(ranks_of(cluster).split()) == 2
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as the terminal does
        elif number:
            process.send_signal(number)
        else:
            (tmp_path / "run/stop").touch()
        process.wait(timeout=60)
        log.seek(0)
        output = log.read()
    wait_until(
        lambda: list((tmp_path / "run/checkpoints").glob("step-*")), 20, f"it saves:\n{output}"
    )
    wait_until(lambda: not ranks_of(cluster), 20, f"all ranks have ended:\n{output}")


def test_a_lost_connection(cluster, settings, hosts, tmp_path):
    """kill -9 of launch.sh and of every ssh: the ranks save, and none is left."""
    command = [CHAPTER / "ssh/launch.sh", hosts, *arguments(tmp_path, MINUTE)]
    one = settings | {"RANKS_PER_NODE": "1"}
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    cluster.popen("head", command, env=one, **nowhere)
    wait_for_step(tmp_path / "run", 20)
    assert len(ranks_of(cluster).split()) == 2
    cluster.run("head", ["pkill", "-KILL", "-f", "launch.sh|ssh -tt"])
    wait_until(lambda: not ranks_of(cluster), 30, "all ranks have ended")
    assert list((tmp_path / "run/checkpoints").glob("step-*"))


def ranks_of(cluster):
    """Return what pgrep says of processes on the hosts that train."""
    found = [cluster.run(host, ["pgrep", "-f", RANKS], check=False) for host in ("h1", "h2")]
    return "".join(done.stdout for done in found)


# ---- what may be wrong with a cluster --------------------------------------------------------


def test_a_folder_that_is_not_shared(cluster, settings, tmp_path):
    """Every host has a disk of its own where the run's folder should be: h2 is named."""
    for host in ("h1", "h2"):
        cluster.run(host, ["mount", "-t", "tmpfs", "tmpfs", str(tmp_path)])
    statuses, said = by_hand(cluster, settings, tmp_path, ranks=1)
    assert statuses == [1, 1], said
    assert "--save-dir: h2 cannot see what rank 0 writes to" in said[0], said


@pytest.mark.parametrize(
    "more, expected",
    [
        ({"GLOO_SOCKET_IFNAME": "eth9"}, "eth9"),
        ({"MASTER_ADDR": "h9"}, "(h9, "),
        ({"MASTER_PORT": "23456"}, "(h1, 23456)"),
    ],
    ids=["interface", "host", "port"],
)
def test_no_way_to_meet(cluster, settings, tmp_path, more, expected):
    """The job's last words are torch's: a wrong interface, host or port is named in them."""
    cluster.block_port("h1", 23456)
    options = ["--nodes=2", "--ntasks-per-node=1", CHAPTER / "slurm/srun-direct.sbatch"]
    job = sbatch(
        cluster, tmp_path, settings | more, *options, *arguments(tmp_path), "--dist-timeout", 10
    )
    ended = cluster.wait_for_job(job, "COMPLETED", "FAILED", seconds=120)
    assert ended["JobState"] == "FAILED", report(tmp_path)
    said = (tmp_path / f"slurm-{job}.out").read_text().partition("the last errors of its ranks:")[2]
    assert "Error: " in said and expected in said, report(tmp_path)


@pytest.mark.parametrize(
    "second, status, expected",
    [
        ("h9", 2, "error: no ssh to h9"),
        ("h2", 255, "h2: torch.distributed.DistNetworkError: The client socket has timed out after "
         "60000ms while trying to connect to (h1, 23456)"),
    ],
    ids=["host", "port"],
)  # fmt: skip
def test_no_way_to_meet_over_ssh(cluster, settings, hosts, tmp_path, second, status, expected):
    """One host fails with a line that says why, and the other is not left waiting."""
    cluster.block_port("h1", 23456)
    hosts.write_text(f"h1\n{second}\n")
    command = [CHAPTER / "ssh/launch.sh", hosts, *arguments(tmp_path)]
    env = settings | {"MASTER_PORT": "23456"}
    done = cluster.run("head", command, timeout=120, check=False, env=env)
    assert done.returncode == status, done.stdout
    assert expected in done.stdout + done.stderr
