"""A checkpoint in other programs: an ordinary GPT-2 that continues openings as this one does."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, pipeline

from gpt2_value_head import load_gpt2
from tests.helpers import run


@pytest.fixture(scope="module", params=["hub", "english"])
def trained(request, tmp_path_factory):
    """(a trained checkpoint, the config keys of its run)"""
    config = request.getfixturevalue(request.param)
    save_dir = tmp_path_factory.mktemp("trained")
    before = os.umask(0o022)
    try:
        folder = Path(run(config, save_dir, iterations=2)["run_dir"])
    finally:
        os.umask(before)
    return folder / "checkpoint-2", {**config, "gen_len": config["gen_len"]}


def test_it_loads_as_a_plain_gpt2_with_the_trained_weights(trained):
    checkpoint, config = trained
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert type(model) is GPT2LMHeadModel
    base = AutoModelForCausalLM.from_pretrained(config["model_name"])
    name = "transformer.h.0.attn.c_attn.weight"
    assert not torch.equal(model.state_dict()[name], base.state_dict()[name])
    assert model.config.architectures == ["GPT2LMHeadModel"]
    assert len(AutoTokenizer.from_pretrained(checkpoint)) == model.config.vocab_size


def test_its_tokenizer_opens_a_document_and_does_not_close_it(trained):
    checkpoint, config = trained
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    opening = config["held_out_prompts"][0] if "held_out_prompts" in config else "这部电影很"
    row = tokenizer(opening)
    assert set(row) == {"input_ids", "attention_mask"}  # no token types for a GPT-2
    assert row["input_ids"][0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in row["input_ids"][1:]
    assert tokenizer.padding_side == "left" and tokenizer.pad_token is not None
    assert tokenizer.model_max_length == 1024  # as the model that it came from says
    assert tokenizer.decode(row["input_ids"], skip_special_tokens=True) == opening
    # transformers 4 knows this class name, and not the one that version 5 gives it
    written = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_plain_pipeline_samples_as_the_program_does(trained):
    checkpoint, config = trained
    rules = json.loads((checkpoint / "generation_config.json").read_text(encoding="utf-8"))
    assert rules["do_sample"] is True and rules["top_k"] == 0
    assert rules["max_new_tokens"] == config["gen_len"]
    # where a pipeline of transformers 4 looks; else it would have temperature 0.7 and 256 tokens
    settings = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    wanted = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    wanted["max_new_tokens"] = config["gen_len"]
    assert settings["task_specific_params"] == {"text-generation": wanted}
    writer = pipeline("text-generation", model=str(checkpoint))
    seen, forward = [], writer.model.generate

    def watched(*arguments, **options):
        seen.append(forward(*arguments, **options))
        return seen[-1]

    writer.model.generate = watched
    opening = config.get("held_out_prompts", ["这部电影很"])[0]
    (output,) = writer(opening)
    n_prompt = len(writer.tokenizer(opening)["input_ids"])
    assert output["generated_text"].startswith(opening)
    assert "[" not in output["generated_text"] and "  " not in output["generated_text"]
    assert 1 <= seen[0].shape[1] - n_prompt <= config["gen_len"]


def test_a_pipeline_keeps_to_the_policys_own_probabilities(trained):
    """No top-k, no top-p, temperature 1: what a text-generation pipeline would add by itself."""
    checkpoint, config = trained
    writer = pipeline("text-generation", model=str(checkpoint))
    with torch.no_grad():
        writer.model.lm_head.weight.mul_(0.5)  # neither even chances nor a single choice
    opening = config.get("held_out_prompts", ["这部电影很"])[0]
    ids = writer.tokenizer(opening, return_tensors="pt")["input_ids"]
    expected = writer.model(ids).logits[0, -1].softmax(-1)
    torch.manual_seed(0)
    output = writer([opening] * 3000, max_new_tokens=1, return_tensors=True, batch_size=500)
    drawn = torch.tensor([row[0]["generated_token_ids"][-1] for row in output])
    counts = torch.bincount(drawn, minlength=len(expected)) / len(drawn)
    error = (expected * (1 - expected) / len(drawn)).sqrt()
    assert ((counts - expected).abs() < 5 * error + 1e-3).all()


def test_its_files_are_as_readable_as_any_other(trained):
    checkpoint, _ = trained
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in checkpoint.iterdir()}
    assert set(modes.values()) == {0o644}, modes


def test_the_program_itself_trains_on(trained, tmp_path):
    checkpoint, config = trained
    model, tokenizer = load_gpt2(checkpoint)
    assert model.v_head.summary.weight.abs().sum() > 0  # with its value head
    tokenizer.save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again("这 good")["input_ids"] == tokenizer("这 good")["input_ids"]
    assert run(config, tmp_path, iterations=1, model_name=str(checkpoint))["after"]
