"""Teach a Chinese GPT-2 to write positive reviews: reinforcement learning from a sentiment judge.

A language model continues review openings. A sentiment classifier, the judge, reads each review
and says how likely it is positive. PPO makes continuations that scored well more likely, while a
penalty keeps the model close to what it was. One iteration (`train_one_iteration`):

    1. draw a batch of openings from the pool                prompts, encode_prompts
    2. let GPT-2 write a continuation of each                generate_responses, decode_responses
    3. let the judge score opening + continuation            score_texts
    4. update GPT-2 on (queries, responses, scores)          PPOTrainer.step in ppo.py

Run it:  python rlhf_sentiment.py [key=value ...]            on a GPU, with the hub in reach
         python rlhf_sentiment.py offline=True               anywhere, with small stand-in models

Read it: this file down to "Plumbing", then gpt2_value_head.py, then ppo.py.
Shapes:  B responses in a batch, Q the longest query, R the longest response.
"The article" is the last of the references in README.md; departures from it are named.
"""

import ast
import copy
import csv
import difflib
import functools
import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy
import torch
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging, set_seed
from transformers import pipeline

from gpt2_value_head import check_vocabulary, load_gpt2
from ppo import PPOTrainer, best_of_n, best_possible, mixed_precision, sequence_kl

config = {
    # which models: names on the hub, or local folders
    "model_name": "uer/gpt2-chinese-cluecorpussmall",  # the GPT-2 that learns
    "reward_model_name": "uer/roberta-base-finetuned-jd-binary-chinese",  # the judge
    "offline": False,  # True: small stand-ins for both, built on the spot (tests/tiny_models.py)
    "reward_label": "positive",  # the judge's label to reward; "negative" trains a grumbler
    # how much: iterations x batch_size responses in all
    "iterations": 157,  # rollout batches; the learning rate decays to 0 over them
    "batch_size": 128,  # responses in each; more: steadier gradients, slower iterations
    "gen_len": 16,  # most new tokens of a response; more: longer texts, harder credit assignment
    # the update
    "ppo_epochs": 4,  # passes over each batch; more: learns faster per sample, may overshoot
    "minibatch_size": 32,  # responses per optimizer step; smaller: less memory, noisier steps
    "lr": 1.41e-5,  # Adam's step for the transformer; small models want more (README)
    "value_lr": 1e-3,  # Adam's step for the value head, which starts from nothing
    "max_grad_norm": 1.0,  # longer gradients are shortened to this
    # the leash, a penalty on the KL divergence: how far from the original model the policy may go
    "kl_coef": 0.05,  # price of a nat of KL, in units of score; 0: no leash, the text degenerates
    "kl_target": None,  # nats per response to steer kl_coef towards; None: kl_coef stays fixed
    "kl_horizon": 10000,  # responses over which that steering acts; smaller: acts faster
    # PPO's own
    "gamma": 1.0,  # discount per token; below 1 the score at the end fades for early tokens
    "lam": 1.0,  # GAE: 1 trusts the sampled rewards, 0 trusts the critic (the article: 0.95)
    "cliprange": 0.2,  # how far a ratio may leave 1 before its gradient stops
    "vf_coef": 0.1,  # weight of the value loss, whose gradient also reaches the transformer
    # where and how
    "seed": 0,  # same seed, same run (on a CPU, bit for bit)
    "device": "auto",  # "auto", "cpu", "cuda", "cuda:1", "mps"
    "dtype": "auto",  # "fp32"; "bf16": faster products, rounded; "auto": bf16 where it is fast
    "save_dir": "runs",  # every run makes a fresh folder in here
    "save_freq": 50,  # iterations between checkpoints; one is always written after the last
    "resume": None,  # a run folder to continue
    "eval_samples": 256,  # responses per opening before and after; more: smaller error bars
    "explain": 0,  # n: token table of a response every n iterations too; 0: only first and last
}

# The pool: "just got the goods, I feel", "this film is very", "honestly, it is really",
# "all in all, this shopping experience was very".
prompts = ["刚收到货，感觉", "这部电影很", "说实话，真的很", "这次购物总的来说体验很"]
# Never trained on; of the same kinds, in other words: "used it for a few days, I feel", "this
# story is very", "frankly, it is really", "all in all, this hotel stay was very".
held_out_prompts = ["东西用了几天，感觉", "这个故事很", "老实说，真的很", "这次住店总的来说体验很"]


