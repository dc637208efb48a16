"""Bad input: each mistake gets one line that says what is wrong and what would be right."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

import rlhf_sentiment
from rlhf_sentiment import ConfigError, device_advice, main
from tests.conftest import write_english_gpt2, write_english_judge, write_gpt2, write_judge
from tests.helpers import run, script

BAD_CONFIGS = [
    ({"learning_rat": 1}, "learning_rat"),
    ({"iteration": 1}, "'iteration'; did you mean iterations"),
    ({"zzz": 1}, "'zzz'; known are model_name, .*, explain$"),
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
    ({"LR": 1}, "'LR'; did you mean lr\\?$"),
    ({"minibatch_size": 10**19}, "minibatch_size=10+: .*below 2..32"),
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
    ({"device": None}, "device=None.*cpu"),
    ({"model_name": 7}, "model_name=7.*text"),
    ({"resume": "/no/such/run"}, "/no/such/run.*no run folder"),
    ({"resume": 7}, "resume=7.*run folder"),
    ({"explain": -2}, "explain=-2.*whole number"),
    ({"kl_target": 6.0, "kl_horizon": 5}, "kl_target needs .* kl_horizon above batch_size"),
    ({"kl_target": 6.0, "kl_coef": 0}, "kl_target needs a kl_coef above 0"),
    ({"offline": True}, "offline=True brings its own models"),
    ({"gen_len": 60}, "gen_len=60.*64 positions of model_name"),
    ({"reward_label": "good"}, "reward_label='good'.*0 labels.*negative.*positive"),
    ({"reward_label": ""}, "reward_label=''.*2 labels"),
    ({"prompts": "这部电影很"}, "prompts='这部电影很': it should be a list of at least one text"),
    ({"held_out_prompts": []}, r"held_out_prompts=\[\]: it should be a list of at least one text"),
    ({"prompts": ["这部电影很", None]}, "prompts=.*None.*it should be a list"),
    ({"held_out_prompts": {"这部电影很": 1}}, "held_out_prompts=.*it should be a list"),
    ({"prompts": ["这部电影很", ""]}, "prompt '' is empty; it should be a text"),
    ({"prompts": ["龘龘龘好"]}, "prompt '龘龘龘好': 3 of its 4 tokens are unknown"),
    (
        {"model_name": "/no/such/folder"},
        "model_name='/no/such/folder'.*no local folder.*offline=True",
    ),
    ({"reward_model_name": "/no/such"}, "reward_model_name='/no/such'.*HF_ENDPOINT"),
    ({"save_dir": __file__}, "no run folder can be made in save_dir=.*test_bad_input.py"),
    ({"save_dir": "a\0b"}, "no run folder can be made in save_dir='a.*null"),
    ({"model_name": "x" * 300}, "model_name='xxx.*no local folder.*Three ways out"),
    ({"prompts": ["很[SEP]"]}, r"prompt '很\[SEP\]': 1 of its 2 tokens are unknown"),
]


@pytest.mark.parametrize("change, message", BAD_CONFIGS, ids=lambda value: str(value)[:40])
def test_bad_config_gets_one_clear_line_before_training(hub, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        main({**hub, "save_dir": str(tmp_path / "runs"), **change})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("key", rlhf_sentiment.config)
def test_every_dial_is_checked(hub, key):
    """A value that is right for none of them is refused by the name of the key."""
    with pytest.raises(ConfigError, match=f"^{key}="):
        main({**hub, key: object()})


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weight(path, name, edit):
    """`edit` gets one weight of a checkpoint and returns it changed, or None to drop it."""
    safe = path.suffix == ".safetensors"
    weights = load_file(path) if safe else torch.load(path)
    weight = edit(weights.pop(name))
    weights |= {name: weight} if weight is not None else {}
    save_file(weights, path, {"format": "pt"}) if safe else torch.save(weights, path)


def drop(weight):
    return None


def spoil(weight):
    weight.view(-1)[3] = float("nan")
    return weight


BROKEN_MODELS = [
    ("no vocabulary", lambda g, j: (g / "vocab.txt").unlink(), "model_name.*cannot be used"),
    ("a shorter vocabulary",
     lambda g, j: (g / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n"),
     "model_name.*tokenizer has"),
    ("no weights",
     lambda g, j: (g / "pytorch_model.bin").unlink(), "model_name.*pytorch_model.bin"),
    ("a pointer instead of weights",
     lambda g, j: (g / "pytorch_model.bin").write_text("version https://git-lfs"), "model_name"),
    ("half the weights", lambda g, j: os.truncate(g / "pytorch_model.bin", 9000), "model_name"),
    ("weights of another shape", lambda g, j: edit_json(g / "config.json", n_positions=32),
     "another shape, as .*transformer.wpe"),
    ("weights that are nan",
     lambda g, j: edit_weight(g / "pytorch_model.bin", "transformer.wpe.weight", spoil),
     "transformer.wpe.weight holds numbers that are not finite"),
    ("a weight missing",
     lambda g, j: edit_weight(g / "pytorch_model.bin", "transformer.wpe.weight", drop),
     "1 weights are missing or have another shape, as transformer.wpe"),
    ("no config", lambda g, j: (g / "config.json").unlink(), "model_name"),
    ("another architecture", lambda g, j: edit_json(g / "config.json", model_type="bert"),
     "found a bert model.*needed is a GPT-2"),
    ("a GPT-2 with more rows than tokens", lambda g, j: (g / "vocab.txt").write_text(
        "\n".join((g / "vocab.txt").read_text().split("\n")[:-3])), "the tokenizer has .* entries"),
    ("a judge of another shape", lambda g, j: edit_json(j / "config.json", intermediate_size=32),
     "missing or have another shape, as .*bert.encoder.layer.0.intermediate.dense.bias"),
    ("a judge without a head",
     lambda g, j: edit_weight(j / "pytorch_model.bin", "classifier.weight", drop),
     "reward_model_name.*missing or have another shape, as classifier"),
    ("a judge whose weights are nan",
     lambda g, j: edit_weight(j / "pytorch_model.bin", "classifier.weight", spoil),
     "reward_model_name.*classifier.weight holds numbers that are not finite"),
    ("a judge with another vocabulary", lambda g, j: (j / "vocab.txt").write_text("[PAD]\n[UNK]\n"),
     "prompt .* 11 of its 11 tokens are unknown to reward_model_name"),
    ("a judge that reads too little",
     lambda g, j: edit_json(j / "tokenizer_config.json", model_max_length=12),
     "gen_len=8: prompt .* leaves room for -?\\d+ tokens in the 12 positions of reward_model_name"),
    ("a judge with other labels",
     lambda g, j: edit_json(j / "config.json", id2label={"0": "LABEL_0", "1": "LABEL_1"}),
     "reward_label='positive'.*LABEL_0; LABEL_1"),
    ("a judge whose labels are numbers",
     lambda g, j: edit_json(j / "config.json", id2label={"0": 0, "1": 1}),
     "reward_label='positive'.*0; 1"),
]  # fmt: skip


@pytest.mark.parametrize(
    "what, damage, message", BROKEN_MODELS, ids=lambda v: v if type(v) is str else ""
)
def test_a_model_that_does_not_fit_gets_one_clear_line(hub, tmp_path, what, damage, message):
    gpt2, judge = write_gpt2(tmp_path / "gpt2"), write_judge(tmp_path / "judge")
    damage(gpt2, judge)
    names = {"model_name": str(gpt2), "reward_model_name": str(judge)}
    with pytest.raises(ConfigError, match=message) as caught:
        main({**hub, **names, "save_dir": str(tmp_path / "runs")})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_judge_may_have_rows_that_fill_it_up_to_a_round_number(hub, tmp_path):
    judge = write_judge(tmp_path / "padded", spare_rows=128)
    assert run(hub, tmp_path, iterations=1, reward_model_name=str(judge))["after"]
    more = write_judge(tmp_path / "more", spare_rows=129)
    with pytest.raises(ConfigError, match="reward_model_name.*the tokenizer has"):
        run(hub, tmp_path, reward_model_name=str(more))


@pytest.mark.parametrize("token", ["bos_token", "eos_token"])
def test_a_tokenizer_without_a_start_or_an_end_token_is_named(english, tmp_path, token):
    folder = write_english_gpt2(tmp_path / "gpt2")
    edit_json(folder / "tokenizer_config.json", **{token: None})
    with pytest.raises(ConfigError, match="has no start token or no end token"):
        run(english, tmp_path, model_name=str(folder))


def test_a_judge_that_cannot_pad_is_refused_before_the_first_rollout(english, tmp_path):
    folder = write_english_judge(tmp_path / "judge")
    edit_json(folder / "tokenizer_config.json", pad_token=None)
    with pytest.raises(ConfigError, match="reward_model_name=.*cannot be used.*pad"):
        run(english, tmp_path, reward_model_name=str(folder))


def test_the_longest_prompt_says_how_long_a_response_may_be(hub, tmp_path):
    with pytest.raises(ConfigError, match="gen_len=60.*leaves room for 52 tokens") as caught:
        run(hub, tmp_path, gen_len=60)
    assert "这次购物总的来说体验很" in str(caught.value)
    with pytest.raises(ConfigError, match="51 tokens in the 64 positions of reward_model_name"):
        run(hub, tmp_path, gen_len=52)


def test_a_prompt_with_one_unknown_character_is_reported(hub, tmp_path, capsys):
    run(hub, tmp_path, iterations=1, prompts=["这部电影很龘"])
    assert "1 of its 6 tokens" in capsys.readouterr().out
    texts = next(tmp_path.glob("*/samples.txt")).read_text(encoding="utf-8").split("\n")[1:4]
    assert all("这部电影很龘" in text for text in texts)  # scored as it was written


def test_as_a_script_a_mistake_is_one_line_on_stderr_and_exit_code_1():
    process = script("iterations=many")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert (
        err == "error: iterations='many': it should be a whole number, at least 1 and below 2**32\n"
    )


# ------------------------------------------------------------------------- errors of the device

MEMORY = "lower minibatch_size, then batch_size"


@pytest.mark.parametrize(
    "error, advice",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), MEMORY),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"), MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), MEMORY),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to"), MEMORY),
        (MemoryError(), MEMORY),
        (RuntimeError("CUDA error: no kernel image is available for execution"), "device=cpu"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), ""),
        (RuntimeError("shapes cannot be multiplied"), ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_error_of_the_device_gets_the_advice_that_fits(error, advice, monkeypatch, hub):
    assert advice in device_advice(error) and bool(advice) == bool(device_advice(error))

    def fail(config):
        raise error

    monkeypatch.setattr(rlhf_sentiment, "main", fail)
    monkeypatch.setattr("warnings.showwarning", None)  # which run_as_script sets
    with pytest.raises(SystemExit if advice else RuntimeError) as caught:
        rlhf_sentiment.run_as_script([])
    assert advice in str(caught.value) and "\n" not in str(caught.value)
