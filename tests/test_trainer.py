"""PPOTrainer: the right numbers for the right tokens, and learning."""

import copy
import math
import warnings

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gpt2_value_head import GPT2HeadWithValueModel
from ppo import PPOTrainer, masked_whiten, mixed_precision, read_scores, sequence_kl

QUERIES = [torch.tensor([2, 8, 9, 10]), torch.tensor([2, 11]), torch.tensor([2, 12, 13])]
RESPONSES = [torch.tensor([14, 15, 3]), torch.tensor([16]), torch.tensor([17, 18, 19, 20, 21])]
SCORES = [0.9, 0.1, 0.5]


@pytest.fixture
def trainer(loaded, settings):
    model, ref_model, _, _ = loaded
    torch.nn.init.normal_(model.v_head.summary.weight, std=0.3)
    return PPOTrainer(model, ref_model, settings)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(before, after):
    return all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_every_response_token_gets_its_own_logprob_and_the_value_before_it(trainer):
    batch = trainer.old_pass(QUERIES, RESPONSES)
    for row, (query, response) in enumerate(zip(QUERIES, RESPONSES)):
        ids = torch.cat([query, response]).unsqueeze(0)  # alone, without any padding
        logits, values = trainer.model.logits_and_values(ids, torch.ones_like(ids))
        for t, token in enumerate(response):
            place = len(query) + t - 1  # this place predicts the token that follows it
            logprob = logits[0, place].log_softmax(-1)[token]
            assert batch["old_logprobs"][row, t].item() == pytest.approx(logprob.item(), abs=1e-5)
            assert batch["values"][row, t].item() == pytest.approx(
                values[0, place].item(), abs=1e-5
            )
        assert batch["mask"][row].tolist() == [1.0] * len(response) + [0.0] * (5 - len(response))


def test_a_longer_neighbour_changes_no_number_of_a_row(trainer):
    alone = trainer.old_pass(QUERIES[:1], RESPONSES[:1])
    beside = trainer.old_pass(QUERIES, RESPONSES)
    for name in ("old_logprobs", "ref_logprobs", "values", "entropy"):
        assert torch.allclose(alone[name][0], beside[name][0, :3], atol=1e-5), name


def test_a_sampled_pad_token_is_a_real_token(trainer):
    batch = trainer.old_pass([torch.tensor([2, 8])], [torch.tensor([14, 0, 15])])
    assert batch["mask"].tolist() == [[1.0, 1.0, 1.0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1]]


def test_the_ratio_is_1_before_the_first_update_even_after_train(trainer):
    trainer.model.train()  # dropout of 0.1 in the hub's config
    batch = trainer.old_pass(QUERIES, RESPONSES)
    for part in trainer.minibatches(batch, torch.tensor([2, 0, 1])):
        logprobs, _, _ = trainer.forward(trainer.model, part)
        ratio = (logprobs - part["old_logprobs"])[part["mask"] > 0].exp()
        assert torch.allclose(ratio, torch.ones_like(ratio), atol=1e-5)


def test_every_sample_is_used_once_per_epoch_whatever_the_remainder(trainer):
    batch = {"row": torch.arange(11)}
    parts = [part["row"].tolist() for part in trainer.minibatches(batch, torch.randperm(11))]
    assert [len(part) for part in parts] == [4, 4, 3]
    assert sorted(row for part in parts for row in part) == list(range(11))


def test_a_minibatch_larger_than_the_batch_is_one_minibatch(trainer):
    trainer.config["minibatch_size"] = 100
    (part,) = trainer.minibatches({"row": torch.arange(3)}, torch.arange(3))
    assert len(part["row"]) == 3


def test_a_step_returns_plain_floats_and_keeps_its_tensors(trainer):
    stats = trainer.step(QUERIES, RESPONSES, SCORES)
    assert {"kl", "policy_loss", "value_loss", "clipfrac", "approx_kl", "entropy"} <= set(stats)
    assert all(type(value) is float and math.isfinite(value) for value in stats.values())
    batch = trainer.last_batch
    assert batch["rewards"].shape == batch["whitened"].shape == (3, 5)
    assert not any(tensor.requires_grad for tensor in batch.values())
    # whitened over the batch, not row by row
    assert torch.allclose(batch["whitened"], masked_whiten(batch["advantages"], batch["mask"]))
    assert batch["whitened"].sum(1).abs().min() > 0.1
    # the score is in the rewards once, at the end; policy and reference agree at first
    assert torch.allclose(batch["rewards"].sum(1), torch.tensor(SCORES), atol=1e-5)
    assert stats["kl"] == pytest.approx(sequence_kl(batch).mean().item())