def load_models(config):
    """-> (model, ref_model, tokenizer, sentiment_pipe), checked, in eval mode, on the device.

    Raises `ConfigError` with one readable line if a model cannot be loaded or does not fit.
    """
    names = config["model_name"], config["reward_model_name"]
    if config["offline"]:
        from tests.tiny_models import build

        names = build()
    with loading("model_name", names[0]):
        model, tokenizer = load_gpt2(names[0])
    check_prompts(tokenizer, model.config.n_positions, config["gen_len"])
    model.to(pick_device(config["device"]))
    if model.device.type == "cpu":  # on texts this short plain products beat the fused kernel
        model.set_attn_implementation("eager")
    # A departure from the article: the model as it was, towards which the KL penalty pulls.
    ref_model = copy.deepcopy(model)

    with loading("reward_model_name", names[1]):
        judge, info = AutoModelForSequenceClassification.from_pretrained(
            names[1], dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True)
        wrong = [*info["missing_keys"], *info["mismatched_keys"]]
        require(not wrong, f"weights are missing or have another shape: {wrong}")
        words = AutoTokenizer.from_pretrained(names[1])
        check_vocabulary(words, judge.config)
        sentiment_pipe = pipeline("sentiment-analysis", judge, tokenizer=words, device=model.device)
    # less one, for the closing [SEP] that the judge's tokenizer adds
    check_prompts(words, longest_text(sentiment_pipe) - 1, config["gen_len"])
    rewarded_label(sentiment_pipe, config["reward_label"])
    return model, ref_model, tokenizer, sentiment_pipe


def encode_prompts(tokenizer, prompts):
    """-> list of 1-D LongTensors, `[CLS] c1 .. cn`.

    The article's `tokenizer.encode` appends `[SEP]`. To a GPT-2 that was trained on documents
    `[CLS] text [SEP]` that means "the end": it would start a new document, not continue this one.
    """
    ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    return [torch.tensor([tokenizer.cls_token_id, *row]) for row in ids]


def generate_responses(model, tokenizer, queries, gen_len, do_sample=True):
    """-> list of 1-D LongTensors, each of 1..gen_len ids and ending at its first `[SEP]`.

    One `generate` for the whole batch, padded on the left so that every row goes on at its own
    last token. The sampler must be the very policy that PPO scores, without top-k, top-p or
    temperature (`generate` has top_k=50 if it is left out): else the KL drifts below 0.
    """
    batch = tokenizer.pad({"input_ids": queries}, padding_side="left", return_tensors="pt")
    pure = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} if do_sample else {}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.sep_token_id}
    output = model.generate(
        **batch.to(model.device), max_new_tokens=gen_len, do_sample=do_sample, **pure, **ends
    )
    tails = output[:, batch["input_ids"].shape[1] :].cpu()  # (B, R): what follows the queries
    # The article keeps the last gen_len ids; where a row ended early, that is padding too.
    ended = tails == tokenizer.sep_token_id
    lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, tails.shape[1])
    return [ids[:length] for ids, length in zip(tails, lengths)]


WIDE = "[\u2014-\u2026\u3000-\u9fff\uf900-\uffef]"  # Chinese characters and punctuation


def decode_responses(tokenizer, responses):
    """-> list of str as a person would write them: no `[SEP]`, no blanks beside Chinese."""
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return [re.sub(f"(?<={WIDE}) +| +(?={WIDE})", "", text).strip() for text in texts]


def longest_text(sentiment_pipe):
    """How many tokens the judge can read."""
    judge, reader = sentiment_pipe.model, sentiment_pipe.tokenizer
    return min(judge.config.max_position_embeddings, reader.model_max_length)


def score_texts(sentiment_pipe, texts, reward_label):
    """-> FloatTensor (B,): P(the one label that starts with `reward_label`, case ignored)."""
    label = rewarded_label(sentiment_pipe, reward_label)
    longest = longest_text(sentiment_pipe)
    # top_k=None: every label; they come sorted by score, so that places in the list mean nothing
    outputs = sentiment_pipe(texts, top_k=None, truncation=True, max_length=longest, batch_size=64)
    return torch.tensor([{o["label"]: o["score"] for o in output}[label] for output in outputs])


