"""Share helpers and fixtures: run scripts on several ranks, read metrics, build tiny models."""

import contextlib
import fcntl
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics
from unittest import mock

import pytest

from chapters import ROOT, chapters
from cluster.cluster import Cluster, missing_requirement
from fork_server import Server, current_environment
from plot import rows_of

SCRIPTS = chapters()
# Only test_frameworks.py runs these chapters, because their frameworks may not be installed.
FRAMEWORKS = {name for name, path in SCRIPTS.items() if "alternative-frameworks" in path.parts}
SERVER = Server()
METRICS = ("loss", "grad_norm", "val_loss")
# With these flags, a run takes a few seconds and logs each of its 20 steps.
SHORT = (
    "--device cpu --precision fp32 --seq-length 64 --global-batch-size 8 --batch-size 8 "
    "--num-steps 20 --log-every 1 --eval-every 10 --eval-samples 10 --checkpoint-every 10"
).split()
# Of the models that save_models() saves, these models are mixtures of experts.
MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v3"]
# These flags let a chapter split a model or a sequence over two ranks.
SPLIT = {
    "06": ["--tensor-parallel-size", 2],
    "07": ["--pipeline-parallel-size", 2, "--batch-size", 4],
    "08": ["--context-parallel-size", 2],
    "09": ["--expert-parallel-size", 2, "-m", ROOT / "09-expert-parallel/tiny-mixture"],
}


def pytest_addoption(parser):
    parser.addoption("--record", action="store_true", help="publish the measured results")


def pytest_configure():
    # If a shell script starts pytest with &, pytest ignores SIGINT, which Ctrl-C sends, and its
    # children inherit this. The tests send SIGINT to children, so stop ignoring the signal here,
    # before any child starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Set these variables now, because libraries read them when a test module imports the libraries.
    # Each process gets one thread, libraries download nothing from the hub, and DeepSpeed uses the
    # CPU.
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", DS_ACCELERATOR="cpu")


# ---- tests side by side ----------------------------------------------------------------------

# The tests of these files take longest. They start first, so that all workers finish at about the
# same time.
LONGEST = """
    test_on_cluster test_dry_run test_layouts test_resume test_launchers test_frameworks
    test_published_files test_kill test_faults test_readme
""".split()
# The tests in these files share no slow fixture, so any worker may run any of these tests.
INDEPENDENT = {"test_faults", "test_kill", "test_kubernetes", "test_readme"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Return a scheduler that lets one worker of pytest-xdist run all tests of a group.

    In the files of INDEPENDENT, each test is a group of its own. In each of the other files, all
    tests form one group, because these tests share fixtures. xdist's own option --dist=loadgroup
    does not work: https://github.com/pytest-dev/pytest-xdist/issues/1386
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, name):
            file = Path(name.partition("::")[0]).stem
            return name if file in INDEPENDENT else file

    # Keep the order of LONGEST; by default, xdist sorts the groups by their number of tests.
    config.option.loadscopereorder = False
    return Groups(config, log)


# Run this hook before pytest applies -m, because the hook adds markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark each slow test of a tool as exhaustive; run the tests of the files in LONGEST first."""
    for item in items:
        if item.get_closest_marker("tool") and item.get_closest_marker("slow"):
            item.add_marker("exhaustive")
    positions = {file: position for position, file in enumerate(LONGEST)}
    items.sort(key=lambda item: positions.get(item.path.stem, len(positions)))


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory):
    """Set environment variables for the tests; after all tests, check that no variable has changed.

    The check leaves out the variables in IGNORED_VARIABLES.
    """
    cache = tmp_path_factory.mktemp("cache")
    os.environ.update(
        HF_HOME=str(cache / "hf"),
        WANDB_DIR=str(cache),
        TORCHINDUCTOR_CACHE_DIR=str(cache / "inductor"),
        TOKENIZERS_PARALLELISM="false",
    )
    SERVER.environment = current_environment()
    yield
    # Fail if a library has changed a variable, because each later script would then need a new
    # process, which takes seconds to start.
    problem = "environment: changed by a library; undo the change, or add it to IGNORED_VARIABLES"
    assert current_environment() == SERVER.environment, problem


