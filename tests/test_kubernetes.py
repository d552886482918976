"""Test that job.yaml and trainjob.yaml are valid and agree, and that pods stop and continue.

The tests need no cluster: they react to the end of a pod as Kubernetes does.
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
    """Return the Kubernetes objects in a file, with the replacements (old, new) in `changes`."""
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


# 1.31 is the first version of Kubernetes that enables all fields of our YAML files by default.
@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
def test_files_satisfy_the_schemas_of_kubernetes(version):
    """In trainjob.yaml, check only the inner job, because the schemas lack objects of Kubeflow."""
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


@pytest.fixture
def start(tmp_path):
    """Return a function that runs the command of pod 0 or 1 here, as the kubelet would."""
    changes = [("train-llm-0.train-llm", "127.0.0.1"), ("29500", free_port())]
    changes += [("per-node=8", "per-node=1"), ("/shared/code", ROOT), ("/shared", tmp_path)]
    _, container = job_and_container("job.yaml", changes)
    command, started = container["command"], []
    # Keep the script's first two arguments, which choose the folder of the run, and replace all
    # later arguments.
    command[command.index("03-job-launchers/train_llm.py") + 3 :] = [*SHORT, "--num-steps", "60"]
    env = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    env["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"

    def start(index):
        words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in command]
        with open(tmp_path / "log", "a") as log:
            streams = {"stdout": log, "stderr": log}
            started.append(subprocess.Popen(words, cwd=ROOT, env=os.environ | env, **streams))
        return started[-1]

    yield start
    for process in started:
        process.kill()
    # Print the log, because pytest shows the printed text if the test has failed.
    print((tmp_path / "log").read_text())


def action_at(status):
    """Return the action that the job's rules choose when a pod ends with the exit status `status`.

    Return Count, the default of Kubernetes, if no rule matches.
    """
    job, _ = job_and_container("job.yaml")
    for rule in job["podFailurePolicy"]["rules"]:
        if status in rule.get("onExitCodes", {}).get("values", []):
            return rule["action"]
    return "Count"


@pytest.mark.slow
@pytest.mark.parametrize("drained", [0, exhaustive(1)])
def test_drained_pod_and_its_peer_are_replaced_and_continue(start, tmp_path, drained):
    """Start each stopped pod again at once, which is earlier than Kubernetes would start it."""
    pods, run_dir = [start(0), start(1)], tmp_path / "outputs/train-llm"
    wait_until(lambda: last_logged_step(run_dir) >= 5, 120, "step 5")
    pods[drained].send_signal(signal.SIGTERM)
    # Kubernetes replaces a drained pod because of the condition DisruptionTarget, whatever the exit
    # status is, so do not call action_at() for the drained pod.
    assert pods[drained].wait(timeout=120) == 128 + signal.SIGTERM
    pods[drained] = start(drained)
    assert action_at(pods[1 - drained].wait(timeout=120)) == "Ignore"
    pods[1 - drained] = start(1 - drained)
    assert [pod.wait(timeout=120) for pod in pods] == [0, 0]
    assert "continuing from" in (tmp_path / "log").read_text()
    one_node = curves_of(tmp_path, {2: {"one-node": ("03", ["--num-steps", 60])}})["one-node"]
    assert difference(metrics(run_dir), one_node) < 1e-5
    assert (run_dir / "model/config.json").exists()