def rollout(trainer, tokenizer, sentiment_pipe, openings):
    """Steps 2 and 3 for B openings -> queries, responses, texts, scores (B,), time stamps."""
    config, clock = trainer.config, [time.perf_counter()]
    queries = encode_prompts(tokenizer, openings)
    with mixed_precision(trainer.model.device, config["dtype"]):
        responses = generate_responses(trainer.model, tokenizer, queries, config["gen_len"])
        # Judged and logged is what a person would read, with the opening as it was written.
        texts = [o + text for o, text in zip(openings, decode_responses(tokenizer, responses))]
        clock.append(time.perf_counter())
        scores = torch.as_tensor(score_texts(sentiment_pipe, texts, config["reward_label"]))
        clock.append(time.perf_counter())
    return queries, responses, texts, scores, clock


def train_one_iteration(trainer, tokenizer, sentiment_pipe):
    """Steps 1 to 4 -> (one row of metrics.csv, texts, scores)."""
    # 1. draw: the same few openings again and again, each time continued differently
    openings = [random.choice(prompts) for _ in range(trainer.config["batch_size"])]
    # 2. write and 3. judge
    queries, responses, texts, scores, clock = rollout(trainer, tokenizer, sentiment_pipe, openings)
    # 4. learn
    stats = trainer.step(queries, responses, scores)
    clock.append(time.perf_counter())

    score, n_tokens, seconds = scores.mean().item(), sum(map(len, responses)), clock[3] - clock[0]
    row = {
        "iteration": trainer.iteration, "score_mean": score,
        "score_std": scores.std(correction=0).item(), **stats,
        "objective": score - stats["kl_coef"] * stats["kl"],
        "response_length": n_tokens / len(responses),
        "distinct": len({tuple(ids.tolist()) for ids in responses}) / len(responses),
        "seconds_rollout": clock[1] - clock[0], "seconds_score": clock[2] - clock[1],
        "seconds_update": clock[3] - clock[2], "seconds_total": seconds,
        "tokens_per_second": n_tokens / seconds}  # fmt: skip
    return row, texts, scores