def test_step_takes_tensor_scores_and_batches_of_one(trainer):
    stats = trainer.step(QUERIES[1:2], RESPONSES[1:2], torch.tensor([1.0]))
    assert all(math.isfinite(value) for value in stats.values())


def test_a_step_moves_the_policy_and_never_the_reference(trainer):
    policy, reference = weights(trainer.model), weights(trainer.ref_model)
    trainer.step(QUERIES, RESPONSES, SCORES)
    assert not same(policy, weights(trainer.model))
    assert same(reference, weights(trainer.ref_model))


def test_good_responses_become_more_likely_and_bad_ones_less(trainer):
    torch.nn.init.zeros_(trainer.model.v_head.summary.weight)  # so that only the scores speak
    before = trainer.old_pass(QUERIES, RESPONSES)
    trainer.step(QUERIES, RESPONSES, [1.0, 0.0, 0.5])
    after = trainer.old_pass(QUERIES, RESPONSES)
    change = ((after["old_logprobs"] - before["old_logprobs"]) * before["mask"]).sum(1)
    assert change[0] > 0 > change[1]


def test_the_reported_kl_is_the_trained_one_and_positive_when_the_policy_has_moved(trainer):
    kls = [trainer.step(QUERIES, RESPONSES, [1.0, 0.0, 0.0])["kl"] for _ in range(2)]
    assert kls[0] == pytest.approx(0.0, abs=1e-5)
    assert kls[1] == pytest.approx(sequence_kl(trainer.last_batch).mean().item(), abs=1e-5)
    log_ratio = trainer.last_batch["old_logprobs"] - trainer.last_batch["ref_logprobs"]
    penalty = -trainer.config["kl_coef"] * log_ratio * trainer.last_batch["mask"]
    rewards = trainer.last_batch["rewards"]
    assert torch.allclose(rewards[0, :2], penalty[0, :2], atol=1e-6)


@pytest.mark.filterwarnings("ignore:more steps than")
def test_both_learning_rates_fall_in_a_straight_line_to_0_and_stay_there(trainer):
    seen = []
    for _ in range(trainer.config["iterations"] + 2):
        stats = trainer.step(QUERIES, RESPONSES, SCORES)
        seen.append([group["lr"] for group in trainer.optimizer.param_groups])
        assert stats["lr"] == seen[-1][0]  # the transformer's is the one that is logged
    lr, value_lr = trainer.config["lr"], trainer.config["value_lr"]
    share = [1, 2 / 3, 1 / 3, 0, 0]
    assert seen == [[pytest.approx(lr * s), pytest.approx(value_lr * s)] for s in share]


def test_the_adaptive_controller_steers_kl_coef_when_there_is_a_target(loaded, settings):
    model, ref_model, _, _ = loaded
    trainer = PPOTrainer(model, ref_model, {**settings, "kl_target": 6.0, "kl_horizon": 30})
    stats = [trainer.step(QUERIES, RESPONSES, SCORES) for _ in range(2)]
    assert stats[0]["kl_coef"] == 0.05  # this step's; KL 0 then lowers it by 0.2 * 3 / 30
    assert stats[1]["kl_coef"] == pytest.approx(0.05 * 0.98)


def test_the_gradient_is_clipped_in_every_minibatch(trainer, monkeypatch):
    norms, clip = [], torch.nn.utils.clip_grad_norm_

    def watched(parameters, limit):
        parameters = list(parameters)
        clip(parameters, limit)
        norms.append(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm())
        return torch.tensor(1.0)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", watched)
    trainer.config["max_grad_norm"] = 1e-3
    trainer.step(QUERIES * 2, RESPONSES * 2, SCORES * 2)
    assert len(norms) == trainer.config["ppo_epochs"] * 2
    assert all(norm == pytest.approx(1e-3, rel=1e-3) for norm in norms)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_stops_the_step_and_nothing_has_moved(trainer, bad):
    trainer.step(QUERIES, RESPONSES, SCORES)
    before, random_state = weights(trainer.model), torch.get_rng_state()
    with pytest.raises(FloatingPointError, match="iteration 2.*score"):
        trainer.step(QUERIES, RESPONSES, [0.5, bad, 0.5])
    assert same(before, weights(trainer.model)) and trainer.iteration == 1
    assert torch.equal(random_state, torch.get_rng_state())


def test_a_loss_that_is_not_finite_stops_before_the_optimizer_step(trainer):
    trainer.step(QUERIES, RESPONSES, SCORES)
    before = weights(trainer.model)
    trainer.config["vf_coef"] = math.nan
    with pytest.raises(FloatingPointError, match="iteration 2.*loss nan"):
        trainer.step(QUERIES, RESPONSES, SCORES)
    assert same(before, weights(trainer.model))


