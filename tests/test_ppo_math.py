"""The formulas of ppo.py against numbers worked out by hand."""

import math

import pytest
import torch

from ppo import (
    AdaptiveKLController,
    FixedKLController,
    best_possible,
    compute_advantages,
    compute_rewards,
    entropy_from_logits,
    explained_variance,
    logprobs_from_logits,
    masked_mean,
    masked_whiten,
    ppo_loss,
)

# two responses, of 3 and 2 tokens; the padded cell holds rubbish on purpose
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
RUBBISH = 1e30


def close(actual, expected, tolerance=1e-6):
    return torch.allclose(torch.as_tensor(actual), torch.as_tensor(expected), atol=tolerance)


def test_logprobs_are_the_log_of_the_softmax_at_the_label():
    # probabilities 1/4, 1/4, 1/2 from logits 0, 0, log 2
    logits = torch.tensor([[[0.0, 0.0, math.log(2)]]])
    for label, probability in enumerate((0.25, 0.25, 0.5)):
        assert close(
            logprobs_from_logits(logits, torch.tensor([[label]])), [[math.log(probability)]]
        )


def test_logprobs_of_half_precision_logits_are_computed_in_float32():
    logits = torch.zeros(1, 1, 21128, dtype=torch.bfloat16)
    actual = logprobs_from_logits(logits, torch.tensor([[7]]))
    assert actual.dtype == torch.float32 and close(actual, [[-math.log(21128)]], 1e-5)


def test_entropy_of_a_fair_choice_is_the_log_of_their_number():
    assert close(entropy_from_logits(torch.zeros(1, 1, 8)), [[math.log(8)]])
    assert close(entropy_from_logits(torch.tensor([[[0.0, 100.0]]])), [[0.0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_masked_mean_sees_only_real_tokens(dtype):
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, RUBBISH]])
    assert close(masked_mean(x, MASK.to(dtype)), 3.0)


def test_whitening_gives_mean_0_and_variance_1_over_the_whole_batch():
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, RUBBISH]])  # mean 3, variance 2
    white = masked_whiten(x, MASK)
    root = math.sqrt(2)
    assert close(white, [[-2 / root, -1 / root, 0], [1 / root, 2 / root, 0]], 1e-5)


def test_whitening_one_token_gives_0_and_not_nan():
    assert close(
        masked_whiten(torch.tensor([[7.0, RUBBISH]]), torch.tensor([[1.0, 0.0]])), [[0.0, 0.0]]
    )


def test_the_score_lands_on_the_last_real_token_and_the_kl_penalty_on_every_one():
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, RUBBISH]])
    ref_logprobs = torch.tensor([[-1.5, -2.0, -2.0], [-2.0, -0.5, -RUBBISH]])
    rewards = compute_rewards(torch.tensor([0.9, 0.4]), logprobs, ref_logprobs, MASK, 0.1)
    assert close(rewards, [[-0.05, 0.0, 0.1 + 0.9], [-0.1, 0.05 + 0.4, 0.0]])


REWARDS = torch.tensor([[0.0, 0.0, 1.0], [0.5, 2.0, RUBBISH]])
VALUES = torch.tensor([[0.1, 0.2, 0.3], [1.0, 0.5, -RUBBISH]])


def test_gae_with_lam_0_is_the_one_step_error():
    advantages, returns = compute_advantages(REWARDS, VALUES, MASK, gamma=1.0, lam=0.0)
    assert close(advantages, [[0.1, 0.1, 0.7], [0.0, 1.5, 0.0]])
    assert close(returns, [[0.2, 0.3, 1.0], [1.0, 2.0, 0.0]])


def test_gae_with_lam_1_is_the_sum_of_rewards_minus_the_value():
    advantages, returns = compute_advantages(REWARDS, VALUES, MASK, gamma=1.0, lam=1.0)
    assert close(advantages, [[0.9, 0.8, 0.7], [1.5, 1.5, 0.0]])
    assert close(returns, [[1.0, 1.0, 1.0], [2.5, 2.0, 0.0]])


