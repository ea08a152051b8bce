"""A site's TOML: every shipped one holds, a user's own wins, and a mistake gets one message that names the key."""

import dataclasses
import io
import os
from pathlib import Path

import pytest

from grappe import sites
from grappe.contrib.slurm.script import render
from grappe.errors import UsageError
from grappe.launch.safe_console import SafeConsole
from grappe.sites import schema
from grappe.verbs.catalogue import site_list
from tests.contrib.slurm.golden import script

GOOD = """title = "Mine"
source = "https://example.org"
date = 2026-11-20
[node]
gpus = 4
gpu = "A100"
cores = 64
[ask]
gpus = "--gres=gpu:{gpus}"
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = sites.own_folder()
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("name", sorted(sites.files()))
def test_shipped_sites_hold(name: str) -> None:
    site = sites.find(name)
    assert site.source.startswith("http")
    assert all(why for why in site.unconfirmed.values())


def test_a_users_own_site_wins_also_behind_a_link(own: Path, tmp_path: Path) -> None:
    (own / "narval.toml").write_text(GOOD)
    (tmp_path / "dotfiles.toml").write_text(GOOD)
    (own / "mine.toml").symlink_to(tmp_path / "dotfiles.toml")
    assert sites.find("narval").title == sites.find("mine").title == "Mine"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("cores = 64", "core = 64", "node.core is not a key: did you mean cores"),
        ("cores = 64", "", "node.cores is missing"),
        ("cores = 64", 'cores = "64"', "node.cores='64' is not a whole number"),
        ("cores = 64", "cores = 0", "node.cores=0: it must be more than 0"),
        ("cores = 64", "cores = true", "node.cores=True is not a whole number"),
        ("--gres=gpu:{gpus}", "--gres=gpu:4", "lacks {gpus}"),
        ("--gres=gpu:{gpus}", "--gres=gpu:{gpus} $(touch x)", "is not an option of sbatch"),
        ("[ask]", '[job]\nmodules = ["a; touch x"]\n[ask]', "is not the name of a module"),
        ("[ask]", '[job]\nlocal = "$(pwd)"\n[ask]', "is not a folder"),
        ("[ask]", '[job.variables]\n"A=1;x" = "1"\n[ask]', "is not the name of a variable"),
        ("[ask]", '[ask]\naccount = "always"', "ask.account='always' is not one of"),
        ("[ask]", "[ask", "Expected"),
        ("date = 2026-11-20", 'date = "today"', "date='today' is not a date"),
        ('"Mine"', '"Mine\\ntouch hacked"', r"title='Mine\ntouch hacked' is not one line"),
        ('"Mine"', '"Mine\\r#SBATCH --wrap=x"', "title="),
        ('"Mine"', '"Mine\\u2028x"', "title="),
        ('"Mine"', '"\\u001b]0;owned\\u0007"', "title="),
        ('"Mine"', '"' + "x" * 501 + '"', "title="),
        ("[ask]", '[unconfirmed]\nnode = "why\\ntouch hacked"\n[ask]', "unconfirmed.node="),
        ("[ask]", '[unconfirmed]\n"no\\nde" = "why"\n[ask]', "unconfirmed="),
        ("[ask]", '[sources]\nnode = "why\\ntouch hacked"\n[ask]', "sources.node="),
        ("[ask]", '[job.variables]\nA = "1\\n#SBATCH --wrap=x"\n[ask]', "job.variables.A="),
        ("[ask]", '[job.variables]\nLD_PRELOAD = "/tmp/a.so"\n[ask]', "LD_PRELOAD controls which programs load or run"),
        ("[ask]", '[job.variables]\nBASH_ENV = "/tmp/a"\n[ask]', "BASH_ENV controls"),
        ("[ask]", '[job]\nmodules = ["/tmp/evil"]\n[ask]', "is not the name of a module"),
        ("[ask]", '[job]\nmodules = ["--force"]\n[ask]', "is not the name of a module"),
        ("[ask]", '[job]\nmodules = [""]\n[ask]', "is not the name of a module"),
        ("[ask]", '[job]\nlocal = "/a/../b"\n[ask]', "is not a folder"),
        ("--gres=gpu:{gpus}", "--gres=gpu:{gpus:2000000000}", "is not an option of sbatch"),
        ("--gres=gpu:{gpus}", "--gres=gpu:{gpus}{0}", "is not an option of sbatch"),
        ("--gres=gpu:{gpus}", "--gres=gpu:{gpus!r}", "is not an option of sbatch"),
        ("--gres=gpu:{gpus}", "--gres=gpu:{gpus.__class__}", "is not an option of sbatch"),
        ("[ask]", '[ask]\noptions = ["--wrap=x"]', "--wrap is not an option that a site may set"),
        ("[ask]", '[ask]\noptions = ["--output=/home/me/.bashrc"]', "--output is not an option that a site may set"),
        ("[ask]", '[ask]\noptions = ["--gré=1"]', "is not an option of sbatch"),
        ("[ask]", "[ask]\nmax_hours = nan", "ask.max_hours=nan: it must be more than 0"),
        ("[ask]", "[ask]\nmax_hours = inf", "ask.max_hours=inf: it must be"),
        ("[ask]", "[ask]\nmax_hours = " + "9" * 400, "ask.max_hours=9"),
        ("cores = 64", "cores = " + "9" * 5000, "mine.toml"),
        ("cores = 64", "cores = 0x" + "f" * 5000, "node.cores="),
        ("cores = 64", "cores = -" + "9" * 4000, "node.cores=-9"),
        ("[ask]", "[job]\nvariables = " + "[" * 5000 + "]" * 5000 + "\n[ask]", "mine.toml"),
        ("[ask]", "[job]\nvariables = " + "{a=" * 900 + "1" + "}" * 900 + "\n[ask]", "mine.toml"),
        ("[ask]", '[ask]\naccounts = ["a"' + ', "a"' * 100 + "]", "ask.accounts has 101 entries"),
        ("[ask]", "# " + "x" * 70000 + "\n[ask]", "has more than 65,536 bytes"),
        ("[ask]", '[ask]\naccount = ["optional"]', "ask.account="),
        ("[ask]", "[ask]\naccount = {}", "ask.account="),
        ("[ask]", '[ask]\nmax_gpus_of = {"def-*" = "many"}', "ask.max_gpus_of.def-*='many' is not a whole number"),
        (
            "[ask]",
            '[[slice]]\nname = "a; touch x"\ngpu_gb = 5\nfraction = 0.1\ncores = 1\nmemory_gb = 1\ncharge = 1\n[ask]',
            "is not the name of a slice",
        ),
        ("[ask]", '[charge]\nunit = "euros"\ngpu = 1\n[ask]', "charge.unit='euros' is not one of 'RGU-hours'"),
        ("[ask]", '[charge]\nunit = "SBU"\n[ask]', "charge.gpu is missing"),
        ("[ask]", '[ask]\ngpu_cores = "most"', "ask.gpu_cores='most' is not one of"),
    ],
)
def test_a_mistake_is_named(own: Path, old: str, new: str, words: str) -> None:
    (own / "mine.toml").write_text(GOOD.replace(old, new))
    with pytest.raises(UsageError) as refusal:
        sites.find("mine")
    assert words in str(refusal.value)
    assert str(own / "mine.toml") in str(refusal.value)


@pytest.mark.parametrize("kind", ["pipe", "folder", "endless", "nowhere", "not text"])
def test_what_is_no_file_is_not_waited_for(own: Path, kind: str) -> None:
    file = own / "mine.toml"
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "endless":
            file.symlink_to("/dev/zero")
        case "nowhere":
            file.symlink_to("nowhere")
        case "not text":
            file.write_bytes(b"\xff\xfe" + GOOD.encode())
    with pytest.raises(UsageError, match=r"mine\.toml"):
        sites.find("mine")
    stream = io.StringIO()
    SafeConsole(stream, width=300).print(site_list())
    assert "narval" in stream.getvalue()
    assert "cannot be used: " in stream.getvalue()
    assert sites.current({"CC_CLUSTER": "narval"}) == "narval"


@pytest.mark.parametrize("name", ["a\nb", "\x1b]0;owned\x07", "-x", ".hidden", "a b", "é"])
def test_a_name_that_no_script_can_hold_is_no_site(own: Path, name: str) -> None:
    (own / f"{name}.toml").write_text(GOOD)
    assert name not in sites.files()


def test_nothing_of_a_site_is_a_format(own: Path) -> None:
    (own / "mine.toml").write_text(GOOD.replace('"Mine"', '"{gpus} {0} {title!r}"'))
    mine = sites.find("mine")
    text = render(dataclasses.replace(script(sites.find("narval"), "1-node"), site=mine))
    assert "# {gpus} {0} {title!r}. " in text


def test_an_unknown_site_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no site 'narvall': did you mean narval"):
        sites.find("narvall")


def test_login_nodes_are_known_by_their_variables() -> None:
    assert sites.current({"CC_CLUSTER": "narval"}) == "narval"
    assert sites.current({"NERSC_HOST": "perlmutter"}) == "perlmutter"
    assert sites.current({}) == "generic"


def test_a_file_that_is_like_a_shipped_one_has_its_facts_and_its_own(own: Path) -> None:
    (own / "narval.toml").write_text('like = "narval"\ntitle = "Mine"\n[node]\ncores = 40\n[job]\nmodules = ["a/1"]\n')
    found, base = sites.find("narval"), schema.site("narval", sites._content(sites.SHIPPED / "narval.toml"), "narval")
    assert (found.title, found.node.cores, found.node.gpus, found.job.modules) == ("Mine", 40, 4, ("a/1",))
    assert (found.storage, found.slice, found.charge, found.ask) == (base.storage, base.slice, base.charge, base.ask)
    assert "_alliance" not in sites.files()


@pytest.mark.parametrize("value", ['"../narval"', '"narvall"', '""', '["narval"]', "1", '"/etc/passwd"', '"a\\nb"'])
def test_a_file_is_like_no_other_file(own: Path, value: str) -> None:
    (own / "mine.toml").write_text(f"like = {value}\n{GOOD}")
    with pytest.raises(UsageError, match=r"mine\.toml: like=.* is not the name of a site that grappe has"):
        sites.find("mine")
