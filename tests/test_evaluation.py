"""Before, after and the ceiling: means, their errors, and the share of the possible gain."""

import pytest
import torch

from ppo import PPOTrainer
from rlhf_sentiment import compare, evaluate, summarize


def samples_of(scores, kls, responses):
    return list(zip(map(torch.tensor, responses), "abcdefgh", scores, kls))


def test_means_and_errors_are_those_of_a_stratified_sample():
    # two openings, two samples each; only the spread within an opening is chance
    samples = samples_of(
        [0.0, 1.0, 0.4, 0.6], [1.0, 1.0, 3.0, 5.0], [[5, 6, 3], [5, 6], [7], [7, 3]]
    )
    summary = summarize(samples, n=2, kl_coef=0.1, end_id=3)
    assert summary["score"] == pytest.approx(0.5)
    assert summary["score_se"] == pytest.approx(((0.5 + 0.02) / 2 / 4) ** 0.5)
    assert summary["kl"] == pytest.approx(2.5)
    assert summary["objective"] == pytest.approx(0.5 - 0.1 * 2.5)
    assert summary["distinct_2"] == pytest.approx(3 / 4)  # (5,6) twice, (6,3), (7,3)
    assert summary["length"] == pytest.approx(2.0)
    assert summary["ended"] == pytest.approx(0.5)
    assert summary["examples"] == [("a", 0.0), ("c", 0.4)]


def test_one_sample_has_an_error_of_0_and_not_nan():
    summary = summarize(samples_of([0.3], [0.1], [[3]]), n=1, kl_coef=0.1, end_id=3)
    assert summary["score_se"] == summary["kl_se"] == summary["objective_se"] == 0.0
    assert summary["distinct_2"] == 0.0


def test_the_share_is_1_for_the_best_policy_and_0_for_the_reference():
    scores, kl_coef = [0.0, 0.5, 0.5, 1.0], 0.2
    before = summarize(samples_of(scores, [0.0] * 4, [[3]] * 4), 4, kl_coef, 3)
    same = compare("pool", dict(before), dict(before), kl_coef)
    assert same["ceiling"]["share"] == pytest.approx(0.0)
    best = compare(
        "pool", dict(before), {**before, "objective": same["ceiling"]["objective"]}, kl_coef
    )
    assert best["ceiling"]["share"] == pytest.approx(1.0)
    assert best["ceiling"]["score"] >= best["before"]["score"]


def test_an_evaluation_draws_by_its_own_seed(loaded, settings):
    model, ref_model, tokenizer, pipe = loaded
    trainer = PPOTrainer(model, ref_model, settings)
    first = evaluate(trainer, tokenizer, pipe)
    torch.manual_seed(3)  # whatever was drawn before
    assert evaluate(trainer, tokenizer, pipe) == first
    assert first["pool"]["kl"] == 0.0  # the policy still is the reference
    trainer.iteration = 1  # after training it draws afresh
    assert evaluate(trainer, tokenizer, pipe) != first
    trainer.config = {**settings, "seed": 2**32 - 1}
    assert evaluate(trainer, tokenizer, pipe) != first
