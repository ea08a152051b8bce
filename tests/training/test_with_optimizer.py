"""--with-optimizer: goes on from another script's file, to the same weights as the training that was not moved."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from grappe.checkpoint.foreign_training import _optimizer_of
from grappe.checkpoint.format import list_checkpoints
from grappe.errors import GrappeError
from grappe.plan import Plan
from grappe.training.options import Options
from grappe.training.run import Run
from grappe.training.worker import worker
from tests.faults.resume_cell import hashes
from tests.parity.cell import TOLERANCE, difference
from tests.parity.tasks import Images
from tests.processes import Pool
from tests.training.test_training import HERE, request_of

EPOCHS, DONE = 4, 2
STEPS = 3  # of an epoch


def task(rule: str = "adam", **fields: Any) -> Images:
    return Images(**{"rule": rule, "epochs": EPOCHS, "clip": 0.5, **fields})


def train(folder: Path, given: Path | None = None, own: Images | None = None, **fields: Any) -> Run:
    request = request_of(folder, own or task(), weights=given, options=Options(keep=100), **fields)
    return Run(worker(request, HERE, folder.parent).run)


def parameters(task: Images) -> tuple[nn.Module, list[tuple[str, nn.Parameter]]]:
    model = task.model()
    return model, list(model.named_parameters())


def script_file(run: Run, task: Images, file: Path, form: str = "page") -> Path:
    """Saves what a hand-written loop would have behind the epochs done, with a real module and a real optimizer."""
    checkpoint = next(one for one in list_checkpoints(run.checkpoints) if one.step == DONE * STEPS)
    tensors, weights = checkpoint.read_tensors(), checkpoint.read_model()
    model, named = parameters(task)
    optimizer = task.optimizer(named)
    with torch.no_grad():
        for name, tensor in [*named, *model.named_buffers()]:
            tensor.copy_(weights.read(name))
    for name, parameter in named:
        prefix = f"optimizer.{name}."
        state = {one.removeprefix(prefix): tensors.read(one).clone() for one in tensors if one.startswith(prefix)}
        if state:
            optimizer.state[parameter] = state
    if form == "lightning":
        content = {
            "epoch": DONE - 1,
            "global_step": DONE * STEPS,
            "pytorch-lightning_version": "2.6.0",
            "state_dict": {f"model.{name}": value for name, value in model.state_dict().items()},
            "loops": {"fit_loop": {"epoch_progress": {"current": {"completed": DONE}}}},
            "optimizer_states": [optimizer.state_dict()],
            "lr_schedulers": [],
        }
    else:
        content = {
            "net": {f"module.{name}": value for name, value in model.state_dict().items()},
            "optimizer": optimizer.state_dict(),
            "epoch": DONE,
        }
    torch.save(content, file)
    return file


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The trainings that nobody moved, by the optimizer's rule."""
    base = tmp_path_factory.mktemp("whole")
    return {rule: train(base / rule, own=task(rule)) for rule in ("adam", "sgd")}


@pytest.mark.parametrize("rule", ["adam", "sgd"])
@pytest.mark.parametrize("form", ["page", "lightning"])
def test_the_same_bits_as_the_training_that_was_not_moved(tmp_path, whole, rule: str, form: str) -> None:
    file = script_file(whole[rule], task(rule), tmp_path / "ckpt", form)
    run = train(tmp_path / "run", file, task(rule), with_optimizer=True)
    assert min(one.step for one in list_checkpoints(run.checkpoints)) == DONE * STEPS
    assert hashes(run.folder, EPOCHS * STEPS) == hashes(whole[rule].folder, EPOCHS * STEPS)


@pytest.mark.parametrize("rule", ["adam", "sgd"])
@pytest.mark.parametrize(
    "plan",
    [
        "replicate=2", "shard=2", "shard=2,zero=1", "pipeline=2,microbatches=2", "engine=textbook,replicate=2",
        "engine=lightning,replicate=2", "engine=deepspeed,shard=2", "engine=deepspeed,replicate=2",
    ],
)  # fmt: skip
def test_any_plan_goes_on(pool: Pool, tmp_path, whole, plan: str, rule: str) -> None:
    file = script_file(whole[rule], task(rule), tmp_path / "ckpt")
    rest = (task(rule), plan, tmp_path / "run", Options(keep=100), None, None, file)
    pool.run("tests.faults.resume_cell:part", Plan.parse(plan).processes, *rest)
    gap, name = difference(model(whole[rule]), model(Run(tmp_path / "run")))
    assert gap <= TOLERANCE, f"{name} is {gap:.1e} away"
    state = moments(Run(tmp_path / "run"))
    reference = moments(whole[rule])
    assert state.keys() == reference.keys()
    gap, name = difference(reference, state)
    assert gap <= 10 * TOLERANCE, f"{name} is {gap:.1e} away"


def model(run: Run) -> dict[str, torch.Tensor]:
    return _read(run, "model.")


def moments(run: Run) -> dict[str, torch.Tensor]:
    return {name: one for name, one in _read(run, "optimizer.").items() if one.dim()}


def _read(run: Run, prefix: str) -> dict[str, torch.Tensor]:
    checkpoint = run.latest()
    assert checkpoint.step == EPOCHS * STEPS
    tensors = checkpoint.read_tensors()
    return {name: tensors.read(name) for name in tensors if name.startswith(prefix)}


def test_a_fresh_optimizer_is_another_training(tmp_path, whole) -> None:
    file = script_file(whole["adam"], task(), tmp_path / "ckpt")
    run = train(tmp_path / "run", file, epochs_done=DONE)
    assert {one.step for one in list_checkpoints(run.checkpoints)} >= {DONE * STEPS, EPOCHS * STEPS}
    gap, _ = difference(model(whole["adam"]), model(run))
    assert gap > 100 * TOLERANCE


