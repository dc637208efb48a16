"""The offline stand-ins: fluent of both kinds, judged well, cached and mended."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import rlhf_sentiment
from rlhf_sentiment import (
    decode_responses,
    encode_prompts,
    generate_responses,
    load_models,
    score_texts,
)
from tests.tiny_models import CACHE, build, make_review, make_reviews, train

TINY = {"gpt2_steps": 2, "classifier_steps": 2}


@pytest.fixture(scope="module")
def stand_ins():
    """The models that `offline=True` uses (built on the first call, about a minute)."""
    return load_models({**rlhf_sentiment.config, "offline": True, "device": "cpu", "dtype": "fp32"})


def test_the_reviews_are_many_and_half_of_them_positive():
    texts, labels = make_reviews(10_000)
    assert len(set(texts)) == 10_000 and 0.45 < sum(labels) / len(labels) < 0.55
    assert max(map(len, texts)) < 60 and all(text.endswith("。") for text in texts)
    assert make_review(random.Random(3)) == make_review(random.Random(3))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_training_step_sees_the_weights_of_the_step_before(dtype):
    """An autocast context keeps the rounded weights that it began with: it must not be kept."""

    class Line(torch.nn.Module):  # y = w x, trained towards y = 3 for x = 1
        device = torch.device("cpu")

        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(1, 1, bias=False)

        def forward(self, x):
            return SimpleNamespace(loss=(self.linear(x) - 3).square().mean())

    model, bar = Line(), SimpleNamespace(update=lambda: None)
    train(model, [{"x": torch.ones(4, 1)}] * 200, 0.1, bar, dtype)
    assert model.linear.weight.item() == pytest.approx(3, abs=0.1)


def test_the_judge_is_right_about_reviews_that_it_has_not_seen(stand_ins):
    texts, labels = make_reviews(1000, seed=1, exclude=set(make_reviews(20_000)[0]))
    said = score_texts(stand_ins[3], texts, "positive") > 0.5
    assert (said == torch.tensor(labels).bool()).float().mean() > 0.97


def test_the_untrained_policy_writes_both_kinds_about_equally_often(stand_ins):
    model, _, tokenizer, judge = stand_ins
    torch.manual_seed(0)
    for key in ("prompts", "held_out_prompts"):
        openings = rlhf_sentiment.config[key]
        queries = encode_prompts(tokenizer, openings * 50)
        responses = generate_responses(model, tokenizer, queries, 16)
        texts = [o + t for o, t in zip(openings * 50, decode_responses(tokenizer, responses))]
        scores = score_texts(judge, texts, "positive")
        assert 0.35 < scores.mean() < 0.65
        assert len(set(texts)) > 120  # of 200: varied
        assert sum(text.endswith("。") for text in texts) > 160  # most say all they have to say


def test_the_label_names_are_the_hub_models(stand_ins):
    hub = {0: "negative (stars 1, 2 and 3)", 1: "positive (stars 4 and 5)"}
    assert stand_ins[3].model.config.id2label == hub


def test_a_build_is_cached_reused_and_mended(tmp_path):
    random.seed(1)
    torch.manual_seed(1)
    states = random.getstate(), torch.get_rng_state()
    gpt2, judge = build(cache=tmp_path, **TINY)
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])
    assert len(AutoTokenizer.from_pretrained(gpt2)) > 300
    assert AutoModelForSequenceClassification.from_pretrained(judge).config.num_labels == 2

    weights = Path(gpt2, "model.safetensors")
    first = weights.stat().st_mtime_ns
    assert build(cache=tmp_path, **TINY) == (gpt2, judge)
    assert weights.stat().st_mtime_ns == first  # reused

    weights.write_bytes(weights.read_bytes()[:-1])  # damaged
    build(cache=tmp_path, **TINY)
    assert weights.stat().st_mtime_ns != first
    Path(judge, "config.json").unlink()  # incomplete
    build(cache=tmp_path, **TINY)
    assert Path(judge, "config.json").exists()

    other, _ = build(cache=tmp_path, gpt2_steps=3, classifier_steps=2)  # another recipe
    assert other != gpt2
    assert [p.name for p in tmp_path.glob("building-*")] == []


def test_the_cache_is_kept_out_of_the_repository():
    ignored = (CACHE.parent / ".gitignore").read_text().split()
    assert f"{CACHE.name}/" in ignored
