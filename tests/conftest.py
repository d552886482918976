"""What the tests share: running scripts on several ranks, reading their metrics, tiny models."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chapters import ROOT, chapters
from cluster.cluster import Cluster, missing_requirement
from fork_server import Server, settings
from readme import commands

SCRIPTS = chapters()
# Chapters in a framework that may not be installed: test_frameworks_*.py test them.
FRAMEWORKS = {name for name, path in SCRIPTS.items() if "alternative-frameworks" in path.parts}
SERVER = Server()
# A run of seconds: 20 steps, every one of them logged.
SHORT = (
    "--device cpu --precision fp32 --seq-length 64 --global-batch-size 8 --batch-size 8 "
    "--num-steps 20 --log-every 1 --eval-every 10 --eval-samples 10 --checkpoint-every 10"
).split()


def pytest_configure(config):
    # what a shell starts with & ignores Ctrl-C, and so would all that the tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "slow: takes minutes, is random, or needs root")
    config.addinivalue_line("markers", "exhaustive: what a change of a chapter hardly breaks")
    config.addinivalue_line("markers", "alone: compares speeds, so nothing may run beside it")
    config.addinivalue_line("markers", "cluster: runs on several hosts, all made on this machine")


# ---- tests side by side ----------------------------------------------------------------------

# What takes longest begins first, so that all workers end at about the same time.
LONGEST = ["machine", "test_resume", "test_fsdp", "test_large", "test_sharded", "test_launchers"]
LONGEST += ["test_pipeline", "test_frameworks_deepspeed", "test_frameworks_hf", "test_tensor"]
LONGEST += ["test_context", "test_kill", "kills", "test_diagnosis", "test_readme"]
# Their slow tests are of tools, which no change of a chapter reaches; `make test-all` runs them.
TOOLS = {"test_benchmarks", "test_cluster", "test_diagnosis", "test_gpu_check", "test_planner"}
TOOLS |= {"test_preflight", "test_scale", "test_watch", "test_whats_wrong", "test_where"}
# So are second ways to start, to stop or to fail under launchers that others start, stop and fail,
# and what measures rather than checks.
SECOND_WAYS = re.compile(
    r"on_cluster.py::test_(one_curve.(pdsh|salloc|MPICH)|variables|environments|by_hand|in_tmux"
    r"|asked|a_lost|no_way|sbatch_of_a_model_split_across_hosts.2"
    r"|fewer_hosts|more_hosts|a_dead_host|a_job_script|(out_of_time|preempted).srun)"
    r"|kubernetes.py::test_(a_drained|a_crash|.*kubeflow)"
    r"|large.py::test_(what_chapter_04|reading)|waiting.py::test_compiled_layers_stay"
)
# no tests there share what they make
INDEPENDENT = {"test_diagnosis", "test_kill", "test_kubernetes", "test_readme"}
MACHINE = re.compile(
    "test_cluster.py|test_on_cluster.py|::test_the_practice_cluster|::test_full_disk"
    "|::TestOnCluster|::test_a_full_disk|::test_a_busy_core|::test_gpus_of_a_slurm_job"
)
KILLS = [f"[{block.name}]" for block in commands() if "kill" in block.text]


def group_of(name):
    """Return the group of a test, whose tests must not run at the same time.

    Those of most files share what a fixture makes. Besides, some look at all mounts of the machine
    or change them, and `pkill` in a README's block looks at all processes.
    """
    file = Path(name.partition("::")[0]).stem
    if MACHINE.search(name):
        return "machine"
    if file == "test_readme" and name.endswith(tuple(KILLS)):
        return "kills"
    return name if file in INDEPENDENT else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each worker of pytest-xdist a group after the other.

    Its own `--dist loadgroup` does nothing: https://github.com/pytest-dev/pytest-xdist/issues/1386
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        _split_scope = staticmethod(group_of)

    config.option.loadscopereorder = False  # by the number of tests, which says little
    return Groups(config, log)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config, items):
    """Put tests that are to run side by side in order; see that their groups are right."""
    for item in items:
        of_tools = item.path.stem in TOOLS or SECOND_WAYS.search(item.nodeid)
        if of_tools and item.get_closest_marker("slow"):
            item.add_marker("exhaustive")
    if not hasattr(config, "workerinput"):
        return
    places = {group: place for place, group in enumerate(LONGEST)}
    for item in items:
        if item.get_closest_marker("cluster") or "small_disk" in item.fixturenames:
            assert group_of(item.nodeid) == "machine", item.nodeid
    last = len(places)
    items.sort(key=lambda item: places.get(group_of(item.nodeid), places.get(item.path.stem, last)))


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory):
    """One thread a process, no hub, no GPU for DeepSpeed, and one data cache for the session."""
    cache = tmp_path_factory.mktemp("cache")
    os.environ.update(
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        DS_ACCELERATOR="cpu",
        HF_HOME=str(cache / "hf"),
        WANDB_DIR=str(cache),
        TORCHINDUCTOR_CACHE_DIR=str(cache / "inductor"),
        TOKENIZERS_PARALLELISM="false",
    )
    SERVER.settings = settings()


def linter(name):
    """Return the path of a linter; skip the test that needs it where nobody has installed it."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        pytest.skip(f"no {name}: pip install -r requirements-lint.txt")
    return path


