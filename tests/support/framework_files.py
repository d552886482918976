"""Write the configuration files of frameworks with the planner, without starting a process."""

import json

import will_it_fit


def write_config(path, framework, *words, stage=3):
    """Write a framework's configuration file to `path`, and return `path`.

    The file is for the planner's flags `words` and the ZeRO stage `stage`.
    """
    if stage < 3:
        words = (*words, "--no-reshard-after-forward")
    args = will_it_fit.parse_args([*map(str, words), "--write-config", framework, str(path)])
    text = args.config_text
    # Change the stage here, because the planner writes no file for stage 1: no chapter shards only
    # the optimizer state.
    if stage == 1:
        settings = json.loads(text)
        settings["zero_optimization"]["stage"] = 1
        # Drop data_types, because zero_to_fp32 cannot read checkpoints of stage 1 with gradients in
        # fp32.
        settings.pop("data_types", None)
        text = json.dumps(settings)
    path.write_text(text)
    return path
