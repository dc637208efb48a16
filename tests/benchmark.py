"""How fast is the program? Against the article's loop, TRL, and the bare matrix products.

    python tests/benchmark.py                            at GPT-2-base and BERT-base size
    python tests/benchmark.py --trl /path/to/python      also TRL 0.11.4, which that python has
    python tests/benchmark.py --sweep                    how time and memory grow with the dials
    python tests/benchmark.py model_name=... ppo_epochs=2 ...        other models, other dials

Everything is measured side by side in one run, because a ratio means something on a busy machine
and a time does not. Without model names both models get random weights: speed does not depend on
what the weights are. The last lines are `name value` pairs:

    ratio_floor        our time over that of the bare matrix products of the same work
    ratio_article      our responses per second over the article's, for the same work
    ratio_article_own  the same, each program at its own published settings
    ratio_trl          over those of TRL's PPOTrainer, for the same work
"""

import argparse
import functools
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not tests/: the program's modules lie beside it

# The same work for every side, whatever the start values of the program are by now.
WORK = {"batch_size": 128, "minibatch_size": 32, "ppo_epochs": 4, "gen_len": 16}
# Pure sampling, and never an early end: with random weights [SEP] is as rare as any other token.
SAMPLING = {"do_sample": True, "top_k": 0, "top_p": 1.0}


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clock(function, repeats=1):
    """Median seconds of `function()`, after one call that does not count if there are several."""
    seconds = []
    for _ in range(repeats + (repeats > 1)):
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[-repeats:])


def peak_memory_gib():
    """Most memory so far: of the GPU if there is one, else of this whole process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def write_models(folder):
    """Random weights in the hub models' sizes (12 layers of 768, vocabulary 21,128), as folders."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        BertTokenizer,
        GPT2Config,
        GPT2LMHeadModel,
        logging,
    )

    logging.disable_progress_bar()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"，。！？"]
    vocabulary = special + [chr(0x4E00 + i) for i in range(21_128 - len(special))]
    for name in ("gpt2", "roberta"):
        (folder / name).mkdir()
        (folder / name / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
        BertTokenizer.from_pretrained(folder / name).save_pretrained(folder / name)
    torch.manual_seed(0)
    ids = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=21_128, **ids)).save_pretrained(folder / "gpt2")
    labels = {0: "negative (stars 1, 2 and 3)", 1: "positive (stars 4 and 5)"}
    judge = BertForSequenceClassification(BertConfig(vocab_size=21_128, id2label=labels))
    judge.save_pretrained(folder / "roberta")
    return {"model_name": str(folder / "gpt2"), "reward_model_name": str(folder / "roberta")}


# ------------------------------------------------------------------------------------ the program


def measure_program(config, iterations):
    """-> ({phase: median seconds}, median responses per second, tokens per second, the trainer)."""
    import rlhf_sentiment
    from ppo import PPOTrainer

    rlhf_sentiment.set_seed(config["seed"])
    model, ref_model, tokenizer, sentiment_pipe = rlhf_sentiment.load_models(config)
    trainer = PPOTrainer(model, ref_model, config)
    old_pass, seconds_old_pass = trainer.old_pass, []

    def timed_old_pass(*queries_and_responses):
        batches = []
        seconds = clock(lambda: batches.append(old_pass(*queries_and_responses)))
        seconds_old_pass.append(seconds)
        return batches[0]

    trainer.old_pass = timed_old_pass
    rows = []
    for _ in range(1 + iterations):  # the first one warms up
        row, _, _ = rlhf_sentiment.train_one_iteration(trainer, tokenizer, sentiment_pipe)
        row["seconds_old_pass"] = seconds_old_pass[-1]
        row["seconds_update"] -= seconds_old_pass[-1]
        rows.append(row)
    names = "rollout", "score", "old_pass", "update", "total"
    phases = {n: statistics.median(row[f"seconds_{n}"] for row in rows[1:]) for n in names}
    tokens = statistics.median(row["tokens_per_second"] for row in rows[1:])
    return phases, config["batch_size"] / phases["total"], tokens, trainer


