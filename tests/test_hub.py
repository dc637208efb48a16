"""The hub: the plain command with the default names, and what a hub that gives nothing ends in."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import rlhf_sentiment
from tests.conftest import SMALL, write_gpt2, write_judge
from tests.helpers import as_arguments, script

COMMIT = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """A small hub: the files of `models` ({name: folder}), under their names on the real one."""

    def do_GET(self):
        owner, name, *rest = self.path.split("?")[0].replace("/api/models/", "/")[1:].split("/")
        folder = self.models.get(f"{owner}/{name}")
        if folder is None:
            return self.answer(404, {"X-Error-Code": "RepoNotFound"})
        if not rest:  # the api's page about the model
            files = [{"rfilename": path.name} for path in folder.iterdir()]
            page = {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": files}
            return self.answer(200, {"Content-Type": "application/json"}, json.dumps(page).encode())
        path = folder / rest[-1]
        if rest[0] != "resolve" or not path.is_file():
            return self.answer(404, {"X-Error-Code": "EntryNotFound"})
        content = path.read_bytes()
        return self.answer(200, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}, content)

    do_HEAD = do_GET

    def answer(self, status, headers, content=b""):
        self.send_response(status)
        commit = {"X-Repo-Commit": COMMIT, "Content-Length": str(len(content))}
        for key, value in {**headers, **commit}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments):
        pass


class Gate(Hub):
    """A hub that answers every question with "not without a login"."""

    def do_GET(self):
        self.answer(401, {"X-Error-Code": "GatedRepo"})

    do_HEAD = do_GET


@pytest.fixture
def serve():
    """Starts a server of the given handler -> its address."""
    servers = []

    def start(handler):
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()


def test_the_plain_command_downloads_both_models_and_trains(serve, tmp_path):
    """`python rlhf_sentiment.py` with the default names, as people type it."""
    models = {
        rlhf_sentiment.config["model_name"]: write_gpt2(tmp_path / "gpt2"),
        rlhf_sentiment.config["reward_model_name"]: write_judge(tmp_path / "roberta"),
    }
    handler = type("Handler", (Hub,), {"models": models})
    environment = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": serve(handler)}
    arguments = as_arguments({**SMALL, "iterations": 2, "save_dir": tmp_path / "runs"})
    process = script(*arguments, **environment)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert err == ""
    lines = [line for line in out.splitlines() if line.strip()]
    assert lines[0] == "loading uer/gpt2-chinese-cluecorpussmall"
    assert lines[-1].startswith("all of it is in ")
    assert len(list(tmp_path.glob("runs/*/checkpoint-2"))) == 1
    for line in lines:  # nothing but the program's own lines
        assert not any(word in line for word in ("Warning", "huggingface", "transformers", "%|"))


@pytest.mark.parametrize("hub_is", ["unreachable", "switched off", "gated"])
def test_a_hub_that_gives_nothing_ends_in_a_readable_line(hub_is, serve):
    environment = {"HF_HOME": "/nonexistent", "HF_ENDPOINT": "http://127.0.0.1:9"}
    if hub_is == "switched off":
        environment["HF_HUB_OFFLINE"] = "1"
    if hub_is == "gated":
        environment["HF_ENDPOINT"] = serve(Gate)
    process = script(**environment)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and err.count("\n") == 1
    assert "uer/gpt2-chinese-cluecorpussmall" in err
    assert "local folder" in err and "HF_ENDPOINT" in err and "offline=True" in err
