"""job.yaml and trainjob.yaml are valid and agree, and their pods train, stop and continue.

There is no cluster: `Pods` does what Kubernetes does with a pod that has ended.
"""

import os
import signal
import subprocess
import sys

import kubernetes_validate
import psutil
import pytest
import yaml

from cluster.cluster import wait_until
from conftest import ROOT, SHORT, curves_of, difference, free_port, metrics
from contenders import load

FOLDER = ROOT / "03-job-launchers/kubernetes"
# 1.31 is the first version that has all fields.
VERSIONS = ["1.31", kubernetes_validate.latest_version()]


def objects(file, changes=()):
    """Return the objects in a file, after these replacements in its text."""
    text = (FOLDER / file).read_text()
    for old, new in changes:
        text = text.replace(old, str(new))
    return list(yaml.safe_load_all(text))


def job_and_container(file, changes=()):
    """Return the specification of a file's job, and the only container of its pods."""
    first, last = objects(file, changes)
    if file == "trainjob.yaml":
        [node] = first["spec"]["template"]["spec"]["replicatedJobs"]
        last = node["template"]
    [container] = last["spec"]["template"]["spec"]["containers"]
    return last["spec"], container


@pytest.mark.parametrize("version", VERSIONS)
def test_files_satisfy_the_schemas_of_kubernetes(version):
    """The schemas have no TrainJob, so check the job in it."""
    service, job = objects("job.yaml")
    inner_job = job | {"spec": job_and_container("trainjob.yaml")[0]}
    for item in [service, job, inner_job, *objects("volume.yaml")]:
        kubernetes_validate.validate(item, version, strict=True)


def test_names_and_sizes_agree_within_each_file():
    (service, job), (_, trainjob) = objects("job.yaml"), objects("trainjob.yaml")
    name, (spec, container) = job["metadata"]["name"], job_and_container("job.yaml")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"] == name
    assert spec["completions"] == spec["parallelism"] == 2
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    words = {"--nnodes=2", f"--nproc-per-node={gpus}", f"--master-addr={name}-0.{name}"}
    assert words | {f"--experiment-name={name}"} <= set(container["command"])
    assert trainjob["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": int(gpus)}


@pytest.mark.parametrize("file", ["job.yaml", "trainjob.yaml"])
def test_stopped_pod_has_time_to_save(file):
    job, container = job_and_container(file)
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    grace = job["template"]["spec"]["terminationGracePeriodSeconds"]
    assert int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == grace - 30 >= 60


def test_retry_status_of_pod_py_is_not_counted():
    job, _ = job_and_container("job.yaml")
    values = {
        rule["action"]: rule["onExitCodes"]["values"]
        for rule in job["podFailurePolicy"]["rules"][1:]
    }
    assert values == {"FailJob": [2], "Ignore": [load(FOLDER / "pod.py").RETRY_STATUS]}


def test_kubeflow_runs_the_pods_of_the_plain_job():
    """No schema has Kubeflow's own fields, so compare them with its Go types, as we know them."""
    runtime, trainjob = objects("trainjob.yaml")
    api = "trainer.kubeflow.org"
    assert runtime["apiVersion"] == trainjob["apiVersion"] == f"{api}/v1alpha1"
    reference = {"apiGroup": api, "kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    assert trainjob["spec"]["runtimeRef"] == reference
    assert runtime["spec"].keys() == {"mlPolicy", "template"}
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2, "torch": {}}
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = {f"{api}/trainjob-ancestor-step": "trainer"}
    assert node["name"] == "node" and node["template"]["metadata"] == {"labels": labels}
    # Kubeflow sets the rest: the number of pods, their names, and torchrun's arguments.
    plain, container = job_and_container("job.yaml")
    del plain["completions"], plain["parallelism"], plain["template"]["spec"]["subdomain"]
    own = ("--nnodes", "--nproc-per-node", "--node-rank", "--master-")
    container["command"] = [word for word in container["command"] if not word.startswith(own)]
    assert plain == node["template"]["spec"]


