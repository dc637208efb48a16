"""Before, after and the ceiling: means, their errors, and the share of the possible gain."""

from pathlib import Path

import pytest
import torch

import rlhf_sentiment
from ppo import PPOTrainer, best_possible
from rlhf_sentiment import evaluate, summarize


class Ends:
    """Stands for a tokenizer: token 3 ends a text."""

    eos_token_id = 3


def of(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_means_and_errors_are_those_of_a_stratified_sample():
    # two openings, two samples each; only the spread within an opening is chance
    scores, kls = of([0.0, 1.0], [0.4, 0.6]), of([1.0, 1.0], [3.0, 5.0])
    responses = [[5, 6, 3], [5, 6], [7], [7, 3]]
    summary = summarize(responses, scores, kls, 0.1, Ends)
    assert summary["score"] == pytest.approx(0.5)
    assert summary["score_se"] == pytest.approx(((0.5 + 0.02) / 2 / 4) ** 0.5)
    assert summary["kl"] == pytest.approx(2.5)
    assert summary["objective"] == pytest.approx(0.5 - 0.1 * 2.5)
    assert summary["distinct_2"] == pytest.approx(3 / 4)  # (5,6) twice, (6,3), (7,3)
    assert summary["length"] == pytest.approx(2.0)
    assert summary["ended"] == pytest.approx(0.5)


def test_one_sample_has_an_error_of_0_and_not_nan():
    summary = summarize([[3]], of([0.3]), of([0.1]), 0.1, Ends)
    assert summary["score_se"] == summary["kl_se"] == summary["objective_se"] == 0.0
    assert summary["distinct_2"] == 0.0


def test_the_share_is_1_for_the_best_policy_and_0_for_the_reference(finished, capsys, monkeypatch):
    folder = rlhf_sentiment.RunFolder.__new__(rlhf_sentiment.RunFolder)
    folder.config = {"kl_coef": 0.2, "kl_target": None}
    folder.path, folder.rows = Path(finished["run_dir"]), []
    monkeypatch.setattr(rlhf_sentiment, "draw_curve", lambda *_: None)
    monkeypatch.setattr(rlhf_sentiment, "write_json", lambda *_: None)
    scores = of([0.0, 0.5, 0.5, 1.0])
    before = summarize([[3]] * 4, scores, scores * 0, 0.2, Ends) | {"examples": [("a", 0.5)]}
    folder.before = {"pool": before, "held_out": before}
    folder.reference_scores = {"pool": scores, "held_out": scores}
    ceiling = best_possible(scores, 0.2)
    best = {**before, "objective": ceiling["objective"]}
    summary = folder.finish({"pool": best, "held_out": before})
    assert summary["ceiling"]["share"] == pytest.approx(1.0)
    assert summary["held_out"]["ceiling"]["share"] == pytest.approx(0.0)
    assert summary["ceiling"]["score"] >= before["score"]
    assert "PPO reached 100% of the possible gain" in capsys.readouterr().out


def test_an_evaluation_draws_by_its_own_seed(loaded, settings):
    model, ref_model, tokenizer, pipe = loaded
    trainer = PPOTrainer(model, ref_model, settings)
    first, scores = evaluate(trainer, tokenizer, pipe)
    torch.manual_seed(3)  # whatever was drawn before
    assert evaluate(trainer, tokenizer, pipe)[0] == first
    assert first["pool"]["kl"] == 0.0  # the policy still is the reference
    assert first["pool"]["score"] == pytest.approx(scores["pool"].mean().item())
    assert scores["pool"].shape == (4, settings["eval_samples"])  # openings, samples
    trainer.iteration = 1  # after training it draws afresh
    assert evaluate(trainer, tokenizer, pipe)[0] != first
    trainer.config = {**settings, "seed": 2**32 - 1}
    assert evaluate(trainer, tokenizer, pipe)[0] != first
