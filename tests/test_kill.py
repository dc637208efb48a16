"""Kill a run without warning, at any moment: resumed, it ends as if nothing had happened.

Minutes and not seconds, therefore only with `python -m pytest tests --slow -k kill`.
"""

import multiprocessing
import random
import time

import pytest

from tests.helpers import assert_same_end

pytestmark = pytest.mark.skipif("not config.getoption('--slow')", reason="only with --slow")

# The server imports torch and transformers once; every run is a fork of it.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["rlhf_sentiment"])


def work(config, queue):
    import os
    import sys

    import rlhf_sentiment

    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    queue.put(rlhf_sentiment.main(config))


def start(config):
    queue = processes.SimpleQueue()
    process = processes.Process(target=work, args=(config, queue))
    process.start()
    return process, queue


def finish(config):
    """Run in a process of its own -> the summary."""
    process, queue = start(config)
    wait(lambda: not queue.empty() or not process.is_alive())
    assert not queue.empty(), f"the run died with exit code {process.exitcode}"
    summary = queue.get()
    process.join()
    return summary


def wait(condition, seconds=120):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.0005)
    raise TimeoutError


@pytest.fixture(scope="module", name="config")
def little_run(hub):
    return {**hub, "iterations": 12, "save_freq": 1, "eval_samples": 1}


@pytest.fixture(scope="module")
def straight(config, tmp_path_factory):
    """(the summary of a run that nobody disturbs, its seconds from folder to last checkpoint)"""
    save_dir = tmp_path_factory.mktemp("straight")
    process, queue = start({**config, "save_dir": str(save_dir)})
    wait(lambda: list(save_dir.glob("*/config.json")))
    begin = time.monotonic()
    wait(lambda: list(save_dir.glob("*/checkpoint-12")))
    seconds = time.monotonic() - begin
    summary = queue.get()
    process.join()
    return summary, seconds


def kill_once(config, save_dir, moment):
    """Start a run, kill it when `moment(its folder)` returns -> its folder; None if it was done."""
    process, _ = start({**config, "save_dir": str(save_dir)})
    wait(lambda: list(save_dir.glob("*/config.json")))
    (folder,) = save_dir.iterdir()
    moment(folder)
    process.kill()
    process.join()
    return folder if not (folder / "evaluation.json").exists() else None


def kill_and_compare(config, straight, factory, moment, times, must_leave=()):
    """Kill `times` runs, resume each, compare the ends -> the folders each had when it died."""
    left = []
    while len(left) < times:
        folder = kill_once(config, factory.mktemp("killed"), moment)
        names = {path.name for path in folder.iterdir() if path.is_dir()} if folder else set()
        if folder and names >= set(must_leave):
            left.append(names)
            assert_same_end(straight, finish({"resume": str(folder)}))
    return left


def test_killed_at_20_random_moments_a_run_resumes_to_the_same_end(
    config, straight, tmp_path_factory
):
    rng, (summary, seconds) = random.Random(0), straight
    left = kill_and_compare(
        config,
        summary,
        tmp_path_factory,
        lambda folder: time.sleep(rng.uniform(0, 1.1 * seconds)),
        20,
    )
    assert len({str(sorted(names)) for names in left}) >= 5  # the moments did differ


def test_killed_while_it_saves_a_run_resumes_to_the_same_end(config, straight, tmp_path_factory):
    rng = random.Random(1)

    def during_a_save(folder):
        n = rng.randrange(5)  # let so many saves pass
        for _ in range(n):
            wait((folder / "incomplete").exists)
            wait(lambda: not (folder / "incomplete").exists())
        wait((folder / "incomplete").exists)
        time.sleep(rng.uniform(0, 0.01))

    # only those count that died in the middle
    left = kill_and_compare(
        config, straight[0], tmp_path_factory, during_a_save, 10, ["incomplete"]
    )
    assert len({str(sorted(names)) for names in left}) > 1
