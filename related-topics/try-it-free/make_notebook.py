"""Write notebook.ipynb from the cells below; to change the notebook, change these cells.

Here:  python related-topics/try-it-free/make_notebook.py

A cell whose first line is `%%bash` or `#service` holds code, and all other cells hold text. The
test runs all code except the cells with the tag `service`, which only a notebook service can run.
"""

from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

# The reader replaces this word with the clone URL, as in the top README.
ADDRESS = "ADDRESS"
CELLS = [
    """# Distributed training on free GPUs

From the clone to chapter 04, on two T4 GPUs (or on one). In the notebook's settings, switch the
internet on and choose the accelerator: on Kaggle *GPU T4 x2*, on Colab *T4 GPU*. The README beside
this notebook says what such a GPU cannot do.

Replace `ADDRESS` by the clone URL of the repository:""",
    f"""#service
import os

if os.path.basename(os.getcwd()) != "distributed-training":  # else this cell has already run
    !git clone {ADDRESS} distributed-training
    %cd distributed-training""",
    """The service's own packages stay as they are: the guide's get an environment of their own.
This takes some minutes.""",
    """#service
!pip install --quiet virtualenv
!virtualenv --quiet /tmp/venv  # not in the folder that the service keeps
!ln -sfn /tmp/venv .venv
!.venv/bin/pip install --quiet -r requirements.txt matplotlib""",
    """What is here? If torch finds no GPU although `nvidia-smi` shows one, the driver is older than
torch's build of CUDA needs. Then install that version of torch into `.venv` once more, built for
the CUDA version that `nvidia-smi` prints: the selector on PyTorch's site says how.""",
    """%%bash
nvidia-smi || true
.venv/bin/python - <<'END'
import torch

print("torch", torch.__version__, "with", torch.cuda.device_count(), "GPUs")
for n in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(n)
    print(f"{gpu.name}: {gpu.total_memory / 2**30:.1f} GiB, capability {gpu.major}.{gpu.minor}")
if torch.cuda.device_count() > 1:
    print("direct access from GPU to GPU:", torch.cuda.can_device_access_peer(0, 1))
END""",
    """All runs take the same arguments. The model, `tiny`, is a small Llama that is built in; the
data comes with Python.""",
    """%%bash
cat > try.args <<'END'
--num-steps 200
--seq-length 512
--global-batch-size 32
--batch-size 16
END""",
    """## Chapter 01: one GPU

`--precision auto` means fp32 here, as a T4 has no units for bf16. After an interruption the same
cell continues from the last checkpoint; when its run is finished, it says so.""",
    """%%bash
.venv/bin/python 01-single-gpu/train_llm.py @try.args -e one""",
    """## Chapter 02: both GPUs

The same arguments give the same losses, so that only `tokens_per_second` should differ.""",
    """%%bash
set -e
.venv/bin/torchrun --standalone --nproc-per-node gpu 02-ddp/train_llm.py @try.args -e ddp
.venv/bin/python tools/plot.py outputs/one outputs/ddp --output outputs/ddp.png""",
    """## fp16: the units that a T4 does have

The diff against chapter 02 is loss scaling.""",
    """%%bash
set -e
diff -u 02-ddp/train_llm.py related-topics/fp16/train_llm.py || true
.venv/bin/torchrun --standalone --nproc-per-node gpu related-topics/fp16/train_llm.py \\
    @try.args --precision fp16 -e fp16""",
    """## Chapter 04: the model, split across both GPUs

FSDP keeps half of the weights, gradients and moments on each GPU. It runs in fp32 here, as this
chapter has no loss scaling.""",
    """%%bash
set -e
diff -u 03-job-launchers/train_llm.py 04-fsdp/train_llm.py || true
.venv/bin/torchrun --standalone --nproc-per-node gpu 04-fsdp/train_llm.py @try.args -e fsdp
.venv/bin/python tools/plot.py outputs/one outputs/ddp outputs/fsdp outputs/fp16 \\
    --output outputs/runs.png""",
    """#service
from IPython.display import Image

Image("outputs/runs.png")""",
    """## Keep what you made

The machine and its disk are gone after the session. Download this file; to go on, unpack it in a
new clone.""",
    """%%bash
set -e
tar -czf outputs.tar.gz outputs
ls -lh outputs.tar.gz""",
]


def cell(number, text):
    """Return a cell of the notebook; its id is its number, so that every run writes the same id."""
    name = f"cell-{number:02}"
    if text.startswith("#service\n"):
        text = text.removeprefix("#service\n")
        return new_code_cell(text, id=name, metadata={"tags": ["service"]})
    if text.startswith("%%bash\n"):
        return new_code_cell(text, id=name)
    return new_markdown_cell(text, id=name)


def notebook():
    """Return the notebook; fail if its format is not valid."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    cells = [cell(number, text) for number, text in enumerate(CELLS)]
    made = new_notebook(cells=cells, metadata={"kernelspec": kernel, "accelerator": "GPU"})
    nbformat.validate(made)
    return made


if __name__ == "__main__":
    nbformat.write(notebook(), Path(__file__).with_name("notebook.ipynb"))