def test_step_refuses_lists_that_do_not_match(trainer):
    with pytest.raises(ValueError, match="3 queries and 2 responses"):
        trainer.step(QUERIES, RESPONSES[:2], SCORES)
    with pytest.raises(ValueError, match="non-empty"):
        trainer.step(QUERIES, [*RESPONSES[:2], torch.tensor([], dtype=torch.long)], SCORES)
    with pytest.raises(ValueError, match="non-empty 1-D tensor"):
        trainer.step([ids.unsqueeze(0) for ids in QUERIES], RESPONSES, SCORES)
    with pytest.raises(ValueError, match="0 queries"):
        trainer.step([], [], [])


def test_a_reference_that_shares_weights_is_refused(loaded, settings):
    model = loaded[0]
    with pytest.raises(ValueError, match="shares weights"):
        PPOTrainer(model, model, settings)


def table(trainer, tokenizer):
    """The printed token table as a dict for each token."""
    head, *rows = trainer.explain(tokenizer).split("\n")
    return [dict(zip(head.split(), row.split())) | {"line": row} for row in rows]


def test_the_token_table_adds_up_from_left_to_right(trainer, loaded):
    """After an update that has moved the policy, so that no column is 0."""
    trainer.step(QUERIES, RESPONSES, SCORES)
    trainer.step(QUERIES, RESPONSES, SCORES)
    rows = table(trainer, loaded[2])
    assert len(rows) == len(RESPONSES[0]) and rows[-1]["token"] == "[SEP]"
    names = ("old_logprobs", "ref_logprobs", "token_kl", "rewards", "values", "advantages")
    number = {name: [float(row[name]) for row in rows] for name in (*names, "returns")}
    for t, kl in enumerate(number["token_kl"]):
        assert kl == pytest.approx(number["old_logprobs"][t] - number["ref_logprobs"][t], abs=0.002)
        to_come = sum(number["rewards"][t:])
        assert number["returns"][t] == pytest.approx(to_come, abs=0.003)
        advantage = number["returns"][t] - number["values"][t]
        assert number["advantages"][t] == pytest.approx(advantage, abs=0.002)
    assert max(map(abs, number["token_kl"])) > 0.01
    paid = sum(number["rewards"]) + trainer.config["kl_coef"] * sum(number["token_kl"])
    assert paid == pytest.approx(SCORES[0], abs=0.005)


def test_the_ratio_column_shows_how_much_likelier_the_update_made_a_token(trainer, loaded):
    trainer.step(QUERIES, RESPONSES, SCORES)
    before = trainer.last_batch["old_logprobs"][0]
    now = trainer.forward(trainer.model, trainer.last_batch)[0][0]
    for t, row in enumerate(table(trainer, loaded[2])):
        ratio = (now[t] - before[t]).exp().item()
        assert float(row["ratio"]) == pytest.approx(ratio, abs=0.001)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_is_called_clipped_where_its_gradient_has_stopped(trainer, loaded, advantage):
    """Beyond the range on the side to which its advantage pulls; on the other it is pulled back."""
    trainer.step(QUERIES, RESPONSES, SCORES)
    logprobs = trainer.forward(trainer.model, trainer.last_batch)[0].detach()
    trainer.last_batch["whitened"] = torch.full_like(logprobs, advantage)
    for log_ratio in (-1.0, -0.1, 0.1, 1.0):
        trainer.last_batch["old_logprobs"] = logprobs - log_ratio
        marks = ["(clipped)" in row["line"] for row in table(trainer, loaded[2])]
        assert marks == [log_ratio == advantage] * len(RESPONSES[0])


# ------------------------------------------------------------- what keeps the numbers what they are


def test_scores_may_be_any_numbers_but_there_must_be_one_for_each_response():
    for scores in ([1, 0], [True, False], torch.tensor([[1.0], [0.0]]), (1.0, 0.0)):
        read = read_scores(scores, 2)
        assert read.dtype == torch.float32 and read.tolist() == [1.0, 0.0]
    for scores, came in (
        ([1.0], "got 1: "),
        ([10**400] * 2, "got what is no list of numbers: "),
        (["good", "bad"], "got what is no list of numbers: .'good', 'bad'"),
        (None, "got what is no list of numbers: None"),
    ):
        with pytest.raises(ValueError, match=f"needed are 2 numbers.*{came}"):
            read_scores(scores, 2)


