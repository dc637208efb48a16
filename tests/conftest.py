"""Fixtures: tiny models with random weights in the exact file layout of the two hub models."""

import copy
import json

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import rlhf_sentiment
from tests import tiny_models


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also kill runs at random (minutes)")


CHARACTERS = sorted(
    set(
        "".join(rlhf_sentiment.prompts + rlhf_sentiment.held_out_prompts)
        + "好差不喜欢失望物流快慢。！“”"
    )
)
WORDS = ["very", "good", "##s", "iphone", "7", "!", ".", "[unused1]"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *CHARACTERS, *WORDS]
LABELS = list(tiny_models.LABELS.values())


def write_tokenizer(folder, max_length):
    special = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]",
               "cls_token": "[CLS]", "mask_token": "[MASK]"}  # fmt: skip
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    settings = {"do_lower_case": True, "model_max_length": max_length, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps(special))


def write_gpt2(folder, dtype=torch.float32, **settings):
    """What `uer/gpt2-chinese-cluecorpussmall` holds: old keys, old buffers, an untied head."""
    folder.mkdir(parents=True)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | settings
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(VOCABULARY), initializer_range=0.2, **sizes))
    weights = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    for layer in range(sizes["n_layer"]):
        n = sizes["n_positions"]
        mask = torch.ones(n, n).tril().view(1, 1, n, n).to(torch.uint8)
        weights[f"transformer.h.{layer}.attn.bias"] = mask
        weights[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    torch.save(weights, folder / "pytorch_model.bin")
    config = {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "gradient_checkpointing": False,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
        "n_ctx": sizes["n_positions"], "n_inner": None, "output_past": True, **sizes,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 320}},
        "tokenizer_class": "BertTokenizer", "vocab_size": len(VOCABULARY),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, 1024)
    return folder


def write_judge(folder, labels=tuple(LABELS), **settings):
    """What `uer/roberta-base-finetuned-jd-binary-chinese` holds: really a BERT."""
    folder.mkdir(parents=True)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 64, "max_position_embeddings": 64} | settings  # fmt: skip
    config = BertConfig(
        vocab_size=len(VOCABULARY), initializer_range=1.0, id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)}, **sizes,
    )  # fmt: skip
    torch.manual_seed(1)
    model = BertForSequenceClassification(config)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    written = config.to_dict() | {"architectures": ["BertForSequenceClassification"],
                                  "tokenizer_class": "BertTokenizer", "model_type": "bert"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(written))
    write_tokenizer(folder, 512)
    return folder


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """The config keys that name tiny models in the hub models' layout, and small sizes."""
    folder = tmp_path_factory.mktemp("hub")
    return {
        "model_name": str(write_gpt2(folder / "gpt2")),
        "reward_model_name": str(write_judge(folder / "roberta")),
        "iterations": 3, "batch_size": 6, "minibatch_size": 4, "gen_len": 8, "ppo_epochs": 2,
        "eval_samples": 4, "dtype": "fp32", "device": "cpu", "lr": 1e-3,
    }  # fmt: skip


@pytest.fixture(scope="session")
def _loaded(hub):
    return rlhf_sentiment.load_models({**rlhf_sentiment.config, **hub})


@pytest.fixture
def loaded(_loaded):
    """(model, ref_model, tokenizer, sentiment_pipe); the two GPT-2s are this test's own."""
    model, ref_model, tokenizer, sentiment_pipe = _loaded
    return copy.deepcopy(model), copy.deepcopy(ref_model), tokenizer, sentiment_pipe


@pytest.fixture
def settings(hub):
    """A complete config for tiny models."""
    return {**rlhf_sentiment.config, **hub}
