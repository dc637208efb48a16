"""A device that is not there: torch's `meta` device refuses every tensor that was left on the CPU.

Its tensors have a shape and a type but no numbers, and an operation that mixes one of them with a
CPU tensor raises, as on a GPU. So this finds a forgotten `.to(device)` on a machine without a GPU.
Where the program reads a number from the device, the test supplies one.
"""

import contextlib

import pytest
import torch

import rlhf_sentiment
from ppo import PPOTrainer

NUMBERS = {
    "__bool__": lambda tensor: True,
    "__float__": lambda tensor: 1.0,
    "item": lambda tensor: 1.0,
    "tolist": lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype).tolist(),
}


@pytest.fixture
def elsewhere(loaded, settings, monkeypatch):
    """(trainer, tokenizer), the two models on the meta device."""
    for name, read in NUMBERS.items():
        original = getattr(torch.Tensor, name)

        def supply(tensor, read=read, original=original):
            return read(tensor) if tensor.device.type == "meta" else original(tensor)

        monkeypatch.setattr(torch.Tensor, name, supply)
    adam = torch.optim.Adam
    monkeypatch.setattr(torch.optim, "Adam", lambda groups, fused: adam(groups))  # not fused there
    monkeypatch.setattr("ppo.mixed_precision", lambda *_: contextlib.nullcontext())  # nor autocast
    model, ref_model, tokenizer, _ = loaded
    model.to("meta")
    ref_model.to("meta")
    return PPOTrainer(model, ref_model, settings), tokenizer


QUERIES = [torch.tensor([2, 8, 9, 10]), torch.tensor([2, 11])]
RESPONSES = [torch.tensor([14, 15, 3]), torch.tensor([16])]


def test_a_forgotten_tensor_is_found(elsewhere):
    """The instrument itself: what the device holds and what was left behind do not mix."""
    trainer, _ = elsewhere
    with pytest.raises(RuntimeError, match="device"):
        trainer.model.v_head.summary.bias + torch.ones(1, 1)


def test_a_step_puts_everything_on_the_device(elsewhere):
    trainer, tokenizer = elsewhere
    stats = trainer.step(QUERIES, RESPONSES, torch.tensor([1.0, 0.0]))
    assert all(type(value) is float for value in stats.values())
    assert {tensor.device.type for tensor in trainer.last_batch.values()} == {"meta"}
    assert len(trainer.explain(tokenizer).split("\n")) == 2  # the head and one token


def test_the_models_are_loaded_onto_the_device(loaded, settings, monkeypatch):
    monkeypatch.setattr(rlhf_sentiment, "pick_device", lambda name: "meta")
    monkeypatch.setattr(rlhf_sentiment, "load_reward_model", lambda name, device: loaded[3])
    model, ref_model, _, _ = rlhf_sentiment.load_models(settings)
    assert model.device.type == ref_model.device.type == "meta"


def test_a_rollout_puts_everything_on_the_device(elsewhere):
    trainer, tokenizer = elsewhere
    responses = rlhf_sentiment.generate_responses(trainer.model, tokenizer, QUERIES, 4)
    assert [ids.device.type for ids in responses] == ["cpu", "cpu"]  # where they are decoded


def test_a_line_of_the_log_reads_from_the_device(elsewhere, settings, tmp_path):
    trainer, tokenizer = elsewhere
    stats = trainer.step(QUERIES, RESPONSES, [1.0, 0.0])
    folder = rlhf_sentiment.RunFolder({**settings, "save_dir": str(tmp_path)}, trainer, tokenizer)
    names = ("score_mean", "score_std", "objective", "distinct", "response_length")
    row = {**stats, **dict.fromkeys((*names, "seconds_total"), 1.0), "iteration": 1}
    folder.log(row, ["一", "二"], torch.tensor([1.0, 0.0]))
    assert len(folder.samples) == 3
