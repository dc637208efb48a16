"""Interrupted, killed, full disk: nothing is lost, and a resumed run ends as an unbroken one."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rlhf_sentiment
from rlhf_sentiment import ConfigError, main
from tests.helpers import ROOT, Stop, as_arguments, assert_same_end, metrics, run, script


@pytest.mark.parametrize("stop_at", [2, 4, 7, 12])
def test_a_run_that_died_resumes_bit_for_bit(finished, hub, tmp_path, monkeypatch, stop_at):
    step = rlhf_sentiment.PPOTrainer.step

    def dying_step(self, *batch):
        if self.iteration + 1 == stop_at:
            raise Stop
        return step(self, *batch)

    monkeypatch.setattr(rlhf_sentiment.PPOTrainer, "step", dying_step)
    with pytest.raises(Stop):
        run(hub, tmp_path, iterations=12, save_freq=4)
    monkeypatch.undo()
    (folder,) = tmp_path.iterdir()
    assert_same_end(finished, main({"resume": str(folder)}))
    with pytest.raises(ConfigError, match="is finished after 12"):
        main({"resume": str(folder)})


def test_a_run_that_died_while_saving_resumes_from_the_older_checkpoint(
    finished, hub, tmp_path, monkeypatch
):
    save = torch.save

    def dying_save(state, path):
        if state["iteration"] == 8:
            Path(path).write_bytes(b"half a file")
            raise Stop
        save(state, path)

    monkeypatch.setattr(torch, "save", dying_save)
    with pytest.raises(Stop):
        run(hub, tmp_path, iterations=12, save_freq=4)
    monkeypatch.undo()
    (folder,) = tmp_path.iterdir()
    assert [p.name for p in folder.glob("*checkpoint-*")] == ["checkpoint-4"]
    assert_same_end(finished, main({"resume": str(folder)}))
    assert not (folder / "incomplete").exists()


@pytest.mark.parametrize("limit", [30_000, 150_000], ids=["the weights", "the trainer's state"])
def test_a_full_disk_costs_nothing_that_was_saved_before(
    finished, hub, tmp_path, monkeypatch, limit
):
    # a limit on the size of files, so that the real writers fail halfway through a file
    resource = pytest.importorskip("resource")
    limits, step = resource.getrlimit(resource.RLIMIT_FSIZE), rlhf_sentiment.PPOTrainer.step

    def step_on_a_full_disk(self, *batch):
        if self.iteration == 7:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        return step(self, *batch)

    monkeypatch.setattr(rlhf_sentiment.PPOTrainer, "step", step_on_a_full_disk)
    try:
        with pytest.raises(ConfigError, match=r"could not be written to .*Make room.* \"resume="):
            run(hub, tmp_path, iterations=12, save_freq=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    (folder,) = tmp_path.iterdir()
    assert [p.name for p in folder.glob("checkpoint-*")] == ["checkpoint-4"]
    assert_same_end(finished, main({"resume": str(folder)}))


def test_a_file_that_another_program_holds_is_called_that(hub, tmp_path, monkeypatch):
    def held(path, *arguments, **options):
        if str(path).endswith("metrics.csv"):
            raise PermissionError(13, "Permission denied", str(path))
        return open(path, *arguments, **options)

    monkeypatch.setattr(rlhf_sentiment, "open", held, raising=False)
    with pytest.raises(ConfigError, match="PermissionError.*metrics.csv.*close the program that"):
        run(hub, tmp_path)


def test_an_error_that_is_not_the_disks_is_not_called_that(hub, tmp_path, monkeypatch):
    def out_of_memory(self, tokenizer):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rlhf_sentiment.PPOTrainer, "explain", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        run(hub, tmp_path)


def test_damaged_files_of_a_run_are_named(hub, tmp_path):
    folder = Path(run(hub, tmp_path, iterations=3, save_freq=2)["run_dir"])
    state = folder / "checkpoint-3" / "trainer_state.pt"
    state.write_bytes(state.read_bytes()[:5000])
    with pytest.raises(ConfigError, match="checkpoint-3 is damaged, delete it to resume"):
        main({"resume": str(folder), "iterations": 4})
    shutil.rmtree(folder / "checkpoint-3")  # as it says
    os.truncate(folder / "metrics.csv", 10)  # the rows are in the checkpoint
    assert main({"resume": str(folder), "iterations": 4})["after"]
    assert [row["iteration"] for row in metrics(folder)] == ["1", "2", "3", "4"]
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key, value in (("lr", "fast"), ("save_freq", 0), ("iterations", "9")):
        (folder / "config.json").write_text(json.dumps(stored | {key: value}), encoding="utf-8")
        with pytest.raises(ConfigError, match=f"{key}={value!r}: it should be"):
            main({"resume": str(folder)})
    for text in ('{"model_na', "[]", "null", "3"):
        (folder / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="is no run folder"):
            main({"resume": str(folder)})


@pytest.mark.parametrize("own", [True, False])
def test_a_run_is_not_resumed_with_another_reward(hub, tmp_path, monkeypatch, own):
    """Both ways: the command line, say, would resume what a script with its own reward began."""
    rewards = [rlhf_sentiment.score_texts, lambda pipe, texts, label: [1] * len(texts)]
    monkeypatch.setattr(rlhf_sentiment, "score_texts", rewards[own])
    folder = run(hub, tmp_path, iterations=1)["run_dir"]
    main({"resume": folder, "iterations": 2})  # where it is still in place
    written = {p: p.stat().st_mtime_ns for p in Path(folder).rglob("*")}
    monkeypatch.setattr(rlhf_sentiment, "score_texts", rewards[not own])
    with pytest.raises(ConfigError, match="was begun with another score_texts"):
        main({"resume": folder, "iterations": 3})
    assert written == {p: p.stat().st_mtime_ns for p in Path(folder).rglob("*")}


def test_the_config_of_an_older_version_is_filled_in(hub, tmp_path, capsys):
    folder = Path(run(hub, tmp_path, iterations=1)["run_dir"])
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del stored["explain"], stored["held_out_prompts"]
    text = json.dumps({**stored, "a_key_of_old": 1}, ensure_ascii=False)
    (folder / "config.json").write_text(text, encoding="utf-8")
    assert main({"resume": str(folder), "iterations": 2})["after"]
    said = capsys.readouterr().out
    assert "another version: start values for held_out_prompts, explain" in said


def test_a_resumed_run_may_grow_but_not_change(hub, tmp_path, monkeypatch):
    folder = run(hub, tmp_path, iterations=2)["run_dir"]
    shutil.copytree(Path(folder, "checkpoint-2"), Path(folder, "checkpoint-2-best"))  # the user's
    with pytest.raises(ConfigError, match="lr=0.5 for 0.001"):
        main({"resume": folder, "lr": 0.5})
    with pytest.raises(ConfigError, match="lr=2e-05 for 0.001"):  # the start value, but given
        main({"resume": folder, "lr": rlhf_sentiment.config["lr"]})
    with pytest.raises(ConfigError, match="finished after 2"):  # in a whole copy it is not
        main({**rlhf_sentiment.config, "resume": folder})
    with pytest.raises(ConfigError, match=r"prompts=\['这部电影很'\] for \['刚收到货"):
        main({"resume": folder, "prompts": ["这部电影很"]})
    with pytest.raises(ConfigError, match="iterations=1.*may only grow"):
        main({"resume": folder, "iterations": 1})
    with pytest.raises(ConfigError, match="not a checkpoint in it"):
        main({"resume": str(Path(folder, "checkpoint-2"))})
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(rlhf_sentiment, "train_one_iteration", lambda *_: (_ for _ in ()).throw(Stop))
        main({"resume": folder, "iterations": 4})
    monkeypatch.setitem(rlhf_sentiment.config, "resume", folder)  # as if written into the file
    summary = main({})  # it remembers that it was to grow
    assert summary["run_dir"] == folder and Path(folder, "checkpoint-2-best").exists()
    assert [row["iteration"] for row in metrics(summary["run_dir"])] == ["1", "2", "3", "4"]


def test_a_finished_run_keeps_its_evaluation_until_there_is_a_newer_one(hub, tmp_path, monkeypatch):
    folder = Path(run(hub, tmp_path, iterations=2)["run_dir"])
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(rlhf_sentiment, "train_one_iteration", lambda *_: (_ for _ in ()).throw(Stop))
        main({"resume": str(folder), "iterations": 3})
    assert (folder / "evaluation.json").exists()
    assert main({"resume": str(folder)})["after"]  # it goes on to 3
    assert (folder / "checkpoint-3").exists()


def test_a_run_without_a_checkpoint_says_that_it_starts_anew(hub, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(rlhf_sentiment, "train_one_iteration", lambda *_: (_ for _ in ()).throw(Stop))
        run(hub, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert main({"resume": str(folder)})["after"]
    assert "has no checkpoint yet: starting from the beginning" in capsys.readouterr().out


def test_a_resumed_run_may_use_less_memory(hub, tmp_path):
    folder = run(hub, tmp_path, iterations=1)["run_dir"]
    smaller = {"minibatch_size": 2, "batch_size": 3, "save_freq": 1, "explain": 1, "device": "cpu"}
    main({"resume": folder, "iterations": 2, **smaller})
    stored = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    assert smaller.items() <= stored.items()


# ------------------------------------------------------------------------------------- signals


def wait_for_the_first_iteration(lines):
    for line in lines:
        if line.split()[:1] == ["1"]:
            return


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_the_iteration_saves_and_says_how_to_continue(hub, tmp_path, number):
    save_dir = tmp_path / "my runs"
    process = script(*as_arguments(hub), "iterations=100000", f"save_dir={save_dir}")
    wait_for_the_first_iteration(process.stdout)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    (folder,) = save_dir.iterdir()
    assert process.returncode == 128 + number and err == ""
    # ready to be pasted into any shell, a blank in the path or not
    assert f'python rlhf_sentiment.py "resume={folder}"' in out
    assert len(list(folder.glob("checkpoint-*"))) == 1


def test_a_terminal_that_is_closed_does_not_prevent_the_save(hub, tmp_path):
    terminal, other_end = pty.openpty()
    command = [sys.executable, str(ROOT / "rlhf_sentiment.py"), *as_arguments(hub)]
    process = subprocess.Popen(
        [*command, "iterations=100000", f"save_dir={tmp_path}"],
        stdin=other_end, stdout=other_end, stderr=other_end, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )  # fmt: skip
    os.close(other_end)
    with open(terminal, encoding="utf-8", errors="replace") as lines:
        wait_for_the_first_iteration(lines)
    process.send_signal(signal.SIGHUP)  # the terminal is gone by now: each print fails
    assert process.wait(timeout=60) == 128 + signal.SIGHUP
    assert len(list(tmp_path.glob("*/checkpoint-*"))) == 1


def test_a_signal_that_was_ignored_stays_ignored():
    """As `nohup` wants it for a terminal that is closed."""
    # set all three, since a job in the background starts with others than one in a terminal
    handlers = {
        signal.SIGHUP: signal.SIG_IGN,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with rlhf_sentiment.stop_signals() as received:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and received == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == [signal.SIGTERM]
            os.kill(os.getpid(), signal.SIGINT)
            assert received == [signal.SIGTERM, signal.SIGINT]
        assert {number: signal.getsignal(number) for number in handlers} == handlers  # as before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("iterations, stops_at", [(9, 2), (1, 1)], ids=["the first", "the last"])
def test_a_signal_during_a_save_still_gets_its_checkpoint(
    hub, tmp_path, monkeypatch, iterations, stops_at
):
    """It comes after the question whether a checkpoint is due: no; in the last iteration, yes."""
    save = rlhf_sentiment.RunFolder.save

    def interrupted(self, checkpoint):
        save(self, checkpoint)
        if self.trainer.iteration == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    monkeypatch.setattr(rlhf_sentiment.RunFolder, "save", interrupted)
    try:
        with pytest.raises(SystemExit) as caught:
            run(hub, tmp_path, iterations=iterations)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == 128 + signal.SIGTERM
    assert [p.name for p in tmp_path.glob("*/checkpoint-*")] == [f"checkpoint-{stops_at}"]
