"""The benchmark's own logic: counts, tables, bounded processes; nothing here is timed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks import environments, material, runner
from benchmarks.contestants.common import Setting, batches, family, peak_bytes
from benchmarks.runner import Contestant, Outcome, Runner, contestants, execute
from benchmarks.table import Conditions, best_of_ours, check, document, section, table
from benchmarks.workloads import MULTIPLICATIONS, WORKLOADS, Workload, chosen
from fedveil.data.federated import Dataset, Examples
from fedveil.engines.choose import ENGINES
from fedveil.models.catalog import build

OURS = Contestant("fedveil factored", "ours.py", variant="factored")
PEER = Contestant("pfl", "with_pfl.py", "pfl")
PLAIN = Contestant("plain SGD", "plain.py", private=False)
W1 = WORKLOADS["W1"]


def outcome(who: Contestant, seconds: float, accuracy: float = 0.7, loss: float = 1.0) -> Outcome:
    middle = (seconds, 3 * seconds, 0.5 * seconds)
    return Outcome("W1", who, middle, loss, accuracy, 500_000_000, {"torch": "2.13.0"})


# Workloads


@pytest.mark.parametrize("name", MULTIPLICATIONS)
def test_multiplications_are_those_of_fedveils_models(name: str) -> None:
    images = Examples(torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.long))
    model = build(name, Dataset("none", images, images, 10), torch.Generator())
    counted: list[int] = []

    def count(layer: nn.Module, _: object, output: Tensor) -> None:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            counted.append(layer.weight.numel() * output[0].numel() // len(layer.weight))

    for layer in model.modules():
        layer.register_forward_hook(count)
    model(images.inputs[:1])
    assert tuple(counted) == MULTIPLICATIONS[name]


def test_operations_leave_out_the_first_layers_input_gradient() -> None:
    assert W1.flops == 4 * 7840 * 20 * 20 * 600
    assert WORKLOADS["W2"].flops == pytest.approx(192e9, rel=0.01)


def test_workloads_are_chosen_by_the_beginning_of_their_key() -> None:
    assert [one.key for one in chosen(["W4"])] == ["W4 MLP", "W4 CNN"]
    assert len(chosen([])) == 7
    with pytest.raises(SystemExit, match="W9"):
        chosen(["W9"])


# Material


def test_clients_of_w1_have_twenty_examples_of_few_labels() -> None:
    labels = np.repeat(np.arange(10), 6000)
    dealt = material.split(W1, labels)
    assert set(np.diff(dealt.offsets)) == {20}
    kinds = [len(set(labels[part])) for part in np.split(dealt.order, dealt.offsets[1:-1])]
    assert max(kinds) <= 5


def test_passes_are_reshuffled_and_follow_without_a_gap() -> None:
    one = setting(batch=4, steps=5)
    index = batches(10, one, np.random.default_rng(0))
    assert index.shape == (5, 4)
    first, second = index.reshape(-1)[:10], index.reshape(-1)[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert list(first) != list(second)


def test_a_batch_as_large_as_the_client_is_the_whole_client() -> None:
    index = batches(3, setting(batch=None, steps=2), np.random.default_rng(0))
    assert index.tolist() == [[0, 1, 2], [0, 1, 2]]


def setting(batch: int | None, steps: int) -> Setting:
    return Setting("W", "softmax", 1, 1, steps, 0.1, 1.0, 1.0, batch, 0.0, "client", "", "")


def test_contestants_compute_the_same_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Workload("T", "", "mlp-256-128", 6, 4, 3, 0.1, 0.2, 1e-6, momentum=0.5)
    examples = material.synthetic(np.random.default_rng(0), 120, 60)
    file = material.write([one], tmp_path, "synthetic", examples)["T"]
    monkeypatch.syspath_prepend(str(material.CONTESTANTS))
    import eager
    import ours
    import stacked

    losses = {}
    for script, variant in ((ours, "dense"), (ours, "loop"), (eager, ""), (stacked, "")):
        command = ["", str(file), "--rounds", "2", "--seconds", "0", "--variant", variant]
        monkeypatch.setattr(sys, "argv", command)
        script.main()
        answer = json.loads(capsys.readouterr().out)
        assert len(answer["seconds"]) == 2
        losses[script.__name__, variant] = answer["loss"]
    assert max(losses.values()) - min(losses.values()) < 1e-4, losses


# Environments


def broken_pip(place: Path, **_: object) -> None:
    """A python whose pip finds nothing."""
    (place / "bin").mkdir(parents=True)
    python = place / "bin" / "python"
    python.write_text("#!/bin/sh\necho 'ERROR: No matching distribution for x' >&2\nexit 1\n")
    python.chmod(0o755)


def test_a_peer_that_does_not_install_is_a_row_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []
    monkeypatch.setattr(environments.venv, "create", lambda place, **k: broken_pip(place))
    real = environments.build
    monkeypatch.setattr(
        environments, "build", lambda place, *rest: (built.append(place), real(place, *rest))[1]
    )
    race = Runner({"W1": tmp_path}, tmp_path, 3, 1.0, 60.0, time.monotonic() + 600)
    outcomes = [race.run(PEER, W1), race.run(PEER, W1)]
    assert {one.problem for one in outcomes} == {"does not install: No matching distribution for x"}
    assert len(built) == 1, "what did not install was tried again"
    assert "| pfl | – |" in section(W1, outcomes, 1e11)
    assert "No matching distribution" in table([W1], outcomes, 1e11)


def test_a_complete_environment_is_left_alone(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("")
    (tmp_path / "requirements.txt").write_text("a==1\nb==2")
    assert environments.build(tmp_path, ("a==1", "b==2"), 1.0) == python


def test_every_engine_but_auto_takes_part_once() -> None:
    engines = [one.variant for one in contestants() if one.ours]
    assert sorted(engines) == sorted(set(ENGINES) - {"auto"})
    assert not any(one.serves(W1) for one in contestants() if one.peer == "opacus")


# Processes


def run_python(code: str, limit: float = 60.0) -> dict[str, object]:
    return execute([sys.executable, "-c", code], runner.environment(1), limit)


def test_the_last_json_line_counts() -> None:
    code = "print('{\"a\": 1}'); print('hello'); print('{\"a\": 2}'); print('[3]'); print('done')"
    assert run_python(code) == {"a": 2}


def test_a_program_that_fails_says_why_in_one_line() -> None:
    answer = run_python("print('{}'); raise ValueError('no | such\\nthing at all')")
    assert answer == {"problem": "failed: thing at all"}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc here")
def test_a_program_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    note = tmp_path / "child"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    assert run_python(code, 5.0) == {"problem": "not finished after 5 s"}
    assert ended(int(note.read_text()))


def ended(process: int) -> bool:
    """Whether it is gone, or will be once its new parent looks; a signal takes a moment."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.1)
    return False


