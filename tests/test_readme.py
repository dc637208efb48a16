"""What the README says is what the program does."""

import json
import re
from pathlib import Path

import pytest

import ppo
import rlhf_sentiment
from tests.helpers import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(heading):
    return README.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_every_dial_is_in_the_table_with_its_start_value():
    rows = [line.split("|")[1:3] for line in section("Turn the dials").splitlines()]
    rows = [(key.strip(" `"), start.strip(" `")) for key, start in filter(None, rows) if "`" in key]
    assert [key for key, _ in rows] == list(rlhf_sentiment.config)  # in the same order
    for key, start in rows:
        value = rlhf_sentiment.config[key]
        if isinstance(value, list):
            assert start == f'["{value[0]}", ...]'
        else:
            assert eval(start) == value, key


def test_every_dial_is_read():
    source = (ROOT / "rlhf_sentiment.py").read_text(encoding="utf-8")
    source += (ROOT / "ppo.py").read_text(encoding="utf-8")
    for key in rlhf_sentiment.config:
        assert len(re.findall(f'"{key}"', source)) >= 2, f"{key} is never read"


def test_the_commands_are_in_both_languages():
    for command in (
        "pip install -r requirements.txt && python rlhf_sentiment.py offline=True",
        "pip install -r tests/requirements.txt && python -m pytest tests",
    ):
        assert README.splitlines().count(command) == 2
    assert "@@" not in README


def test_it_is_a_page_and_not_a_book():
    assert len(README.splitlines()) <= 340 and len(README.encode()) <= 32 * 1024


@pytest.mark.parametrize("file", ["rlhf_sentiment.py", "gpt2_value_head.py", "ppo.py"])
def test_no_line_is_wider_than_a_screen(file):
    # the linter counts a Chinese character twice, and so cannot check it
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 100] == []


def test_files_that_are_linked_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README) + re.findall(
        r"\]\((\.github[^)]+)\)", README
    ):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_the_token_table_adds_up():
    head, *lines = README.split("```text\n  old_logprobs")[1].split("```")[0].splitlines()
    names = ["old_logprobs", *head.split()][:-1]  # the last one is the token
    rows = [dict(zip(names, map(float, line.split()[: len(names)]))) for line in lines]
    kl_coef, rounding = rlhf_sentiment.config["kl_coef"], 0.0011
    for t, row in enumerate(rows):
        token_kl = row["old_logprobs"] - row["ref_logprobs"]
        assert row["token_kl"] == pytest.approx(token_kl, abs=2 * rounding)
        score = 0.0 if row is not rows[-1] else row["rewards"] + kl_coef * row["token_kl"]
        assert row["rewards"] == pytest.approx(-kl_coef * row["token_kl"] + score, abs=rounding)
        to_come = sum(later["rewards"] for later in rows[t:])
        tolerance = rounding * len(rows)
        assert row["advantages"] == pytest.approx(to_come - row["values"], abs=tolerance)
        assert row["returns"] == pytest.approx(row["advantages"] + row["values"], abs=2 * rounding)
    assert 0 <= score <= 1
    # whitening shifts and scales all tokens alike: two of them give the line on which all lie
    low, high = (pick(rows, key=lambda row: row["advantages"]) for pick in (min, max))
    scale = (high["whitened"] - low["whitened"]) / (high["advantages"] - low["advantages"])
    for row in rows:
        expected = low["whitened"] + scale * (row["advantages"] - low["advantages"])
        tolerance = rounding * (2 + 2 * scale)
        assert scale > 0 and row["whitened"] == pytest.approx(expected, abs=tolerance)
    # "(clipped)": the ratio has moved by more than cliprange, the way the advantage pulls
    for line, row in zip(lines, rows):
        change = row["ratio"] - 1
        far = abs(change) > rlhf_sentiment.config["cliprange"] and change * row["whitened"] > 0
        assert far == line.endswith("(clipped)")
    assert sum(line.endswith("(clipped)") for line in lines) == 1


def test_the_share_in_the_report_follows_from_its_rows():
    reports = README.split("of each opening before -> after")[1:]
    assert reports
    for report in reports:
        numbers = {}
        for name in ("before", "after", "ceiling"):
            row = re.search(rf"\n{name} .*", report)[0].replace("±", " ± ").split()
            means = [word for i, word in enumerate(row) if word != "±" and row[i - 1] != "±"]
            numbers[name] = float(means[3])  # label, score, KL, objective
        share = int(re.search(r"PPO reached (\d+)%", report)[1])
        gain = numbers["after"] - numbers["before"]
        possible = numbers["ceiling"] - numbers["before"]
        assert 100 * gain / possible == pytest.approx(share, abs=0.8)


def python_block(heading):
    return section(heading).split("```python\n")[1].split("```")[0]


def test_the_trainer_alone_runs_as_it_stands(capsys):
    code = python_block("Use PPOTrainer alone")
    short = re.sub(r'"iterations": \d+', '"iterations": 2', code)
    assert short != code
    exec(compile(short, "README.md", "exec"), {})
    assert "2: " in capsys.readouterr().out


def test_a_reward_of_ones_own_runs_as_it_stands(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(rlhf_sentiment, "score_texts", rlhf_sentiment.score_texts)  # put back after
    code = python_block("Your own openings, reward, models")
    settings = {**hub, "iterations": 1, "save_dir": str(tmp_path)}
    small = code.replace('{"offline": True}', repr(settings))
    assert small != code
    exec(compile(small, "README.md", "exec"), {})
    evaluation = json.loads(next(tmp_path.glob("*/evaluation.json")).read_text(encoding="utf-8"))
    for text, score in evaluation["after"]["examples"]:
        assert score == pytest.approx(len(set(text)) / 20)


def test_a_checkpoint_continues_an_opening_as_it_stands(finished, capsys):
    checkpoint = str(Path(finished["run_dir"], "checkpoint-12"))
    code = python_block("A trained checkpoint elsewhere")
    assert "runs/<folder>/checkpoint-157" in code
    exec(compile(code.replace("runs/<folder>/checkpoint-157", checkpoint), "README.md", "exec"), {})
    assert "这部电影很" in capsys.readouterr().out


def test_the_names_in_how_it_works_exist():
    for name in re.findall(r"`([a-z_]+)`", section("How it works")):
        found = [hasattr(place, name) for place in (rlhf_sentiment, ppo, ppo.PPOTrainer)]
        assert any(found) or name in rlhf_sentiment.config, name