def main(config):
    """Train; -> summary dict with `before`, `after`, `held_out`, `ceiling` and `run_dir`.

    `config` holds the keys to change, or is a changed copy of the dict above (of which only what
    differs counts as given). Raises `ConfigError`, a `ValueError`, for a user's mistake, and
    `FloatingPointError` if a score, a loss or a gradient is not finite.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a console without Chinese must not end the run
    config = check_config(config)
    model, ref_model, tokenizer, sentiment_pipe = load_models(config)
    trainer = PPOTrainer(model, ref_model, config)
    run = RunFolder(config, trainer, tokenizer)  # with `resume`: back at the newest checkpoint
    run.before = run.before or evaluate(trainer, tokenizer, sentiment_pipe)

    done, last = trainer.iteration, config["iterations"]
    bar = tqdm(range(done + 1, last + 1), initial=done, total=last, disable=None, ncols=100)
    with stop_signals() as stop:
        for iteration in bar:
            # a seed for each, so that a resumed run draws what an uninterrupted one would have
            set_seed(hash((config["seed"], iteration)) % 2**32)
            row, texts, scores = train_one_iteration(trainer, tokenizer, sentiment_pipe)
            bar.set_postfix(score=f"{row['score_mean']:.3f}", kl=f"{row['kl']:.2f}", refresh=False)
            with one_line(f"{run.path} could not be written to (REASON). What was saved before is "
                          f"whole: make room, then {run.resume_command}"):  # fmt: skip
                run.log(row, texts, scores)
                if stop or iteration == last or iteration % config["save_freq"] == 0:
                    run.save_checkpoint()
            if stop:
                tqdm.write(f"to continue: {run.resume_command}")
                raise SystemExit(128 + stop[0])

    return run.finish(evaluate(trainer, tokenizer, sentiment_pipe))


# ======================================================================================= Plumbing
# A first reading may stop here. Below: evaluation, the run folder, checks of what a user gives.

# ------------------------------------------------------------------------------------- evaluation


def evaluate(trainer, tokenizer, sentiment_pipe):
    """Sample `eval_samples` responses to each opening -> {"pool": summary, "held out": summary}."""
    config, results = trainer.config, {}
    set_seed(hash((config["seed"], trainer.iteration, 0)) % 2**32)
    n, size = config["eval_samples"], config["batch_size"]
    for name, openings in (("pool", prompts), ("held out", held_out_prompts)):
        todo, samples = [opening for opening in openings for _ in range(n)], []
        for i in tqdm(range(0, len(todo), size), name, disable=None, leave=False, ncols=100):
            batch = todo[i : i + size]
            queries, ids, texts, scores, _ = rollout(trainer, tokenizer, sentiment_pipe, batch)
            kls = sequence_kl(trainer.old_pass(queries, ids))
            samples += zip(ids, texts, scores.tolist(), kls.tolist())
        results[name] = summarize(samples, n, config["kl_coef"], tokenizer.sep_token_id)
    return results


def summarize(samples, n, kl_coef, end_id):
    """Means and standard errors of (response, text, score, kl), n of each opening in turn."""
    responses, texts, scores, kls = zip(*samples)
    rows, n_rows = [response.tolist() for response in responses], len(responses)
    ends = sum(row[-1] == end_id for row in rows)
    pairs = [pair for row in rows for pair in zip(row, row[1:])]
    summary = {
        "examples": list(zip(texts, scores))[::n],  # one of each opening
        "distinct_2": len(set(pairs)) / max(1, len(pairs)),
        "length": sum(map(len, rows)) / n_rows, "ended": ends / n_rows}  # fmt: skip
    scores, kls = (torch.tensor(x, dtype=torch.float64).view(-1, n) for x in (scores, kls))
    for name, x in (("score", scores), ("kl", kls), ("objective", scores - kl_coef * kls)):
        # the openings are fixed, not drawn: only the spread within each of them is chance
        error = (x.var(1, correction=min(1, n - 1)).mean() / len(samples)).sqrt()
        summary |= {name: x.mean().item(), f"{name}_se": error.item()}
    return summary | {"scores": scores.tolist()}


def compare(name, before, after, kl_coef):
    """Print before, after and the ceiling of one set of openings -> dict of the three."""
    ceiling, scores, _ = None, torch.tensor(before.pop("scores")), after.pop("scores")
    tqdm.write(f"\n{name}: a text of each opening before -> after training, with scores")
    for (old, old_score), (new, new_score) in zip(before["examples"], after["examples"]):
        # filled with wide blanks, so that Chinese columns stay aligned
        tqdm.write(f"{old_score:.3f} {old[:21]:\u3000<21} -> {new_score:.3f} {new[:21]}")
    tqdm.write("                  score      KL (nats)      objective  distinct-2  length  ended")
    means = "{:9}{score:6.3f} ± {score_se:.3f} {kl:6.3f} ± {kl_se:.3f} {objective:6.3f}"
    means += " ± {objective_se:.3f}"
    for label, row in (("before", before), ("after", after)):
        tqdm.write((means + "{distinct_2:12.3f}{length:8.2f}{ended:7.2f}").format(label, **row))
    if kl_coef > 0:  # without a leash the best policy repeats the one best text for ever
        ceiling = best_possible(scores, kl_coef)
        gain = ceiling["objective"] - before["objective"]
        ceiling["share"] = (after["objective"] - before["objective"]) / gain if gain > 0 else 0.0
        tries = [best_of_n(scores, 2**k, kl_coef) for k in range(7) if 2**k <= scores.shape[1]]
        best = ceiling["best_of_n"] = max(tries, key=lambda result: result["objective"])
        tqdm.write(means.format("ceiling", **ceiling))
        tqdm.write(f"PPO reached {ceiling['share']:.0%} of the possible gain in the objective; "
                   f"best of {best['n']}: {best['objective']:.3f}")  # fmt: skip
        if (n := ceiling["effective_samples"]) < 30:
            tqdm.write(f"ceiling too low, share too high: raise eval_samples (effective: {n:.0f})")
    return {"before": before, "after": after, "ceiling": ceiling}


# --------------------------------------------------------------------------------- the run folder

LOGS = "metrics.csv", "samples.txt"
HEADER = "iteration  score ± std       KL  objective  entropy  clipfrac  distinct  length  seconds"
LINE = "{iteration:9d}  {score_mean:.3f} ± {score_std:.3f} {kl:6.3f} {objective:10.3f}"
LINE += "{entropy:9.2f} {clipfrac:9.3f} {distinct:9.2f} {response_length:7.1f} {seconds_total:8.1f}"


class RunFolder:
    """What a run leaves behind: config, metrics, samples, checkpoints, evaluation, curve."""

    def __init__(self, config, trainer, tokenizer):
        self.config, self.trainer, self.tokenizer = config, trainer, tokenizer
        self.before, self.recent = None, []  # the evaluation before training; see watch()
        self.write_once = functools.cache(tqdm.write)
        stamp = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}.{time.time_ns() % 10**9:09}"
        self.path = Path(config["resume"] or Path(config["save_dir"], stamp))
        with one_line(f"no run folder can be made in save_dir={config['save_dir']!r}: REASON"):
            self.path.mkdir(parents=True, exist_ok=bool(config["resume"]))
        self.resume_command = f"python rlhf_sentiment.py {shlex.quote(f'resume={self.path}')}"
        shutil.rmtree(self.path / "incomplete", ignore_errors=True)  # where a save was cut short
        checkpoints = self.checkpoints()
        logged = self.restore(checkpoints[-1]) if checkpoints else dict.fromkeys(LOGS, 0)
        # weights and Adam's two moments, in two checkpoints and the one that is being written
        needed = (3 - len(checkpoints)) * 12 * sum(p.numel() for p in trainer.model.parameters())
        free, done = shutil.disk_usage(self.path).free, trainer.iteration == config["iterations"]
        require(done or needed < free, f"{self.path}: checkpoints need {needed:,} bytes, {free:,} "
                "are free")  # fmt: skip
        for name, size in logged.items():  # what was logged after that checkpoint will come again
            with open(self.path / name, "ab") as file:
                require(file.tell() >= size, f"{self.path / name} has lost lines: start a new run")
                file.truncate(size)
        (self.path / "evaluation.json").unlink(missing_ok=True)  # a finished run that now grows
        write_json(self.path / "config.json", {**config, "resume": None})
        tqdm.write(f"iterations {trainer.iteration + 1} to {config['iterations']} of "
                   f"{config['batch_size']} responses, on {trainer.model.device}, in {self.path}")
        tqdm.write(HEADER)

    def log(self, row, texts, scores):
        """A row of metrics.csv; in the first, the last and every 10th iteration texts as well."""
        with open(self.path / "metrics.csv", "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, row)
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow({k: v if isinstance(v, int) else f"{v:.6g}" for k, v in row.items()})
        n, last, every = row["iteration"], self.config["iterations"], self.config["explain"]
        if n in (1, last) or n % 10 == 0:
            lines = [f"{score:.3f}  {text}" for text, score in zip(texts[:3], scores)]
            tqdm.write("\n           ".join([LINE.format(**row), *lines]))
            with open(self.path / "samples.txt", "a", encoding="utf-8") as file:
                file.write("\n".join([f"iteration {n}", *lines, ""]))
        if n in (1, last) or every and n % every == 0:
            tqdm.write(self.trainer.explain(self.tokenizer))
        self.watch(row)

    def watch(self, row):
        """Say once, in plain words, what looks wrong although the program runs on."""
        batch = self.trainer.last_batch
        ended = ((batch["labels"] == self.tokenizer.sep_token_id) & (batch["mask"] > 0)).any(1)
        self.recent = [*self.recent[-4:], torch.stack([sequence_kl(batch), ended])]
        kls, ended = torch.cat(self.recent, 1)
        enough = len(self.recent) == 5 and len(kls) > 100
        if enough and kls.mean() < -4 * kls.std() / len(kls) ** 0.5:
            self.write_once("warning: KL clearly negative: another policy samples than PPO updates")
        if row["distinct"] < 0.1 and self.config["gen_len"] > 4:
            self.write_once("warning: nearly all responses are alike: raise kl_coef or lower lr")
        if enough and not ended.any() and self.before["pool"]["ended"] > 0.1:
            self.write_once("warning: no response ends as they did before: raise kl_coef")

    def checkpoints(self):
        """The complete checkpoints, oldest first; checkpoint-9-best is the user's own."""
        found = [path for path in self.path.glob("checkpoint-*") if path.name[11:].isdigit()]
        return sorted(found, key=lambda path: int(path.name[11:]))

    def save_checkpoint(self):
        """Write everything under a temporary name, then rename; keep the newest two."""
        trainer, incomplete = self.trainer, self.path / "incomplete"
        state = {
            "iteration": trainer.iteration, "kl_coef": trainer.kl_controller.value,
            "optimizer": trainer.optimizer.state_dict(), "before": self.before,
            "prompts": [prompts, held_out_prompts],
            "logged": {name: (self.path / name).stat().st_size for name in LOGS}}  # fmt: skip
        trainer.model.save_pretrained(incomplete)
        self.tokenizer.save_pretrained(incomplete)
        torch.save(state, incomplete / "trainer_state.pt")
        for file in incomplete.iterdir():
            with open(file, "rb+") as opened:
                os.fsync(opened)
        incomplete.rename(self.path / f"checkpoint-{trainer.iteration}")
        for old in self.checkpoints()[:-2]:
            shutil.rmtree(old.rename(incomplete))  # half deleted it must not look complete

    def restore(self, checkpoint):
        """Put the trainer back to `checkpoint` -> bytes logged by then.

        The reference stays the base model: a leash tied to a checkpoint would move along.
        """
        file = checkpoint / "trainer_state.pt"
        with one_line(f"{checkpoint} is damaged: delete it to resume from before it (REASON)"):
            state = torch.load(file, map_location="cpu", weights_only=True)
            self.trainer.model.load_state_dict(load_gpt2(checkpoint)[0].state_dict())
        require(state["prompts"] == [prompts, held_out_prompts],
                f"the run in {self.path} was begun with other prompts: {state['prompts']}")
        self.trainer.optimizer.load_state_dict(state["optimizer"])
        self.trainer.iteration, self.before = state["iteration"], state["before"]
        self.trainer.kl_controller.value = state["kl_coef"]
        return state["logged"]

    def finish(self, after):
        """Compare and report; evaluation.json and curve.png -> the summary that `main` returns."""
        kl_coef = self.config["kl_coef"]
        results = {name: compare(name, self.before[name], after[name], kl_coef) for name in after}
        summary = {**results["pool"], "held_out": results["held out"], "run_dir": str(self.path)}
        draw_curve(self.path, summary["ceiling"] if self.config["kl_target"] is None else None)
        write_json(self.path / "evaluation.json", summary)  # the last: with it a run is finished
        tqdm.write(f"\nall of it is in {self.path}")
        return summary