def linter(name):
    """Return the path of the linter `name`; skip the test if the linter is not installed."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        pytest.skip(f"{name}: not installed; run pip install -r requirements-lint.txt")
    return path


def free_port():
    """Return a free TCP port below 30000.

    By default, Linux uses only ports from 32768 on for outgoing connections.
    """
    while True:
        port = random.randrange(12_000, 30_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def run_jobs(world_size, jobs, folder, timeout=1200, shares=1, must_succeed=False):
    """Run each job, which is a pair (chapter or script, arguments), on `world_size` ranks.

    Return a list for each job; the list has one dictionary per rank, with the keys `status`,
    `stdout` and `stderr`.

    At most `shares` jobs run at the same time. After `timeout` seconds, kill all ranks of a job.
    With `must_succeed`, a failed rank fails the test. All ranks of its job are then killed at once,
    because they might wait for the failed rank until the timeout. If crashed_in_collective() is
    true for a rank, run its job once more.
    """

    def run(number, may_start_again=True):
        (name, args), job_folder = jobs[number], folder / str(number)
        job_folder.mkdir(parents=True, exist_ok=True)
        command = [SCRIPTS.get(name, name), *args]
        ranks = start_ranks(world_size, command, job_folder, split_output=True)
        deadline = time.monotonic() + timeout
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            if must_succeed and any(rank.poll() for rank in ranks):
                break
            time.sleep(0.02)
        results = []
        for index, rank in enumerate(ranks):
            rank.kill()
            rank.wait()
            out, err = (job_folder / f"rank{index}.{kind}" for kind in ("log", "err"))
            result = {"status": rank.returncode, "stdout": out.read_text()}
            results.append(result | {"stderr": err.read_text()})
        if may_start_again and any(map(crashed_in_collective, results)):
            warnings.warn(
                f"{job_folder}: PyTorch has crashed a rank; the job starts again", stacklevel=1
            )
            return run(number, may_start_again=False)
        if must_succeed and any(result["status"] for result in results):
            output = "".join(result["stdout"] + result["stderr"] for result in results)
            pytest.fail(f"{' '.join(map(str, command))}\n{output}")
        return results

    with ThreadPoolExecutor(shares) as pool:
        return list(pool.map(run, range(len(jobs))))


def crashed_in_collective(result):
    """Return whether a rank has crashed in PyTorch while it waited for a DTensor collective.

    With PyTorch 2.13 and Gloo, a few runs of chapters 06 to 09 have crashed in such a wait, with a
    segmentation fault or a corrupted heap. We do not know the reason. After such a crash,
    run_jobs() starts the ranks again, and they resume the run.
    """
    is_crash = result["status"] in (-signal.SIGSEGV, -signal.SIGABRT)
    return is_crash and "torch/distributed/_functional_collectives.py" in result["stderr"]


def start_ranks(world_size, command, folder, log="", split_output=False, **variables):
    """Start a script with arguments on `world_size` ranks, as a launcher would.

    Return one process per rank. Each rank writes its output to one file in `folder`; with
    `split_output`, each rank writes its stderr to a second file.
    """
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | variables
    variables |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    processes = []
    for rank in map(str, range(world_size)):
        path = folder / f"rank{rank}{log}.log"
        with open(path, "w") as out, open(path.with_suffix(".err"), "w") as err:
            variables |= {"RANK": rank, "LOCAL_RANK": rank}
            processes.append(SERVER.start(command, variables, out, err if split_output else out))
    return processes


def run_or_fail(world_size, jobs, *args, **options):
    """Run jobs with run_jobs(), and return their results.

    Fail the test unless every rank of every job exits with status 0.
    """
    return run_jobs(world_size, jobs, *args, must_succeed=True, **options)


def curves_of(root, runs):
    """Train short runs in the folder `root`; return the metrics of each run by the run's name.

    `runs` maps each world size to a dictionary, which maps the name of each run to a pair (chapter,
    arguments).
    """
    for world_size, jobs_by_name in runs.items():
        jobs = []
        for name, (chapter, args) in jobs_by_name.items():
            jobs.append((chapter, [*SHORT, *args, "--save-dir", root, "-e", name]))
        shares = 2 if world_size == 1 else 1
        run_or_fail(world_size, jobs, root / f"ranks{world_size}", shares=shares)
    return {path.parent.name: metrics(path.parent) for path in root.glob("*/metrics.jsonl")}


def run_command(*command, check=False, **options):
    """Run a Python script or a command; return a CompletedProcess, with the output as text."""
    command = [sys.executable] * str(command[0]).endswith(".py") + list(map(str, command))
    options = {"capture_output": True, "text": True, "timeout": 300} | options
    return subprocess.run(command, check=check, **options)


def parse(chapter, *words, ranks=1):
    """Parse a chapter's command line as rank 0 of `ranks` ranks; return the parsed arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train_llm.py", *map(str, words)])
        values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks}
        values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29400}
        for name, value in values.items():
            patch.setenv(name, str(value))
        return chapter.parse_args()


