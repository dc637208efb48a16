"""Any GPT-2 and any classifier: a byte-pair tokenizer, a DistilBERT, English openings."""

import json
from pathlib import Path

import torch

from gpt2_value_head import load_gpt2
from rlhf_sentiment import config as start_values
from rlhf_sentiment import (
    decode_responses,
    encode_prompts,
    generate_responses,
    load_models,
    main,
    score_texts,
)
from tests.helpers import as_arguments, run, script


def test_one_token_is_start_end_and_pad(english):
    _, tokenizer = load_gpt2(english["model_name"])
    assert tokenizer.bos_token == tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    (ids,) = encode_prompts(tokenizer, ["This film is"])
    assert ids[0] == tokenizer.bos_token_id and tokenizer.eos_token_id not in ids[1:]
    assert tokenizer.decode(ids[1:]) == "This film is"


def test_blanks_stay_where_a_person_would_write_them(english):
    _, tokenizer = load_gpt2(english["model_name"])
    ids = [torch.tensor(tokenizer(text)["input_ids"][1:]) for text in (" very good .", "!")]
    assert decode_responses(tokenizer, ids) == [" very good .", "!"]


def test_padding_and_end_are_told_apart_although_they_are_one_token(english):
    model, tokenizer = load_gpt2(english["model_name"])
    queries = encode_prompts(tokenizer, ["This film is", "I", "I really hate the end and"])
    together = generate_responses(model, tokenizer, queries, 8, do_sample=False)
    for query, response in zip(queries, together):
        (alone,) = generate_responses(model, tokenizer, [query], 8, do_sample=False)
        assert response.tolist() == alone.tolist()


def test_a_classifier_without_token_types_and_with_short_labels(english):
    *_, pipe = load_models({**start_values, **english})
    texts = ["This film is very good", "I hate the end"]
    positive, negative = (score_texts(pipe, texts, label) for label in ("positive", "neg"))
    assert torch.allclose(positive + negative, torch.ones(2), atol=1e-5)


def test_an_english_pair_trains_saves_and_resumes(english, tmp_path):
    folder = Path(run(english, tmp_path, iterations=2, save_freq=1)["run_dir"])
    samples = (folder / "samples.txt").read_text(encoding="utf-8").splitlines()
    texts = [line.split(maxsplit=3)[3] for line in samples if " KL " in line]
    assert len(texts) == 6 and all(text.startswith(("This film is", "I really")) for text in texts)
    again = main({"resume": str(folder), "iterations": 3})
    assert again["after"]["score"] >= 0
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert stored["prompts"] == ["This film is", "I really"]


def test_openings_come_from_the_command_line(english, tmp_path):
    arguments = {**english, "prompts": "['The end is']", "iterations": 1, "save_dir": tmp_path}
    process = script(*as_arguments(arguments))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and err == "" and "  The end is" in out
