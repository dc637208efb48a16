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
            assert (
                eval(start.strip().strip("`")) == value
                if not isinstance(value, str)
                else value in start
            )


def test_the_chinese_part_has_every_dial_too():
    table = README.split("### 怎么改")[1].split("\n### ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == sorted(rlhf_sentiment.config)


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


def test_the_token_table_adds_up():
    table = README.split("```text\n  logprobs")[1].split("```")[0].splitlines()[1:]
    names = ["logprobs", "reference", "kl", "rewards", "values", "advantage", "returns", "whitened"]
    rows = [
        dict(zip(names, map(float, line.split())))
        for line in (" ".join(line.split()[:8]) for line in table)
    ]
    kl_coef, rounding = rlhf_sentiment.config["kl_coef"], 0.0011
    for t, row in enumerate(rows):
        assert row["kl"] == pytest.approx(row["logprobs"] - row["reference"], abs=2 * rounding)
        score = 0.0 if row is not rows[-1] else row["rewards"] + kl_coef * row["kl"]
        assert row["rewards"] == pytest.approx(-kl_coef * row["kl"] + score, abs=rounding)
        to_come = sum(later["rewards"] for later in rows[t:])
        assert row["advantage"] == pytest.approx(to_come - row["values"], abs=rounding * len(rows))
        assert row["returns"] == pytest.approx(row["advantage"] + row["values"], abs=2 * rounding)
    assert 0 <= score <= 1
    # whitening shifts and scales all tokens alike: two of them give the line on which all lie
    low, high = (pick(rows, key=lambda row: row["advantage"]) for pick in (min, max))
    scale = (high["whitened"] - low["whitened"]) / (high["advantage"] - low["advantage"])
    for row in rows:
        expected = low["whitened"] + scale * (row["advantage"] - low["advantage"])
        assert scale > 0 and row["whitened"] == pytest.approx(
            expected, abs=rounding * (2 + 2 * scale)
        )


def test_the_share_in_the_report_follows_from_its_rows():
    for report in README.split("of each opening before -> after")[1:]:
        rows = [re.search(rf"\n{name} .*", report)[0] for name in ("before", "after", "ceiling")]
        before, after, ceiling = (float(row.split("±")[2].split()[-1]) for row in rows)
        share = int(re.search(r"PPO reached (\d+)%", report)[1])
        assert 100 * (after - before) / (ceiling - before) == pytest.approx(share, abs=0.8)


@pytest.mark.parametrize("heading", ["Use PPOTrainer alone", "Use a trained checkpoint"])
def test_the_snippets_run(heading, hub, tmp_path, monkeypatch, capsys):
    code = README.split(f"## {heading}")[1].split("```python\n")[1].split("```")[0]
    monkeypatch.setattr(rlhf_sentiment, "config", {**rlhf_sentiment.config, **hub, "lr": 1e-5})
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
