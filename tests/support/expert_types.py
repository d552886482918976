"""Write the type of the numbers that the experts of a mixture compute in a chapter."""

import json
import sys
from pathlib import Path

import torch

from recorded import load


def main():
    """Compute the loss of one batch per case, and write a JSON file.

    The file has, by case, the dtypes of the products of tokens and expert weights.
    """
    cases, result, script = sys.argv[1:]
    chapter, types = load(script), {}
    for name, arguments in json.loads(Path(cases).read_text()).items():
        sys.argv = [script, *arguments]
        args = chapter.parse_args()
        chapter.setup(args)
        _, config = chapter.build_tokenizer_and_config(args)
        model = chapter.build_model(args, config)
        # Record the inputs of the activation functions, which are the products of tokens and expert
        # weights.
        products = []
        for module in model.modules():
            if hasattr(module, "_apply_gate"):
                module.act_fn.register_forward_pre_hook(lambda _, x, to=products: to.append(x[0]))
        chapter.loss_of(args, model, torch.zeros(1, 8, dtype=torch.int64))
        types[name] = sorted({str(product.dtype) for product in products})
    Path(result).write_text(json.dumps(types))


if __name__ == "__main__":
    main()
