"""A loop of one's own: the same numbers under every plan, nothing lost when it is stopped, five changed lines."""

import contextlib
import difflib
import functools
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import grappe
from grappe.errors import PlanError, RunError, TaskError, UsageError
from grappe.plan import Plan
from grappe.training.run import Run
from tests.cli.test_corrections import answer_to
from tests.commands import TORCHRUN, Command
from tests.processes import Pool
from tests.training import loops

SCRIPT = str(Path(__file__).with_name("gan.py"))
EXAMPLES = Path(__file__).parents[2] / "examples"
TOLERANCE = 1e-5
EXACT = 1e-8
"""Tolerance of float64 results."""


def train(folder: Path, plan: str, name: str, *more: str) -> int:
    processes = Plan.parse(plan).processes
    starter = (TORCHRUN, "--nproc-per-node", str(processes)) if processes > 1 else (sys.executable,)
    words = (SCRIPT, f"{plan},threads=1,device=cpu".lstrip(","), f"{name}.safetensors", *more)
    with contextlib.closing(Command(*starter, *words, cwd=folder)) as command:
        code, _, err = command.end()
    assert code in (0, 1, 75), err
    return code


Tensors = dict[str, torch.Tensor]
Trained = Callable[[str], tuple[Path, Tensors]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """By plan: the folder of a loop that nobody has stopped, and what it has learned."""

    @functools.cache
    def of(plan: str) -> tuple[Path, Tensors]:
        folder = tmp_path_factory.mktemp("trained")
        assert train(folder, plan, "found", "run") == 0
        return folder / "run", load_file(folder / "found.safetensors")

    return of


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "replicate=3"])
def test_learns_the_same(trained: Trained, plan: str) -> None:
    alone, found = trained("")[1], trained(plan)[1]
    assert set(found) == set(alone)
    for name, wanted in alone.items():
        gap = (found[name].double() - wanted.double()).norm() / wanted.double().norm()
        assert gap <= TOLERANCE, f"{name} is {gap:.1e} away"


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_its_folder_gives_the_trained_models(tmp_path: Path, trained: Trained, plan: str) -> None:
    run, found = trained(plan)
    made = (
        nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.0), nn.ReLU(), nn.Linear(16, 2)),
        nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)),
    )
    generator, critic = grappe.load_models(run, *made)
    assert not generator.training
    for which, model in (("g", generator), ("c", critic)):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.detach(), found[f"{which}.{name}"]), name
    with pytest.raises(TaskError, match="another model's"):
        grappe.load_models(run, nn.Sequential(*made[0], nn.Linear(2, 2)))
    with pytest.raises(RunError, match=r"grappe\.Loop"):
        grappe.load_models(tmp_path, *made)


@pytest.mark.parametrize(
    ("plan", "stop", "exit_code"),
    [
        ("", "SIGTERM", 75),
        ("replicate=2", "SIGTERM", 1),  # torchrun has one exit code of its own for all failures
        ("replicate=2", "SIGKILL", 1),
    ],
)
def test_it_is_stopped_in_mid_epoch_and_goes_on_to_the_same_bits(
    tmp_path: Path, trained: Trained, plan: str, stop: str, exit_code: int
) -> None:
    assert train(tmp_path, plan, "parts", "parts", "6", stop) == exit_code
    assert not (tmp_path / "parts.safetensors").exists()
    assert train(tmp_path, plan, "parts", "parts") == 0
    whole, parts = trained(plan)[1], load_file(tmp_path / "parts.safetensors")
    assert 0 < len(parts["losses"]) < len(whole["losses"])
    for name, wanted in whole.items():
        assert torch.equal(parts[name], wanted[-len(parts["losses"]) :] if name == "losses" else wanted), name


