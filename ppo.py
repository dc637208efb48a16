"""PPO for a language model, by hand: the formulas as pure functions, then the trainer.

Notation: B responses in a batch, Q the longest query, R the longest response, V the vocabulary.
`old_` is at rollout time, `ref_` is the frozen reference model, no prefix is now. `mask` is (B, R),
1 on the real tokens of a response and 0 on its padding; what stands in padded cells never matters.

References:
    PPO   Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347
    GAE   Schulman et al. 2015, "High-Dimensional Continuous Control Using Generalized Advantage
          Estimation", arXiv:1506.02438
    RLHF  Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences",
          arXiv:1909.08593
"""

import math

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
    # masked_fill and not `x * mask`: infinity times zero is nan
    return x.masked_fill(mask == 0, 0).sum() / mask.sum()


def masked_whiten(x, mask):
    """Shift and scale `x` to mean 0 and variance 1 over the real tokens; 0 on the padding.

    A departure from the article, which uses the advantages as they are: whitened, they leave the
    step size to the learning rate, whatever the units of the score.
    """
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    return ((x - mean) * torch.rsqrt(variance + 1e-8)).masked_fill(mask == 0, 0)


def compute_rewards(scores, logprobs, ref_logprobs, mask, kl_coef):
    """Rewards per token: the KL penalty everywhere, plus the score at the end. Ziegler eq. 2.

        r_t = -kl_coef * (log pi(y_t) - log pi_ref(y_t))  + score if t is the last real token

    scores `(B,)`, the others `(B, R)` -> `(B, R)`. A sentence is judged only as a whole, so the
    score falls on its last real token (which is not the last column), and GAE hands it back to the
    earlier ones. The article has no KL penalty, and calls `rewards` what is `scores` here.
    """
    kl_penalty = -kl_coef * (logprobs - ref_logprobs)
    followed = torch.nn.functional.pad(mask[:, 1:], (0, 1))  # (B, R): is the next cell real too?
    is_last = (mask != 0) & (followed == 0)
    rewards = kl_penalty + is_last * scores.unsqueeze(1)
    return rewards.masked_fill(mask == 0, 0)


@torch.no_grad()  # advantages and returns are targets: constants of the optimization
def compute_advantages(rewards, values, mask, gamma, lam):
    """Generalized advantage estimation, GAE eqs. 11-16: `(B, R)` x 3 -> advantages, returns.

        delta_t = r_t + gamma * V_{t+1} - V_t         V after the last real token is 0
        A_t     = delta_t + gamma * lam * A_{t+1}
        return  = A + V                               what the value head is trained towards

    Neither is whitened: returns must stay in units of reward.
    """
    rewards, values = rewards.masked_fill(mask == 0, 0), values.masked_fill(mask == 0, 0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])  # (B,)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        # on padding delta is 0, so that nothing flows from there into the real tokens
        advantages[:, t] = delta + gamma * lam * next_advantage
        next_value, next_advantage = values[:, t], advantages[:, t]
    return advantages, advantages + values


