"""What manifest.py prints is valid, its mistakes are told, and the pods' command trains.

There is no cluster: what Kubernetes does with a pod that has ended is played by `Pods`.
"""

import json
import os
import signal
import subprocess
import sys

import kubernetes_validate
import psutil
import pytest
import yaml

from cluster.cluster import ClusterError, wait_until
from conftest import ROOT, difference, free_port, metrics, run_command, torchrun

FOLDER = ROOT / "03-job-launchers/kubernetes"
VERSIONS = ["1.31", kubernetes_validate.latest_version()]  # 1.31 is the first that has all we use
TRAIN = "03-job-launchers/train_llm.py"
SIZES = [(1, 8), (2, 0), (16, 8)]


def manifest(*args):
    """Run manifest.py; return what came of it."""
    return run_command(FOLDER / "manifest.py", *args)


def objects(*script, nodes=2, gpus=8, options=()):
    """Return the objects that manifest.py prints, by kind."""
    size = ["--nodes", nodes, "--gpus-per-node", gpus, "--image", "train:1", *options]
    done = manifest(*size, "--", *(script or (TRAIN,)))
    assert done.returncode == 0, done.stderr
    return {item["kind"]: item for item in json.loads(done.stdout)["items"]}


def job_of(found):
    """Return the specification of the job: the one that we write, or that Kubeflow would."""
    if "Job" in found:
        return found["Job"]["spec"]
    (node,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    return node["template"]["spec"]


def container_of(found):
    (container,) = job_of(found)["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("nodes, gpus", SIZES)
def test_manifests_are_valid(nodes, gpus, version):
    found = objects(nodes=nodes, gpus=gpus, options=["--cpu", "64", "--memory", "512Gi"])
    assert set(found) == {"Service", "Job"}
    for item in found.values():
        kubernetes_validate.validate(item, version, strict=True)
    spec = found["Job"]["spec"]
    assert spec["completions"] == spec["parallelism"] == nodes
    words = container_of(found)["command"]
    assert words[words.index("--nnodes") + 1] == str(nodes)
    assert words[words.index("--nproc-per-node") + 1] == str(gpus or 1)
    assert container_of(found)["resources"]["limits"].get("nvidia.com/gpu", "0") == str(gpus)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_volume_is_valid(version):
    for item in yaml.safe_load_all((FOLDER / "volume.yaml").read_text()):
        kubernetes_validate.validate(item, version, strict=True)


def test_names_meet():
    """The pods find the first of them: its name is made of the job's and the service's."""
    found = objects(options=["--name", "llama-1b"])
    service, spec = found["Service"], found["Job"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "llama-1b"}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"] == "llama-1b"
    assert found["Job"]["metadata"]["name"] == "llama-1b"
    words = container_of(found)["command"]
    assert words[words.index("--master-addr") + 1] == "llama-1b-0.llama-1b"


def test_a_save_fits_into_the_grace():
    found = objects(options=["--grace", "600"])
    env = {one["name"]: one.get("value") for one in container_of(found)["env"]}
    grace = job_of(found)["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace == 600 > int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) >= 500


def test_kubernetes_leaves_arguments_as_they_are():
    words = container_of(objects(TRAIN, "--text-column", "$(HOSTNAME)"))["command"]
    assert "$$(HOSTNAME)" in words  # which Kubernetes hands over as $(HOSTNAME)


@pytest.mark.parametrize("nodes, gpus", SIZES)
def test_kubeflow(nodes, gpus):
    """Kubeflow's own fields are compared with what its Go types have; its job with the schema."""
    found = objects(nodes=nodes, gpus=gpus, options=["--kubeflow"])
    assert {item["apiVersion"] for item in found.values()} == {"trainer.kubeflow.org/v1alpha1"}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime"}
    assert found.pop("TrainJob")["spec"] == {
        "runtimeRef": reference | {"name": found["TrainingRuntime"]["metadata"]["name"]},
        "trainer": {"numNodes": nodes, "numProcPerNode": gpus or 1},
    }
    runtime = found["TrainingRuntime"]["spec"]
    assert runtime.keys() == {"mlPolicy", "template"}
    assert runtime["mlPolicy"] == {"numNodes": nodes, "torch": {}}
    (node,) = runtime["template"]["spec"]["replicatedJobs"]
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert node["name"] == "node" and node["template"]["metadata"] == {"labels": labels}
    assert container_of(found)["name"] == "node"
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    kubernetes_validate.validate(job | {"spec": job_of(found)}, VERSIONS[-1], strict=True)


BAD = {
    "no script": ([], "no script given"),
    "no such script": (["--", "nosuch.py"], "nosuch.py: no such script"),
    "no nodes": (["--nodes", "0", "--", TRAIN], "--nodes 0: must be at least 1"),
    "flag": (["--node", "4", "--", TRAIN], "unrecognized arguments: --node 4"),
    "name": (["--name", "Llama_1B", "--", TRAIN], "--name Llama_1B: not a valid name"),
    "short grace": (["--grace", "5", "--", TRAIN], "--grace 5: must be at least 60"),
    "folder": (["--", TRAIN, "--save-dir", "x"], "--save-dir: not allowed after the --"),
    "run": (["--", TRAIN, "-e", "x"], "-e: not allowed after the --"),
}


@pytest.mark.parametrize("args, message", BAD.values(), ids=BAD.keys())
def test_a_mistake_costs_one_line(args, message):
    done = manifest("--nodes", 2, "--gpus-per-node", 8, "--image", "train:1", *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"manifest.py: error: {message}"), done.stderr
    assert done.stderr.count("\n") == 1


SMALL = (
    "--device cpu --precision fp32 --seq-length 64 --global-batch-size 4 --batch-size 2 "
    "--eval-samples 4 --checkpoint-every 1000 --eval-every 1000 --log-every 5"
).split()


class Pods:
    """Two pods on this machine: the command, variables and rules are those of a manifest."""

    def __init__(self, folder, *script, before=(), kubeflow=False):
        script = [*before, TRAIN, *SMALL, *script]
        found = objects(*script, gpus=0, options=["--kubeflow"] * kubeflow)
        self.folder, self.kubeflow = folder, kubeflow
        self.container, self.port = container_of(found), str(free_port())
        self.rules = job_of(found)["podFailurePolicy"]["rules"]
        self.run_dir = folder / "outputs/train-llm"
        self.running, self.started = {}, 0

    def here(self, text):
        """Return a word of the manifest as it is on this machine."""
        text = text.replace("train-llm-0.train-llm", "127.0.0.1").replace("29500", self.port)
        text = text.replace("/shared/code", str(ROOT)).replace("/shared", str(self.folder))
        return text.replace("$$(", "$(")

    def start(self, index):
        """Start a pod as the kubelet would; what it prints goes to a file."""
        env = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
        for one in self.container["env"]:
            if "value" in one:  # the secrets are optional
                env[one["name"]] = self.here(one["value"])
        if self.kubeflow:  # which sets these variables
            env |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(index)}
            env |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": self.port}
        words = map(self.here, self.container["command"])
        words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in words]
        log = open(self.folder / f"pod{index}.{self.started:02}.log", "w")
        self.started += 1
        self.running[index] = subprocess.Popen(
            words, cwd=self.here(self.container["workingDir"]), env=env, stdout=log, stderr=log
        )

    def action(self, status):
        """Return what the rules say of a pod that nobody disrupted."""
        for rule in self.rules:
            if status in rule.get("onExitCodes", {}).get("values", []):
                return rule["action"]
        return "Succeeded" if status == 0 else "Count"

    def wait_until(self, condition, seconds=120):
        """Wait for a condition; a failure tells all that was printed."""
        try:
            wait_until(condition, seconds, "what is awaited")
        except ClusterError as error:
            raise AssertionError(self.logs()) from error

    def logs(self):
        logs = sorted(self.folder.glob("pod*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in logs)

    def statuses(self, seconds=120):
        """Return the pods' exit statuses when all have ended."""
        self.wait_until(
            lambda: all(pod.poll() is not None for pod in self.running.values()), seconds
        )
        return {index: pod.returncode for index, pod in sorted(self.running.items())}


@pytest.fixture
def pods(tmp_path):
    """Start pods by calling this; they are ended with the test, and then their ranks."""
    made = []

    def make(*script, **options):
        made.append(Pods(tmp_path, *script, **options))
        for index in (0, 1):
            made[-1].start(index)
        return made[-1]

    yield make
    for pod in (pod for pods in made for pod in pods.running.values()):
        pod.kill()
        pod.wait(timeout=20)


@pytest.mark.slow
@pytest.mark.parametrize("kubeflow", [False, True], ids=["job", "kubeflow"])
def test_the_command_of_the_pods_trains(pods, kubeflow):
    """Two pods give the losses of two ranks of one node; with watched.py before the script too."""
    before = ["diagnosing-errors/watched.py", "--into", "/shared/outputs/train-llm"] * kubeflow
    both = pods("--num-steps", "10", before=before, kubeflow=kubeflow)
    assert both.statuses() == {0: 0, 1: 0}, both.logs()
    beats = [json.loads(path.read_text()) for path in sorted(both.run_dir.glob("ranks/*.json"))]
    assert [beat["end"] for beat in beats] == ["finished", "finished"] * kubeflow
    args = [*SMALL, "--num-steps", 10, "-e", "one-node", "--save-dir", both.folder / "outputs"]
    alone = torchrun("03", *args)
    assert alone.wait(timeout=120) == 0, alone.communicate()
    other = metrics(both.folder / "outputs/one-node")
    assert difference(metrics(both.run_dir), other, names=["loss"]) < 1e-5
    assert (both.run_dir / "model/config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("drained", [0, 1])
def test_a_drained_pod_is_replaced_and_the_others_too(pods, drained):
    """Each pod is started again the moment it has ended, which is sooner than Kubernetes does."""
    both = pods("--num-steps", "60")
    both.wait_until(lambda: "step 5 " in both.logs())
    ended, other = both.running[drained], both.running[1 - drained]
    ended.send_signal(signal.SIGTERM)
    both.wait_until(lambda: ended.poll() is not None)
    assert ended.returncode == 128 + signal.SIGTERM, both.logs()
    both.start(drained)  # its DisruptionTarget says so, whatever the status
    both.wait_until(lambda: other.poll() is not None, seconds=30)
    assert both.action(other.returncode) == "Ignore", both.logs()
    both.start(1 - drained)
    assert both.statuses() == {0: 0, 1: 0}, both.logs()
    assert "continuing from" in both.logs()
    assert 60 in metrics(both.run_dir)


@pytest.mark.slow
def test_a_bad_argument_fails_the_job(pods):
    both = pods("--lr", "nan")
    both.wait_until(lambda: both.running[0].poll() is not None)
    assert both.action(both.running[0].returncode) == "FailJob", both.logs()
    assert both.action(both.statuses()[1]) in ("FailJob", "Count"), both.logs()
    assert "--lr nan: must be at least 0" in both.logs()


@pytest.mark.slow
def test_a_crash_is_counted(pods):
    """One rank is killed: both pods fail, and are to be started again."""
    both = pods("--num-steps", "1000")
    both.wait_until(lambda: "step 5 " in both.logs())
    [rank] = psutil.Process(both.running[1].pid).children()
    rank.kill()
    found = both.statuses()
    assert found[1] == 128 + signal.SIGKILL, both.logs()
    assert {both.action(status) for status in found.values()} == {"Count"}, both.logs()
