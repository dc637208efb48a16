"""The whole script: what a run returns, what it leaves behind, and what bad input gets."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlhf_sentiment
from ppo import PPOTrainer
from rlhf_sentiment import ConfigError, main, parse_overrides
from tests.conftest import write_gpt2, write_judge

ROOT = Path(__file__).parent.parent
CLOCKS = (
    "seconds_rollout",
    "seconds_score",
    "seconds_update",
    "seconds_total",
    "tokens_per_second",
)


def run(hub, save_dir, **changes):
    return main({**rlhf_sentiment.config, **hub, "save_dir": str(save_dir), **changes})


def metrics(run_dir, clocks=False):
    with open(Path(run_dir, "metrics.csv"), newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return rows if clocks else [{k: v for k, v in r.items() if k not in CLOCKS} for r in rows]


@pytest.fixture(scope="module")
def finished(hub, tmp_path_factory):
    """The summary of a complete little run."""
    return run(hub, tmp_path_factory.mktemp("runs"), iterations=12, save_freq=4)


def test_a_run_returns_and_stores_its_evaluation(finished):
    for result in (finished, finished["held_out"]):
        for when in ("before", "after"):
            means = result[when]
            objective = means["score"] - 0.05 * means["kl"]
            assert means["objective"] == pytest.approx(objective)
            assert 0 <= means["score"] <= 1 and means["score_se"] >= 0 and means["length"] >= 1
        assert result["before"]["kl"] == pytest.approx(0.0, abs=1e-5)
        ceiling = result["ceiling"]
        assert ceiling["objective"] == pytest.approx(ceiling["score"] - 0.05 * ceiling["kl"])
        gain = ceiling["objective"] - result["before"]["objective"]
        reached = result["after"]["objective"] - result["before"]["objective"]
        assert ceiling["share"] == pytest.approx(reached / gain)
    stored = json.loads(Path(finished["run_dir"], "evaluation.json").read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(finished))


def test_a_run_folder_holds_what_the_readme_promises(finished):
    folder = Path(finished["run_dir"])
    rows = metrics(folder, clocks=True)
    assert [row["iteration"] for row in rows] == [str(n) for n in range(1, 13)]
    for row in rows:
        score, kl, kl_coef = (float(row[k]) for k in ("score_mean", "kl", "kl_coef"))
        assert float(row["objective"]) == pytest.approx(score - kl_coef * kl, abs=1e-5)
        assert 0 < float(row["distinct"]) <= 1 and 1 <= float(row["response_length"]) <= 8
        parts = sum(float(row[k]) for k in CLOCKS[:3])
        assert float(row["seconds_total"]) == pytest.approx(parts, rel=1e-4)
    assert json.loads((folder / "config.json").read_text())["batch_size"] == 6
    samples = (folder / "samples.txt").read_text(encoding="utf-8")
    assert [line for line in samples.split("\n") if line.startswith("iteration")] == [
        "iteration 1", "iteration 10", "iteration 12",
    ]  # fmt: skip
    assert any(prompt in samples for prompt in rlhf_sentiment.prompts) and "[SEP]" not in samples
    assert sorted(p.name for p in folder.glob("*checkpoint*")) == ["checkpoint-12", "checkpoint-8"]


def test_a_checkpoint_loads_with_plain_transformers(finished, hub):
    checkpoint = Path(finished["run_dir"], "checkpoint-12")
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert len(tokenizer) == model.config.vocab_size
    base = AutoModelForCausalLM.from_pretrained(hub["model_name"]).eval()
    ids = torch.tensor([[2, 8, 9]])
    assert not torch.equal(model(ids).logits, base(ids).logits)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(hub, tmp_path):
    first, second, other = (run(hub, tmp_path, seed=seed, iterations=2) for seed in (5, 5, 6))
    assert metrics(first["run_dir"]) == metrics(second["run_dir"])
    assert first["after"] == second["after"] and first["run_dir"] != second["run_dir"]
    assert metrics(first["run_dir"]) != metrics(other["run_dir"])


def test_every_iteration_draws_afresh(hub, tmp_path):
    folder = run(hub, tmp_path, iterations=2, lr=0, value_lr=0)["run_dir"]  # nothing is learned
    first, second = metrics(folder)
    assert first["score_mean"] != second["score_mean"]


def test_how_much_is_evaluated_changes_nothing_in_the_training(hub, tmp_path):
    runs = [run(hub, tmp_path, iterations=2, eval_samples=n) for n in (1, 7)]
    assert metrics(runs[0]["run_dir"]) == metrics(runs[1]["run_dir"])


def test_without_a_leash_there_is_no_ceiling(hub, tmp_path):
    summary = run(hub, tmp_path, iterations=1, kl_coef=0.0)
    assert summary["ceiling"] is None and summary["after"]["objective"] == summary["after"]["score"]


def test_your_own_reward_may_be_a_plain_list(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(
        rlhf_sentiment, "score_texts", lambda pipe, texts, label: [len(t) / 30 for t in texts]
    )
    summary = run(hub, tmp_path, iterations=1)
    assert summary["before"]["score"] > 0.2 and summary["after"]["score"] > 0.2


def test_only_the_keys_that_change_may_be_given(hub, tmp_path):
    summary = main({**hub, "iterations": 1, "save_dir": str(tmp_path)})
    assert json.loads(Path(summary["run_dir"], "config.json").read_text())["cliprange"] == 0.2


def test_overrides_are_python_values_and_names_stay_names():
    overrides = parse_overrides(
        ["lr=1e-4", "offline=True", "save_dir=2024", "lr=2e-4", "kl_target=None"]
    )
    assert overrides == {"lr": 2e-4, "offline": True, "save_dir": "2024", "kl_target": None}


# ------------------------------------------------------------------------------------- bad input

BAD_CONFIGS = [
    ({"learning_rat": 1}, "learning_rat"),
    ({"iteration": 1}, "iteration.*iterations"),
    ({"iterations": 0}, "iterations=0.*whole number"),
    ({"iterations": 1.5}, "iterations=1.5.*whole number"),
    ({"iterations": "ten"}, "iterations='ten'.*whole number"),
    ({"batch_size": True}, "batch_size=True.*whole number"),
    ({"gen_len": -1}, "gen_len=-1.*at least 1"),
    ({"lr": -1e-5}, "lr=-1e-05.*0 to 1"),
    ({"lr": float("nan")}, "lr=nan.*number"),
    ({"lr": "1e-5x"}, "lr='1e-5x'.*number"),
    ({"lr": 1e30}, r"lr=1e\+30.*0 to 1"),
    ({"value_lr": 2}, "value_lr=2.*0 to 1"),
    ({"LR": 1}, "'LR'; known is: lr$"),
    ({"minibatch_size": 10**19}, "minibatch_size=10+: .*whole number"),
    ({"kl_coef": None}, "kl_coef=None.*number"),
    ({"kl_coef": 1e-310}, "kl_coef=1e-310.*number"),
    ({"vf_coef": 10**29}, "vf_coef=10+: .*number"),
    ({"kl_target": 0}, "kl_target=0.*None or a number above 0"),
    ({"kl_horizon": 0}, "kl_horizon=0.*above 0"),
    ({"gamma": 1.1}, "gamma=1.1.*0 to 1"),
    ({"lam": -0.1}, "lam=-0.1.*0 to 1"),
    ({"cliprange": 0}, "cliprange=0.*above 0"),
    ({"max_grad_norm": float("inf")}, "max_grad_norm=inf.*above 0"),
    ({"seed": -1}, "seed=-1.*0 to 2"),
    ({"offline": "yes"}, "offline='yes'.*True or False"),
    ({"dtype": "fp16"}, "dtype='fp16'.*auto, fp32 or bf16"),
    ({"device": "gpu"}, "device='gpu'.*auto.*cpu"),
    ({"device": "cuda:99"}, "device='cuda:99'.*cpu"),
    ({"model_name": 7}, "model_name=7.*text"),
    ({"resume": "/no/such/run"}, "/no/such/run.*no run folder"),
    ({"resume": 7}, "resume=7.*run folder"),
    ({"explain": -2}, "explain=-2.*whole number"),
    ({"kl_target": 6.0, "kl_horizon": 5}, "kl_horizon should reach batch_size"),
    ({"kl_target": 6.0, "kl_coef": 0}, "kl_target needs a kl_coef above 0"),
    ({"offline": True}, "offline=True brings its own models"),
    ({"gen_len": 60}, "gen_len=60.*64 positions"),
    ({"reward_label": "good"}, "reward_label='good'.*0 labels.*negative.*positive"),
    ({"reward_label": ""}, "reward_label=''.*2 labels"),
    (
        {"model_name": "/no/such/folder"},
        "model_name='/no/such/folder'.*no local folder.*offline=True",
    ),
    ({"reward_model_name": "/no/such"}, "reward_model_name='/no/such'.*HF_ENDPOINT"),
    ({"save_dir": __file__}, "no run folder can be made in save_dir=.*test_main.py"),
]


@pytest.mark.parametrize("change, message", BAD_CONFIGS, ids=lambda value: str(value)[:40])
def test_bad_config_gets_one_clear_line_before_training(hub, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        main({**hub, "save_dir": str(tmp_path / "runs"), **change})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_weight(path, name):
    weights = torch.load(path)
    del weights[name]
    torch.save(weights, path)


BROKEN_MODELS = [
    ("no vocabulary", lambda g, j: (g / "vocab.txt").unlink(), "model_name.*cannot be used"),
    ("a shorter vocabulary",
     lambda g, j: (g / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n"),
     "model_name.*tokenizer has"),
    ("no weights",
     lambda g, j: (g / "pytorch_model.bin").unlink(), "model_name.*pytorch_model.bin"),
    ("a pointer instead of weights",
     lambda g, j: (g / "pytorch_model.bin").write_text("version https://git-lfs"), "model_name"),
    ("half the weights",
     lambda g, j: os.truncate(g / "pytorch_model.bin", 9000),
     "model_name"),
    ("weights of another shape",
     lambda g, j: edit_json(g / "config.json", n_positions=32), "another shape, as .*transformer.wpe"),
    ("a judge of another shape",
     lambda g, j: edit_json(j / "config.json", intermediate_size=32),
     "another shape: .*intermediate.dense.weight"),
    ("a weight missing",
     lambda g, j: drop_weight(g / "pytorch_model.bin", "transformer.wpe.weight"), "1 weights are missing or have another shape, as transformer.wpe"),
    ("no config", lambda g, j: (g / "config.json").unlink(), "model_name"),
    ("another architecture", lambda g, j: edit_json(g / "config.json", model_type="bert"),
     "found a bert model.*needed is a GPT-2"),
    ("a judge without a head",
     lambda g, j: drop_weight(j / "pytorch_model.bin", "classifier.weight"),
     "reward_model_name.*missing or have another shape: .*classifier"),
    ("a judge with another vocabulary", lambda g, j: (j / "vocab.txt").write_text("[PAD]\n[UNK]\n"),
     "reward_model_name.*tokenizer has"),
    ("a judge that reads too little",
     lambda g, j: edit_json(j / "tokenizer_config.json", model_max_length=12),
     "gen_len=8: prompt .* leaves room for -?\\d+ tokens in a model of 11 positions"),
    ("a judge with other labels",
     lambda g, j: edit_json(j / "config.json", id2label={"0": "LABEL_0", "1": "LABEL_1"}),
     "reward_label='positive'.*LABEL_0; LABEL_1"),
]  # fmt: skip


@pytest.mark.parametrize(
    "what, damage, message", BROKEN_MODELS, ids=lambda v: v if type(v) is str else ""
)
def test_a_model_that_does_not_fit_gets_one_clear_line(hub, tmp_path, what, damage, message):
    gpt2, judge = write_gpt2(tmp_path / "gpt2"), write_judge(tmp_path / "judge")
    damage(gpt2, judge)
    with pytest.raises(ConfigError, match=message) as caught:
        main({**hub, "model_name": str(gpt2), "reward_model_name": str(judge),
              "save_dir": str(tmp_path / "runs")})  # fmt: skip
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("pool", ["这部电影很", [], ["这部电影很", None], {"这部电影很": 1}])
def test_prompts_that_are_no_list_of_texts_are_refused(hub, tmp_path, monkeypatch, pool):
    monkeypatch.setattr(rlhf_sentiment, "held_out_prompts", pool)
    with pytest.raises(ConfigError, match="held_out_prompts should be a list of at least one text"):
        run(hub, tmp_path)


def test_the_longest_prompt_says_how_long_a_response_may_be(hub, tmp_path):
    with pytest.raises(ConfigError, match="gen_len=60.*leaves room for 52 tokens") as caught:
        run(hub, tmp_path, gen_len=60)
    assert max(rlhf_sentiment.prompts + rlhf_sentiment.held_out_prompts, key=len) in str(caught.value)
    with pytest.raises(ConfigError, match="room for 51 tokens in a model of 63"):  # the judge's
        run(hub, tmp_path, gen_len=52)


@pytest.mark.parametrize(
    "prompt, message", [("", "prompt ''"), ("龘龘龘好", "龘.*3 of its 4 tokens")]
)
def test_a_prompt_that_the_model_cannot_read_is_named(hub, tmp_path, monkeypatch, prompt, message):
    monkeypatch.setattr(rlhf_sentiment, "prompts", ["这部电影很", prompt])
    with pytest.raises(ConfigError, match=message):
        run(hub, tmp_path)


def test_a_prompt_with_one_unknown_character_is_reported(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rlhf_sentiment, "prompts", ["这部电影很龘"])
    run(hub, tmp_path, iterations=1)
    assert "1 of its 6 tokens" in capsys.readouterr().out
    texts = next(tmp_path.glob("*/samples.txt")).read_text(encoding="utf-8").split("\n")[1:4]
    assert all("这部电影很龘" in text for text in texts)  # scored as it was written


# ---------------------------------------------------------------------------- interrupt and resume


class Stop(BaseException):
    """Stands for whatever ends a process without warning: no `except Exception` sees it."""


def assert_same_end(straight, resumed):
    assert metrics(straight["run_dir"]) == metrics(resumed["run_dir"])
    assert straight["after"] == resumed["after"] and straight["before"] == resumed["before"]
    folders = [Path(summary["run_dir"]) for summary in (straight, resumed)]
    models = [AutoModelForCausalLM.from_pretrained(f / "checkpoint-12") for f in folders]
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, models[1].state_dict()[name]), name
    samples = [(folder / "samples.txt").read_text(encoding="utf-8") for folder in folders]
    assert samples[0] == samples[1]


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
    assert [p.name for p in folder.glob("checkpoint-*")] == ["checkpoint-4"]
    assert_same_end(finished, main({"resume": str(folder)}))


def test_a_full_disk_costs_nothing_that_was_saved_before(finished, hub, tmp_path, monkeypatch):
    # a limit on the size of files, so that the real writers fail halfway through the weights
    resource = pytest.importorskip("resource")
    limits, step = resource.getrlimit(resource.RLIMIT_FSIZE), rlhf_sentiment.PPOTrainer.step

    def step_on_a_full_disk(self, *batch):
        if self.iteration == 7:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
        return step(self, *batch)

    monkeypatch.setattr(rlhf_sentiment.PPOTrainer, "step", step_on_a_full_disk)
    try:
        with pytest.raises(ConfigError, match="could not be written to .*make room, then.* resume="):
            run(hub, tmp_path, iterations=12, save_freq=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    (folder,) = tmp_path.iterdir()
    assert [p.name for p in folder.glob("checkpoint-*")] == ["checkpoint-4"]
    assert_same_end(finished, main({"resume": str(folder)}))


def test_what_a_failed_save_left_behind_takes_no_room(hub, tmp_path, monkeypatch):
    folder = Path(run(hub, tmp_path, iterations=1)["run_dir"])
    (folder / "incomplete").mkdir()
    usage = shutil.disk_usage

    def usage_with_half_a_checkpoint(path):
        return shutil._ntuple_diskusage(1, 1, 0) if (folder / "incomplete").exists() else usage(path)

    monkeypatch.setattr(shutil, "disk_usage", usage_with_half_a_checkpoint)
    main({"resume": str(folder), "iterations": 2})
    assert not (folder / "incomplete").exists()


def test_too_little_room_is_found_before_training(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ConfigError, match="checkpoints need .* bytes, 1 are free"):
        run(hub, tmp_path)


def test_damaged_files_of_a_run_are_named(hub, tmp_path):
    folder = Path(run(hub, tmp_path, iterations=3, save_freq=2)["run_dir"])
    state = folder / "checkpoint-3" / "trainer_state.pt"
    state.write_bytes(state.read_bytes()[:5000])
    with pytest.raises(ConfigError, match="checkpoint-3 is damaged: delete it to resume"):
        main({"resume": str(folder), "iterations": 4})
    shutil.rmtree(folder / "checkpoint-3")  # as it says
    assert main({"resume": str(folder), "iterations": 4})["after"]
    assert [row["iteration"] for row in metrics(folder)] == ["1", "2", "3", "4"]
    with pytest.raises(ConfigError, match="metrics.csv has lost lines"):
        os.truncate(folder / "metrics.csv", 600)
        main({"resume": str(folder), "iterations": 5})
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key, value in (("lr", "fast"), ("save_freq", 0), ("iterations", "9")):
        (folder / "config.json").write_text(json.dumps(stored | {key: value}), encoding="utf-8")
        with pytest.raises(ConfigError, match=f"{key}={value!r}: it should be"):
            main({"resume": str(folder)})
    for text in ('{"model_na', "[]", "null", "3"):
        (folder / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="is no run folder"):
            main({"resume": str(folder)})


def test_a_resumed_run_keeps_its_prompts(hub, tmp_path, monkeypatch):
    folder = run(hub, tmp_path, iterations=1)["run_dir"]
    monkeypatch.setattr(rlhf_sentiment, "prompts", ["这部电影很"])
    with pytest.raises(ConfigError, match="begun with other prompts: .*刚收到货"):
        main({"resume": folder, "iterations": 2})


def test_a_resumed_run_may_grow_but_not_change(hub, tmp_path, monkeypatch):
    folder = run(hub, tmp_path, iterations=2)["run_dir"]
    shutil.copytree(Path(folder, "checkpoint-2"), Path(folder, "checkpoint-2-best"))  # the user's
    with pytest.raises(ConfigError, match="lr=0.5 for 0.001"):
        main({"resume": folder, "lr": 0.5})
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


def script(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "rlhf_sentiment.py"), *arguments], text=True, encoding="utf-8",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


@pytest.mark.parametrize("number, exit_code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_iteration_saves_and_says_how_to_continue(
    hub, tmp_path, number, exit_code
):
    arguments = [f"{key}={value}" for key, value in hub.items()]
    save_dir = tmp_path / "my runs"
    process = script(*arguments, "iterations=100000", f"save_dir={save_dir}", PYTHONUNBUFFERED="1")
    for line in process.stdout:
        if line.split()[:1] == ["1"]:  # the first iteration is done
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    (folder,) = save_dir.iterdir()
    assert process.returncode == exit_code and err == ""
    assert f"python rlhf_sentiment.py 'resume={folder}'" in out  # ready to be pasted into a shell
    assert len(list(folder.glob("checkpoint-*"))) == 1


def test_as_a_script_a_mistake_is_one_line_on_stderr_and_exit_code_1():
    process = script("iterations=many")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err == "error: iterations='many': it should be a whole number, at least 1\n"


class Gate(BaseHTTPRequestHandler):
    """A hub that answers every question with "not without a login"."""

    def do_GET(self):
        self.send_response(401)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *arguments):
        pass


@pytest.fixture
def gated_hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gate)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.parametrize("hub_is", ["unreachable", "switched off", "gated"])
def test_a_hub_that_gives_nothing_ends_in_a_readable_line(hub_is, request):
    environment = {"HF_HOME": "/nonexistent", "HF_ENDPOINT": "http://127.0.0.1:9"}
    if hub_is == "switched off":
        environment["HF_HUB_OFFLINE"] = "1"
    if hub_is == "gated":
        environment["HF_ENDPOINT"] = request.getfixturevalue("gated_hub")
    process = script(**environment)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and err.count("\n") == 1
    assert "uer/gpt2-chinese-cluecorpussmall" in err
    assert "local folder" in err and "HF_ENDPOINT" in err and "offline=True" in err


# ------------------------------------------------------------------------------------ the warnings


@pytest.fixture
def watch(loaded, settings, tmp_path, capsys):
    """Looks at a batch with given KLs, last ids and share of different rows -> what it says."""
    model, ref_model, tokenizer, _ = loaded
    trainer = PPOTrainer(model, ref_model, settings)
    run = rlhf_sentiment.RunFolder({**settings, "save_dir": str(tmp_path)}, trainer, tokenizer)
    run.before = {"pool": {"ended": 0.5}}

    def look(kls, last_id=tokenizer.sep_token_id, distinct=1.0):
        capsys.readouterr()
        logprobs = torch.tensor(kls)[:, None].expand(-1, 2) / 2
        labels = torch.tensor([[8, last_id]] * len(kls))
        trainer.last_batch = {"logprobs": logprobs, "ref_logprobs": torch.zeros_like(logprobs),
                              "mask": torch.ones_like(logprobs), "labels": labels}  # fmt: skip
        run.watch({"distinct": distinct})
        return capsys.readouterr().out

    return look


def test_a_kl_that_stays_negative_is_reported_once(watch):
    kls = [-0.3 + 0.01 * n for n in range(24)]
    assert [bool(watch(kls)) for _ in range(7)] == [False] * 4 + [True] + [False] * 2


def test_a_kl_around_0_is_no_reason_to_warn(watch):
    assert not any(watch([(-1) ** n * 0.3 - 0.01 for n in range(24)]) for _ in range(7))


def test_responses_that_are_all_alike_are_reported_once(watch):
    said = [watch([0.1] * 24, distinct=distinct) for distinct in (0.2, 0.05, 0.05)]
    assert "alike" in said[1] and not said[0] and not said[2]


def test_responses_that_no_longer_end_are_reported_once(watch):
    said = [watch([0.1] * 24, last_id=9) for _ in range(7)]
    assert "no response ends" in said[4] and not any(said[:4] + said[5:])


def test_a_few_responses_are_too_few_to_warn(watch):
    assert not any(watch([-0.3, -0.31], last_id=9) for _ in range(7))
