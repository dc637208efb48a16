"""PPO for a language model, by hand: the formulas as pure functions, then the trainer.

In the words of reinforcement learning: the *policy* is the language model, a *state* the text so
far, an *action* the next token, an *episode* one response. The *reward* is the score of the whole
response, given with its last token, less a KL penalty on every token.

The idea: before each token the critic (the value head) estimates how much reward is still to come,
the *value*. The *return* is how much did come. The *advantage* of a token is return - value: how
much better it went from there than the critic had expected. (So it is for `gamma` = `lam` = 1. GAE
is the general form: a smaller `lam` trusts the sampled rewards less and the critic more.) PPO makes
a token likelier if its advantage is above the batch's mean, else less likely (`masked_whiten`).

One batch serves for several optimizer steps, and after the first of them the policy is no longer
the one that wrote it. The *ratio*, a token's probability now over that when it was sampled,
corrects for that while the two are close. So PPO stops pushing a token once its ratio has left
1 +- cliprange in the direction in which its advantage pushes: the *clip*.

Shapes: B responses in a batch, Q the longest query, R the longest response, V the vocabulary.
Words:  `old_` is the policy that wrote the responses, before this iteration's update; `ref_` is the
frozen reference model; no prefix is the policy as it is now, in the middle of the update. (Old ones
without prefix: `values` and `entropy` in a batch, `logprobs` in `compute_rewards`.) `mask` is
(B, R), 1 on the real tokens of a response and 0 on its padding, where the other tensors may hold
anything finite.

Three numbers are called a KL divergence, all in nats:
    token KL     old_logprob - ref_logprob of one token: what the KL penalty is made of
    `kl`         its sum over a response, averaged over the batch: how far the policy has moved
                 from the reference since training began
    `approx_kl`  per token, from the policy before this update to the policy during it

References:
    PPO   Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347
    GAE   Schulman et al. 2015, "High-Dimensional Continuous Control Using Generalized Advantage
          Estimation", arXiv:1506.02438
    RLHF  Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences",
          arXiv:1909.08593
"""

import math
import warnings

import torch
from torch.nn.utils.rnn import pad_sequence

# ------------------------------------------------------------------------------- the mathematics


def logprobs_from_logits(logits, labels):
    """log p(label) at each place: logits `(B, R, V)`, labels `(B, R)` -> `(B, R)`, in float32."""
    return logits.log_softmax(-1, dtype=torch.float32).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits):
    """Entropy of the next-token distribution, in nats: `(B, R, V)` -> `(B, R)`."""
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    return -(logprobs.exp() * logprobs).sum(-1)


def masked_mean(x, mask):
    """Mean of `x` over the cells where `mask` is 1, a scalar."""
    # not `x * mask`: what is computed from padding may overflow, and infinity times zero is nan
    return x.masked_fill(mask == 0, 0).sum() / mask.sum()


def masked_variance(x, mask):
    """Variance of `x` over the cells where `mask` is 1, a scalar; 0 for a single cell."""
    return masked_mean((x - masked_mean(x, mask)) ** 2, mask)


def masked_whiten(x, mask):
    """Shift and scale `x` to mean 0 and variance 1 over the real tokens; 0 on the padding.

    A departure from the article, which uses the advantages as they are. A shift common to all
    cancels on average until the clip acts: probabilities sum to 1, so to push every possible token
    alike moves none. The scale keeps the gradient's size the same, whatever the units of the score.
    """
    scale = torch.rsqrt(masked_variance(x, mask) + 1e-8)
    return ((x - masked_mean(x, mask)) * scale).masked_fill(mask == 0, 0)


def compute_rewards(scores, logprobs, ref_logprobs, mask, kl_coef):
    """Rewards per token: the KL penalty everywhere, plus the score at the end.

    Ziegler eq. 2, spread over the tokens:

        r_t = -kl_coef * (log pi_old(y_t) - log pi_ref(y_t))  + score if t is the last real token

    scores `(B,)`, the others `(B, R)` -> `(B, R)`. A text is scored only as a whole, so the score
    falls on its last real token (which need not be the last column), and GAE hands it back to the
    earlier ones. The article's text shows no KL penalty (its source code has one), and its
    `rewards` are the `scores` of this program.
    """
    token_kl = logprobs - ref_logprobs
    column = torch.arange(mask.shape[1], device=mask.device)
    is_last = column == mask.sum(1, keepdim=True) - 1  # (B, R)
    rewards = torch.where(is_last, scores.unsqueeze(1), 0.0) - kl_coef * token_kl
    return rewards.masked_fill(mask == 0, 0)


