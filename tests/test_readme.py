"""What the README says is what the program does."""

import re
from pathlib import Path

import pytest

import rlhf_sentiment

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_dial_is_in_the_table_with_its_start_value():
    table = README.split("## Turn the dials")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    names = [name for keys, _ in rows for name in re.findall(r"`(\w+)`", keys)]
    assert sorted(names) == sorted(rlhf_sentiment.config)
    for keys, start in rows:
        for name in re.findall(r"`(\w+)`", keys):
            value = rlhf_sentiment.config[name]
            assert eval(start.strip().strip("`")) == value if not isinstance(value, str) else value in start


def test_every_dial_is_checked_and_read():
    checked = " ".join(rlhf_sentiment.RULES).split()
    assert sorted([*checked, "device"]) == sorted(rlhf_sentiment.config)
    source = (ROOT / "rlhf_sentiment.py").read_text() + (ROOT / "ppo.py").read_text()
    for key in rlhf_sentiment.config:
        assert len(re.findall(f'"{key}"', source)) >= 2, f"{key} is never read"


def test_the_two_commands_are_in_both_languages():
    for command in (
        "pip install -r requirements.txt && python rlhf_sentiment.py offline=True\n",
        "pip install -r tests/requirements.txt && python -m pytest tests\n",
    ):
        assert README.count(command) == 2
    assert "@@" not in README


@pytest.mark.parametrize("heading", ["Use PPOTrainer alone", "Use a trained checkpoint"])
def test_the_snippets_run(heading, hub, tmp_path, monkeypatch, capsys):
    code = README.split(f"## {heading}")[1].split("```python\n")[1].split("```")[0]
    monkeypatch.setattr(
        rlhf_sentiment, "config", {**rlhf_sentiment.config, **hub, "lr": 1e-5}
    )
    code = code.replace("runs/<folder>/checkpoint-157", hub["model_name"])
    exec(compile(code, heading, "exec"), {})
    printed = capsys.readouterr().out
    assert "'policy_loss': " in printed or "这部电影很" in printed


def test_the_names_in_how_it_works_exist():
    import ppo

    text = README.split("## How it works")[1].split("\n## ")[0]
    for name in re.findall(r"`([a-z_]+)`", text):
        found = [hasattr(place, name) for place in (rlhf_sentiment, ppo, ppo.PPOTrainer)]
        assert any(found) or name in rlhf_sentiment.config, name