def test_a_step_beyond_the_last_is_warned_of(trainer):
    """By then the learning rate is 0: nothing is learned, and nothing else would say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(trainer.config["iterations"]):
            trainer.step(QUERIES, RESPONSES, SCORES)
    before = weights(trainer.model)
    with pytest.warns(UserWarning, match="the learning rate is 0"):
        trainer.step(QUERIES, RESPONSES, SCORES)
    assert same(before, weights(trainer.model))


def test_the_reference_has_no_dropout_even_after_train(loaded, settings):
    """The hub's config has dropout of 0.1; with it the KL would be noise from the first step."""
    model, ref_model, _, _ = loaded
    trainer = PPOTrainer(model, ref_model.train(), settings)
    batch = trainer.old_pass(QUERIES, RESPONSES)
    assert torch.allclose(batch["old_logprobs"], batch["ref_logprobs"], atol=1e-6)
    assert not any(parameter.requires_grad for parameter in ref_model.parameters())


def test_one_epoch_of_one_minibatch_is_an_update_too(trainer):
    trainer.config.update(ppo_epochs=1, minibatch_size=100)
    stats = trainer.step(QUERIES, RESPONSES, SCORES)
    assert stats["clipfrac"] == 0.0 and stats["approx_kl"] == pytest.approx(0.0, abs=1e-6)


def test_in_half_precision_only_the_products_are_rounded(trainer):
    """bf16 has 8 bits for a number: kept in it, values and log-probs would be useless."""
    exact = trainer.old_pass(QUERIES, RESPONSES)
    trainer.config["dtype"] = "bf16"
    rounded = trainer.old_pass(QUERIES, RESPONSES)
    for name in ("old_logprobs", "ref_logprobs", "values", "entropy"):
        assert rounded[name].dtype == torch.float32
        assert torch.allclose(rounded[name], exact[name], atol=0.2)
    assert not torch.equal(rounded["old_logprobs"], exact["old_logprobs"])


@pytest.mark.parametrize(
    "device, dtype, hardware, wanted",
    [
        ("cuda", "auto", True, True),
        ("cuda:1", "auto", False, False),  # emulated bf16 is slower than float32
        ("cpu", "auto", True, True),
        ("cpu", "auto", False, False),
        ("mps", "auto", True, False),
        ("cpu", "bf16", False, True),
        ("cuda", "fp32", True, False),
    ],
)
def test_bf16_is_taken_where_the_hardware_multiplies_it_fast(
    device, dtype, hardware, wanted, monkeypatch
):
    def supported(including_emulation=True):
        return including_emulation or hardware

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: hardware)
    chosen = []
    monkeypatch.setattr(torch, "autocast", lambda kind, **options: chosen.append((kind, options)))
    mixed_precision(device, dtype)
    assert chosen == [(device[:4].rstrip(":"), {"dtype": torch.bfloat16, "enabled": wanted})]


# ------------------------------------------------------------------- does it learn, and is it held


def toy_world(seed, **changes):
    """A tiny random GPT-2 that is rewarded for writing token 5; returns its share before, after."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 12, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}
    model = GPT2HeadWithValueModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)).eval()
    config = {
        "iterations": 15, "ppo_epochs": 4, "minibatch_size": 16, "lr": 3e-3, "value_lr": 1e-2,
        "max_grad_norm": 1.0, "kl_coef": 0.0, "kl_target": None, "kl_horizon": 10000, "gamma": 1.0,
        "lam": 0.95, "cliprange": 0.2, "vf_coef": 0.1, "dtype": "fp32", **changes,
    }  # fmt: skip
    trainer = PPOTrainer(model, copy.deepcopy(model), config)
    shares, kls = [], []
    for _ in range(config["iterations"]):
        ids = torch.full((32, 2), 2)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, top_k=0,
                             min_new_tokens=4, do_sample=True, pad_token_id=0)  # fmt: skip
        responses = list(out[:, 2:])
        scores = [(response == 5).float().mean() for response in responses]
        kls.append(trainer.step(list(ids), responses, torch.stack(scores))["kl"])
        shares.append(torch.stack(scores).mean().item())
    return shares[0], shares[-1], kls[-1]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_learns_a_toy_reward(seed):
    before, after, _ = toy_world(seed)
    assert before < 0.25 and after > 0.8


def test_a_strong_leash_holds_the_policy_back():
    _, _, free_kl = toy_world(0)
    before, held, held_kl = toy_world(0, kl_coef=10.0)
    assert held < before + 0.1 and held_kl < 0.1 * free_kl


def test_generate_is_inherited():
    assert GPT2HeadWithValueModel.generate is GPT2LMHeadModel.generate
    assert GPT2HeadWithValueModel.forward is GPT2LMHeadModel.forward