def free_port():
    """Return a port that nothing listens on, and that the system gives to no connection either."""
    while True:
        port = random.randrange(12_000, 30_000)  # Linux takes those of connections from 32768 on
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def run_jobs(world_size, jobs, folder, timeout=None, shares=1, well=False):
    """Run (chapter or script, arguments) on `world_size` ranks; return each job's results by rank.

    Each rank runs one after the other. With more `shares` than one, so many such groups of ranks
    run at once, and divide the jobs among them. If all must end `well`, the first that does not
    is the last: a rank whose fellow has failed may wait for days.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started = []
    for share in range(shares):
        listed = [
            {"script": str(SCRIPTS.get(name, name)), "args": [*map(str, args)]}
            | {"port": free_port(), "well": well}
            for name, args in jobs[share::shares]
        ]
        if listed:
            (folder / f"jobs{share}.json").write_text(json.dumps(listed))
            command = [ROOT / "tests/support/worker.py", folder, share]
            started += start_ranks(world_size, command, folder, f"-{share}")
    try:
        deadline = time.monotonic() + (timeout or 900 + 60 * len(jobs))
        while any(process.poll() is None for process in started):
            if any(process.poll() for process in started) or time.monotonic() > deadline:
                break  # the others would wait for the one that failed
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
    logs = "\n".join(path.read_text() for path in sorted(folder.glob("rank*.log")))
    assert all(process.returncode == 0 for process in started), logs
    done = [None] * len(jobs)
    for share in range(min(shares, len(jobs))):
        ranks = [folder / f"results{share}-{rank}.json" for rank in range(world_size)]
        by_rank = [json.loads(path.read_text()) for path in ranks]
        done[share::shares] = [list(job) for job in zip(*by_rank, strict=True)]
    return done


def start_ranks(world_size, command, folder, log="", **variables):
    """Start a script and its arguments on `world_size` ranks, as a launcher would."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | variables
    variables |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    started = []
    for rank in map(str, range(world_size)):
        with open(folder / f"rank{rank}{log}.log", "w") as file:
            variables |= {"RANK": rank, "LOCAL_RANK": rank}
            started.append(SERVER.start(command, variables, file))
    return started


def run_well(world_size, jobs, *args, **options):
    """Run jobs as `run_jobs` does; fail if any rank of any did not end well."""
    return run_jobs(world_size, jobs, *args, well=True, **options)


def curves_of(root, runs):
    """Run (chapter, arguments) by name, for each world size; return all metrics by name."""
    for world_size, by_name in runs.items():
        jobs = [
            (chapter, [*SHORT, *args, "--save-dir", root, "-e", name])
            for name, (chapter, args) in by_name.items()
        ]
        run_well(world_size, jobs, root / f"ranks{world_size}", shares=2 if world_size == 1 else 1)
    return {folder.parent.name: metrics(folder.parent) for folder in root.glob("*/metrics.jsonl")}


def tried(runs, quick):
    """Return runs as parameters; those not in `quick` are exhaustive."""
    return [pytest.param(run, marks=[pytest.mark.exhaustive] * (run not in quick)) for run in runs]


def wanted(request, runs):
    """Return the runs by world size without those, named CHAPTER@..., that no test is to take."""
    names = {
        item.callspec.params.get("run")
        for item in request.session.items
        if hasattr(item, "callspec")
    }
    return {
        world_size: {name: job for name, job in jobs.items() if "@" not in name or name in names}
        for world_size, jobs in runs.items()
    }


