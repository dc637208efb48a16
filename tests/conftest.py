"""Fixtures: tiny models with random weights, in the exact file layout of models on the hub."""

import copy
import json

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

import rlhf_sentiment
from tests import tiny_models


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also kill runs at random (minutes)")


PROMPTS = rlhf_sentiment.config["prompts"] + rlhf_sentiment.config["held_out_prompts"]
CHARACTERS = sorted(set("".join(PROMPTS) + "好差不喜欢失望物流快慢。！“”"))
WORDS = ["very", "good", "##s", "iphone", "7", "!", ".", "[unused1]"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *CHARACTERS, *WORDS]
SEED = 7  # of a classifier that finds some texts good and some bad
LABELS = list(tiny_models.LABELS.values())


def write_tokenizer(folder, max_length):
    special = {
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    }
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


def write_judge(folder, labels=tuple(LABELS), spare_rows=0, **settings):
    """What `uer/roberta-base-finetuned-jd-binary-chinese` holds: really a BERT."""
    folder.mkdir(parents=True)
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "max_position_embeddings": 64,
    } | settings  # fmt: skip
    config = BertConfig(
        vocab_size=len(VOCABULARY) + spare_rows, initializer_range=1.0,
        id2label=dict(enumerate(labels)), label2id={name: i for i, name in enumerate(labels)},
        **sizes,
    )  # fmt: skip
    torch.manual_seed(SEED)
    model = BertForSequenceClassification(config)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    names = {
        "architectures": ["BertForSequenceClassification"],
        "tokenizer_class": "BertTokenizer",
        "model_type": "bert",
    }
    (folder / "config.json").write_text(json.dumps(config.to_dict() | names))
    write_tokenizer(folder, 512)
    return folder


ENGLISH = [
    "This",
    "film",
    "is",
    "very",
    "good",
    ".",
    "I",
    "really",
    "hate",
    "the",
    "end",
    "and",
    "love",
    "music",
    "!",
]


def write_english_gpt2(folder):
    """What `gpt2` and `lvwerra/gpt2-imdb` hold: a byte-pair tokenizer of vocab.json and merges.txt,
    in which `<|endoftext|>` is the start, the end and whatever else is special."""
    folder.mkdir(parents=True)
    tokenizer = ByteLevelBPETokenizer()
    texts = [" ".join(ENGLISH)] * 3
    tokenizer.train_from_iterator(texts, 400, 2, False, special_tokens=["<|endoftext|>"])
    tokenizer.save_model(str(folder))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    end = tokenizer.token_to_id("<|endoftext|>")
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(), initializer_range=0.2,
        bos_token_id=end, eos_token_id=end, **sizes,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    return folder


def write_english_judge(folder):
    """What `distilbert-base-uncased-finetuned-sst-2-english` holds: no token types, new labels."""
    folder.mkdir(parents=True)
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*letters, *(f"##{letter}" for letter in letters)]
    words = [word.lower() for word in ENGLISH if len(word) > 1]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, ".", "!", *pieces]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    settings = {"do_lower_case": True, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    labels = {0: "NEGATIVE", 1: "POSITIVE"}
    torch.manual_seed(1)
    config = DistilBertConfig(
        vocab_size=len(vocabulary), dim=32, n_layers=2, n_heads=4, hidden_dim=64,
        initializer_range=1.0, id2label=labels, label2id={name: i for i, name in labels.items()},
    )  # fmt: skip
    DistilBertForSequenceClassification(config).save_pretrained(folder)
    return folder


# Small sizes for whatever runs the whole program.
SMALL = {
    "iterations": 3, "batch_size": 6, "minibatch_size": 4, "gen_len": 8, "ppo_epochs": 2,
    "eval_samples": 4, "dtype": "fp32", "device": "cpu", "lr": 1e-3,
}  # fmt: skip


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """The config keys that name tiny models in the hub models' layout, and small sizes."""
    folder = tmp_path_factory.mktemp("hub")
    names = {
        "model_name": str(write_gpt2(folder / "gpt2")),
        "reward_model_name": str(write_judge(folder / "roberta")),
    }
    return names | SMALL


@pytest.fixture(scope="session")
def english(tmp_path_factory):
    """The same for an English pair, with English openings."""
    folder = tmp_path_factory.mktemp("english")
    names = {
        "model_name": str(write_english_gpt2(folder / "gpt2")),
        "reward_model_name": str(write_english_judge(folder / "distilbert")),
        "prompts": ["This film is", "I really"],
        "held_out_prompts": ["The end is"],
    }
    return names | SMALL


@pytest.fixture(scope="session")
def finished(hub, tmp_path_factory):
    """The summary of a complete little run."""
    save_dir = tmp_path_factory.mktemp("finished")
    config = {**hub, "save_dir": str(save_dir), "iterations": 12, "save_freq": 4}
    return rlhf_sentiment.main(config)


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