@torch.no_grad()  # advantages and returns are targets: constants of the optimization
def compute_advantages(rewards, values, mask, gamma, lam):
    """Generalized advantage estimation, GAE eqs. 11-16: `(B, R)` x 3 -> advantages, returns.

        delta_t     = r_t + gamma * value_{t+1} - value_t    the value after the last token is 0
        advantage_t = delta_t + gamma * lam * advantage_{t+1}
        return_t    = advantage_t + value_t                  what the value head is trained towards

    Not whitened here: returns must stay in units of reward.
    """
    rewards = rewards.masked_fill(mask == 0, 0)
    values = values.masked_fill(mask == 0, 0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])  # (B,)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        # On padding delta is 0, so that nothing flows from there into the real tokens.
        advantages[:, t] = delta + gamma * lam * next_advantage
        next_value, next_advantage = values[:, t], advantages[:, t]
    return advantages, advantages + values


def ppo_loss(logprobs, values, old_logprobs, advantages, returns, mask, cliprange, vf_coef):
    """The clipped surrogate loss plus the value loss; all tensors `(B, R)`, advantages whitened.

    PPO eqs. 7 and 9, without the entropy bonus of the latter.

        ratio       = pi(y_t) / pi_old(y_t) = exp(logprob - old_logprob)
        clipped     = clip(ratio, 1 - cliprange, 1 + cliprange)
        policy_loss = mean max(-advantage * ratio, -advantage * clipped)
        value_loss  = mean (value - return)^2
        loss        = policy_loss + vf_coef * value_loss

    `max` takes the worse loss. Once a token is cliprange more (or less) likely than at rollout, the
    way its advantage pulls, that is the clipped one, whose gradient is zero. Where it has moved the
    other way, it is the unclipped one, which still pulls it back. The article's text shows only the
    unclipped half, and adds the two losses with equal weight; its source code has both halves, and
    `vf_coef`.

    Whitened advantages average 0 and the first ratio is 1, so `policy_loss` starts near 0 and stays
    small. That is as it should be: its gradient is not 0.

    Returns `(loss, stats)`; stats are detached scalars: both losses, `clipfrac` (share of tokens
    with |ratio - 1| > cliprange, whether or not their gradient is clipped) and `approx_kl` = mean
    of (ratio - 1 - log ratio), an estimate of KL(old || now) that is never negative.
    """
    log_ratio = (logprobs - old_logprobs).masked_fill(mask == 0, 0)
    ratio = torch.exp(log_ratio)
    clipped_ratio = ratio.clamp(1 - cliprange, 1 + cliprange)
    policy_loss = masked_mean(torch.max(-advantages * ratio, -advantages * clipped_ratio), mask)
    value_loss = masked_mean((values - returns) ** 2, mask)
    loss = policy_loss + vf_coef * value_loss
    stats = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "clipfrac": masked_mean(((ratio - 1).abs() > cliprange).float(), mask),
        "approx_kl": masked_mean(ratio - 1 - log_ratio, mask),
    }
    return loss, {name: value.detach() for name, value in stats.items()}


def explained_variance(values, returns, mask):
    """1 - Var(return - value) / Var(return) over the real tokens: `(B, R)` x 3 -> a scalar.

    How much of the spread of the returns the critic foresaw: 1 all of it, 0 nothing, as if it said
    the same of every state; below 0 it is worse than that.
    """
    unforeseen = masked_variance(returns - values, mask)
    spread = masked_variance(returns, mask)
    return torch.where(spread > 0, 1 - unforeseen / spread, 0.0)


# ---------------------------------------------------------------------------- the KL coefficient


class FixedKLController:
    """`kl_coef` stays as it is."""

    def __init__(self, kl_coef):
        self.value = kl_coef

    def update(self, kl, n_samples):
        """Nothing to adapt."""


