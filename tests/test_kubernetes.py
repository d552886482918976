"""job.yaml and trainjob.yaml are valid and meet each other, and their pods' command trains.

There is no cluster: `Pods` plays what Kubernetes does with a pod that has ended.
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
from conftest import ROOT, difference, free_port, metrics, torchrun
from contenders import load

FOLDER = ROOT / "03-job-launchers/kubernetes"
# 1.31 is the first version that has all fields.
VERSIONS = ["1.31", kubernetes_validate.latest_version()]
TRAIN = "03-job-launchers/train_llm.py"


def objects(file="job.yaml"):
    """Return the objects in a file by their kind."""
    return {item["kind"]: item for item in yaml.safe_load_all((FOLDER / file).read_text())}


def job_of(file):
    """Return the specification of the job that a file describes."""
    found = objects(file)
    if "Job" in found:
        return found["Job"]["spec"]
    (node,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    return node["template"]["spec"]


def container_of(file):
    """Return the one container of a pod."""
    (container,) = job_of(file)["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", ["job.yaml", "volume.yaml"])
def test_file_satisfies_the_schemas_of_kubernetes(file, version):
    for item in yaml.safe_load_all((FOLDER / file).read_text()):
        kubernetes_validate.validate(item, version, strict=True)


def test_wrong_field_is_refused_by_the_schemas():
    job = objects()["Job"]
    job["spec"]["template"]["spec"]["restartpolicy"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


def test_pods_find_the_first_pod_by_its_name():
    service, job = objects()["Service"], objects()["Job"]
    name = job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"] == name
    assert f"--master-addr={name}-0.{name}" in container_of("job.yaml")["command"]
    assert f"--experiment-name={name}" in container_of("job.yaml")["command"]


def test_sizes_agree_within_each_file():
    job, words = objects()["Job"]["spec"], container_of("job.yaml")["command"]
    gpus = container_of("job.yaml")["resources"]["limits"]["nvidia.com/gpu"]
    assert job["completions"] == job["parallelism"] == 2 and "--nnodes=2" in words
    assert f"--nproc-per-node={gpus}" in words
    trainer = objects("trainjob.yaml")["TrainJob"]["spec"]["trainer"]
    assert trainer == {"numNodes": 2, "numProcPerNode": int(gpus)}


@pytest.mark.parametrize("file", ["job.yaml", "trainjob.yaml"])
def test_stopped_pod_has_time_to_save(file):
    env = {one["name"]: one.get("value") for one in container_of(file)["env"]}
    grace = job_of(file)["template"]["spec"]["terminationGracePeriodSeconds"]
    assert int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == grace - 30 >= 60


def test_kubeflow_has_the_pods_of_the_plain_job():
    """Kubeflow's own fields are compared with its Go types; the job inside with the schema."""
    found = objects("trainjob.yaml")
    assert {item["apiVersion"] for item in found.values()} == {"trainer.kubeflow.org/v1alpha1"}
    name = found["TrainingRuntime"]["metadata"]["name"]
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
    assert found["TrainJob"]["spec"]["runtimeRef"] == reference
    runtime = found["TrainingRuntime"]["spec"]
    assert runtime.keys() == {"mlPolicy", "template"}
    assert runtime["mlPolicy"] == {"numNodes": 2, "torch": {}}
    (node,) = runtime["template"]["spec"]["replicatedJobs"]
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert node["name"] == "node" and node["template"]["metadata"] == {"labels": labels}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    kubernetes_validate.validate(job | {"spec": job_of("trainjob.yaml")}, VERSIONS[-1], strict=True)
    # Kubeflow sets the rest: the number of pods, their names, and torchrun's arguments.
    plain, kubeflow = job_of("job.yaml"), job_of("trainjob.yaml")
    del plain["completions"], plain["parallelism"], plain["template"]["spec"]["subdomain"]
    words = plain["template"]["spec"]["containers"][0]["command"]
    own = ("--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port")
    words[:] = [word for word in words if not word.startswith(own)]
    assert plain == kubeflow


def test_rules_know_the_status_of_a_pod_that_must_start_again():
    rules = job_of("job.yaml")["podFailurePolicy"]["rules"]
    values = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules[1:]}
    assert values == {"FailJob": [2], "Ignore": [load(FOLDER / "pod.py").RETRY_STATUS]}


SMALL = (
    "--device cpu --precision fp32 --seq-length 64 --global-batch-size 4 --batch-size 2 "
    "--eval-samples 4 --checkpoint-every 1000 --eval-every 1000 --log-every 5"
).split()


class Pods:
    """Two pods on this machine: their command, variables and rules are those of the files."""

    def __init__(self, folder, *script, before=(), kubeflow=False):
        file = "trainjob.yaml" if kubeflow else "job.yaml"
        self.folder, self.kubeflow = folder, kubeflow
        self.container, self.port = container_of(file), str(free_port())
        # The arguments of the script, after its folder, are the user's.
        words = self.container["command"]
        first = words.index(TRAIN)
        words[first:] = [*before, *words[first : first + 3], *SMALL, *script]
        self.rules = job_of(file)["podFailurePolicy"]["rules"]
        self.run_dir = folder / "outputs/train-llm"
        self.running, self.started = {}, 0

    def here(self, text):
        """Return a word of the manifest as it is on this machine."""
        text = text.replace("train-llm-0.train-llm", "127.0.0.1").replace("29500", self.port)
        text = text.replace("/shared/code", str(ROOT)).replace("/shared", str(self.folder))
        return text.replace("--nproc-per-node=8", "--nproc-per-node=1")

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