def test_the_same_command_again_resumes(tmp_path, whole) -> None:
    file = script_file(whole["sgd"], task("sgd"), tmp_path / "ckpt")
    run = train(tmp_path / "run", file, task("sgd"), with_optimizer=True)
    for one in list_checkpoints(run.checkpoints):
        if one.step > (DONE + 1) * STEPS:
            shutil.rmtree(one.folder)
    (run.folder / "done").unlink()
    again = train(tmp_path / "run", file, task("sgd"), with_optimizer=True)
    assert hashes(again.folder, EPOCHS * STEPS) == hashes(whole["sgd"].folder, EPOCHS * STEPS)


def saved(tmp_path: Path, whole: dict[str, Run], change: Any) -> Path:
    file = script_file(whole["adam"], task(), tmp_path / "ckpt.pt")
    content = torch.load(file, weights_only=True)
    change(content)
    torch.save(content, file)
    return file


def put(value: object, *place: str | int) -> Callable[[Any], None]:
    """Makes a change of a file: what is at `place` is `value`."""

    def change(content: Any) -> None:
        for name in place[:-1]:
            content = content[name]
        content[place[-1]] = value

    return change


def swapped(content: dict[str, Any]) -> None:
    names = list(content["net"])
    content["net"] = {name: content["net"][name] for name in [names[2], *names[:2], *names[3:]]}


def in_two_groups(content: dict[str, Any]) -> None:
    group, *others = content["optimizer"]["param_groups"]
    parts = [{**group, "params": part} for part in (group["params"][:1], group["params"][1:])]
    content["optimizer"]["param_groups"] = [*parts, *others]


def of_another_class(content: dict[str, Any]) -> None:
    for group in content["optimizer"]["param_groups"]:
        group |= {"nesterov": False}
        del group["betas"]


def factored(content: dict[str, Any]) -> None:
    state = content["optimizer"]["state"][0]
    state["row_var"] = state["exp_avg"].flatten(1).mean(1)


def of_two_optimizers(content: dict[str, Any]) -> None:
    content["optimizer"] = [content["optimizer"]] * 2


FIRST = ("optimizer", "state", 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swapped, "parameters come in another order"),
        (
            lambda content: content.pop("optimizer"),
            "no optimizer's state in it.*only: net, epoch.*--epochs-done N",
        ),
        (in_two_groups, r"its optimizer has 1 \+ 3 \+ 4 parameters in 3 groups, this task's"),
        (of_another_class, "its optimizer is not of the class Adam"),
        (
            put(torch.zeros(3, 5, 7), *FIRST, "exp_avg"),
            r"'exp_avg' of parameter 0 is \[3, 5, 7\], where the",
        ),
        (factored, r"'row_var' of parameter 0 is .*factored.*leave --with-optimizer out"),
        (put({"step": torch.tensor(1.0)}, "optimizer", "state", 1000), "of no parameter"),
        (put(torch.tensor(1.0), *FIRST, "../../evil"), "no name of an optimizer's state"),
        (put(torch.eye(3).to_sparse(), *FIRST, "exp_avg"), "'exp_avg' of parameter 0 is of the layout sparse_coo"),
        (put([0] * 4, "optimizer", "param_groups", 0, "params"), "not numbered"),
        (of_two_optimizers, "the states of 2 optimizers"),
        (lambda content: content.pop("epoch"), "does not record how many epochs were done: give --epochs-done N"),
        (put(EPOCHS, "epoch"), "4 epochs are done, and the task has epochs=4: nothing is left to do"),
        (put(-1, "epoch"), "-1 epochs done"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(tmp_path, whole, change, words: str) -> None:
    file = saved(tmp_path, whole, change)
    with pytest.raises(GrappeError, match=words):
        train(tmp_path / "run", file, with_optimizer=True)
    assert not (tmp_path / "run").exists()


def test_other_things_under_an_optimizers_names_are_passed_over() -> None:
    state = {"state": {}, "param_groups": [{"params": [0]}]}
    assert _optimizer_of({"optimizer": "adam", "opt": {"lr": 1.0}, "optim": state}, Path("a.pt")) is state
    with pytest.raises(GrappeError, match="only: optimizer"):
        _optimizer_of({"optimizer": "adam"}, Path("a.pt"))


def test_files_without_an_optimizer(tmp_path, whole) -> None:
    with pytest.raises(GrappeError, match="that is a folder: continue a run of grappe by --run"):
        train(tmp_path / "run", whole["adam"].folder, with_optimizer=True)
    (tmp_path / "a.safetensors").write_bytes(b"")
    with pytest.raises(GrappeError):
        train(tmp_path / "run", tmp_path / "a.safetensors", with_optimizer=True)
    with pytest.raises(GrappeError, match="add --from FILE"):
        train(tmp_path / "run", epochs_done=1)


def test_numbers_that_differ_are_named(tmp_path, whole, capfd) -> None:
    def change(content: dict[str, Any]) -> None:
        content["optimizer"]["param_groups"][0] |= {"weight_decay": 0.25, "lr": 0.125}

    train(tmp_path / "run", saved(tmp_path, whole, change), with_optimizer=True)
    told = capfd.readouterr().out
    assert "weight_decay of group 0: 0.25 in the file, 0.01 in the task, which counts" in told
    assert "lr of group 0: last 0.125 in the file; the task's lr and schedule count" in told
    assert "2 epochs done, as the file's 'epoch' is understood; otherwise give --epochs-done N" in told