def logprob_error(trainer):
    """Mean |log-prob in mixed precision - log-prob in float32| of a token."""
    batch = {name: tensor[:32] for name, tensor in trainer.last_batch.items()}
    config, found = trainer.config, []
    for dtype in (config["dtype"], "fp32"):
        trainer.config = {**config, "dtype": dtype}
        with torch.no_grad():
            found.append(trainer.forward(trainer.model, batch)[0])
    trainer.config = config
    return (((found[0] - found[1]).abs() * batch["mask"]).sum() / batch["mask"].sum()).item()


# ---------------------------------------------------------------------------------- (a) the article


def measure_article(config, n_samples):
    """Responses per second of the article's loop, written from its text, on a few samples.

    One `generate` for each prompt and one optimizer step for each sample, all in float32, with
    the logits of the whole sequence. It has no reference model.
    """
    import rlhf_sentiment
    from ppo import logprobs_from_logits

    config = {**config, "dtype": "fp32"}
    model, _, tokenizer, sentiment_pipe = rlhf_sentiment.load_models(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.41e-5)
    gen_len, gamma, lam = config["gen_len"], 1.0, 0.95

    def logprobs_and_values(sequence):
        logits, values = model.logits_and_values(sequence, torch.ones_like(sequence))
        logprobs = logprobs_from_logits(logits[:, :-1], sequence[:, 1:])
        return logprobs[:, -gen_len:], values[:, -gen_len - 1 : -1]

    def one_iteration():
        prompts = [random.choice(config["prompts"]) for _ in range(n_samples)]
        queries = [torch.tensor(tokenizer.encode(p), device=model.device) for p in prompts]
        sequences = [
            model.generate(query[None], attention_mask=torch.ones_like(query[None]),
                           max_new_tokens=gen_len, min_new_tokens=gen_len, **SAMPLING)
            for query in queries
        ]  # fmt: skip
        texts = [p + tokenizer.decode(s[0, -gen_len:]) for p, s in zip(prompts, sequences)]
        scores = [output["score"] for output in sentiment_pipe(texts)]
        with torch.no_grad():
            olds = [logprobs_and_values(sequence) for sequence in sequences]
        for _ in range(config["ppo_epochs"]):
            for sequence, score, (old_logprobs, values) in zip(sequences, scores, olds):
                advantages, last = torch.zeros_like(values), 0.0
                for t in reversed(range(gen_len)):
                    reward = score if t == gen_len - 1 else 0.0
                    next_value = values[:, t + 1] if t < gen_len - 1 else 0.0
                    last = reward + gamma * next_value - values[:, t] + gamma * lam * last
                    advantages[:, t] = last
                logprobs, new_values = logprobs_and_values(sequence)
                policy_loss = (-advantages * torch.exp(logprobs - old_logprobs)).mean()
                loss = policy_loss + ((new_values - advantages - values) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    one_iteration()  # warms up
    return n_samples / clock(one_iteration)


# ------------------------------------------------------------------------------------ (b) the floor


def needed_products(trainer):
    """Every matrix product that one iteration cannot do without -> Counter of (batch, m, k, n).

    Padding is not needed, and neither is the language model head on the openings, a second look at
    an opening in the rollout, or a look at the last token, which predicts nothing.
    """
    from transformers import AutoConfig

    config, batch, gpt2 = trainer.config, trainer.last_batch, trainer.model.config
    bert = AutoConfig.from_pretrained(config["reward_model_name"])
    n_rows, width = len(batch["mask"]), gpt2.n_embd
    response = round(batch["mask"].sum().item() / n_rows)  # mean lengths, in tokens
    query = round(batch["attention_mask"].sum().item() / n_rows) - response
    length = query + response
    # {(in, out): how often} of the linear layers
    body = {(width, 3 * width): gpt2.n_layer, (width, width): gpt2.n_layer,
            (width, 4 * width): gpt2.n_layer, (4 * width, width): gpt2.n_layer}  # fmt: skip
    head = {(width, gpt2.vocab_size): 1}
    products = Counter()

    def add_layers(layers, n_tokens, times, backward=False):
        for (k, n), count in layers.items():
            products[1, n_tokens, k, n] += times * count
            if backward:
                products[1, n_tokens, n, k] += times * count  # gradient of the input
                products[1, k, n_tokens, n] += times * count  # gradient of the weight

    def add_attention(n_heads, queries, keys, size, times):
        products[n_heads, queries, size, keys] += times  # scores
        products[n_heads, queries, keys, size] += times  # weighted values

    # rollout: each distinct opening once, then every row token by token
    size = width // gpt2.n_head
    add_layers(body, query * len(config["prompts"]), 1)
    add_layers(body, n_rows, response - 1)
    add_layers(head, n_rows, response)
    for t in range(1, response):
        add_attention(n_rows * gpt2.n_head, 1, query + t, size, gpt2.n_layer)
    # score: [CLS] + text + [SEP]
    width, depth, n_heads = bert.hidden_size, bert.num_hidden_layers, bert.num_attention_heads
    layers = {(width, width): 4 * depth, (width, bert.intermediate_size): depth,
              (bert.intermediate_size, width): depth}  # fmt: skip
    add_layers(layers, n_rows * (length + 1), 1)
    add_attention(n_rows * n_heads, length + 1, length + 1, width // n_heads, depth)
    # old pass: policy and reference; update: ppo_epochs times forward and backward
    rows = min(config["minibatch_size"], n_rows)
    for passes, backward in ((2, False), (config["ppo_epochs"], True)):
        times = passes * n_rows // rows
        add_layers(body, rows * (length - 1), times, backward)
        add_layers(head, rows * response, times, backward)
        both = 3 if backward else 1
        add_attention(rows * gpt2.n_head, length - 1, length - 1, size, both * times * gpt2.n_layer)
    return products


def measure_floor(trainer):
    """Seconds of one iteration's matrix products, each shape timed alone, here and now."""
    from ppo import mixed_precision

    device, total = trainer.model.device, 0.0
    with mixed_precision(device, trainer.config["dtype"]):
        dtype = torch.bfloat16 if torch.is_autocast_enabled(device.type) else torch.float32
    for (batch, m, k, n), count in needed_products(trainer).items():
        left = torch.randn(*[batch] * (batch > 1), m, k, device=device, dtype=dtype)
        right = torch.randn(*[batch] * (batch > 1), k, n, device=device, dtype=dtype)
        total += count * clock(functools.partial(torch.matmul, left, right), repeats=9)
    return total


# -------------------------------------------------------------------------------------- (c) TRL


def measure_trl(config, iterations):
    """TRL 0.11.4's PPOTrainer on the same folders; run by the interpreter that has it."""
    from transformers import AutoTokenizer, pipeline
    from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

    device = 0 if torch.cuda.is_available() else -1
    tokenizer = AutoTokenizer.from_pretrained(config["model_name"])
    tokenizer.eos_token = "[SEP]"  # TRL looks for it in the responses
    model, reference = (AutoModelForCausalLMWithValueHead.from_pretrained(config["model_name"])
                        for _ in range(2))  # fmt: skip
    settings = PPOConfig(
        batch_size=config["batch_size"], mini_batch_size=config["minibatch_size"],
        ppo_epochs=config["ppo_epochs"], learning_rate=1.41e-5,
    )  # fmt: skip
    trainer = PPOTrainer(settings, model, reference, tokenizer)
    name = config["reward_model_name"]
    words = AutoTokenizer.from_pretrained(name)
    sentiment_pipe = pipeline("sentiment-analysis", name, tokenizer=words, device=device)

    def one_iteration():
        prompts = [random.choice(config["prompts"]) for _ in range(config["batch_size"])]
        queries = [torch.tensor(tokenizer.encode(prompt)[:-1]) for prompt in prompts]
        responses = trainer.generate(
            queries, batch_size=config["batch_size"], return_prompt=False,
            max_new_tokens=config["gen_len"], pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.sep_token_id, **SAMPLING,
        )  # fmt: skip
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        texts = [prompt + text.replace(" ", "") for prompt, text in zip(prompts, texts)]
        outputs = sentiment_pipe(texts, top_k=None, batch_size=64)
        scores = [{o["label"][:3]: o["score"] for o in output}["pos"] for output in outputs]
        trainer.step(queries, responses, [torch.tensor(score) for score in scores])

    one_iteration()  # warms up
    return config["batch_size"] / statistics.median(clock(one_iteration) for _ in range(iterations))


def ask(python, *arguments):
    """Run this file in a process of its own -> the dict that it prints last."""
    command = [python, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}")
    return json.loads(done.stdout.strip().split("\n")[-1])


# -------------------------------------------------------------------------------------- the report


def sweep(config):
    """Each row is a process of its own, so that its peak memory is its own."""
    print("batch_size  minibatch_size  gen_len  s/iteration  ms/response  peak GiB")
    tries = [{"batch_size": n} for n in (64, 128, 256, 512)]
    tries += [{"minibatch_size": n} for n in (8, 32, 128)]
    tries += [{"gen_len": n} for n in (16, 32, 64, 128)]
    for change in tries:
        work = {**config, **change}
        result = ask(sys.executable, "--child", "program", "--config", json.dumps(work))
        seconds = result["phases"]["total"]
        sizes = f"{work['batch_size']:10d} {work['minibatch_size']:15d} {work['gen_len']:8d}"
        each = 1000 * seconds / work["batch_size"]
        print(f"{sizes} {seconds:12.2f} {each:12.1f} {result['peak']:9.2f}", flush=True)


def report(config, options):
    """Measure every side and print the table and the `name value` lines."""
    from ppo import sequence_kl
    from rlhf_sentiment import config as start_values

    phases, ours, tokens, trainer = measure_program(config, options.iterations)
    batch, peak = trainer.last_batch, peak_memory_gib()
    print(f"torch {torch.__version__} on {trainer.model.device}, {torch.get_num_threads()} threads")
    print(f"seconds for an iteration of {config['batch_size']} responses (median):")
    for name, seconds in phases.items():
        print(f"{name:>10} {seconds:8.3f}", flush=True)
    floor = measure_floor(trainer)
    show("responses_per_second", ours)
    show("tokens_per_second", tokens)
    show("floor_seconds", floor)
    show("ratio_floor", phases["total"] / floor)
    show("peak_memory_gib", peak)
    show("logprob_error_per_token", logprob_error(trainer))
    show("kl_per_token", (sequence_kl(batch).sum() / batch["mask"].sum()).item())
    del trainer, batch
    article = measure_article(config, options.article_samples)
    show("ratio_article", ours / article)
    own = {**config, **{key: start_values[key] for key in WORK}}
    show("ratio_article_own", measure_program(own, options.iterations)[1] / article)
    if options.trl:
        work = json.dumps(config)
        times = "--iterations", str(options.iterations)
        trl = ask(options.trl, "--child", "trl", "--config", work, *times)["responses_per_second"]
        show("ratio_trl", ours / trl)
        slow = measure_program({**config, "dtype": "fp32"}, 1)[1]  # TRL's is fp32
        show("ratio_trl_fp32", slow / trl)


def show(name, value):
    """One result, at once: what was measured stands even if the rest fails."""
    print(name, f"{value:.4g}", flush=True)


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="config keys of the program")
    add("--iterations", type=int, default=3, help="measured, after one that warms up (3)")
    add("--article-samples", type=int, default=4, help="responses of the article's loop (4)")
    add("--trl", metavar="PYTHON", help="an interpreter that has trl==0.11.4")
    add("--sweep", action="store_true", help="vary batch_size, minibatch_size and gen_len instead")
    add("--child", choices=("program", "trl"), help=argparse.SUPPRESS)
    add("--config", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    if options.child == "trl":
        result = {"responses_per_second": measure_trl(options.config, options.iterations)}
        print("\n" + json.dumps(result))
    elif options.child == "program":
        phases, *_ = measure_program(options.config, options.iterations)
        print("\n" + json.dumps({"phases": phases, "peak": peak_memory_gib()}))
    else:
        from rlhf_sentiment import ConfigError, check_config, parse_overrides

        with tempfile.TemporaryDirectory() as folder:
            try:
                given = {**WORK, "iterations": 10, **parse_overrides(options.overrides)}
                if "model_name" not in given:
                    check_config(given)  # before anything takes time
                    given |= write_models(Path(folder))
                config = check_config(given)
            except ConfigError as error:
                sys.exit(f"error: {error}")
            (sweep(config) if options.sweep else report(config, options))