def test_it_goes_on_under_other_numbers_of_processes(tmp_path: Path, trained: Trained) -> None:
    """Two replicas, then one process, then two shards: in the end what one process alone has learned."""
    for plan, stop in (("replicate=2", "4"), ("", "8")):
        assert train(tmp_path, plan, "found", "run", stop) in (1, 75)
    assert train(tmp_path, "shard=2", "found", "run") == 0
    alone, found = trained("")[1], load_file(tmp_path / "found.safetensors")
    losses = found.pop("losses")
    assert 0 < len(losses) < len(alone["losses"]) - 6, "it went on behind the second stop"
    assert torch.allclose(losses, alone["losses"][-len(losses) :], rtol=TOLERANCE)
    for name, wanted in found.items():
        gap = (alone[name].double() - wanted.double()).norm() / wanted.double().norm()
        assert gap <= TOLERANCE, f"{name} is {gap:.1e} away"


def test_five_lines_change_an_existing_loop() -> None:
    texts = [(EXAMPLES / name).read_text().split('"""', 2)[2] for name in ("gan_by_hand.py", "gan.py")]
    before, after = (text.splitlines() for text in texts)
    added = [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    changed = [line for line in added if "grappe" in line or "loop" in line]
    assert len(changed) == 5
    beside = {"import sys", "from torch.utils.data import TensorDataset"}  # to read the plan; one import less
    assert set(added) - set(changed) == beside


@pytest.mark.parametrize(
    ("plan", "error", "words"),
    [
        ("tensor=2", PlanError, "not tensor, which needs an engine"),
        ("engine=textbook", PlanError, "another engine"),
        ("replicate=2", UsageError, "grappe launch --plan replicate=2"),
        ("replicate=2,offload=cpu", PlanError, "use shard=2, or no offload"),
        ("microbatches=2", PlanError, "accumulate gradients in the loop, as in any PyTorch script"),
        ("exact=4", PlanError, "not exact, which needs an engine"),
        ("replicate=2,compile", PlanError, "compile on several processes is not for a custom loop"),
        ("replicate=2,dropout=local", PlanError, "not dropout=local"),
    ],
)
def test_what_a_loop_of_ones_own_cannot_have(plan: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        grappe.Loop(plan)


# ---- Loops in a pool's processes: what a body may do ----


def learned(pool: Pool, name: str, plan: str, *arguments: Any) -> Any:
    """Returns what the loop `name` of loops.py returns on process 0."""
    return pool.run("tests.training.loops:in_process", Plan.parse(plan).processes, name, plan, *arguments)[0]


BODIES = ("branches", "padded", "contrastive", "recurrent", "closure", "loaded", "unloaded")


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *((name, plan) for name in BODIES for plan in ("replicate=2", "replicate=3")),
        *((name, "replicate=4,recompute") for name in ("contrastive", "loaded")),  # one has no row of the last batch
        ("contrastive", "shard=2"),
        ("padded", "shard=2"),
        ("thawed", "shard=2"),
        ("overflowing", "shard=2"),
        ("overflowing", "shard=2,offload=cpu"),
        ("overflowing", "precision=fp64"),
        ("blocks", "shard=2"),
        ("blocks", "replicate=2,shard=2,recompute"),
        ("second", "replicate=2"),
    ],
)
def test_a_body_learns_what_it_learns_on_one_process(pool: Pool, name: str, plan: str) -> None:
    for wanted, found in zip(learned(pool, name, ""), learned(pool, name, plan), strict=True):
        gap = (found.double() - wanted.double()).norm() / wanted.double().norm()
        assert gap <= EXACT, f"{gap:.1e} away"


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_fp16_leaves_a_step_with_an_infinity_out_everywhere(pool: Pool, plan: str) -> None:
    alone, several = (learned(pool, "overflowing", f"precision=fp16{more}") for more in ("", f",{plan}"))
    for wanted, found in zip(alone, several, strict=True):
        assert torch.allclose(wanted, found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("plan", ["replicate=2", "replicate=4", "shard=2"])
def test_an_evaluation_counts_each_sample_once(pool: Pool, plan: str) -> None:
    inputs, targets = loops.DATA.tensors
    scores = learned(pool, "evaluated", "")
    assert scores["first"] == pytest.approx(float(inputs[:, 0].mean()), rel=EXACT)
    assert scores["small"] == pytest.approx(float((targets < 2).float().mean()), rel=EXACT)
    assert not scores["eval"]
    assert learned(pool, "evaluated", plan) == pytest.approx(scores, rel=EXACT)


@pytest.mark.parametrize(
    ("case", "plan", "words"),
    [
        ("shapes", "replicate=2", "samples of a batch have different shapes"),
        ("zip", "", "StackDataset"),
        ("alone", "replicate=2", r"process \d has computed something else than others"),
        ("score", "replicate=2", "the score loss has shape"),
        ("hook", "shard=2", "a hook on a parameter's gradient"),
        ("hook", "replicate=2", "^$"),
        ("closure", "precision=fp16", "LBFGS computes its gradients in a closure"),
    ],
)
def test_what_would_not_be_one_process_s_is_refused(pool: Pool, case: str, plan: str, words: str) -> None:
    assert re.search(words, learned(pool, "refused", plan, case))


def test_a_function_is_launched_as_from_a_notebook() -> None:
    def trained(steps: int) -> tuple[int, list[torch.Tensor]]:
        net = loops.model()
        with grappe.Loop() as loop:
            net, optimizer = loop.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.1))
            for inputs, _ in itertools.islice(loop.batches(loops.DATA, 8), steps):
                optimizer.zero_grad()
                net(inputs).square().mean().backward()
                optimizer.step()
        return loop.world.size, loops.weights(net)

    (one, alone), (two, several) = (
        grappe.Loop.launch(trained, 2, plan=f"{plan},threads=1,device=cpu") for plan in ("replicate=1", "replicate=2")
    )
    assert (one, two) == (1, 2)
    assert all(map(functools.partial(torch.allclose, rtol=TOLERANCE), alone, several))


