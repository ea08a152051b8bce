"""packaging/ondemand, the app of Open OnDemand: its YAML, and its scripts as they are rendered, with stand-ins."""

import hashlib
import os
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests import needs

APP = Path(__file__).parent.parent / "packaging/ondemand"
VALUES = {"environment": "~/my env", "folder": "~", "gpus": "h100:2", "cores": "8", "memory": "32G"}
READY = {"bc_account", "bc_num_hours", "bc_email_on_started"}
"""Attributes that Open OnDemand defines."""
CONNECTION = {"host": "node7", "port": "8123", "password": "secret"}


def rendered(name: str) -> str:
    """The file as ERB renders it: each tag is one of these expressions, and there are no others."""
    # Shellwords.escape of Ruby writes backslashes, where shlex.quote writes quotes.
    escaped = {f"context.{key}.shellescape": re.sub(r"([^\w\-.,:+/@])", r"\\\1", text) for key, text in VALUES.items()}
    tags = {**VALUES, **CONNECTION, **escaped}
    return re.sub(r"<%= (.*?) %>", lambda tag: tags[tag[1]], (APP / name).read_text())


def test_the_manifest_makes_an_interactive_app() -> None:
    manifest = yaml.safe_load((APP / "manifest.yml").read_text())
    assert manifest["role"] == "batch_connect"
    assert "%load_ext grappe.contrib.jupyter" in manifest["description"]


def test_the_form_asks_for_what_the_scripts_use() -> None:
    form = yaml.safe_load((APP / "form.yml").read_text())
    assert set(form["form"]) == {*VALUES, *READY} and set(form["attributes"]) == {*VALUES}
    used = set(re.findall(r"<%= (?:context\.)?(\w+)", "".join(file.read_text() for file in APP.rglob("*.erb"))))
    assert used == {*VALUES, *CONNECTION}


def test_the_job_asks_for_the_forms_resources() -> None:
    job = yaml.safe_load(rendered("submit.yml.erb"))
    assert job["batch_connect"] == {"template": "basic"}
    expected = ["--nodes=1", "--ntasks=1", "--cpus-per-task=8", "--gpus-per-node=h100:2", "--mem=32G"]
    assert job["script"]["native"] == expected


def test_the_button_posts_the_password() -> None:
    view = rendered("view.html.erb")
    assert 'action="/node/node7/8123/login?next=%2Fnode%2Fnode7%2F8123%2Flab" method="post"' in view
    assert 'name="password" value="secret"' in view


@pytest.mark.parametrize("name", ["before.sh.erb", "script.sh.erb"])
def test_the_scripts_pass_shellcheck(name: str) -> None:
    needs.program("shellcheck")
    text = rendered(f"template/{name}")
    done = subprocess.run(["shellcheck", "-"], input=text, capture_output=True, text=True, check=False)
    assert done.stdout == "" and done.returncode == 0


def started(home: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Runs both scripts in one shell, as the template `basic` does, with stand-ins for what it gives."""
    gives = "host=node7; find_port() { echo 8123; }; create_passwd() { printf 'x%.0s' $(seq \"$1\"); }"
    (home / "before.sh").write_text(rendered("template/before.sh.erb"))
    (home / "script.sh").write_text(rendered("template/script.sh.erb"))
    text = f"{gives}; . ./before.sh; {script}"
    environment = {**os.environ, "HOME": str(home)}
    return subprocess.run(["bash", "-c", text], cwd=home, env=environment, capture_output=True, text=True, check=False)


def test_the_server_starts_in_the_environment_with_the_password(tmp_path: Path) -> None:
    programs = tmp_path / "my env/bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH={shlex.quote(str(programs))}:$PATH\n")
    (programs / "jupyter").write_text('#!/bin/sh\necho "$PWD" "$@"\n')
    (programs / "jupyter").chmod(0o755)
    done = started(tmp_path, 'bash script.sh; echo "$port $password"')
    assert done.stderr == ""
    assert done.stdout == f"{tmp_path} lab --config={tmp_path}/config.py\n8123 {'x' * 32}\n"
    config = tmp_path / "config.py"
    assert config.stat().st_mode & 0o777 == 0o600
    c = SimpleNamespace(ServerApp=SimpleNamespace(), PasswordIdentityProvider=SimpleNamespace())
    exec(config.read_text(), {"c": c})
    assert c.ServerApp.ip == "0.0.0.0" and c.ServerApp.base_url == "/node/node7/8123/"
    kind, salt, digest = c.PasswordIdentityProvider.hashed_password.split(":")
    assert digest == hashlib.new(kind, f"{'x' * 32}{salt}".encode()).hexdigest()


def test_an_environment_without_jupyter_is_one_message(tmp_path: Path) -> None:
    done = started(tmp_path, "bash script.sh")
    assert done.returncode == 1
    assert done.stderr == (
        f"{tmp_path}/my env/bin/jupyter does not exist: make the environment, and pip install grappe jupyterlab in it\n"
    )
