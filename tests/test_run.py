"""A run: what `main` returns, what it leaves in its folder, what it prints and warns of."""

import io
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import rlhf_sentiment
from ppo import PPOTrainer
from rlhf_sentiment import main, parse_overrides
from tests.helpers import ROOT, SECONDS, as_arguments, metrics, run, script


def test_a_run_returns_and_stores_its_evaluation(finished):
    for result in (finished, finished["held_out"]):
        for when in ("before", "after"):
            means = result[when]
            objective = means["score"] - 0.05 * means["kl"]
            assert means["objective"] == pytest.approx(objective)
            assert 0 <= means["score"] <= 1 and means["score_se"] >= 0 and means["length"] >= 1
        assert result["before"]["kl"] == pytest.approx(0.0, abs=1e-5)
        ceiling = result["ceiling"]
        assert ceiling["objective"] == pytest.approx(ceiling["score"] - 0.05 * ceiling["kl"])
        gain = ceiling["objective"] - result["before"]["objective"]
        reached = result["after"]["objective"] - result["before"]["objective"]
        assert ceiling["share"] == pytest.approx(reached / gain)
    stored = json.loads(Path(finished["run_dir"], "evaluation.json").read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(finished))
    openings = [text[:5] for text, _ in finished["before"]["examples"]]
    assert openings == [prompt[:5] for prompt in rlhf_sentiment.config["prompts"]]


def test_a_run_folder_holds_what_the_readme_promises(finished):
    folder = Path(finished["run_dir"])
    rows = metrics(folder, clocks=True)
    assert [row["iteration"] for row in rows] == [str(n) for n in range(1, 13)]
    for row in rows:
        score, kl, kl_coef = (float(row[k]) for k in ("score_mean", "kl", "kl_coef"))
        assert float(row["objective"]) == pytest.approx(score - kl_coef * kl, abs=1e-5)
        assert 0 < float(row["distinct"]) <= 1 and 1 <= float(row["response_length"]) <= 8
        assert float(row["explained_variance"]) <= 1
        parts = sum(float(row[k]) for k in SECONDS[:3])
        assert float(row["seconds_total"]) == pytest.approx(parts, rel=1e-4)
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert stored["batch_size"] == 6 and stored["prompts"] == rlhf_sentiment.config["prompts"]
    samples = (folder / "samples.txt").read_text(encoding="utf-8").splitlines()
    heads = [line for line in samples if line.startswith("iteration")]
    assert heads == ["iteration 1", "iteration 10", "iteration 12"]
    assert "[SEP]" not in "".join(samples)
    score, kl_name, kl, text = samples[-1].split(
        maxsplit=3
    )  # the KL beside the score: what it cost
    assert 0 <= float(score) <= 1 and kl_name == "KL" and float(kl) != 0
    assert any(text.startswith(prompt) for prompt in stored["prompts"])
    assert sorted(p.name for p in folder.glob("*checkpoint*")) == ["checkpoint-12", "checkpoint-8"]


def test_the_logs_are_there_while_the_run_goes_on(hub, tmp_path, monkeypatch):
    seen, save = [], rlhf_sentiment.RunFolder.save

    def look(self, checkpoint):
        save(self, checkpoint)
        seen.append(len(metrics(self.path)))

    monkeypatch.setattr(rlhf_sentiment.RunFolder, "save", look)
    run(hub, tmp_path)
    assert seen == [1, 2, 3]


def test_the_same_seed_gives_the_same_run_and_another_seed_another(hub, tmp_path):
    first, second, other = (run(hub, tmp_path, seed=seed, iterations=2) for seed in (5, 5, 6))
    assert metrics(first["run_dir"]) == metrics(second["run_dir"])
    assert first["after"] == second["after"] and first["run_dir"] != second["run_dir"]
    assert metrics(first["run_dir"]) != metrics(other["run_dir"])


def test_every_iteration_draws_afresh(hub, tmp_path):
    folder = run(hub, tmp_path, iterations=2, lr=0, value_lr=0)["run_dir"]  # nothing is learned
    first, second = metrics(folder)
    assert first["score_mean"] != second["score_mean"]


def test_how_much_is_evaluated_changes_nothing_in_the_training(hub, tmp_path):
    runs = [run(hub, tmp_path, iterations=2, eval_samples=n) for n in (1, 7)]
    assert metrics(runs[0]["run_dir"]) == metrics(runs[1]["run_dir"])


def test_without_a_kl_penalty_there_is_no_ceiling(hub, tmp_path):
    summary = run(hub, tmp_path, iterations=1, kl_coef=0.0)
    assert summary["ceiling"] is None and summary["after"]["objective"] == summary["after"]["score"]