def prepare_training(chapter, *words):
    """Build the model, the optimizer and the data that a chapter's command line asks for.

    Return the arguments, the model, the optimizer, the training samples and the held-out samples.
    """
    args = parse(chapter, *words)
    tokenizer, config = chapter.build_tokenizer_and_config(args)
    model = chapter.build_model(args, config)
    optimizer = chapter.build_optimizer(args, model)
    return args, model, optimizer, *chapter.build_data(args, tokenizer)


def prepare_tokens(source, folder, model="tiny"):
    """Let prepare.py tokenize the text file `source` for a model; return the folder of tokens."""
    words = ["-m", model, "-o", folder, source]
    run_command(ROOT / "preparing-data/prepare.py", *words, check=True)
    return folder


def change_file(file, old, new, copy=None):
    """Replace the text `old` in a file with `new`; return the path of the changed file.

    Fail unless `old` occurs exactly once. With `copy`, leave the file unchanged, and write the new
    text to the path `copy`.
    """
    text, path = file.read_text(), copy or file
    assert text.count(old) == 1, f"{file}: this text must occur exactly once: {old}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace(old, new))
    return path


def user_error(capsys, function, *args):
    """Call a function that must exit with status 2; return the text that it prints to stderr."""
    with pytest.raises(SystemExit) as stop:
        function(*args)
    assert stop.value.code == 2
    return capsys.readouterr().err


def metrics(run_dir):
    """Return the metrics of a run by step; if a step has several rows, the last row counts.

    Skip incomplete rows, which a run leaves behind if the disk is full or if the run is killed.
    """
    rows = rows_of(run_dir / "metrics.jsonl")
    return {row["step"]: row for row in sorted(rows, key=lambda row: row["step"])}


def difference(curve, other_curve, after=0, names=METRICS, relative=False):
    """Return the largest difference between the metrics of two runs in the steps after `after`.

    Compare only the metrics in `names`. Step 0, which has only a validation loss, counts if `after`
    is 0. With `relative`, divide each difference by the absolute value in `curve`.
    """
    assert curve.keys() == other_curve.keys()
    largest = 0.0
    for step in (step for step in curve if step > after or step == after == 0):
        row, other_row = curve[step], other_curve[step]
        logged_names = [name for name in names if name in row]
        assert logged_names == [name for name in names if name in other_row]
        for name in logged_names:
            scale = abs(row[name]) if relative else 1.0
            largest = max(largest, abs(row[name] - other_row[name]) / scale)
    return largest


def disagreement(curve, other_curve):
    """Return, by metric, the largest difference between two runs; leave out values below 1e-5.

    The difference between two gradient norms is divided by the first run's norm, because rounding
    errors are larger in large gradients.
    """
    by_metric = {
        name: difference(curve, other_curve, names=[name], relative=name == "grad_norm")
        for name in METRICS
    }
    return {name: apart for name, apart in by_metric.items() if not apart < 1e-5}