def test_after_the_deadline_nothing_is_started(tmp_path: Path) -> None:
    race = Runner({}, tmp_path, 3, 1.0, 60.0, time.monotonic())
    assert race.run(OURS, W1).problem == "not run: out of time"


def test_threads_and_silence_are_in_the_environment() -> None:
    variables = runner.environment(2)
    assert variables["OMP_NUM_THREADS"] == "2"
    assert variables["FLWR_TELEMETRY_ENABLED"] == "0"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc here")
def test_a_family_is_a_process_and_its_descendants() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = family(os.getpid())
        child.communicate(b"\n")
    assert {os.getpid(), child.pid} <= set(found)
    assert os.getppid() not in found
    assert peak_bytes() > 10_000_000


# The table


def test_ratios_are_to_the_limit_and_to_our_fastest() -> None:
    slow = replace(outcome(OURS, 9.0), contestant=replace(OURS, name="fedveil loop"))
    outcomes = [outcome(PEER, 4.0), slow, outcome(OURS, 0.5)]
    lines = section(W1, outcomes, W1.flops).splitlines()  # so that the limit is one second
    assert [line.split(" | ")[0] for line in lines[1:]] == [
        "| fedveil factored", "| pfl", "| fedveil loop",
    ]  # fmt: skip
    assert lines[2] == "| pfl | 4 | 2 | 3 | 4.00 | 8.00 | 500 | 0.700 | 1.000 | agrees |"
    assert best_of_ours(outcomes) is outcomes[2]


def test_the_check_tells_noise_from_another_result() -> None:
    reference = outcome(OURS, 1.0, loss=2.25)
    assert check(outcome(PEER, 1.0, accuracy=0.1, loss=2.254), reference) == "agrees"
    assert check(outcome(PEER, 1.0, loss=2.27), reference) == "differs"
    assert check(outcome(PEER, 1.0, loss=math.log(10)), reference) == "differs", "learned nothing"
    assert check(outcome(PEER, 1.0, loss=1.1), outcome(OURS, 1.0, loss=1.0)) == "agrees"
    assert check(outcome(PEER, 1.0, float("nan"), float("nan")), reference) == "differs"
    assert check(outcome(PLAIN, 1.0, accuracy=0.9), reference) == "reference"
    assert check(outcome(PEER, 1.0), None) == "nothing to compare"


def test_the_document_says_where_it_was_made() -> None:
    conditions = Conditions(True, "2026-01-02", "a processor", 2, (9e10, 1e11, 2e11), 3.0, "data")
    text = document([W1], [outcome(OURS, 1.0)], conditions)
    assert "quick run: 2026-01-02, 2 cores of a processor" in text
    assert "100 GFLOP/s in the median, from 90 to 200" in text
    assert "other work was using the machine" in text
    assert "torch 2.13.0" in text
    quiet = document([W1], [], replace(conditions, load=0.1, quick=False))
    assert "other work" not in quiet
    assert "full run" in quiet