def test_gae_in_between_discounts_by_gamma_and_lam():
    # row 0: d = .9*.2-.1 = .08, .9*.3-.2 = .07, 1-.3 = .7 and A_t = d_t + .45 A_{t+1}
    advantages, returns = compute_advantages(REWARDS, VALUES, MASK, gamma=0.9, lam=0.5)
    row_0 = [0.08 + 0.45 * (0.07 + 0.45 * 0.7), 0.07 + 0.45 * 0.7, 0.7]
    row_1 = [(0.5 + 0.9 * 0.5 - 1.0) + 0.45 * 1.5, 1.5, 0.0]
    assert close(advantages, [row_0, row_1])
    assert close(returns, [[row_0[0] + 0.1, row_0[1] + 0.2, 1.0], [row_1[0] + 1.0, 2.0, 0.0]])


def test_advantages_and_returns_are_constants_to_the_optimizer():
    values = VALUES.clone().requires_grad_()
    advantages, returns = compute_advantages(REWARDS, values, MASK, 1.0, 0.95)
    assert not advantages.requires_grad and not returns.requires_grad


def test_explained_variance_is_the_share_of_the_returns_that_the_critic_foresaw():
    returns = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, RUBBISH]])  # variance 2
    values = torch.tensor([[1.0, 1.0, 4.0], [4.0, 5.0, -RUBBISH]])  # errors 0, 1, -1, 0, 0
    assert close(explained_variance(values, returns, MASK), 1 - 0.4 / 2)
    assert close(explained_variance(returns, returns, MASK), 1.0)
    assert close(explained_variance(returns * 0, returns, MASK), 0.0)  # it knows nothing
    assert close(explained_variance(-returns, returns, MASK), -3.0)  # worse than that
    assert close(explained_variance(values, returns * 0 + 1, MASK), 0.0)  # nothing to foresee
    assert close(explained_variance(values[:1, :1], returns[:1, :1], MASK[:1, :1]), 0.0)


def loss_of_one_token(ratio, advantage, value=0.0, target=0.0):
    """Loss, stats and d loss / d logprob of a single token."""
    logprob = torch.tensor([[math.log(ratio)]], requires_grad=True)
    one = torch.ones(1, 1)
    loss, stats = ppo_loss(
        logprob, one * value, one * 0, one * advantage, one * target, one, 0.2, 0.1
    )
    loss.backward()
    return loss.item(), stats, logprob.grad.item()


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient",
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the clip: -A * ratio, and d ratio / d logprob = ratio
        (1.5, 2.0, -2.4, 0.0),  # good and already 50 % more likely: enough, no gradient
        (0.5, 2.0, -1.0, -1.0),  # good but less likely: pulled back up with full force
        (0.5, -2.0, 1.6, 0.0),  # bad and already half as likely: enough
        (1.5, -2.0, 3.0, 3.0),  # bad but more likely: pushed down with full force
    ],
)
def test_the_clip_stops_only_what_has_already_moved_the_right_way(ratio, advantage, loss, gradient):
    actual_loss, stats, actual_gradient = loss_of_one_token(ratio, advantage)
    assert actual_loss == pytest.approx(loss, abs=1e-5)
    assert actual_gradient == pytest.approx(gradient, abs=1e-5)
    assert stats["clipfrac"].item() == float(abs(ratio - 1) > 0.2)
    assert stats["approx_kl"].item() == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-5)