def ppo_loss(logprobs, values, old_logprobs, advantages, returns, mask, cliprange, vf_coef):
    """The clipped surrogate loss plus the value loss, PPO eqs. 7 and 9; all tensors `(B, R)`.

        ratio       = pi(y_t) / pi_old(y_t) = exp(logprob - old_logprob)
        policy_loss = mean max(-A * ratio, -A * clip(ratio, 1 - cliprange, 1 + cliprange))
        value_loss  = mean (V - return)^2
        loss        = policy_loss + vf_coef * value_loss

    `max` of two losses is the pessimistic one: once a token is cliprange more (or less) likely than
    at rollout, in the direction in which its advantage pulls, its gradient is zero. The article's
    text shows only the unclipped half, and adds the two losses with equal weight.

    Returns `(loss, stats)`; stats are detached scalars: both losses, `clipfrac` (share of tokens
    with |ratio - 1| > cliprange) and `approx_kl` = mean (ratio - 1) - log ratio >= 0, an estimate
    of how far this policy is from the one that wrote the responses.
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


# ----------------------------------------------------- how far PPO could get (not needed to train)


def best_possible(scores, kl_coef):
    """The ceiling: what no policy can beat, from scores of the reference's own samples, `(P, N)`.

    E[score] - kl_coef * KL(pi || ref) is largest for pi* ~ ref * exp(score / kl_coef) (Korbak et
    al. 2022, arXiv:2205.11275). For each of P openings, with means over its N samples:

        J* - J(pi) = kl_coef * KL(pi || pi*), never below 0

        w         = exp(score / kl_coef)
        J*        = kl_coef * log mean(w)
        E*[score] = mean(score * w) / mean(w)
        KL*       = (E*[score] - J*) / kl_coef

    `effective_samples` = (sum w)^2 / sum w^2 of the worst opening: so many samples carry J*; with
    few it is too low. Standard errors (`_se`) are to first order in the spread of w.
    """
    scores = torch.as_tensor(scores, dtype=torch.float64)
    n_openings, n = scores.shape
    log_w = scores / kl_coef  # up to thousands: w itself would overflow
    share = log_w.softmax(1)  # w / sum(w)
    score = (share * scores).sum(1, keepdim=True)  # (P, 1)
    objective = kl_coef * (log_w.logsumexp(1, keepdim=True) - math.log(n))
    means = {"score": score, "kl": (score - objective) / kl_coef, "objective": objective}
    # what one sample contributes to each mean beyond it (the delta method)
    score_part = n * share * (scores - score)
    objective_part = kl_coef * (n * share - 1)
    parts = (score_part, (score_part - objective_part) / kl_coef, objective_part)
    errors = [(part.square().mean() / (n * n_openings)).sqrt().item() for part in parts]
    result = {name: mean.mean().item() for name, mean in means.items()}
    result |= {f"{name}_se": error for name, error in zip(means, errors)}
    return result | {"effective_samples": (1 / share.square().sum(1)).min().item()}


def best_of_n(scores, n, kl_coef):
    """Another yardstick: of n responses of the reference keep the best; `scores` are `(P, N)`.

    Expected best of n drawn without replacement from the N, its KL of at most log n - (n - 1) / n
    (Stiennon et al. 2020, arXiv:2009.01325, appendix G.3), and the objective that follows.
    """
    ranked = torch.as_tensor(scores, dtype=torch.float64).sort(1).values
    # rank i (from 0) is the best of n if the other n - 1 are among the i samples below it
    total = math.comb(ranked.shape[1], n)
    chances = [math.comb(i, n - 1) / total for i in range(ranked.shape[1])]
    score = (ranked.mean(0) * torch.tensor(chances, dtype=torch.float64)).sum().item()
    kl = math.log(n) - (n - 1) / n
    return {"n": n, "score": score, "kl": kl, "objective": score - kl_coef * kl}


# ---------------------------------------------------------------------------- the KL coefficient


class FixedKLController:
    """The leash keeps its length."""

    def __init__(self, kl_coef):
        self.value = kl_coef

    def update(self, kl, n_samples):
        """Nothing to adapt."""


class AdaptiveKLController:
    """Lengthens or shortens the leash until the KL meets `target`. Ziegler section 2.2.

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

    `dtype` is "fp32", "bf16", or "auto": bf16 where the hardware multiplies it fast.
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

    # Masks come from lengths and never from ids: a policy may well sample the pad token.
    labels = pad(responses, "right")  # (B, R)
    mask = pad([torch.ones_like(row) for row in responses], "right")
    query_mask = pad([torch.ones_like(row) for row in queries], "left")  # (B, Q)
    input_ids = torch.cat([pad(queries, "left"), labels], dim=1)  # (B, Q + R)
    attention_mask = torch.cat([query_mask, mask], dim=1)
    names = "input_ids", "attention_mask", "labels", "mask"
    return dict(zip(names, (input_ids, attention_mask, labels, mask.float())))


