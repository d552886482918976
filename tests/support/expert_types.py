"""Write the type of the numbers that the experts of a mixture compute in a chapter."""

import json
import sys
from pathlib import Path

import torch

from recorded import load


def main():
    """Compute the loss of one batch, and write the dtypes that the experts use to a JSON file.

    The file has a list of the dtypes of the products of tokens and expert weights.
    """
    cases, result, script = sys.argv[1:]
    chapter = load(script)
    sys.argv = [script, *json.loads(Path(cases).read_text())["words"]]
    args = chapter.parse_args()
    chapter.setup(args)
    _, config = chapter.build_tokenizer_and_config(args)
    model = chapter.build_model(args, config)
    # Record the inputs of the activation functions, because these inputs are the products of tokens
    # and expert weights.
    products = []
    for module in model.modules():
        if hasattr(module, "_apply_gate"):
            module.act_fn.register_forward_pre_hook(lambda _, inputs: products.append(inputs[0]))
    chapter.loss_of(args, model, torch.zeros(1, 8, dtype=torch.int64))
    Path(result).write_text(json.dumps(sorted({str(product.dtype) for product in products})))


if __name__ == "__main__":
    main()