def torchrun(chapter, *args, launcher=(), **options):
    """Start a chapter under torchrun on two ranks; return the process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *launcher]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen([*command, str(SCRIPTS[chapter]), *map(str, args)], **options)


def printed(*command, check=False, **options):
    """Run a script of Python's, or a command, to its end; return it with what it printed."""
    command = [sys.executable] * str(command[0]).endswith(".py") + list(map(str, command))
    options = {"capture_output": True, "text": True, "timeout": 300} | options
    return subprocess.run(command, check=check, **options)


def prepared(chapter, *words):
    """Return the arguments of a command line, with the model, optimizer and samples they make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train_llm.py", *map(str, words)])
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            patch.setenv(name, value)
        args = chapter.parse_args()
    tokenizer, config = chapter.build_tokenizer_and_config(args)
    model = chapter.build_model(args, config)
    optimizer = chapter.build_optimizer(args, model)
    return args, model, optimizer, *chapter.build_data(args, tokenizer)


def refused(capsys, work, *args):
    """Return what is said when arguments are refused, with exit status 2."""
    with pytest.raises(SystemExit) as stop:
        work(*args)
    assert stop.value.code == 2
    return capsys.readouterr().err


def metrics(run_dir):
    """Return a run's metrics: a dictionary from step to row, the last of each step."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in sorted(rows, key=lambda row: row["step"])}


def logged(run_dir, step):
    """Return whether a run has logged a step."""
    path = run_dir / "metrics.jsonl"
    return path.exists() and f'"step": {step},' in path.read_text()


def difference(one, other, after=0, names=("loss", "grad_norm", "val_loss"), relative=False):
    """Return the largest difference between two runs' metrics in the steps after `after`."""
    assert one.keys() == other.keys()
    worst = 0.0
    for step in (step for step in one if step > after or step == after == 0):
        logged = [name for name in names if name in one[step]]
        assert logged == [name for name in names if name in other[step]]
        for name in logged:
            scale = abs(one[step][name]) if relative else 1.0
            worst = max(worst, abs(one[step][name] - other[step][name]) / scale)
    return worst


def on_one_curve(one, other):
    """Return whether metrics agree within 1e-5: norms relatively, as a rare sample's is large."""
    losses = difference(one, other, names=["loss", "val_loss"])
    return losses < 1e-5 and difference(one, other, names=["grad_norm"], relative=True) < 1e-5


@pytest.fixture
def cluster():
    """Two hosts with Slurm, which are up in a second, so that each test has its own."""
    if reason := missing_requirement():
        pytest.skip(reason)
    with Cluster(hosts=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def load():
    """Import a chapter's script as a module, for tests of its functions."""
    import contenders

    return lambda chapter: contenders.load(SCRIPTS[chapter])


@pytest.fixture
def alone(tmp_path):
    """A process group of this process."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():  # by the planner, for ranks that are not there
        dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)  # which a test may have changed


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 30 MiB, on which two of the tiny model's checkpoints fit and three do not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = printed(*"mount -t tmpfs -o size=30m tmpfs".split(), disk)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fast_byte_tokenizer():
    """Return a tokenizer of bytes, of the kind that Mistral's and Mixtral's folders must have."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders with the configuration and byte tokenizer of tiny models of several families."""
    import transformers

    size = {"vocab_size": 384, "bos_token_id": None, "eos_token_id": 1}
    gpt2 = size | {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
    common = size | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    common |= {"intermediate_size": 64, "max_position_embeddings": 128, "num_key_value_heads": 1}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    configs = {
        "gpt2": transformers.GPT2Config(**gpt2, **still),
        "gpt2-dropout": transformers.GPT2Config(**gpt2),
        "qwen3": transformers.Qwen3Config(**common, head_dim=16, tie_word_embeddings=True),
        "mistral": transformers.MistralConfig(**common, head_dim=16),
        "mixtral": transformers.MixtralConfig(**common, num_local_experts=4),
        "gpt_neox": transformers.GPTNeoXConfig(**common),
        "gemma3": transformers.Gemma3TextConfig(**common, head_dim=16),
        "gemma3-window": transformers.Gemma3TextConfig(**common, head_dim=16, sliding_window=32),
    }
    root = tmp_path_factory.mktemp("models")
    for name, config in configs.items():
        config.save_pretrained(root / name)
        fast = name in ("mistral", "mixtral")
        tokenizer = fast_byte_tokenizer() if fast else transformers.ByT5Tokenizer()
        tokenizer.save_pretrained(root / name)
    return root
