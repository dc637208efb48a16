"""What several test files need: start a run, start the script, read what a run left behind."""

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import rlhf_sentiment

ROOT = Path(__file__).parent.parent
SECONDS = ("seconds_rollout", "seconds_score", "seconds_update", "seconds_total")
CLOCKS = (*SECONDS, "tokens_per_second")


def run(hub, save_dir, **changes):
    """`main` with a changed copy of the config, as a notebook would call it -> the summary."""
    return rlhf_sentiment.main(
        {**rlhf_sentiment.config, **hub, "save_dir": str(save_dir), **changes}
    )


def metrics(run_dir, clocks=False):
    """The rows of metrics.csv; without `clocks` only what is the same in a repeated run."""
    with open(Path(run_dir, "metrics.csv"), newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return rows if clocks else [{k: v for k, v in r.items() if k not in CLOCKS} for r in rows]


def script(*arguments, **environment):
    """The program as a process of its own, with output into pipes."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "rlhf_sentiment.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=os.environ | environment,
        preexec_fn=start_with_plain_signals,
    )


def start_with_plain_signals():
    """A job started in the background, or by nohup, has these ignored, and so have its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def as_arguments(config):
    return [f"{key}={value}" for key, value in config.items()]


class Stop(BaseException):
    """Stands for whatever ends a process without warning: no `except Exception` sees it."""


def assert_same_end(straight, resumed):
    """Two runs of 12 iterations left the same metrics, samples, evaluation and weights."""
    assert metrics(straight["run_dir"]) == metrics(resumed["run_dir"])
    assert straight["after"] == resumed["after"] and straight["before"] == resumed["before"]
    folders = [Path(summary["run_dir"]) for summary in (straight, resumed)]
    models = [AutoModelForCausalLM.from_pretrained(f / "checkpoint-12") for f in folders]
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, models[1].state_dict()[name]), name
    samples = [(folder / "samples.txt").read_text(encoding="utf-8") for folder in folders]
    assert samples[0] == samples[1]