def sequence_kl(batch):
    """KL to the reference, in nats, summed over the tokens of each response: `(B,)`.

    `batch` is what `PPOTrainer.old_pass` returns.

    log pi(y) - log pi_ref(y) of one sample y is an unbiased estimate of KL(pi || pi_ref): on
    average it is positive, on a single response it often is not.
    """
    return ((batch["logprobs"] - batch["ref_logprobs"]) * batch["mask"]).sum(1)


class PPOTrainer:
    """Improves `model` on batches of (queries, responses, scores), wherever the scores come from.

    `model` and `ref_model` are two `GPT2HeadWithValueModel`s that share no weights; the second is
    frozen here. `config` is a dict with `iterations`, `ppo_epochs`, `minibatch_size`, `lr`,
    `value_lr`, `max_grad_norm`, `kl_coef`, `kl_target`, `kl_horizon`, `gamma`, `lam`, `cliprange`,
    `vf_coef` and `dtype`, as in rlhf_sentiment.py. `iterations` is how many steps you will make:
    the learning rates fall to 0 over them and stay there.
    """

    def __init__(self, model, ref_model, config):
        shared = {p.data_ptr() for p in model.parameters()}
        if any(p.data_ptr() in shared for p in ref_model.parameters()):
            raise ValueError("ref_model shares weights with model: pass copy.deepcopy(model)")
        self.model, self.config = model, config
        self.ref_model = ref_model.eval().requires_grad_(False)
        kl_coef, target, horizon = (config[k] for k in ("kl_coef", "kl_target", "kl_horizon"))
        self.kl_controller = FixedKLController(kl_coef)
        if target is not None:
            self.kl_controller = AdaptiveKLController(kl_coef, target, horizon)
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
        Raises `ValueError` if these do not match, and `FloatingPointError` before the optimizer
        step if a score, a loss or a gradient is not finite.
        """
        scores = torch.as_tensor(scores, dtype=torch.float32).flatten()
        counts = len(queries), len(responses), len(scores)
        flat = all(ids.dim() == 1 and len(ids) for ids in [*queries, *responses])
        if not queries or len(set(counts)) > 1 or not flat:
            raise ValueError(
                "step() needs as many queries as responses as scores, each of the first two a 1-D "
                "tensor of at least one id; got %d queries, %d responses, %d scores" % counts
            )
        if not torch.isfinite(scores).all():
            raise FloatingPointError(f"iteration {self.iteration + 1}: a score is not finite")

        batch = self.old_pass(queries, responses)
        mask = batch["mask"]
        kl_coef = self.kl_controller.value
        kl = sequence_kl(batch).mean()  # may print slightly negative: it is an estimate
        batch["rewards"] = compute_rewards(
            scores.to(mask.device), batch["logprobs"], batch["ref_logprobs"], mask, kl_coef
        )
        batch["advantages"], batch["returns"] = compute_advantages(
            batch["rewards"], batch["values"], mask, self.config["gamma"], self.config["lam"]
        )
        # Whitened over the batch, once: over one response alone it would erase whether that
        # response was good, and over a minibatch good would mean something else in each.
        batch["whitened"] = masked_whiten(batch["advantages"], mask)
        self.last_batch = batch

        stats = self.update(batch)
        stats["kl"], stats["entropy"] = kl, masked_mean(batch["entropy"], mask)
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
        Q+R-2. Earlier columns never see the language model head, the last never the model.
        """
        places = slice(-batch["labels"].shape[1], None)
        ids, attention_mask = batch["input_ids"][:, :-1], batch["attention_mask"][:, :-1]
        with mixed_precision(model.device, self.config["dtype"]):
            logits, values = model.logits_and_values(ids, attention_mask, places)
        return logprobs_from_logits(logits, batch["labels"]), values.float(), logits

    @torch.no_grad()
    def old_pass(self, queries, responses):
        """What policy and reference think of the responses before the update, `(B, R)` each.

        Returns the dict of `collate` with `logprobs`, `ref_logprobs`, `values` and `entropy` (of
        the policy's whole next-token distribution, in nats). The rollout's own log-probs will not
        do: computed in other batch shapes, they differ in the last digits, and the ratio must be 1
        before the first update.
        """
        # No dropout, here and in update(): it would move the ratio without any learning.
        self.model.eval()
        batch = {k: v.to(self.model.device) for k, v in collate(queries, responses).items()}
        results = []
        for part in self.minibatches(batch, torch.arange(len(queries))):
            logprobs, values, logits = self.forward(self.model, part)
            ref_logprobs, _, _ = self.forward(self.ref_model, part)
            results.append((logprobs, ref_logprobs, values, entropy_from_logits(logits)))
        names = ("logprobs", "ref_logprobs", "values", "entropy")
        return batch | {name: torch.cat(parts) for name, parts in zip(names, zip(*results))}

    def minibatches(self, batch, order):
        """Cut the rows of `batch` in the given order; the last minibatch may be smaller."""
        for rows in order.split(self.config["minibatch_size"]):
            yield {name: tensor[rows.to(tensor.device)] for name, tensor in batch.items()}

    def update(self, batch):
        """`ppo_epochs` passes over shuffled minibatches; returns mean stats as 0-d tensors."""
        # A departure from the article: both learning rates fall in a straight line to 0.
        remaining = max(0.0, 1 - self.iteration / self.config["iterations"])
        for group, start in zip(self.optimizer.param_groups, ("lr", "value_lr")):
            group["lr"] = self.config[start] * remaining
        all_stats = []
        for _ in range(self.config["ppo_epochs"]):
            for part in self.minibatches(batch, torch.randperm(len(batch["mask"]))):
                logprobs, values, _ = self.forward(self.model, part)
                loss, stats = ppo_loss(
                    logprobs, values, part["logprobs"], part["whitened"], part["returns"],
                    part["mask"], self.config["cliprange"], self.config["vf_coef"],
                )  # fmt: skip
                self.optimizer.zero_grad()
                loss.backward()
                # A departure from the article: one odd batch cannot throw the policy far off.
                grad_norm = torch.nn.utils.clip_grad_norm_(
                    self.model.parameters(), self.config["max_grad_norm"]
                )
                if not torch.isfinite(loss.detach() + grad_norm):
                    raise FloatingPointError(
                        f"iteration {self.iteration + 1}: loss {loss.item()}, gradient norm "
                        f"{grad_norm.item()}; the weights are those of the last good step"
                    )
                self.optimizer.step()
                all_stats.append(stats)
        return {name: torch.stack([s[name] for s in all_stats]).mean() for name in all_stats[0]}

    @torch.no_grad()
    def explain(self, tokenizer):
        """The first response of the last step as a table, a row per token, for the curious.

        Columns stand in the order of their computation; `ratio` is the one after the last epoch.
        """
        batch = {name: tensor[:1] for name, tensor in self.last_batch.items()}
        batch["kl"] = batch["logprobs"] - batch["ref_logprobs"]
        batch["ratio"] = (self.forward(self.model, batch)[0] - batch["logprobs"]).exp()
        batch["reference"], batch["advantage"] = batch["ref_logprobs"], batch["advantages"]
        names = "logprobs reference kl rewards values advantage returns whitened ratio".split()
        lines = ["".join(f"{name:>10}" for name in names) + "  clipped  token"]
        for t, token in enumerate(tokenizer.convert_ids_to_tokens(batch["labels"][0].tolist())):
            if batch["mask"][0, t]:
                numbers = "".join(f"{batch[name][0, t].item():10.3f}" for name in names)
                clipped = abs(batch["ratio"][0, t].item() - 1) > self.config["cliprange"]
                lines.append(f"{numbers}  {'yes' if clipped else 'no':7}  {token}")
        return "\n".join(lines)
