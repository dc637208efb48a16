"""Teach a Chinese GPT-2 to write positive reviews: reinforcement learning from a classifier.

The policy, a language model, continues review openings. The reward model, a sentiment classifier,
reads each review and says how likely it is positive: the score. PPO makes continuations that scored
well more likely, while a KL penalty keeps the policy close to what it was. One iteration
(`train_one_iteration`):

    1. draw a batch of openings             config["prompts"]
    2. let GPT-2 continue each of them      encode_prompts, generate_responses, decode_responses
    3. let the reward model score           score_texts, of opening + continuation
    4. update GPT-2                         PPOTrainer.step in ppo.py, on queries, responses, scores

Run it:  python rlhf_sentiment.py [key=value ...]            on a GPU, with the Hugging Face hub
         python rlhf_sentiment.py offline=True               anywhere, with small stand-in models

Read it: this file down to "Plumbing", then gpt2_value_head.py, then ppo.py.
Words:   a prompt (or opening) and a continuation are text, a query and a response their token ids.
Shapes:  B responses in a batch, Q the longest query, R the longest response.
"The article" is 【RLHF】想训练ChatGPT？先来看看强化学习（RL）+语言模型（LM）吧（附源码）, whose steps and
names this program follows; departures are named. Its text and its source code differ: README.md.
"""

import ast
import copy
import csv
import difflib
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import torch
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline, set_seed
from transformers import logging as hf_logging

from gpt2_value_head import SAMPLING, load_checked, load_gpt2
from ppo import PPOTrainer, best_possible, mixed_precision, read_scores, sequence_kl

# The dials. Pass `main` only those that you change; the other functions get the complete config.
config = {
    # which models: names on the hub, or local folders
    "model_name": "uer/gpt2-chinese-cluecorpussmall",  # the GPT-2 that learns
    "reward_model_name": "uer/roberta-base-finetuned-jd-binary-chinese",  # a classifier
    "offline": False,  # True: small stand-ins for both, built on the spot (tests/tiny_models.py)
    "reward_label": "positive",  # the classifier's label to reward; "negative": complaints
    "prompts": [  # the openings that training draws from
        "刚收到货，感觉",  # just got the goods, I feel
        "这部电影很",  # this film is very
        "说实话，真的很",  # honestly, it is really
        "这次购物总的来说体验很",  # all in all, this shopping experience was very
    ],
    "held_out_prompts": [  # openings that are only evaluated
        "用了几天，感觉",  # used it for a few days, I feel
        "这个故事很",  # this story is very
        "老实说，真的很",  # frankly, it is really
        "这次入住总的来说体验很",  # all in all, this hotel stay was very
    ],
    # how much: iterations x batch_size responses, about 20,000
    "iterations": 157,  # batches of fresh responses (rollouts); the learning rate falls to 0
    "batch_size": 128,  # responses in each; more: less noise, more optimizer steps, slower
    "gen_len": 16,  # a response ends here; more: harder to tell which token earned the score
    # Most words from here through "PPO's own" are explained in ppo.py, mainly at its top.
    # the update
    "ppo_epochs": 2,  # passes over each batch; more: learns faster per sample, may overshoot
    "minibatch_size": 64,  # responses per optimizer step; smaller: less memory, noisier steps
    "lr": 2e-5,  # Adam's step for the transformer; higher: faster, then unstable
    "value_lr": 3e-3,  # Adam's step for the value head, which starts from nothing
    "max_grad_norm": 1.0,  # longer gradients are shortened to this
    # the penalty on the KL divergence from the original model
    "kl_coef": 0.05,  # what a nat (a unit of KL) costs, in units of score; 0: no penalty
    "kl_target": None,  # a KL, in nats per response, to steer towards by kl_coef; None: fixed
    "kl_horizon": 10000,  # responses in which kl_coef moves by about 20% at most; smaller: faster
    # PPO's own
    "gamma": 1.0,  # discount per token; below 1 the score at the end fades for early tokens
    "lam": 1.0,  # GAE: 1 trusts the sampled rewards, 0 the critic (the article's code: 0.95)
    "cliprange": 0.2,  # how far the update may push a ratio from 1 before its gradient stops
    "vf_coef": 0.1,  # weight of the value loss, whose gradient also reaches the transformer
    # where and how
    "seed": 0,  # same seed, same run (on a CPU, bit for bit)
    "device": "auto",  # "auto", "cpu", "cuda", "cuda:1", "mps"
    "dtype": "auto",  # "fp32"; "bf16": faster products, rounded; "auto": bf16 where it is fast
    "save_dir": "runs",  # every run makes a fresh folder in here
    "save_freq": 50,  # iterations between checkpoints; one is always written after the last
    "resume": None,  # a run folder to continue
    "eval_samples": 256,  # responses per opening before and after; more: smaller error bars
    "explain": 0,  # n: print the token table every n iterations; 0: in the first and last only
}