def test_the_value_loss_is_the_squared_error_times_vf_coef():
    loss, stats, _ = loss_of_one_token(ratio=1.0, advantage=0.0, value=4.0, target=1.0)
    assert stats["value_loss"].item() == pytest.approx(9.0)
    assert loss == pytest.approx(0.9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_padding_changes_neither_loss_nor_gradient(dtype):
    def gradients(width, fill):
        def padded(*rows, sign=1):
            out = torch.full((2, width), sign * fill)
            for i, row in enumerate(rows):
                out[i, : len(row)] = torch.tensor(row)
            return out

        mask = torch.zeros(2, width)
        mask[0, :3] = mask[1, :2] = 1
        logprobs = padded([-1.0, -2.0, -0.5], [-1.0, -1.5]).requires_grad_()
        values = padded([0.1, 0.2, 0.3], [0.5, 0.6]).requires_grad_()
        loss, stats = ppo_loss(
            logprobs, values, padded([-1.1, -1.0, -0.5], [-0.9, -1.6], sign=-1),
            padded([1.0, -1.0, 0.5], [0.3, -0.2]), padded([1.0, 1.0, 1.0], [0.2, 0.1]),
            mask.to(dtype), 0.2, 0.1,
        )  # fmt: skip
        loss.backward()
        real = mask.bool()
        assert torch.isfinite(logprobs.grad).all() and (logprobs.grad[~real] == 0).all()
        return (
            loss.detach(),
            logprobs.grad[real],
            values.grad[real],
            torch.stack(list(stats.values())),
        )

    for narrow, wide in zip(gradients(3, 1.0), gradients(7, 9e9)):
        assert close(narrow, wide)


def test_the_statistics_keep_no_graph_alive():
    logprobs = torch.zeros(1, 1, requires_grad=True)
    one = torch.ones(1, 1)
    _, stats = ppo_loss(logprobs, one, one, one, one, one, 0.2, 0.1)
    assert not any(value.requires_grad for value in stats.values())


def test_the_adaptive_controller_moves_by_at_most_a_fifth_of_n_over_horizon():
    controller = AdaptiveKLController(0.1, target=6.0, horizon=1000)
    controller.update(kl=60.0, n_samples=100)  # far too high: clipped to +0.2
    assert controller.value == pytest.approx(0.1 * 1.02)
    controller.update(kl=6.6, n_samples=100)  # 10 % too high
    assert controller.value == pytest.approx(0.1 * 1.02 * 1.01)
    controller.update(kl=-50.0, n_samples=100)  # far too low: clipped to -0.2
    assert controller.value == pytest.approx(0.1 * 1.02 * 1.01 * 0.98)


def test_the_fixed_controller_stays():
    controller = FixedKLController(0.3)
    controller.update(kl=1e6, n_samples=128)
    assert controller.value == 0.3


def test_the_ceiling_of_a_world_of_three_responses():
    # reference probabilities 1/2, 1/4, 1/4 for scores 0, 0.5, 1, as four equally likely samples
    scores, kl_coef = torch.tensor([[0.0, 0.0, 0.5, 1.0]]), 0.25
    reference, score = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.0, 0.5, 1.0])
    best = reference * (score / kl_coef).exp()
    best = best / best.sum()
    ceiling = best_possible(scores, kl_coef)
    assert ceiling["score"] == pytest.approx((best * score).sum().item(), abs=1e-6)
    assert ceiling["kl"] == pytest.approx((best * (best / reference).log()).sum().item(), abs=1e-6)
    assert ceiling["objective"] == pytest.approx(ceiling["score"] - kl_coef * ceiling["kl"])
    # brute force: no policy on a fine grid is better
    grid = torch.cartesian_prod(*[torch.linspace(0.0, 1.0, 101)] * 2)
    grid = torch.cat([grid, 1 - grid.sum(1, keepdim=True)], 1)
    grid = grid[grid[:, 2] >= 0]
    kl = (grid * (grid / reference).clamp(min=1e-30).log()).sum(1)
    objectives = grid @ score - kl_coef * kl
    assert objectives.max().item() <= ceiling["objective"] + 1e-6
    assert objectives.max().item() == pytest.approx(ceiling["objective"], abs=1e-3)


def test_the_ceiling_survives_a_short_leash_and_counts_its_effective_samples():
    scores = torch.rand(3, 200, generator=torch.manual_seed(0))
    ceiling = best_possible(scores, 1e-4)  # exp(1 / 1e-4) would overflow
    assert ceiling["score"] == pytest.approx(scores.max(1).values.mean().item(), abs=1e-2)
    assert ceiling["score"] >= scores.mean().item() and 1 <= ceiling["effective_samples"] < 3
    assert best_possible(scores.double(), 1e-4) == ceiling  # in float32 the KL would be rough
    assert best_possible(torch.full((1, 50), 0.7), 0.1)["effective_samples"] == pytest.approx(50)