def test_only_the_keys_that_change_may_be_given(hub, tmp_path):
    summary = main({**hub, "iterations": 1, "save_dir": str(tmp_path)})
    stored = json.loads(Path(summary["run_dir"], "config.json").read_text(encoding="utf-8"))
    assert stored["cliprange"] == 0.2


def test_overrides_are_python_values_and_names_stay_names():
    arguments = ["lr=1e-4", "offline=True", "save_dir=2024", "lr=2e-4", "kl_target=None"]
    overrides = parse_overrides([*arguments, "prompts=['a=b', 'c']"])
    assert overrides == {
        "lr": 2e-4, "offline": True, "save_dir": "2024", "kl_target": None, "prompts": ["a=b", "c"],
    }  # fmt: skip


def test_a_tilde_is_the_home_folder(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(hub["model_name"], tmp_path / "gpt2")
    folder = run(hub, "~/my runs", iterations=1, model_name="~/gpt2")["run_dir"]
    assert folder.startswith(str(tmp_path / "my runs")) and not Path("~").exists()
    again = main({"resume": folder.replace(str(tmp_path), "~"), "iterations": 2})
    assert again["run_dir"] == folder


def test_offline_changes_the_models_and_nothing_else(hub, tmp_path, monkeypatch):
    own = hub["model_name"], hub["reward_model_name"]
    monkeypatch.setattr(rlhf_sentiment, "build_stand_ins", lambda: own)
    small = {key: value for key, value in hub.items() if "model_name" not in key}
    named = run(hub, tmp_path)
    offline = run(small, tmp_path, offline=True)
    assert metrics(named["run_dir"]) == metrics(offline["run_dir"])


def test_the_stand_ins_are_found_beside_another_package_called_tests(tmp_path):
    """As in a notebook that lives in a project of its own, with `tests` of its own."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").write_text("")
    code = (
        "import tests, rlhf_sentiment; assert 'tiny_models.py' not in str(tests.__path__);"
        "print(rlhf_sentiment.build_stand_ins())"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert str(ROOT / ".tiny_models") in done.stdout, done.stderr


# ------------------------------------------------------------------------ a reward of one's own


@pytest.mark.parametrize(
    "reward",
    [
        lambda texts: [len(text) / 30 for text in texts],
        lambda texts: [len(text) for text in texts],
        lambda texts: ["好" in text for text in texts],
        lambda texts: torch.tensor([[len(text)] for text in texts]),
        lambda texts: torch.tensor([len(text) for text in texts]).numpy() / 30,
        lambda texts: [torch.tensor(len(text) / 30) for text in texts],
    ],
    ids=["floats", "ints", "bools", "a column", "numpy", "tensors"],
)
def test_a_reward_may_be_any_numbers_in_any_list(hub, tmp_path, monkeypatch, reward):
    monkeypatch.setattr(rlhf_sentiment, "score_texts", lambda pipe, texts, label: reward(texts))
    summary = run(hub, tmp_path, iterations=1)
    assert summary["before"]["score"] >= 0 and summary["after"]["length"] >= 1


@pytest.mark.parametrize(
    "reward, came",
    [
        (lambda texts: [0.5] * (len(texts) - 1), "needed are 6 numbers.*got 5"),
        (lambda texts: torch.ones(len(texts), 2), "got 12"),
        (lambda texts: texts, r"got what is no list of numbers: \[.刚收到货"),
        (lambda texts: None, "got what is no list of numbers: None"),
        (lambda texts: dict.fromkeys(texts, 1.0), r"got what is no list of numbers: \{"),
    ],
    ids=["too few", "a matrix", "texts", "None", "a dict"],
)
def test_what_is_no_reward_is_one_line(hub, tmp_path, monkeypatch, reward, came):
    monkeypatch.setattr(rlhf_sentiment, "score_texts", lambda pipe, texts, label: reward(texts))
    with pytest.raises(rlhf_sentiment.ConfigError, match=came) as caught:
        run(hub, tmp_path, iterations=1)
    assert "\n" not in str(caught.value)


def test_a_score_that_is_not_finite_stops_an_evaluation_too(hub, tmp_path, monkeypatch):
    nan = float("nan")
    monkeypatch.setattr(
        rlhf_sentiment, "score_texts", lambda pipe, texts, label: [nan] * len(texts)
    )
    with pytest.raises(FloatingPointError, match=r"evaluation \(pool\): a score is not"):
        run(hub, tmp_path)


# ------------------------------------------------------------------------------------- output


def test_in_a_pipe_every_line_comes_when_it_is_written(hub, tmp_path):
    """The first iteration is read while thousands are still to come."""
    process = script(*as_arguments(hub), "iterations=100000", f"save_dir={tmp_path}")
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.split()[:1] == ["1"]:
            break
    process.kill()
    process.communicate()
    # without a terminal the evaluation says that it runs, and for about how long
    assert any(line.startswith("evaluating 16 responses (pool), about") for line in lines)
    assert max(len(line) for line in lines if "/" not in line) <= 100


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_in_a_terminal_a_bar_shows_how_far_a_run_is_also_a_resumed_one(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    folder = run(hub, tmp_path, iterations=2)["run_dir"]
    monkeypatch.setattr(sys, "stderr", Terminal())
    main({"resume": folder, "iterations": 4})
    bars = [bar for bar in sys.stderr.getvalue().split("\r") if "score=" in bar]
    assert "2/4" in bars[0] and "4/4" in bars[-1]
    last = metrics(folder)[-1]
    assert f"kl={float(last['kl']):.2f}, score={float(last['score_mean']):.3f}" in bars[-1]


def test_without_a_terminal_there_is_no_bar_but_a_head_over_the_columns(hub, tmp_path, capfd):
    run(hub, tmp_path, iterations=1)
    out, err = capfd.readouterr()
    assert err == "" and "all columns: README.md" in out
    head, first = out[out.index("iter  score") :].split("\n")[:2]
    for name in ("objective", "entropy", "clipfrac", "distinct", "length", "secs"):
        end = head.index(name) + len(name)  # each number ends where its name ends
        assert first[end - 1].isdigit() and not first[end : end + 1].strip(), name


def test_a_console_without_chinese_gets_something_else_and_the_run_goes_on(hub, tmp_path):
    process = script(*as_arguments(hub), f"save_dir={tmp_path}", PYTHONIOENCODING="ascii")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and err == "" and "?????" in out


def test_a_terminal_that_is_gone_does_not_end_the_run(hub, tmp_path, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stdout", Gone())
    assert run(hub, tmp_path, iterations=1)["after"]


def test_the_curve_is_drawn_where_matplotlib_is(finished, tmp_path, capsys, monkeypatch):
    rows = [{name: float(value) for name, value in r.items()} for r in metrics(finished["run_dir"])]
    try:
        import matplotlib  # noqa: F401

        rlhf_sentiment.draw_curve(tmp_path, rows, None)
        assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    except ImportError:
        pass
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    rlhf_sentiment.draw_curve(tmp_path / "nowhere", rows, None)
    assert "it needs matplotlib" in capsys.readouterr().out


# ------------------------------------------------------------------------------------ the warnings


@pytest.fixture
def warned(loaded, settings, tmp_path):
    """Warns about seven rows with the given values -> in which of them, as a list of bools."""
    model, ref_model, tokenizer, _ = loaded
    trainer = PPOTrainer(model, ref_model, settings)
    folder = rlhf_sentiment.RunFolder({**settings, "save_dir": str(tmp_path)}, trainer, tokenizer)
    folder.before = {"pool": {"ended": 0.5}}

    def look(**values):
        found = []
        for _ in range(7):
            row = {"kl": 0.1, "distinct": 1.0, "response_length": 5.0, **values}
            folder.rows.append(row)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                folder.warn(row)
            found.append([str(warning.message) for warning in caught])
        return found

    return look


def test_a_kl_that_stays_negative_is_reported(warned):
    found = warned(kl=-0.6)
    assert found[:4] == [[]] * 4 and "KL clearly negative" in found[4][0]


def test_a_kl_around_0_is_no_reason_to_warn(warned):
    assert warned(kl=-0.1) == [[]] * 7


def test_responses_that_are_all_alike_are_reported(warned):
    assert warned(distinct=0.2) == [[]] * 7
    assert "alike" in warned(distinct=0.05)[0][0]


def test_responses_that_no_longer_end_are_reported(warned):
    found = warned(response_length=8.0)  # gen_len: each one was cut off
    assert found[:4] == [[]] * 4 and "no response ends" in found[4][0]
    assert warned(response_length=7.9)[-1] == []


def test_a_warning_is_given_once_and_on_the_command_line_in_one_line(hub, tmp_path):
    # one response an opening: all alike, in each of ten iterations
    arguments = as_arguments({**hub, "batch_size": 11, "iterations": 6, "gen_len": 5})
    code = (
        "import sys, rlhf_sentiment as r; f = r.decode_responses;"
        "g = r.generate_responses;"
        "r.generate_responses = lambda *a, **k: g(*a, **k)[:1] * len(a[2]);"
        "r.run_as_script(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, f"save_dir={tmp_path}"],
        capture_output=True, text=True, encoding="utf-8", cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.count("warning: nearly all responses are alike: raise kl_coef") == 1