def load_models(config):
    """-> (model, ref_model, tokenizer, sentiment_pipe), checked, in eval mode, on the device.

    Raises `ConfigError` with one readable line if a model cannot be loaded or does not fit.
    """
    gpt2_name, reward_name = config["model_name"], config["reward_model_name"]
    if config["offline"]:
        gpt2_name, reward_name = build_stand_ins()
    device = pick_device(config["device"])
    with loading("model_name", gpt2_name):
        model, tokenizer = load_gpt2(gpt2_name)
    model.generation_config.max_new_tokens = config["gen_len"]  # for whoever uses a checkpoint
    model.to(device)
    if model.device.type == "cpu":  # on texts this short plain products beat the fused kernel
        model.set_attn_implementation("eager")
    # A departure from the article's text: the model as it was, from which the KL is measured.
    ref_model = copy.deepcopy(model)
    with loading("reward_model_name", reward_name):
        sentiment_pipe = load_reward_model(reward_name, device)
    # What cannot be used should fail now, not after the first rollout.
    check_prompts(config, tokenizer, model.config.n_positions, "model_name")
    longest = longest_text(sentiment_pipe)
    check_prompts(config, sentiment_pipe.tokenizer, longest, "reward_model_name")
    find_label(sentiment_pipe, config["reward_label"])
    return model, ref_model, tokenizer, sentiment_pipe


def encode_prompts(tokenizer, prompts):
    """-> list of 1-D LongTensors: the start token and the text's ids, `[CLS] c1 .. cn`.

    A departure from the article, whose `tokenizer.encode` also appends `[SEP]`: see load_tokenizer
    in gpt2_value_head.py.
    """
    return [torch.tensor(ids) for ids in tokenizer(prompts)["input_ids"]]


def generate_responses(model, tokenizer, queries, gen_len, do_sample=True):
    """-> list of 1-D LongTensors, each of 1..gen_len ids, cut after its first end token.

    One `generate` for the whole batch, padded on the left so that every row continues from its own
    last token; the article generates prompt by prompt.
    """
    batch = tokenizer.pad({"input_ids": queries}, padding_side="left", return_tensors="pt")
    # load_gpt2 sets these too; repeated for a model that was loaded otherwise.
    how = SAMPLING if do_sample else {"do_sample": False}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    output = model.generate(**batch.to(model.device), max_new_tokens=gen_len, **how, **ends)
    responses = []
    for ids in output[:, batch["input_ids"].shape[1] :].tolist():  # what follows the query
        # Behind an early end is padding. The article keeps the last gen_len ids, whatever they are.
        if tokenizer.eos_token_id in ids:
            ids = ids[: ids.index(tokenizer.eos_token_id) + 1]
        responses.append(torch.tensor(ids))
    return responses


def decode_responses(tokenizer, responses):
    """-> list of str as a person would write them.

    Without special tokens (`[UNK]` is one) and without spaces beside Chinese characters.
    """
    return tokenizer.batch_decode(responses, skip_special_tokens=True)


def score_texts(sentiment_pipe, texts, reward_label):
    """-> FloatTensor (B,): P(the one label that starts with `reward_label`, case ignored).

    The place for a reward of your own: the same arguments, B numbers back.
    """
    label = find_label(sentiment_pipe, reward_label)
    longest = longest_text(sentiment_pipe)
    # top_k=None gives every label, sorted by score: so look the label up by its name.
    # A text that is too long for the reward model loses its end.
    outputs = sentiment_pipe(texts, top_k=None, truncation=True, max_length=longest, batch_size=64)
    scores = []
    for output in outputs:
        probability = {str(entry["label"]): entry["score"] for entry in output}
        scores.append(probability[label])
    return torch.tensor(scores)


def rollout(trainer, tokenizer, sentiment_pipe, openings):
    """Steps 2 and 3 for B openings -> queries, responses, texts, scores `(B,)`, seconds."""
    config = trainer.config
    start = time.perf_counter()
    queries = encode_prompts(tokenizer, openings)
    with mixed_precision(trainer.model.device, config["dtype"]):  # for the reward model as well
        responses = generate_responses(trainer.model, tokenizer, queries, config["gen_len"])
        continuations = decode_responses(tokenizer, responses)
        # Scored and logged is what a person would read, with the opening as it was written.
        texts = [opening + continuation for opening, continuation in zip(openings, continuations)]
        written = time.perf_counter()
        scores = score_texts(sentiment_pipe, texts, config["reward_label"])
    with as_config_error("score_texts", ValueError):  # your own reward might not give B numbers
        scores = read_scores(scores, len(texts))
    scored = time.perf_counter()
    seconds = {"seconds_rollout": written - start, "seconds_score": scored - written}
    return queries, responses, texts, scores, seconds


