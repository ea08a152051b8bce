"""Options of sbatch: in their forms, none that grappe sets by itself, merged with ours; nothing reaches a shell."""

import pytest

from grappe.errors import UsageError
from grappe.sites.sbatch import JobOptions, merged, options


@pytest.mark.parametrize("value", ["", "a b", "a\nb", "$(x)", "`x`", "a;b", "'a'", "é", "a#b", "--x"])
@pytest.mark.parametrize("name", ["mem", "mem_per_cpu", "qos", "partition", "reservation", "dependency", "mail_user"])
def test_hostile_values_are_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}="):
        options(JobOptions(**{name: value}))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("-p x", "write one option"),
        ("--a b", "write one option"),
        ("--a=b c", "write one option"),
        ("--a=$(x)", "write one option"),
        ("--a=b\n#SBATCH --wrap=x", "write one option"),
        ("--A=b", "write one option"),
        ("--", "write one option"),
        ("", "write one option"),
        ("--wrap=x", "by itself"),
        ("--output=x", "by itself"),
        ("--requeue", "by itself"),
        ("--gres=gpu:4", "--gpus sets that"),
        ("--gres=tmp:1,gpu:a100:4", "--gpus sets that"),
        ("--time=3", "--time sets that"),
        ("--qos=x", "--qos sets that"),
        ("--array=1-3", "--chain"),
        ("--ntasks=3", "--processes"),
    ],
)
def test_what_grappe_sets_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refusal:
        options(JobOptions(sbatch=(text,)))
    assert said in str(refusal.value)


def test_other_resources_may_be_asked_for_and_memory_in_one_way() -> None:
    assert options(JobOptions(sbatch=("--gres=tmp:100", "--exclusive"))) == ("--gres=tmp:100", "--exclusive")
    with pytest.raises(UsageError, match="give one of them"):
        options(JobOptions(mem="1G", mem_per_cpu="1G"))


def test_the_users_options_take_the_place_of_ours() -> None:
    ours = ["--name=x", "--constraint=h100", "--mem=498G", "--hint=nomultithread"]
    assert merged(ours, ["--mem-per-cpu=2G"]) == ["--name=x", *ours[1:2], ours[3], "--mem-per-cpu=2G"]
    found = merged(ours, ["--hint=multithread", "--constraint=a|b"])
    assert found == ["--name=x", "--mem=498G", "--hint=multithread", "--constraint=h100&(a|b)"]
