"""The policy with its value head: loading, saving, and numbers that padding does not touch."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, pipeline

from gpt2_value_head import GPT2HeadWithValueModel, ValueHead, load_gpt2
from tests.conftest import write_gpt2

IDS = torch.tensor([[2, 10, 11, 12, 13], [2, 20, 21, 22, 23]])


def test_a_plain_checkpoint_loads_with_unchanged_logits_and_a_value_of_0(hub):
    plain = GPT2LMHeadModel.from_pretrained(hub["model_name"]).eval()
    model, info = GPT2HeadWithValueModel.from_pretrained(
        hub["model_name"], output_loading_info=True
    )
    logits, values = model.eval().logits_and_values(IDS, torch.ones_like(IDS))
    assert set(info["missing_keys"]) == {"v_head.summary.weight", "v_head.summary.bias"}
    assert torch.equal(logits, plain(IDS).logits)
    assert torch.equal(values, torch.zeros(2, 5))


def test_the_value_head_starts_at_zero_whatever_made_it():
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10)
    for head in (ValueHead(config), GPT2HeadWithValueModel(config).v_head):
        assert all((parameter == 0).all() for parameter in head.parameters())
        assert not any("Dropout" in type(module).__name__ for module in head.modules())
    # everything else starts as a GPT-2 does
    spread = GPT2HeadWithValueModel(config).transformer.wte.weight.std().item()
    assert spread == pytest.approx(config.initializer_range, rel=0.3)


def test_what_is_saved_loads_back_and_loads_as_a_plain_gpt2(loaded, tmp_path):
    model, _, tokenizer, _ = loaded
    torch.nn.init.normal_(model.v_head.summary.weight)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load_gpt2(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(plain) is GPT2LMHeadModel
    assert torch.allclose(plain(IDS).logits, model(IDS).logits, atol=1e-5)
    assert pipeline("text-generation", str(tmp_path))("好", max_new_tokens=2)[0]["generated_text"]


def test_the_language_model_head_stays_tied_to_the_embedding(loaded):
    model = loaded[0]
    assert model.lm_head.weight is model.transformer.wte.weight
    assert len(list(model.parameters())) == len({p.data_ptr() for p in model.parameters()})


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_neither_logits_nor_values(loaded, side):
    model = loaded[0]
    torch.nn.init.normal_(model.v_head.summary.weight)
    logits, values = model.logits_and_values(IDS, torch.ones_like(IDS))
    pads, zeros = torch.full((2, 3), 7), torch.zeros(2, 3, dtype=torch.long)
    order = (lambda pad, real: [pad, real]) if side == "left" else (lambda pad, real: [real, pad])
    padded = torch.cat(order(pads, IDS), 1)
    mask = torch.cat(order(zeros, torch.ones_like(IDS)), 1)
    padded_logits, padded_values = model.logits_and_values(padded, mask)
    real = slice(3, None) if side == "left" else slice(0, 5)
    assert torch.allclose(padded_logits[:, real], logits, atol=1e-5)
    assert torch.allclose(padded_values[:, real], values, atol=1e-5)


def test_columns_are_a_slice_of_the_full_result(loaded):
    model = loaded[0]
    logits, values = model.logits_and_values(IDS, torch.ones_like(IDS))
    some_logits, some_values = model.logits_and_values(IDS, torch.ones_like(IDS), slice(1, 3))
    assert torch.allclose(some_logits, logits[:, 1:3], atol=1e-6)
    assert torch.allclose(some_values, values[:, 1:3], atol=1e-6)


def test_loading_mends_what_the_hub_config_says(hub):
    # eos 50256 of a small vocabulary, dropout on, the slow spelling of GELU
    model, tokenizer = load_gpt2(hub["model_name"])
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.sep_token_id == 3
        assert config.pad_token_id == tokenizer.pad_token_id == 0
    assert not model.training
    assert model.config.activation_function == "gelu_pytorch_tanh"


def test_a_half_precision_checkpoint_is_trained_in_float32(tmp_path):
    model, _ = load_gpt2(write_gpt2(tmp_path / "half", dtype=torch.float16))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