def train_one_iteration(trainer, tokenizer, sentiment_pipe):
    """Steps 1 to 4 -> (one row of metrics.csv, texts, scores)."""
    # 1. draw: the same few openings again and again, each time continued differently
    config = trainer.config
    openings = [random.choice(config["prompts"]) for _ in range(config["batch_size"])]
    # 2. write and 3. score
    result = rollout(trainer, tokenizer, sentiment_pipe, openings)
    queries, responses, texts, scores, seconds = result
    # 4. learn
    start = time.perf_counter()
    stats = trainer.step(queries, responses, scores)
    seconds["seconds_update"] = time.perf_counter() - start
    row = metrics_row(trainer.iteration, stats, responses, scores, seconds)
    return row, texts, scores


def main(config):
    """Train; -> summary dict with `before`, `after`, `ceiling`, `held_out` and `run_dir`.

    `config` holds the keys to change, or is a changed copy of the dict above. `ceiling` is what the
    best policy would reach, see `best_possible` in ppo.py; `held_out` has the same three. Raises
    `ConfigError`, a `ValueError`, for a user's mistake, `FloatingPointError` if a score, a loss or
    a gradient is not finite, and `SystemExit` after Ctrl-C or another stop signal in training, once
    a checkpoint is written.
    """
    prepare_output()
    config = check_config(config)
    model, ref_model, tokenizer, sentiment_pipe = load_models(config)
    trainer = PPOTrainer(model, ref_model, config)
    run = RunFolder(config, trainer, tokenizer)  # with `resume`: back at the newest checkpoint
    # The model before training: its evaluation, and its scores, from which the ceiling follows.
    if run.before is None:
        run.before, run.reference_scores = evaluate(trainer, tokenizer, sentiment_pipe)

    say("KL: from the original model, in nats per response; all columns: README.md")
    say(HEADER)
    done, last = trainer.iteration, config["iterations"]
    # disable=None: a bar in a terminal, none in a file
    bar = tqdm(range(done + 1, last + 1), initial=done, total=last, disable=None)
    with stop_signals() as received:
        for iteration in bar:
            # A seed for each, so that a resumed run draws what an uninterrupted one would have;
            # even numbers are for training, odd ones for evaluations.
            seed_draws(config["seed"], 2 * iteration)
            row, texts, scores = train_one_iteration(trainer, tokenizer, sentiment_pipe)
            bar.set_postfix(score=f"{row['score_mean']:.3f}", kl=f"{row['kl']:.2f}", refresh=False)
            run.log(row, texts, scores)
            due = iteration == last or iteration % config["save_freq"] == 0
            # Asked once: a signal that comes during the save waits for the next iteration's.
            stop = bool(received)
            run.save(checkpoint=due or stop)
            if stop:
                break
        if received:
            say(f"to continue: {run.resume_command}")
            raise SystemExit(128 + received[0])

    after, _ = evaluate(trainer, tokenizer, sentiment_pipe)
    return run.finish(after)


# ======================================================================================= Plumbing
# A first reading may stop here. Below: evaluation, the run folder, checks of what a user gives.


class ConfigError(ValueError):
    """What the user can put right, in one line: what is wrong, what would be right."""


@contextmanager
def as_config_error(problem, kinds, advice=""):
    """Turn an error of these kinds into a `ConfigError`: the problem, the reason, the advice."""
    try:
        yield
    except kinds as error:
        if device_advice(error):
            raise  # it was not the user's config but the device: out of memory, say
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:400].rstrip(".")
        raise ConfigError(f"{problem} ({reason}). {advice}".rstrip()) from error


def prepare_output():
    """Write every line at once, also into files; print ? where the console has no Chinese."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace", line_buffering=True)


def say(text):
    """Print above the progress bar. A terminal that was closed must not end the run."""
    # RuntimeError: a signal came in the middle of a print, and its handler prints as well.
    with suppress(OSError, RuntimeError):
        tqdm.write(text)


def seed_draws(seed, n):
    """Seed Python's, numpy's and torch's random numbers for the n-th part of a run."""
    set_seed((1_000_000 * seed + n) % 2**32)


def metrics_row(iteration, stats, responses, scores, seconds):
    """One row of metrics.csv: the stats of `PPOTrainer.step`, and what else is known of a batch."""
    n_tokens = sum(len(ids) for ids in responses)
    total = sum(seconds.values())
    return {
        "iteration": iteration,
        "score_mean": scores.mean().item(),
        "score_std": scores.std(correction=0).item(),
        **stats,
        # what PPO maximizes: the score less what the KL to the original model costs
        "objective": scores.mean().item() - stats["kl_coef"] * stats["kl"],
        "response_length": n_tokens / len(responses),
        "distinct": len({tuple(ids.tolist()) for ids in responses}) / len(responses),
        **seconds,
        "seconds_total": total,
        "tokens_per_second": n_tokens / total,
    }


# ------------------------------------------------------------------------------------- evaluation


