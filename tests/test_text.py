"""From prompt to ids to text to score: the places where text silently goes wrong."""

import pytest
import torch

from rlhf_sentiment import (
    config,
    decode_responses,
    encode_prompts,
    generate_responses,
    score_texts,
)
from tests.conftest import LABELS, write_judge

prompts = config["prompts"]


def test_prompts_open_a_document_and_do_not_close_it(loaded):
    tokenizer = loaded[2]
    for prompt, ids in zip(prompts, encode_prompts(tokenizer, prompts)):
        assert ids.dtype == torch.long and ids.dim() == 1
        assert tokenizer.convert_ids_to_tokens(ids.tolist()) == ["[CLS]", *prompt]


def test_token_type_ids_never_reach_the_gpt2(loaded, monkeypatch):
    model, _, tokenizer, _ = loaded
    seen, forward = [], model.transformer.forward
    monkeypatch.setattr(
        model.transformer, "forward", lambda *args, **kw: seen.append(kw) or forward(*args, **kw)
    )
    queries = encode_prompts(tokenizer, prompts)
    generate_responses(model, tokenizer, queries, 2)
    assert seen and all(call.get("token_type_ids") is None for call in seen)


def test_a_batch_is_generated_as_if_each_row_were_alone(loaded):
    model, _, tokenizer, _ = loaded
    queries = encode_prompts(tokenizer, prompts)  # of different lengths
    together = generate_responses(model, tokenizer, queries, 12, do_sample=False)
    for query, response in zip(queries, together):
        (alone,) = generate_responses(model, tokenizer, [query], 12, do_sample=False)
        assert response.tolist() == alone.tolist()


def test_responses_end_at_their_first_sep_and_hold_no_prompt(loaded):
    model, _, tokenizer, _ = loaded
    end = tokenizer.eos_token_id
    with torch.no_grad():  # make [SEP] about as likely as everything else together
        model.lm_head.weight[end] *= 4
    torch.manual_seed(0)
    responses = generate_responses(model, tokenizer, encode_prompts(tokenizer, prompts) * 20, 12)
    lengths = {len(response) for response in responses}
    assert min(lengths) < 12 and max(lengths) <= 12 and len(lengths) > 3
    for response in responses:
        assert (response[:-1] != end).all()
        assert len(response) == 12 or response[-1] == end


@pytest.mark.parametrize("sharpness", [0.1, 1.0])
def test_the_sampler_is_the_policy_itself(loaded, sharpness):
    """Frequencies of the first token match the model's probabilities: no top-k, no temperature.

    With nearly even chances a top-50 of 68 tokens would cut a quarter off; with uneven ones another
    temperature would show.
    """
    model, _, tokenizer, _ = loaded
    model.generation_config.update(top_k=3, top_p=0.5, temperature=0.1, repetition_penalty=1.0)
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    query = encode_prompts(tokenizer, prompts[:1])[0]
    expected = model(query.unsqueeze(0)).logits[0, -1].softmax(-1)
    torch.manual_seed(0)
    responses = generate_responses(model, tokenizer, [query] * 4000, 1)
    counts = torch.bincount(torch.cat(responses), minlength=len(expected)) / 4000
    error = (expected * (1 - expected) / 4000).sqrt()
    assert ((counts - expected).abs() < 5 * error + 1e-3).all()


def test_decoded_text_is_as_a_person_would_write_it(loaded):
    tokenizer = loaded[2]

    def decode(*tokens):
        return decode_responses(tokenizer, [torch.tensor(tokenizer.convert_tokens_to_ids(tokens))])[
            0
        ]

    assert decode("很", "好", "。", "[SEP]") == "很好。"
    assert decode("very", "good", "[SEP]") == "very good"
    assert decode("good", "##s", "很", "好", "iphone", "7") == "goods很好iphone 7"
    assert decode("“", "好", "”", "！", "very", "good") == "“好”！very good"
    assert decode("[SEP]") == decode("[PAD]", "[CLS]", "[UNK]", "[MASK]") == ""
    assert decode("##s", "very", "##s") == "s verys"  # it goes on with a word of the opening


def test_the_score_is_looked_up_by_label_and_not_by_place(loaded, tmp_path):
    from transformers import pipeline

    pipe = loaded[3]
    texts = [a + b for a in prompts for b in ("很好", "失望", "物流快。", "！！")]
    positive = score_texts(pipe, texts, "positive")
    negative = score_texts(pipe, texts, "Negative")
    assert positive.shape == (16,) and positive.dtype == torch.float32
    assert torch.allclose(positive + negative, torch.ones(16), atol=1e-5)
    assert (positive < 0.5).any() and (positive > 0.5).any()  # so that the order changes
    # the same judge with its labels named the other way round
    turned = pipeline("sentiment-analysis", str(write_judge(tmp_path / "judge", LABELS[::-1])))
    assert torch.allclose(score_texts(turned, texts, "negative"), positive, atol=1e-5)


def test_scores_do_not_depend_on_the_neighbours(loaded):
    pipe = loaded[3]
    texts = ["很好", "这次购物总的来说体验很失望失望失望", "", "very good"]
    together = score_texts(pipe, texts, "positive")
    alone = torch.cat([score_texts(pipe, [text], "positive") for text in texts])
    assert torch.allclose(together, alone, atol=1e-5)


def test_a_text_longer_than_the_judge_can_read_is_cut(loaded):
    assert torch.isfinite(score_texts(loaded[3], ["好" * 500], "positive")).all()


def test_the_judge_is_in_eval_mode(loaded):
    assert not loaded[3].model.training


@pytest.mark.parametrize("label", ["positive", "POSITIVE (stars", "positive (stars 4 and 5)"])
def test_a_label_is_named_by_its_beginning(loaded, label):
    assert torch.equal(score_texts(loaded[3], ["好"], label), score_texts(loaded[3], ["好"], "pos"))