def write_json(path, content):
    incomplete = path.with_suffix(".incomplete")
    incomplete.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    incomplete.replace(path)


def draw_curve(folder, ceiling):
    """curve.png from metrics.csv, if matplotlib happens to be installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return tqdm.write("no curve.png: it needs matplotlib (pip install matplotlib)")
    metrics = numpy.genfromtxt(folder / "metrics.csv", delimiter=",", names=True, ndmin=1)
    figure = Figure(figsize=(12, 6), layout="constrained")
    names = "score_mean objective kl entropy policy_loss value_loss".split()
    for axes, name in zip(figure.subplots(2, 3).flat, names):
        axes.plot(metrics["iteration"], metrics[name])
        axes.set(title=name, xlabel="iteration")
        if name == "objective" and ceiling:
            axes.axhline(ceiling["objective"], ls="--", c="gray", label="ceiling")
            axes.legend()
    figure.savefig(folder / "curve.png", dpi=100)


@contextmanager
def stop_signals():
    """-> list to which the first Ctrl-C or SIGTERM adds its number; a second stops at once."""
    received, previous = [], {}

    def note(number, frame):
        received.append(number)
        signal.signal(number, previous.get(number, signal.SIG_DFL))
        tqdm.write("finishing this iteration and writing a checkpoint; once more stops at once")

    with suppress(ValueError):  # Python lets only the main thread handle signals
        previous |= {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# -------------------------------------------------------------------------------------- the checks


class ConfigError(ValueError):
    """What a user can mend; the message is one line: what is wrong, and what would be right."""


def require(condition, message):
    if not condition:
        raise ConfigError(message)


@contextmanager
def one_line(message):
    """Turn whatever goes wrong inside into `message`, with REASON replaced by what it was."""
    try:
        yield
    except Exception as error:  # the libraries raise a dozen kinds; to a user they are one
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:400].rstrip(".")
        raise ConfigError(message.replace("REASON", reason)) from error


def number(x):  # neither a bool, nor nan, nor what float32 or int64 cannot hold
    return type(x) in (int, float) and (x == 0 or 1e-30 < abs(x) < 1e18)


RULES = {  # config keys: what is right for them, and the test for it
    "iterations batch_size gen_len ppo_epochs minibatch_size save_freq eval_samples":
        ("a whole number, at least 1", lambda x: type(x) is int and 1 <= x < 2**31),
    "explain seed": ("a whole number, 0 to 2**32-1", lambda x: type(x) is int and 0 <= x < 2**32),
    "kl_coef vf_coef": ("a number, at least 0", lambda x: number(x) and x >= 0),
    "max_grad_norm kl_horizon cliprange": ("a number above 0", lambda x: number(x) and x > 0),
    "kl_target": ("None or a number above 0", lambda x: x is None or number(x) and x > 0),
    "lr value_lr gamma lam": ("a number from 0 to 1", lambda x: number(x) and 0 <= x <= 1),
    "offline": ("True or False", lambda x: type(x) is bool),
    "model_name reward_model_name reward_label save_dir": ("a text", lambda x: type(x) is str),
    "resume": ("None or a run folder", lambda x: x is None or type(x) is str and x),
    "dtype": ("auto, fp32 or bf16", lambda x: x in ("auto", "fp32", "bf16"))}  # fmt: skip


def check_values(values):
    """-> `values`, a complete config, in which each value by itself was found right."""
    for keys, (right, test) in RULES.items():
        for key in keys.split():
            require(test(values[key]), f"{key}={values[key]!r}: it should be {right}")
    return values


def check_config(given):
    """-> the complete config: `given` over the start values, or over those of the run to resume."""
    for key in given:
        near = difflib.get_close_matches(str(key).lower(), config, 1) or config
        require(key in config, f"unknown config key {key!r}; known is: {', '.join(near)}")
    if len(given) == len(config):  # a full copy: what is meant is what was changed in it
        given = {key: value for key, value in given.items() if value != config[key]}
    full = check_values(config | given)
    if full["resume"]:
        full = stored_config(Path(full["resume"]), given) | given | {"resume": full["resume"]}
    elif full["offline"]:
        from tests.tiny_models import SMALL_MODEL_SETTINGS

        full |= SMALL_MODEL_SETTINGS | given
        tqdm.write("offline=True: " + " ".join(f"{k}={full[k]}" for k in SMALL_MODEL_SETTINGS))
        named = [key for key in ("model_name", "reward_model_name") if key in given]
        require(not named, f"offline=True brings its own models: leave out {' and '.join(named)}")
    if full["kl_target"] is not None:
        require(full["kl_coef"], "kl_target needs a kl_coef above 0 to steer")
        require(full["kl_horizon"] >= full["batch_size"], "kl_horizon should reach batch_size")
    pick_device(full["device"])
    return full


def stored_config(folder, given):
    """The config of the run in `folder`, if `given` changes only what a resumed run may change."""
    stored, free = {}, ("resume", "iterations", "save_freq", "device", "explain")
    with suppress(OSError, ValueError, TypeError):  # a file that is not there, or is not whole
        stored = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    require(stored.keys() == config.keys(), f"resume={str(folder)!r} is no run folder: it has no "
            "config.json of a run (name the run's own folder, not a checkpoint in it)")
    check_values(stored)
    refused = [key for key, value in given.items() if value != stored[key] and key not in free]
    refused = ", ".join(f"{key}={given[key]!r} for {stored[key]!r}" for key in refused)
    require(not refused, f"a resumed run keeps its settings; refused are {refused}")
    done, total = stored["iterations"], given.get("iterations", stored["iterations"])
    finished = total == done and (folder / "evaluation.json").exists()
    require(not finished, f"the run in {folder} is finished after {done} iterations; it may grow")
    require(total >= done, f"iterations={total}: the run in {folder} has {done}; it may only grow")
    return stored


def pick_device(name):
    """'auto' -> cuda, else mps, else cpu; any other name must be a device that is here."""
    found = ["cuda", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
    found = found[len(found) == 1 :] + ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    require(name in ["auto", *found], f"device={name!r}: it should be auto or {', '.join(found)}")
    return found[0] if name == "auto" else name


def loading(key, name):
    """A context to load a model in: quiet, and errors become one line with three ways out."""
    tqdm.write(f"loading {name}")
    # That the value head is new, an id is odd or a hub does not answer is dealt with here.
    for library in ("transformers", "huggingface_hub"):
        logging.get_logger(library).setLevel("ERROR")
    is_folder = Path(name).is_dir()  # a download keeps its progress bar
    (logging.disable_progress_bar if is_folder else logging.enable_progress_bar)()
    return one_line(
        f"{key}={name!r}{'' if is_folder else ' (no local folder)'} cannot be used: REASON. Three "
        "ways out: name a local folder that holds the model; set HF_ENDPOINT to a mirror in the "
        "shell; or train small models with offline=True")  # fmt: skip


def check_prompts(tokenizer, n_positions, gen_len):
    """Every prompt must be a text that the model can read, with room for the response."""
    for name, pool in (("prompts", prompts), ("held_out_prompts", held_out_prompts)):
        right = isinstance(pool, list) and pool and all(isinstance(text, str) for text in pool)
        require(right, f"{name} should be a list of at least one text")
    openings = prompts + held_out_prompts
    encoded = encode_prompts(tokenizer, openings)
    for opening, ids in zip(openings, encoded):
        n, unknown = len(ids) - 1, (ids == tokenizer.unk_token_id).sum().item()
        note = f"prompt {opening!r}: {unknown} of its {n} tokens are unknown to the vocabulary"
        require(2 * unknown < n, f"{note}; it should be a text that the model can read")
        if unknown:
            tqdm.write(f"warning: {note}")
    longest, opening = max(zip(map(len, encoded), openings))
    require(gen_len + longest <= n_positions, f"gen_len={gen_len}: prompt {opening!r} leaves room "
            f"for {n_positions - longest} tokens in a model of {n_positions} positions")


def rewarded_label(sentiment_pipe, reward_label):
    """The one label of the judge that starts with `reward_label`, case ignored."""
    labels = list(sentiment_pipe.model.config.id2label.values())
    found = [label for label in labels if label.lower().startswith(reward_label.lower())]
    require(len(found) == 1, f"reward_label={reward_label!r} fits {len(found)} labels; it should "
            f"begin exactly one of: {'; '.join(labels)}")
    return found[0]


def parse_overrides(arguments):
    """`["lr=1e-4", "offline=True"]` -> `{"lr": 1e-4, "offline": True}`; the last of a key wins."""
    overrides = dict(argument.partition("=")[::2] for argument in arguments)
    for key, text in overrides.items():
        require(text, f"{key!r} is not key=value; the keys are: {', '.join(config)}")
        if type(config.get(key)) is not str and key != "resume":  # a name may well be 2024
            with suppress(ValueError, SyntaxError, TypeError):  # what is no value stays a text
                overrides[key] = ast.literal_eval(text)
    return overrides


def run_as_script(arguments):
    """`main` for the command line: every foreseen failure is one line on stderr and exit code 1."""
    try:
        main(parse_overrides(arguments))
    except (ConfigError, FloatingPointError, OSError) as error:
        sys.exit(f"error: {error}")
    except RuntimeError as error:  # CUDA has a class of its own for this, CPU and MPS have not
        if "memory" not in str(error):
            raise
        sys.exit(f"error: out of memory; lower minibatch_size, then batch_size ({error})")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run_as_script(sys.argv[1:])