def evaluate(trainer, tokenizer, sentiment_pipe):
    """Sample `eval_samples` responses to each of `prompts`, the pool, and of `held_out_prompts`.

    Returns two dicts with keys "pool" and "held_out": summaries, and scores `(openings, samples)`.
    The objective takes kl_coef from the config, also where kl_target has moved it since.
    """
    config = trainer.config
    n, size = config["eval_samples"], config["batch_size"]
    summaries, all_scores = {}, {}
    seed_draws(config["seed"], 2 * trainer.iteration + 1)
    for name, openings in (("pool", config["prompts"]), ("held_out", config["held_out_prompts"])):
        todo = [opening for opening in openings for _ in range(n)]
        responses, texts, scores, kls = [], [], [], []
        start = time.perf_counter()
        for i in tqdm(range(0, len(todo), size), name, disable=None, leave=False):
            result = rollout(trainer, tokenizer, sentiment_pipe, todo[i : i + size])
            queries, batch_responses, batch_texts, batch_scores, _ = result
            if not torch.isfinite(batch_scores).all():
                raise FloatingPointError(f"evaluation ({name}): a score is not finite")
            responses += [ids.tolist() for ids in batch_responses]
            texts += batch_texts
            scores += batch_scores.tolist()
            kls += sequence_kl(trainer.old_pass(queries, batch_responses)).tolist()
            if i == 0:
                seconds = (time.perf_counter() - start) * len(todo) / len(texts)
                say(f"evaluating {len(todo)} responses ({name}), about {seconds:.0f} s")
        all_scores[name] = torch.tensor(scores, dtype=torch.float64).view(-1, n)
        kls = torch.tensor(kls, dtype=torch.float64).view(-1, n)
        summaries[name] = summarize(responses, all_scores[name], kls, config["kl_coef"], tokenizer)
        firsts = range(0, len(todo), n)  # one of each opening
        summaries[name]["examples"] = [(texts[i], scores[i]) for i in firsts]
    return summaries, all_scores


def summarize(responses, scores, kls, kl_coef, tokenizer):
    """What is printed of an evaluation: a dict of means, some with their standard error.

    `responses` is a list of lists of ids, `scores` and `kls` are `(openings, samples)`.
    """
    pairs = []  # of neighbouring tokens; few different ones: the texts repeat themselves
    for ids in responses:
        pairs += zip(ids, ids[1:])
    ended = sum(ids[-1] == tokenizer.eos_token_id for ids in responses)
    summary = {
        "distinct_2": len(set(pairs)) / max(1, len(pairs)),
        "length": sum(len(ids) for ids in responses) / len(responses),
        "ended": ended / len(responses),
    }
    summary["score"], summary["score_se"] = mean_and_error(scores)
    summary["kl"], summary["kl_se"] = mean_and_error(kls)
    summary["objective"], summary["objective_se"] = mean_and_error(scores - kl_coef * kls)
    return summary


def mean_and_error(x):
    """`(openings, samples)` -> mean and its standard error."""
    # The openings are fixed, not drawn: only the spread within each of them is chance.
    n = x.shape[1]
    variance = x.var(1, correction=min(1, n - 1)).mean()  # of a single sample: 0, not nan
    return x.mean().item(), (variance / x.numel()).sqrt().item()


def compare(name, before, after, ceiling):
    """Print before, after and the ceiling of one set of openings, and the share of the gain."""
    say(f"\n{name}: a text of each opening before -> after training, with scores")
    for (old, old_score), (new, new_score) in zip(before["examples"], after["examples"]):
        wide = old.ljust(24, "\u3000")  # full-width spaces, so that Chinese columns stay aligned
        say(f"{old_score:.3f} {wide} -> {new_score:.3f} {new}")
    say("           score          KL (nats)        objective     distinct-2   length  ended")
    print_row("before", before)
    print_row("after", after)
    if ceiling:
        print_row("ceiling", ceiling)
        say(f"PPO reached {ceiling['share']:.0%} of the possible gain in the objective")
        n = ceiling["effective_samples"]
        if n < 30:
            say(f"only {n:.0f} samples carry the ceiling: it is too low, the share too high; raise "
                "eval_samples")  # fmt: skip


def print_row(label, row):
    columns = [f"{label:8}"]
    for key in ("score", "kl", "objective"):
        error = f" ± {row[key + '_se']:.3f}" if key + "_se" in row else " " * 8
        columns.append(f"{row[key]:6.3f}{error}")
    if "length" in row:
        columns.append(f"{row['distinct_2']:8.3f} {row['length']:8.2f} {row['ended']:6.2f}")
    say("  ".join(columns))


# --------------------------------------------------------------------------------- the run folder


HEADER = "iter  score ± std      KL  objective  entropy  clipfrac  distinct  length  secs"
ROW = (
    "{iteration:4d}  {score_mean:.3f} ± {score_std:.3f} {kl:5.2f}{objective:11.3f}{entropy:9.2f}"
    "{clipfrac:10.3f}{distinct:10.2f}{response_length:8.1f}{seconds_total:6.1f}"
)


classifier_reward = score_texts  # checkpoints record whether a script has replaced it


