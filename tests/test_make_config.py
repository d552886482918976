"""What make_config.py writes: batches that multiply, commands that bash reads as they are meant."""

import json
import re
from itertools import product

import pytest

import contenders
from conftest import ROOT, linter, run_command, user_error

SCRIPT = ROOT / "alternative-frameworks/make_config.py"
TRAINING = ROOT / "03-job-launchers/train_llm.py"
STRANGE = ["--dataset-name", "my $file's.txt", "--lr", "1e-3"]
# What stands in for a launcher prints a word per line, and the time that it is given.
STUBS = """
torchrun() { printf '%s\\n' torchrun "$@"; }
accelerate() { printf '%s\\n' accelerate "$@"; }
timeout() { printf '%s\\n' "$2"; shift 2; "$@"; }
"""


@pytest.fixture(scope="module")
def maker():
    """The script as a module."""
    return contenders.load(str(SCRIPT))


def made(maker, line, *more):
    """Return what a command line makes."""
    args = maker.parse_args([*line.split(), *more])
    return args.write(args)


def test_batches_multiply_as_the_chapters_derive_them(maker, load, monkeypatch):
    for ranks, batch, most in product((1, 2, 3, 4, 8), (8, 24, 32, 96), (1, 3, 8, 100)):
        line = f"deepspeed --ranks {ranks} --global-batch-size {batch} --batch-size {most}"
        if batch % ranks:
            continue
        config = json.loads(made(maker, line))
        micro_batch = config["train_micro_batch_size_per_gpu"]
        accumulation = config["gradient_accumulation_steps"]
        assert micro_batch * accumulation * ranks == config["train_batch_size"] == batch
        words = ["--global-batch-size", batch // ranks, "--batch-size", most]
        args = arguments(load("01"), monkeypatch, *words)
        assert (args.micro_batch_size, args.accumulation) == (micro_batch, accumulation)


def arguments(chapter, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["train_llm.py", *map(str, words)])
    return chapter.parse_args()


REFUSED = {
    "deepspeed --ranks 3": "--global-batch-size 32 does not divide by 3 ranks",
    "deepspeed --stage 0": "take 1, or 02-ddp",
    "deepspeed --stage 2 --offload-params cpu": "stage 2 leaves all weights on each GPU",
    "deepspeed --precision fp32 --weights bf16": "the forward pass would be in bf16 too",
    "deepspeed --batch-size 0": "--batch-size 0: must be at least 1",
    "deepspeed --max-grad-norm nan": "--max-grad-norm nan: must be at least 0",
    "deepspeed --stage 4": "invalid choice: 4",
    "slurm --time-limit 48:00 -- {script}": "write hours:minutes:seconds, such as 48:00:00",
    "slurm --time-limit 0:01:00 -- {script}": "--save-seconds 100 leaves no time",
    "slurm -- nothing.py": "nothing.py: there is no such script",
    "launch --launcher deepspeed --time-limit 1:00:00 -- {script}": "whose save takes over 30 s",
    "launch --nodes 4 --hosts a b -- {script}": "--nodes 4, but --hosts has 2",
    "launch --gpus-per-node 1 --launcher accelerate -- {script}": "a single rank",
    "": "the following arguments are required",
}


@pytest.mark.parametrize("line", REFUSED)
def test_one_line_says_why_not(maker, capsys, line):
    said = user_error(capsys, made, maker, line.format(script=TRAINING))
    assert said.count("\n") == 1 and said.startswith("make_config.py: error: ")
    assert REFUSED[line] in said


@pytest.mark.parametrize(
    "line",
    [
        "launch",
        "launch --nodes 2 --time-limit 1-00:00:00 --cpus-per-node 16",
        "launch --hosts a b --launcher accelerate",
        "launch --nodes 2 --launcher deepspeed",
        "slurm --nodes 4 --account me --partition gpu --qos high --cpus-per-node 96",
    ],
)
def test_shellcheck_has_nothing_to_say(maker, tmp_path, line):
    (tmp_path / "made.sh").write_text(made(maker, line, "--", str(TRAINING), "--num-steps", "5"))
    done = run_command(linter("shellcheck"), "--shell=bash", tmp_path / "made.sh")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_arguments_reach_the_script_as_they_were_typed(maker, launcher):
    line = f"launch --hosts a b --gpus-per-node 4 --cpus-per-node 10 --launcher {launcher}"
    text = made(maker, f"{line} --time-limit 1-00:10:00", "--", str(TRAINING), *STRANGE)
    said = run_command("bash", "-euc", STUBS + text, check=True).stdout.splitlines()
    assert said[-len(STRANGE) :] == STRANGE
    assert said[0] == str(24 * 3600 + 600 - 120)  # 100 s to save, and 20 s to end
    if launcher == "torchrun":
        assert text.startswith("# on a, b\nOMP_NUM_THREADS=2 ") and text.count("torchrun") == 1
    else:
        ranks = [(said[n + 1], host) for n, word in enumerate(said) if word == "--machine_rank"
                 for host in [re.findall("# on (.)", text)[int(said[n + 1])]]]  # fmt: skip
        assert ranks == [("0", "a"), ("1", "b")] and "--num_processes 8 " in text
        assert text.count("--mixed_precision bf16 ") == 2
        text = made(maker, line, "--", str(TRAINING), "--precision", "fp32")
        assert text.count("--mixed_precision no ") == 2


def test_a_job_script_has_the_options_of_the_one_that_it_calls(maker):
    line = "slurm --nodes 4 --cpus-per-node 96 --save-seconds 300 --time-limit 48:00:00"
    text = made(maker, line, "--", str(TRAINING), *STRANGE)
    options = re.findall("^#SBATCH --(.*)", text, re.M)
    assert options[:4] == ["nodes=4", "gpus-per-node=8", "cpus-per-task=96", "time=48:00:00"]
    ours = re.findall("^#SBATCH --(.*)", maker.SLURM.read_text(), re.M)
    assert "signal=B:USR1@120" in ours and "signal=B:USR1@320" in options
    assert set(ours) - set(options) == {"signal=B:USR1@120"}
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300\n" in text


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_command_for_one_machine_runs(tmp_path):
    """As bash reads it, with torchrun, in the folder of the repository."""
    words = ["--", TRAINING, "--num-steps", 2, "--seq-length", 32, "--eval-samples", 4]
    words += ["--device", "cpu", "--precision", "fp32", "--save-dir", tmp_path]
    line = ["launch", "--gpus-per-node", 2, "--time-limit", "0:10:00"]
    run_command(SCRIPT, *line, "--output", tmp_path / "run.sh", *words, cwd=ROOT, check=True)
    path = f"PATH={ROOT / '.venv/bin'}:$PATH; . {tmp_path / 'run.sh'}"
    done = run_command("bash", "-euc", path, cwd=ROOT)
    assert done.returncode == 0 and "finished: " in done.stdout, done.stderr