class Pods:
    """Two pods on this machine; their command, variables and rules are those of a file."""

    def __init__(self, folder, file):
        self.folder, self.file, self.log = folder, file, folder / "pods.log"
        self.run_dir, self.processes = folder / "outputs/train-llm", {}
        self.port = str(free_port())
        changes = [("train-llm-0.train-llm", "127.0.0.1"), ("29500", self.port)]
        changes += [("per-node=8", "per-node=1"), ("/shared/code", ROOT), ("/shared", folder)]
        self.job, self.container = job_and_container(file, changes)

    def train(self, *arguments):
        """Start both pods, with the arguments of a small model."""
        words = self.container["command"]
        # The arguments after the two for the folder are the user's.
        first = words.index("03-job-launchers/train_llm.py")
        words[first + 3 :] = [*SHORT, *arguments]
        for index in (0, 1):
            self.start(index)

    def start(self, index):
        """Start a pod as the kubelet would."""
        env = {name["name"]: name["value"] for name in self.container["env"] if "value" in name}
        env["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        if self.file == "trainjob.yaml":
            # Kubeflow sets these variables.
            env |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(index)}
            env |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": self.port}
        words = self.container["command"]
        words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in words]
        with open(self.log, "a") as log:
            streams = {"stdout": log, "stderr": log}
            pod = subprocess.Popen(words, cwd=ROOT, env=os.environ | env, **streams)
        self.processes[index] = pod

    def wait_for(self, text):
        wait_until(lambda: text in self.log.read_text(), 120, text)

    def end_of(self, index):
        """Wait until a pod has ended; return the job's reaction if nobody has disrupted the pod."""
        status = self.processes[index].wait(timeout=120)
        for rule in self.job["podFailurePolicy"]["rules"]:
            if status in rule.get("onExitCodes", {}).get("values", []):
                return rule["action"]
        return "Count" if status else "Succeeded"


@pytest.fixture
def pods(request, tmp_path):
    pods = Pods(tmp_path, getattr(request, "param", "job.yaml"))
    yield pods
    for process in pods.processes.values():
        process.kill()
        process.wait(timeout=20)
    # pytest shows this if the test has failed.
    print(pods.log.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "pods",
    ["job.yaml", pytest.param("trainjob.yaml", marks=pytest.mark.exhaustive)],
    indirect=True,
)
def test_pods_have_the_losses_of_two_ranks_on_one_node(pods):
    pods.train()
    assert [pods.end_of(0), pods.end_of(1)] == ["Succeeded", "Succeeded"]
    one_node = curves_of(pods.folder, {2: {"one-node": ("03", [])}})["one-node"]
    assert difference(metrics(pods.run_dir), one_node) < 1e-5
    assert (pods.run_dir / "model/config.json").exists()


@pytest.mark.slow
def test_bad_argument_fails_the_job(pods):
    pods.train("--lr", "nan")
    assert pods.end_of(0) == "FailJob"
    assert pods.end_of(1) in ("FailJob", "Count")
    assert "--lr nan: must be at least 0" in pods.log.read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("drained", [0, 1])
def test_drained_pod_is_replaced_and_so_is_the_other(pods, drained):
    """Start each pod again the moment it has ended, which is sooner than Kubernetes does."""
    pods.train("--num-steps", "60")
    pods.wait_for("step 5 ")
    pods.processes[drained].send_signal(signal.SIGTERM)
    # Its DisruptionTarget replaces a drained pod, whatever its status is.
    assert pods.processes[drained].wait(timeout=120) == 128 + signal.SIGTERM
    pods.start(drained)
    assert pods.end_of(1 - drained) == "Ignore"
    pods.start(1 - drained)
    assert [pods.end_of(0), pods.end_of(1)] == ["Succeeded", "Succeeded"]
    assert "continuing from" in pods.log.read_text()
    assert 60 in metrics(pods.run_dir)


@pytest.mark.exhaustive
def test_killed_rank_is_counted_as_a_failure_of_both_pods(pods):
    pods.train("--num-steps", "1000")
    pods.wait_for("step 5 ")
    [rank] = psutil.Process(pods.processes[1].pid).children()
    rank.kill()
    assert [pods.end_of(0), pods.end_of(1)] == ["Count", "Count"]
    assert pods.processes[1].returncode == 128 + signal.SIGKILL