@pytest.fixture
def machine(tmp_path_factory):
    """Let only one test at a time read or change the mounts and networks of this machine.

    Skip the test if no cluster can start on this machine.
    """
    if reason := missing_requirement():
        pytest.skip(reason)
    # Lock a file in the common parent of the workers' folders, so that all workers see the lock.
    with open(tmp_path_factory.getbasetemp().parent / "machine.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def cluster(machine):
    """Start a new cluster for each test; a start takes about a second."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def browser():
    """Start Chromium without a window for the tests of a module.

    Skip these tests if the machine has neither Chromium nor Chrome.
    """
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no chromium; run CI=true bash tests/cluster/packages.sh")
    with sync_playwright() as playwright:
        # Turn off Chromium's sandbox, because it does not work for root.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def load():
    """Return a function that imports the script of a chapter, or another script, as a module."""
    import harness

    def load(chapter):
        # Undo changes that libraries make to the environment, because run_jobs() can fork only if
        # the environment is unchanged.
        with mock.patch.dict(os.environ):
            return harness.load(SCRIPTS.get(chapter, chapter))

    return load


@pytest.fixture(autouse=True)
def keep_transformers():
    """Restore two functions of transformers after each test, because scripts replace them.

    Other tests need the original functions.
    """
    from transformers import masking_utils as masks
    from transformers.integrations import sdpa_attention as sdpa

    originals = masks.find_packed_sequence_indices, sdpa.use_gqa_in_sdpa
    yield
    masks.find_packed_sequence_indices, sdpa.use_gqa_in_sdpa = originals


@pytest.fixture(scope="session")
def chapter(load):
    """Return the script of chapter 01 as a module."""
    return load("01")


@pytest.fixture
def no_group():
    """Before the test, destroy a process group that the planner may have simulated earlier."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    if dist.is_initialized():
        dist.destroy_process_group()
        # Clear DTensor's cache, because its entries refer to the destroyed process group.
        _clear_sharding_prop_cache()


@pytest.fixture
def one_rank_group(no_group, monkeypatch, tmp_path):
    """Create a process group with this process as the only rank; destroy it after the test."""
    import torch
    import torch.distributed as dist

    monkeypatch.setenv("LOCAL_RANK", "0")
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    # Restore the default, because a test may have changed this setting.
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_disk(machine, tmp_path):
    """Mount a disk of 30 MiB, which has space for two checkpoints of `tiny`, but not for three."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run([*"mount -t tmpfs -o size=30m tmpfs".split(), disk], check=True)
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture(scope="session")
def small_tokens(tmp_path_factory):
    """Return a function that tokenizes a small text for a model, and returns the folder of tokens.

    The text is a part of pydoc's topics, because a tokenizer needs many seconds for all topics.
    """
    root = tmp_path_factory.mktemp("small")
    (root / "small.txt").write_text("\n\n".join(topics.values())[:100_000])

    @functools.cache
    def prepare(model="tiny"):
        return prepare_tokens(root / "small.txt", root / f"{Path(model).name}.tokens", model)

    return prepare


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Save configurations of tiny models of several families; return their parent folder."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 128}
    return save_models(tmp_path_factory.mktemp("models"), sizes, key_value_heads=1)


@pytest.fixture(scope="session")
def layout_models(tmp_path_factory):
    """Save configurations of tiny models, and return their parent folder.

    Each model has four layers and at least four heads for keys and values, so that two or four
    ranks can split the model.
    """
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8}
    sizes |= {"intermediate_size": 128, "max_position_embeddings": 256}
    return save_models(tmp_path_factory.mktemp("layout_models"), sizes, key_value_heads=4)


def save_models(root, sizes, key_value_heads):
    """Save the configuration and a byte tokenizer of each tiny model; return the folder `root`."""
    import transformers

    from families import fast_byte_tokenizer

    ids = {"vocab_size": 384, "bos_token_id": None, "eos_token_id": 1}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    full = ids | sizes
    grouped = full | {"num_key_value_heads": key_value_heads, "head_dim": 16}
    # In models with these settings, each token uses two of eight experts. Qwen2-MoE, GLM-4-MoE and
    # DeepSeek-V3 also have shared experts, but no experts in the first layer.
    eight = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    eight |= {"shared_expert_intermediate_size": 32}
    shared = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    shared |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 16}
    latent |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
    configs = {
        "llama": transformers.LlamaConfig(**grouped),
        # This vocabulary has an odd size, so two or four ranks cannot split it evenly.
        "odd": transformers.LlamaConfig(**grouped | {"vocab_size": 385}),
        "gpt2": transformers.GPT2Config(**full, **no_dropout),
        "gpt2-dropout": transformers.GPT2Config(**full),
        "qwen3": transformers.Qwen3Config(**grouped, tie_word_embeddings=True),
        "mistral": transformers.MistralConfig(**grouped),
        "mixtral": transformers.MixtralConfig(**grouped, num_local_experts=4),
        "qwen2_moe": transformers.Qwen2MoeConfig(**grouped | eight, mlp_only_layers=[0]),
        "qwen3_moe": transformers.Qwen3MoeConfig(**grouped | eight),
        "olmoe": transformers.OlmoeConfig(**full | eight),
        "gpt_oss": transformers.GptOssConfig(**grouped, num_local_experts=8, num_experts_per_tok=2),
        "glm4_moe": transformers.Glm4MoeConfig(**grouped | shared),
        "deepseek_v3": transformers.DeepseekV3Config(**full | shared | latent),
        "gpt_neox": transformers.GPTNeoXConfig(**full),
        "apertus": transformers.ApertusConfig(**full, pad_token_id=0),
        "gemma": transformers.GemmaConfig(**grouped),
        "gemma3": transformers.Gemma3TextConfig(**grouped),
        "gemma3-window": transformers.Gemma3TextConfig(**grouped, sliding_window=32),
        "olmo": transformers.OlmoConfig(**full, num_key_value_heads=key_value_heads),
    }
    for name, config in configs.items():
        config.save_pretrained(root / name)
        needs_fast_tokenizer = name in ("mistral", *MIXTURES)
        tokenizer = fast_byte_tokenizer() if needs_fast_tokenizer else transformers.ByT5Tokenizer()
        tokenizer.save_pretrained(root / name)
    return root