# ---- In this process: what is refused, and what a resumed loop goes on with ----


def test_further_calls_of_batches_are_further_epochs() -> None:
    def orders(calls: list[int]) -> list[list[int]]:
        with grappe.Loop("threads=1") as loop:  # its end gives torch its own functions back
            return [batch.tolist() for epochs in calls for batch, _ in loop.batches(NUMBERS, 4, epochs)]

    assert orders([1, 1, 1]) == orders([3]) == orders([2, 1])
    assert len(orders([1, 1, 1])) == 9
    assert orders([1, 1])[:3] != orders([1, 1])[3:]


NUMBERS = TensorDataset(torch.arange(10), torch.arange(10))


class Sharpness(torch.optim.Optimizer):
    """SAM as its authors publish it: another optimizer inside."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def first_step(self) -> None: ...

    def second_step(self) -> None: ...

    def step(self, closure: Any = None) -> None:
        self.base_optimizer.step()


SCHEDULES: dict[str, Callable] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 3], 0.5),
    "cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=30),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.3),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "by hand": lambda o: None,
}


def scheduled(folder: Path | None, name: str, stop: int | None, *, epochs: bool = True, keep: bool = True) -> list:
    """Trains with a schedule that steps after each epoch of three steps; leaves the loop after `stop` steps."""
    net = loops.model()
    optimizer = Sharpness(net.parameters(), lr=0.1, momentum=0.9)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    with grappe.Loop("threads=1", folder, save_every=2) as loop:
        net, optimizer = loop.parallelize(net, optimizer)
        schedule = SCHEDULES[name](optimizer)
        if keep:
            loop.keep(average=average)
        if keep and schedule is not None:
            loop.keep(schedule=schedule)
        for _ in loop.epochs(5) if epochs else range(5):
            for inputs, targets in loop.batches(loops.DATA, 8):
                optimizer.zero_grad()
                F.cross_entropy(net(inputs), targets).backward()
                optimizer.step()
                average.update_parameters(net)
                if loop.step == stop:
                    return []
            if name == "plateau":
                schedule.step(1.0)
            elif schedule is not None:
                schedule.step()
            else:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.7
    return [*loops.weights(net), *loops.weights(average), torch.tensor(optimizer.param_groups[0]["lr"])]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stop", [5, 7])  # in the second epoch, and just after the second's checkpoint
@pytest.mark.parametrize("epochs", [True, False])
def test_a_schedule_an_average_and_a_wrapped_optimizer_go_on(
    tmp_path: Path, name: str, stop: int, epochs: bool
) -> None:
    whole = scheduled(None, name, None)
    assert not scheduled(tmp_path / "run", name, stop, epochs=epochs)
    for wanted, found in zip(whole, scheduled(tmp_path / "run", name, None, epochs=epochs), strict=True):
        assert torch.equal(wanted, found)


def test_what_a_checkpoint_would_lack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"loop.keep\((average|schedule)=…\)"):
        scheduled(tmp_path / "run", "step", None, keep=False)
    with grappe.Loop("threads=1") as loop, pytest.raises(UsageError, match="a dict has no state_dict"):
        loop.keep(things={})


def test_its_folder_is_a_run(tmp_path: Path) -> None:
    net = loops.model()
    with grappe.Loop("threads=1", tmp_path / "run") as loop:
        net, optimizer = loop.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in loop.epochs(2):
            for inputs, targets in loop.batches(loops.DATA, 8):
                optimizer.zero_grad()
                F.cross_entropy(net(inputs), targets).backward()
                (0.0 * net(inputs).square().mean()).backward()
                optimizer.step()
            loop.evaluate(loops.DATA, lambda inputs, targets: F.cross_entropy(net(inputs), targets, reduction="none"))
    run = Run(tmp_path / "run")
    steps, scores = (list(run.records(kind)) for kind in ("step", "evaluation"))
    assert [(each["step"], each["epoch"], each["samples"]) for each in steps] == [
        (1, 0, 8), (2, 0, 16), (3, 0, 22), (4, 1, 30), (5, 1, 38), (6, 1, 44),
    ]  # fmt: skip
    assert all(each["loss"] > 0 and each["loss_2"] == 0 and each["lr"] == 0.1 for each in steps)
    assert [(each["step"], each["samples"]) for each in scores] == [(3, 22), (6, 22)]
    assert scores[1]["loss"] < scores[0]["loss"]
    assert run.read_status(run.read_description()) == "finished"
    assert f"start its script again: grappe launch --plan threads=1 {sys.argv[0]}" in answer_to(f"resume {run.folder}")
    with pytest.raises(RunError, match="whose models only its script makes"):
        grappe.evaluate(run)
    with pytest.raises(ZeroDivisionError), grappe.Loop("threads=1", tmp_path / "run"):
        raise ZeroDivisionError("division by zero")
    assert run.read_status(run.read_description()) == "failed: ZeroDivisionError: division by zero"


def test_a_resumed_loop_goes_on_in_its_curves_and_tidies_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    with pytest.raises(ZeroDivisionError), grappe.Loop("threads=1", run):
        raise ZeroDivisionError
    assert not scheduled(run, "step", 4)
    assert capsys.readouterr().err == f"grappe: {run} has no checkpoint: starting again from step 0\n"
    unfinished = run / "checkpoints" / ".step-000099.0123456789abcdef"
    unfinished.mkdir()
    (unfinished / "rank-00000.safetensors").write_bytes(b"")
    assert scheduled(run, "step", None)
    assert capsys.readouterr().err == f"grappe: {run}: resuming from step 4\n"
    assert [record["samples"] for record in Run(run).records("step")][2:6] == [22, 30, 38, 44]
    assert not unfinished.exists()
    assert Run(run).read_description()["restarts"] == 2