class RunFolder:
    """What a run leaves behind: config, metrics, samples, checkpoints, evaluation, curve."""

    def __init__(self, config, trainer, tokenizer):
        self.config, self.trainer, self.tokenizer = config, trainer, tokenizer
        self.before = self.reference_scores = None  # the evaluation before training
        self.rows, self.samples = [], []  # of metrics.csv and samples.txt, from the beginning
        new = Path(config["save_dir"], datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f"))
        self.path = Path(config["resume"] or new)
        problem = f"no run folder can be made in save_dir={config['save_dir']!r}"
        with as_config_error(problem, (OSError, ValueError)):
            self.path.mkdir(parents=True, exist_ok=bool(config["resume"]))
        self.resume_command = f'python rlhf_sentiment.py "resume={self.path}"'
        shutil.rmtree(self.path / "incomplete", ignore_errors=True)  # where a save was cut short
        checkpoints = self.checkpoints()
        if checkpoints:
            self.restore(checkpoints[-1])
        elif config["resume"]:
            say(f"{self.path} has no checkpoint yet: starting from the beginning")
        write_json(self.path / "config.json", {**config, "resume": None})
        say(f"run folder {self.path}, on {trainer.model.device}")
        first, last, size = trainer.iteration + 1, config["iterations"], config["batch_size"]
        say(f"iterations {first} to {last} of {size} responses each")

    def log(self, row, texts, scores):
        """Keep a row; in the first, the last and every 10th iteration print it with three texts."""
        self.rows.append(row)
        n, last, every = row["iteration"], self.config["iterations"], self.config["explain"]
        if n in (1, last) or n % 10 == 0:
            say(ROW.format(**row))
            kls = sequence_kl(self.trainer.last_batch).tolist()
            self.samples.append(f"iteration {n}")
            for i in range(min(3, len(texts))):
                self.samples.append(f"{scores[i].item():.3f}  KL {kls[i]:5.2f}  {texts[i]}")
                say("      " + self.samples[-1])
        if n in (1, last) or (every and n % every == 0):
            say(self.trainer.explain(self.tokenizer))
        self.warn(row)

    def warn(self, row):
        """Warn of what looks wrong although the program runs on; Python shows a warning once."""
        gen_len = self.config["gen_len"]
        if row["distinct"] < 0.1 and gen_len > 4:
            warnings.warn("nearly all responses are alike: raise kl_coef or lower lr")
        recent = self.rows[-5:]
        if len(recent) < 5:
            return
        if sum(past["kl"] for past in recent) / 5 < -0.5:
            warnings.warn("KL clearly negative: the sampler is not the policy that PPO updates")
        all_cut = all(past["response_length"] == gen_len for past in recent)
        if all_cut and gen_len > 4 and self.before["pool"]["ended"] > 0.1:
            warnings.warn("no response ends any more: raise kl_coef")

    def save(self, checkpoint):
        """Write the two log files whole, and a checkpoint if it is time for one."""
        advice = (
            "Make room if the disk is full; close the program that holds a file of it open. The "
            f"last checkpoint is whole, and this continues from it: {self.resume_command}"
        )
        with as_config_error(
            f"{self.path} could not be written to", (OSError, SafetensorError), advice
        ):
            with open(self.path / "metrics.csv", "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self.rows[0])
                writer.writeheader()
                for row in self.rows:
                    writer.writerow({key: f"{value:.6g}" for key, value in row.items()})
            samples = "\n".join([*self.samples, ""])
            (self.path / "samples.txt").write_text(samples, encoding="utf-8")
            if checkpoint:
                self.save_checkpoint()

    def checkpoints(self):
        """The complete checkpoints, oldest first; checkpoint-9-best is the user's own."""
        found = {}
        for path in self.path.glob("checkpoint-*"):
            number = path.name.removeprefix("checkpoint-")
            if number.isdecimal():
                found[int(number)] = path
        return [found[number] for number in sorted(found)]

    def save_checkpoint(self):
        """Write everything under a temporary name, then rename; keep the newest two."""
        trainer, incomplete = self.trainer, self.path / "incomplete"
        trainer.model.save_pretrained(incomplete)
        self.tokenizer.save_pretrained(incomplete)
        state = {
            "iteration": trainer.iteration,
            "kl_coef": trainer.kl_controller.value,
            "optimizer": trainer.optimizer.state_dict(),
            "before": self.before,
            "reference_scores": self.reference_scores,
            "own_reward": score_texts is not classifier_reward,
            "rows": self.rows,
            "samples": self.samples,
        }
        try:
            torch.save(state, incomplete / "trainer_state.pt")
        except RuntimeError as error:  # what torch raises when it cannot write a file
            raise OSError(error) from error
        for file in incomplete.iterdir():
            with open(file, "rb+") as opened:
                os.fsync(opened)  # on the disk before it is called complete
        # The evaluation of a finished run that grows is kept until there is something newer.
        (self.path / "evaluation.json").unlink(missing_ok=True)
        incomplete.rename(self.path / f"checkpoint-{trainer.iteration}")
        for old in self.checkpoints()[:-2]:
            old.rename(incomplete)  # half deleted, it must not look complete
            shutil.rmtree(incomplete)

    def restore(self, checkpoint):
        """Put trainer and logs back to `checkpoint`.

        The reference stays the original model: else the KL penalty would pull to the checkpoint.
        """
        with as_config_error(
            f"{checkpoint} is damaged, delete it to resume from before it", Exception
        ):
            file = checkpoint / "trainer_state.pt"
            state = torch.load(file, map_location="cpu", weights_only=True)
            self.trainer.model.load_state_dict(load_gpt2(checkpoint)[0].state_dict())
            self.trainer.optimizer.load_state_dict(state["optimizer"])
            self.trainer.iteration = state["iteration"]
            self.trainer.kl_controller.value = state["kl_coef"]
            self.before, self.reference_scores = state["before"], state["reference_scores"]
            self.rows, self.samples = state["rows"], state["samples"]
        if state.get("own_reward", False) != (score_texts is not classifier_reward):
            raise ConfigError(
                f"{self.path} was begun with another score_texts; one with a reward of your own is "
                'resumed by the script that sets it, with main({"resume": ...})'
            )

    def finish(self, after):
        """Compare and report; curve.png and evaluation.json -> the summary that `main` returns."""
        results = {}
        for name in after:
            before, ceiling = self.before[name], None
            if self.config["kl_coef"] > 0:  # else the best policy repeats the one best text
                ceiling = best_possible(self.reference_scores[name], self.config["kl_coef"])
                gain = after[name]["objective"] - before["objective"]
                possible = ceiling["objective"] - before["objective"]
                ceiling["share"] = gain / possible if possible > 0 else 0.0
            compare(name, before, after[name], ceiling)
            results[name] = {"before": before, "after": after[name], "ceiling": ceiling}
        steered = self.config["kl_target"] is not None  # then kl_coef and the objective move
        draw_curve(self.path, self.rows, None if steered else results["pool"]["ceiling"])
        summary = {**results["pool"], "held_out": results["held_out"], "run_dir": str(self.path)}
        write_json(self.path / "evaluation.json", summary)  # last: it marks a finished run
        say(f"\nall of it is in {self.path}")
        return summary


def write_json(path, content):
    """Write beside it and rename, so that the file is never half written."""
    incomplete = path.with_suffix(".incomplete")
    incomplete.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    incomplete.replace(path)


def draw_curve(folder, rows, ceiling):
    """curve.png, if matplotlib happens to be installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say("no curve.png: it needs matplotlib (pip install matplotlib)")
        return
    figure = Figure(figsize=(12, 6), layout="constrained")
    names = ("score_mean", "objective", "kl", "entropy", "policy_loss", "value_loss")
    for axes, name in zip(figure.subplots(2, 3).flat, names):
        axes.plot([row["iteration"] for row in rows], [row[name] for row in rows])
        axes.set(title=name, xlabel="iteration")
        if name == "objective" and ceiling:
            axes.axhline(ceiling["objective"], ls="--", c="gray", label="ceiling")
            axes.legend()
    figure.savefig(folder / "curve.png", dpi=100)


# Ctrl-C, `kill`, and a closed terminal, for which Windows has no signal.
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}


@contextmanager
def stop_signals():
    """-> list to which a signal adds its number; the same signal again acts as it always does."""
    received, previous = [], {}

    def note(number, frame):
        received.append(number)
        signal.signal(number, previous[number])
        say("finishing this iteration and writing a checkpoint; once more stops at once")

    with suppress(ValueError):  # Python lets only the main thread handle signals
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup wants it ignored
                previous[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# -------------------------------------------------------------------------------------- the checks


def check_config(given):
    """-> the complete config: what was given, over the start values or those of a run to resume."""
    for key in given:
        if key not in config:
            near = difflib.get_close_matches(str(key).lower(), config, 1)
            right = f"did you mean {near[0]}?" if near else f"known are {', '.join(config)}"
            raise ConfigError(f"unknown config key {key!r}; {right}")
    full = config | given
    check_values(full)
    for key in ("model_name", "reward_model_name", "save_dir", "resume"):
        if full[key]:
            full[key] = os.path.expanduser(full[key])  # ~ is home; no shell does that behind key=
    # In a changed copy of the dict, given (and refused by a resumed run) is what differs from it.
    if given.keys() == config.keys():
        given = {key: value for key, value in given.items() if value != config[key]}
    if full["resume"]:
        changes = {key: full[key] for key in given}
        full = stored_config(Path(full["resume"]), changes) | changes | {"resume": full["resume"]}
    elif full["offline"]:
        for key in ("model_name", "reward_model_name"):
            if key in given:
                raise ConfigError(f"offline=True brings its own models: leave out {key}")
    # Else there is nothing to steer, or one batch could change kl_coef by 20% or more.
    steers = full["kl_coef"] > 0 and full["kl_horizon"] > full["batch_size"]
    if full["kl_target"] is not None and not steers:
        raise ConfigError("kl_target needs a kl_coef above 0 and a kl_horizon above batch_size")
    pick_device(full["device"])
    return full


def check_values(values):
    """Raise `ConfigError` if one of the values of a complete config is wrong by itself."""

    def check(key, right, wanted):
        if not right:
            raise ConfigError(f"{key}={values[key]!r}: it should be {wanted}")

    def is_whole(x, low):
        return type(x) is int and low <= x < 2**32

    def is_number(x):  # no bool, no nan, and so far from float32's limits that products fit too
        return type(x) in (int, float) and (x == 0 or 1e-30 < abs(x) < 1e18)

    counts = ("iterations", "batch_size", "gen_len", "ppo_epochs", "minibatch_size")
    for key in (*counts, "save_freq", "eval_samples"):
        check(key, is_whole(values[key], 1), "a whole number, at least 1 and below 2**32")
    for key in ("explain", "seed"):
        check(key, is_whole(values[key], 0), "a whole number, 0 to 2**32-1")
    for key in ("kl_coef", "vf_coef"):
        check(key, is_number(values[key]) and values[key] >= 0, "a number, at least 0")
    for key in ("max_grad_norm", "kl_horizon", "cliprange"):
        check(key, is_number(values[key]) and values[key] > 0, "a number above 0")
    for key in ("lr", "value_lr", "gamma", "lam"):
        check(key, is_number(values[key]) and 0 <= values[key] <= 1, "a number from 0 to 1")
    for key in ("model_name", "reward_model_name", "reward_label", "save_dir"):
        check(key, type(values[key]) is str, "a text")
    for key in ("prompts", "held_out_prompts"):
        texts = values[key]
        right = type(texts) is list and texts and all(type(text) is str for text in texts)
        check(key, right, "a list of at least one text, as ['这部电影很']")
    target, resume = values["kl_target"], values["resume"]
    right = target is None or (is_number(target) and target > 0)
    check("kl_target", right, "None or a number above 0")
    check("resume", resume is None or type(resume) is str, "None or a run folder")
    check("offline", type(values["offline"]) is bool, "True or False")
    check("dtype", values["dtype"] in ("auto", "fp32", "bf16"), "auto, fp32 or bf16")


def stored_config(folder, given):
    """The config of the run in `folder`, if `given` changes only what a resumed run may change."""
    try:
        stored = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # it is not there, or not whole
        stored = {}
    if "reward_model_name" not in stored:
        raise ConfigError(
            f"resume={str(folder)!r} is no run folder: it has no config.json of a run, or a "
            "damaged one (name the run's own folder, not a checkpoint in it)"
        )
    missing = [key for key in config if key not in stored]
    if missing:
        say(f"{folder} is of another version: start values for {', '.join(missing)}")
    stored = {key: stored.get(key, start) for key, start in config.items()}
    check_values(stored)
    free = ("iterations", "minibatch_size", "batch_size", "save_freq", "device", "explain")
    refused = []
    for key, value in given.items():
        if value != stored[key] and key not in (*free, "resume"):
            refused.append(f"{key}={value!r} for {stored[key]!r}")
    if refused:
        raise ConfigError(f"a resumed run keeps its settings; refused are {', '.join(refused)}")
    planned = stored["iterations"]
    total = given.get("iterations", planned)
    if total < planned:
        raise ConfigError(f"iterations={total}: {folder} is set up for {planned}; it may only grow")
    last_checkpoint = folder / f"checkpoint-{planned}"
    finished = last_checkpoint.exists() and (folder / "evaluation.json").exists()
    if total == planned and finished:
        more = f"to go on, give it more: iterations={2 * planned}, say"
        raise ConfigError(f"the run in {folder} is finished after {planned} iterations; {more}")
    return stored


def pick_device(name):
    """'auto' -> cuda, else mps, else cpu; any other name must be a device that is here."""
    found = ["cpu"]
    if torch.backends.mps.is_available():
        found = ["mps", *found]
    if torch.cuda.is_available():
        numbered = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
        found = ["cuda", *numbered, *found]
    if name not in ("auto", *found):
        raise ConfigError(f"device={name!r}: it should be auto or {', '.join(found)}")
    return found[0] if name == "auto" else name


def build_stand_ins():
    """Train the two offline models, or find them in their cache -> their folders."""
    # Imported by its path: Python may know another package called `tests`.
    path = Path(__file__).parent / "tests" / "tiny_models.py"
    spec = importlib.util.spec_from_file_location("tiny_models", path)
    tiny_models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny_models)
    return tiny_models.build()


@contextmanager
def loading(key, name):
    """A context to load a model in: an error becomes one line with three ways out.

    From here on the libraries stay quiet: their warnings are about what is dealt with here, as the
    new value head, ids outside the vocabulary, or a hub that does not answer.
    """
    say(f"loading {name}")
    for library in ("transformers", "huggingface_hub"):
        hf_logging.get_logger(library).setLevel("ERROR")
    from_hub = not os.path.isdir(name)
    hf_logging.disable_progress_bar()
    if from_hub and sys.stderr.isatty():
        hf_logging.enable_progress_bar()  # somebody may be waiting for a download
    advice = (
        "Three ways out: name a local folder that holds the model; set HF_ENDPOINT to a mirror in "
        "the shell; or train small models with offline=True"
    )
    where = " (no local folder)" if from_hub else ""
    with as_config_error(f"{key}={name!r}{where} cannot be used", Exception, advice):
        yield


def check_prompts(config, tokenizer, n_positions, key):
    """Every opening must be a text that the model of `key` can read, with room for a response."""
    gen_len = config["gen_len"]
    openings = config["prompts"] + config["held_out_prompts"]
    for opening in sorted(openings, key=len, reverse=True):  # the longest says what fits all
        ids = tokenizer(opening, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ConfigError(f"prompt {opening!r} is empty; it should be a text")
        # [UNK], or one that the opening spells out, as "[SEP]"
        unknown = sum(token in tokenizer.all_special_ids for token in ids)
        note = f"prompt {opening!r}: {unknown} of its {len(ids)} tokens are unknown to {key}"
        if 2 * unknown >= len(ids):
            raise ConfigError(f"{note}; it should be a text that the model can read")
        if unknown:
            say(f"warning: {note}")
        room = n_positions - len(tokenizer(opening)["input_ids"])
        if gen_len > room:
            space = f"leaves room for {room} tokens in the {n_positions} positions of {key}"
            raise ConfigError(f"gen_len={gen_len}: prompt {opening!r} {space}")


def load_reward_model(name, device):
    """-> a pipeline that reads texts and gives the probability of every label."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    # Its embedding is often padded to a round number of rows.
    classifier = load_checked(AutoModelForSequenceClassification, name, tokenizer, spare_rows=128)
    sentiment_pipe = pipeline("sentiment-analysis", classifier, tokenizer=tokenizer, device=device)
    # A trial: some tokenizers cannot pad, some models need more than token ids or know no limit.
    how = {"top_k": None, "truncation": True, "max_length": longest_text(sentiment_pipe)}
    sentiment_pipe(["one", "two texts"], batch_size=64, **how)
    return sentiment_pipe


def longest_text(sentiment_pipe):
    """How many tokens the reward model can read at most."""
    limit = sentiment_pipe.tokenizer.model_max_length  # 1e30 where nobody has set it
    return min(limit, getattr(sentiment_pipe.model.config, "max_position_embeddings", limit))


def find_label(sentiment_pipe, reward_label):
    """The one label of the reward model that starts with `reward_label`, case ignored."""
    labels = [str(label) for label in sentiment_pipe.model.config.id2label.values()]
    found = [label for label in labels if label.lower().startswith(reward_label.lower())]
    if len(found) != 1:
        fits = f"reward_label={reward_label!r} fits {len(found)} labels"
        raise ConfigError(f"{fits}; it should begin exactly one of: {'; '.join(labels)}")
    return found[0]


def parse_overrides(arguments):
    """`["lr=1e-4", "offline=True"]` -> `{"lr": 1e-4, "offline": True}`; the last of a key wins."""
    overrides = {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        if not text:
            raise ConfigError(f"{argument!r} is not key=value; the keys are: {', '.join(config)}")
        overrides[key] = text
        if type(config.get(key)) is not str and key != "resume":  # a name may well be 2024
            with suppress(ValueError, SyntaxError, TypeError):  # no Python value: it stays a text
                overrides[key] = ast.literal_eval(text)
    return overrides


def device_advice(error):
    """What a user can do about an error of the device, "" if nothing is known."""
    text = f"{type(error).__name__}: {error}".lower()
    signs = ("out of memory", "memoryerror", "alloc_failed", "allocate memory", "enough memory")
    if any(sign in text for sign in signs):
        return "out of memory; lower minibatch_size, then batch_size (also with resume=)"
    if "no kernel image" in text:
        return "this build of torch does not serve this GPU; use device=cpu or another build"
    return ""


def run_as_script(arguments):
    """`main` for the command line: every foreseen failure is one line on stderr and exit code 1."""
    warnings.showwarning = lambda message, *where: say(f"warning: {message}")
    try:
        main(parse_overrides(arguments))
    except (ConfigError, FloatingPointError, OSError) as error:
        sys.exit(f"error: {error}")
    except (RuntimeError, MemoryError) as error:
        if not device_advice(error):
            raise
        sys.exit(f"error: {device_advice(error)} ({' '.join(str(error).split())[:400]})")
    except KeyboardInterrupt:  # during an evaluation, or a second one
        say("stopped; resume=<run folder> continues, from its newest checkpoint if it has one")
        sys.exit(130)


if __name__ == "__main__":
    run_as_script(sys.argv[1:])