class AdaptiveKLController:
    """Raises or lowers `kl_coef` until the KL meets `target`.

    Ziegler section 2.2, with n_samples / horizon for its K_beta:

        value *= 1 + clip(kl / target - 1, -0.2, 0.2) * n_samples / horizon

    `target` is in nats per response and must be above 0; `horizon` is in responses.
    """

    def __init__(self, kl_coef, target, horizon):
        self.value, self.target, self.horizon = kl_coef, target, horizon

    def update(self, kl, n_samples):
        """Adapt to the `kl` that `n_samples` responses showed on average."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_samples / self.horizon


# ----------------------------------------------------------------------------------- the trainer


def mixed_precision(device, dtype):
    """A context in which matrix products run in bfloat16; weights and Adam stay float32.

    `dtype` is "fp32", "bf16", or "auto": bf16 on a cuda device or a CPU that multiplies it fast.
    """
    kind = torch.device(device).type
    if dtype == "auto" and kind == "cuda":
        dtype = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if dtype == "auto" and kind == "cpu":
        dtype = "bf16" if torch.cpu._is_avx512_bf16_supported() else "fp32"
    return torch.autocast(kind, dtype=torch.bfloat16, enabled=dtype == "bf16")


def collate(queries, responses):
    """Pad B queries and B responses (lists of 1-D id tensors) into one batch.

        left pad | query | response | right pad

    Every response then starts in column Q, so that one slice serves the whole batch. Returns a dict
    of `input_ids` and `attention_mask`, `(B, Q + R)`, and `labels` (the response ids) and `mask`,
    `(B, R)`.
    """

    def pad(rows, side):
        return pad_sequence(rows, batch_first=True, padding_side=side)

    # Padded with 0; any id would do. Masks come from lengths and never from ids: a policy may well
    # sample the pad token.
    labels = pad(responses, "right")  # (B, R)
    mask = pad([torch.ones_like(row) for row in responses], "right")
    query_mask = pad([torch.ones_like(row) for row in queries], "left")  # (B, Q)
    return {
        "input_ids": torch.cat([pad(queries, "left"), labels], dim=1),
        "attention_mask": torch.cat([query_mask, mask], dim=1),
        "labels": labels,
        "mask": mask.float(),
    }


def sequence_kl(batch):
    """KL to the reference, in nats, summed over the tokens of each response: `(B,)`.

    `batch` is what `PPOTrainer.old_pass` returns.

    log pi(y) - log pi_ref(y) of one sample y is an unbiased estimate of KL(pi || pi_ref): on
    average it is positive, on a single response it often is not.
    """
    token_kl = batch["old_logprobs"] - batch["ref_logprobs"]
    return token_kl.masked_fill(batch["mask"] == 0, 0).sum(1)


def read_scores(scores, n):
    """`n` scores, whatever numbers they are and whatever holds them -> FloatTensor `(n,)`.

    Raises `ValueError` for anything that cannot be read as n numbers.
    """
    needed = f"needed are {n} numbers, one score for each response; got"
    try:
        numbers = torch.as_tensor(scores, dtype=torch.float32).flatten()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{needed} what is no list of numbers: {repr(scores)[:80]}") from error
    if len(numbers) != n:
        raise ValueError(f"{needed} {len(numbers)}: {repr(scores)[:80]}")
    return numbers


class PPOTrainer:
    """Improves `model` on batches of (queries, responses, scores), wherever the scores come from.

    `model` and `ref_model` are two `GPT2HeadWithValueModel`s that share no weights; the second is
    frozen here. `config` is a dict with `iterations`, `ppo_epochs`, `minibatch_size`, `lr`,
    `value_lr`, `max_grad_norm`, `kl_coef`, `kl_target`, `kl_horizon`, `gamma`, `lam`, `cliprange`,
    `vf_coef` and `dtype`, as in rlhf_sentiment.py. `iterations` is how many steps you will make:
    the learning rates fall to 0 over them and stay there.
    """

    def __init__(self, model, ref_model, config):
        if set(model.parameters()) & set(ref_model.parameters()):
            raise ValueError("ref_model shares weights with model: pass copy.deepcopy(model)")
        self.model, self.config = model, config
        self.ref_model = ref_model.eval().requires_grad_(False)
        kl_coef, kl_target = config["kl_coef"], config["kl_target"]
        self.kl_controller = FixedKLController(kl_coef)
        if kl_target is not None:
            self.kl_controller = AdaptiveKLController(kl_coef, kl_target, config["kl_horizon"])
        # The value head starts from nothing and may take larger steps than the pretrained body.
        head = list(model.v_head.parameters())
        body = [p for name, p in model.named_parameters() if not name.startswith("v_head.")]
        groups = [{"params": body, "lr": config["lr"]}, {"params": head, "lr": config["value_lr"]}]
        self.optimizer = torch.optim.Adam(groups, fused=True)
        self.iteration = 0  # steps done so far
        self.last_batch = None  # the per-token tensors of the last step, for whoever wants to look

    def step(self, queries, responses, scores):
        """One PPO iteration; returns a dict of plain floats.

        queries, responses: lists of B 1-D id tensors of any lengths >= 1; scores: B floats.
        Raises `ValueError` if these do not match, and `FloatingPointError` if a score, a loss or a
        gradient is not finite: before the optimizer step, so that the weights stay good.
        """
        well_formed = all(ids.dim() == 1 and len(ids) > 0 for ids in [*queries, *responses])
        if len(queries) == 0 or len(queries) != len(responses) or not well_formed:
            counts = f"{len(queries)} queries and {len(responses)} responses"
            right = "as many of both, at least one, each a non-empty 1-D tensor of ids"
            raise ValueError(f"{counts}: there must be {right}")
        scores = read_scores(scores, len(responses))
        if not torch.isfinite(scores).all():
            raise FloatingPointError(f"iteration {self.iteration + 1}: a score is not finite")
        if self.iteration >= self.config["iterations"]:
            warnings.warn("more steps than `iterations`: the learning rate is 0 by now")

        batch = self.old_pass(queries, responses)
        mask = batch["mask"]
        kl_coef = self.kl_controller.value
        kl = sequence_kl(batch).mean()  # may print slightly negative: it is an estimate
        batch["rewards"] = compute_rewards(
            scores.to(mask.device), batch["old_logprobs"], batch["ref_logprobs"], mask, kl_coef
        )
        batch["advantages"], batch["returns"] = compute_advantages(
            batch["rewards"], batch["values"], mask, self.config["gamma"], self.config["lam"]
        )
        # Once, over the whole batch. To whiten each response alone would erase which one was good,
        # to whiten each minibatch would give equal advantages different weights.
        batch["whitened"] = masked_whiten(batch["advantages"], mask)
        self.last_batch = batch

        stats = self.update(batch)
        stats["kl"] = kl
        stats["entropy"] = masked_mean(batch["entropy"], mask)
        stats["explained_variance"] = explained_variance(batch["values"], batch["returns"], mask)
        stats = {name: float(value) for name, value in stats.items()}
        self.iteration += 1
        self.kl_controller.update(stats["kl"], len(queries))
        return {**stats, "kl_coef": kl_coef, "lr": self.optimizer.param_groups[0]["lr"]}

    def forward(self, model, batch):
        """Log-probs of the responses, their values, and the full logits: `(B, R)` x 2, `(B, R, V)`.

            column     ... Q-2  Q-1 | Q    Q+1  ...  Q+R-1
            holds      ... q    q   | y_0  y_1  ...  y_R-1
            predicts   ... q    y_0 | y_1  y_2  ...  (nothing that is needed)

        Column p predicts the token in column p + 1. So the log-prob of y_t, and the value of the
        state in which y_t was chosen, both stand one place to the left of y_t: columns Q-1 to
        Q+R-2. The model does not get the last column, which predicts nothing that is needed, and
        its two heads read only these R columns.
        """
        ids, attention_mask = batch["input_ids"][:, :-1], batch["attention_mask"][:, :-1]
        columns = slice(-batch["labels"].shape[1], None)  # the last R of Q+R-1: Q-1 to Q+R-2
        with mixed_precision(model.device, self.config["dtype"]):
            logits, values = model.logits_and_values(ids, attention_mask, columns)
        return logprobs_from_logits(logits, batch["labels"]), values.float(), logits

    @torch.no_grad()
    def old_pass(self, queries, responses):
        """Before the update: log-probs under policy and reference, and the critic's values.

        Returns the dict of `collate` with `old_logprobs`, `ref_logprobs`, `values` and `entropy`
        (of the policy's whole next-token distribution, in nats). Both models read the text that the
        policy wrote: how likely would each have made these very tokens? The difference of the
        log-probs is the token KL. The rollout's own log-probs will not do: made token by token with
        a cache, they differ in the last digits, and the ratio has to start at 1.
        """
        # Here and in `update` without dropout: it would move the ratio without any learning.
        self.model.eval()
        batch = collate(queries, responses)
        batch = {name: tensor.to(self.model.device) for name, tensor in batch.items()}
        done = []
        for minibatch in self.minibatches(batch, torch.arange(len(queries))):
            old_logprobs, values, logits = self.forward(self.model, minibatch)
            ref_logprobs, _, _ = self.forward(self.ref_model, minibatch)
            minibatch["old_logprobs"] = old_logprobs
            minibatch["ref_logprobs"] = ref_logprobs
            minibatch["values"] = values
            minibatch["entropy"] = entropy_from_logits(logits)
            done.append(minibatch)
        return {name: torch.cat([minibatch[name] for minibatch in done]) for name in done[0]}

    def minibatches(self, batch, order):
        """Cut the rows of `batch` in the given order; the last minibatch may be smaller."""
        for rows in order.split(self.config["minibatch_size"]):
            yield {name: tensor[rows] for name, tensor in batch.items()}

    def update(self, batch):
        """`ppo_epochs` passes over shuffled minibatches; returns mean stats as 0-d tensors."""
        # A departure from the article: both learning rates fall in a straight line to 0.
        remaining = max(0.0, 1 - self.iteration / self.config["iterations"])
        body, head = self.optimizer.param_groups
        body["lr"] = self.config["lr"] * remaining
        head["lr"] = self.config["value_lr"] * remaining
        all_stats = []
        for _ in range(self.config["ppo_epochs"]):
            for minibatch in self.minibatches(batch, torch.randperm(len(batch["mask"]))):
                all_stats.append(self.optimizer_step(minibatch))
        return {name: torch.stack([s[name] for s in all_stats]).mean() for name in all_stats[0]}

    def optimizer_step(self, minibatch):
        """One step of Adam on one minibatch; returns the stats of `ppo_loss`."""
        logprobs, values, _ = self.forward(self.model, minibatch)
        loss, stats = ppo_loss(
            logprobs, values, minibatch["old_logprobs"], minibatch["whitened"],
            minibatch["returns"], minibatch["mask"],
            self.config["cliprange"], self.config["vf_coef"],
        )  # fmt: skip
        self.optimizer.zero_grad()
        loss.backward()
        # A departure from the article: a gradient longer than that (one norm for transformer and
        # value head) is shortened, so that one odd batch cannot throw the policy far off.
        grad_norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.config["max_grad_norm"]
        )
        # One check for both, since a check waits until the GPU is done.
        if not (torch.isfinite(loss) & torch.isfinite(grad_norm)):
            raise FloatingPointError(
                f"iteration {self.iteration + 1}: loss {loss.item()}, gradient norm "
                f"{grad_norm.item()}; the weights are those of the last good step"
            )
        self.optimizer.step()
        return stats

    @torch.no_grad()
    def explain(self, tokenizer):
        """The first response of the last step as a table, a row per token, for the curious.

        `values` is what the critic expected before the token was chosen, `ratio` how much likelier
        the update has made the token; "(clipped)" is a token whose policy gradient is 0: it has
        moved so far the way its advantage pulls.
        """
        first = {name: tensor[:1] for name, tensor in self.last_batch.items()}
        first["token_kl"] = first["old_logprobs"] - first["ref_logprobs"]
        logprobs, _, _ = self.forward(self.model, first)
        first["ratio"] = (logprobs - first["old_logprobs"]).exp()
        columns = ("old_logprobs", "ref_logprobs", "token_kl", "rewards", "values")
        columns += ("advantages", "returns", "whitened", "ratio")
        lines = ["".join(f"{name:>{len(name) + 2}}" for name in columns) + "  token"]
        ids = first["labels"][0].tolist()[: int(first["mask"].sum().item())]
        for t, token in enumerate(tokenizer.convert_ids_to_tokens(ids)):
            numbers = (f"{first[name][0, t].item():{len(name) + 2}.3f}" for name in columns)
            lines.append("".join(numbers) + f"  {token}")
            change = first["ratio"][0, t].item() - 1
            advantage = first["whitened"][0, t].item()
            if abs(change) > self.config["cliprange"] and change * advantage > 0:
                lines[-1] += "  (clipped)"
        return "\n".join(lines)


# ----------------------------------------------------- how far PPO could get (not needed to train)


def best_possible(scores, kl_coef):
    """The ceiling, estimated from scores of the reference's own samples, `(P, N)`.

    J(pi) = E[score] - kl_coef * KL(pi || ref), the `objective`, is largest for the best policy pi*,
    proportional to ref * exp(score / kl_coef) (Korbak et al. 2022, arXiv:2205.11275), and J* =
    J(pi*) is the ceiling. For each of P openings, with means over its N samples:

        J* - J(pi) = kl_coef * KL(pi || pi*), never below 0

        w         = exp(score / kl_coef)
        J*        = kl_coef * log mean(w)
        E*[score] = mean(score * w) / mean(w)
        KL*       = (E*[score] - J*) / kl_coef

    `effective_samples` = (sum w)^2 / sum w^2: how many samples carry the mean of w, for the opening
    where they are fewest. With few of them J* comes out too low.
    """
    scores = torch.as_tensor(scores, dtype=torch.float64)
    log_w = scores / kl_coef  # up to thousands: w itself would overflow
    share = log_w.softmax(1)  # w / sum(w)
    score = (share * scores).sum(1)  # (P,)
    objective = kl_coef * (log_w.logsumexp(1) - math.log(scores.shape[1]))
    kl = (score - objective) / kl_coef
    effective_samples = 1 / share.square().sum(1)
    return {
        "score": score.mean().item(),
        "kl": kl.mean().item(),
        "objective": objective.mean().item(),
        "effective_samples": effective_samples.min().item(),
    }
