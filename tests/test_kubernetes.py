"""Test that job.yaml and trainjob.yaml are valid and agree, and that pods stop and continue.

The tests need no cluster: `Pods` reacts to the end of a pod as Kubernetes does.
"""

import os
import signal
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from cluster.cluster import wait_until
from conftest import ROOT, SHORT, curves_of, difference, free_port, metrics
from marks import exhaustive
from runs import last_logged_step

FOLDER = ROOT / "03-job-launchers/kubernetes"


def objects(file, changes=()):
    """Return the objects in a file, after replacing the texts in `changes`."""
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


# 1.31 is the first version of Kubernetes that has all fields of the files.
@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
def test_files_satisfy_the_schemas_of_kubernetes(version):
    """Check the job inside the TrainJob, because the schemas have no TrainJob."""
    service, job = objects("job.yaml")
    inner_job = job | {"spec": job_and_container("trainjob.yaml")[0]}
    for item in [service, job, inner_job, *objects("volume.yaml")]:
        kubernetes_validate.validate(item, version, strict=True)


def test_service_gives_host_names_to_the_pods_of_the_job():
    service, job = objects("job.yaml")
    name, template = job["metadata"]["name"], job["spec"]["template"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert template["spec"]["subdomain"] == service["metadata"]["name"] == name


def test_kubeflow_runs_the_pods_of_the_plain_job():
    (plain, container), (kubeflow, _) = map(job_and_container, ["job.yaml", "trainjob.yaml"])
    # Drop the values that Kubeflow sets: the number and names of pods, and torchrun's arguments.
    del plain["completions"], plain["parallelism"], plain["template"]["spec"]["subdomain"]
    own = ("--nnodes", "--nproc-per-node", "--node-rank", "--master-")
    container["command"] = [word for word in container["command"] if not word.startswith(own)]
    assert plain == kubeflow


class Pods:
    """Run two pods on this machine, with the command, variables and rules in job.yaml."""

    def __init__(self, folder):
        self.folder, self.log = folder, folder / "pods.log"
        self.run_dir, self.processes = folder / "outputs/train-llm", {}
        changes = [("train-llm-0.train-llm", "127.0.0.1"), ("29500", free_port())]
        changes += [("per-node=8", "per-node=1"), ("/shared/code", ROOT), ("/shared", folder)]
        self.job, self.container = job_and_container("job.yaml", changes)

    def train(self, *arguments):
        """Start both pods, with the arguments of a small model."""
        words = self.container["command"]
        # Keep the script's first two arguments, which choose the folder, and replace all later
        # arguments.
        first = words.index("03-job-launchers/train_llm.py")
        words[first + 3 :] = [*SHORT, *arguments]
        for index in (0, 1):
            self.start(index)

    def start(self, index):
        """Start a pod's command with the pod's variables, as the kubelet would."""
        env = {name["name"]: name["value"] for name in self.container["env"] if "value" in name}
        env["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        words = self.container["command"]
        words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in words]
        with open(self.log, "a") as log:
            streams = {"stdout": log, "stderr": log}
            pod = subprocess.Popen(words, cwd=ROOT, env=os.environ | env, **streams)
        self.processes[index] = pod

    def end_of(self, index):
        """Wait until a pod has ended; return the action that the job's rules choose."""
        status = self.processes[index].wait(timeout=120)
        for rule in self.job["podFailurePolicy"]["rules"]:
            if status in rule.get("onExitCodes", {}).get("values", []):
                return rule["action"]
        return "Count" if status else "Succeeded"


@pytest.fixture
def pods(tmp_path):
    pods = Pods(tmp_path)
    yield pods
    for process in pods.processes.values():
        process.kill()
    # Print the log, which pytest shows if the test has failed.
    print(pods.log.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("drained", [0, exhaustive(1)])
def test_drained_pod_and_its_peer_are_replaced_and_continue(pods, drained):
    """Start each pod again as soon as it has ended, earlier than Kubernetes would start it."""
    pods.train("--num-steps", "60")
    wait_until(lambda: last_logged_step(pods.run_dir) >= 5, 120, "step 5")
    pods.processes[drained].send_signal(signal.SIGTERM)
    # Kubernetes replaces a drained pod because of the condition DisruptionTarget, whatever the exit
    # status is, so do not read the action of the job's rules here.
    assert pods.processes[drained].wait(timeout=120) == 128 + signal.SIGTERM
    pods.start(drained)
    assert pods.end_of(1 - drained) == "Ignore"
    pods.start(1 - drained)
    assert [pods.end_of(0), pods.end_of(1)] == ["Succeeded", "Succeeded"]
    assert "continuing from" in pods.log.read_text()
    one_node = curves_of(pods.folder, {2: {"one-node": ("03", ["--num-steps", 60])}})["one-node"]
    assert difference(metrics(pods.run_dir), one_node) < 1e-5
    assert (pods.run_dir / "model/config.json").exists()
