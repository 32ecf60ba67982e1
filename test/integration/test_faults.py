"""Two workers, of which one meets a fault: both end soon, and the other one says why."""

import signal
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import faults

CASES = [
    case if case == ("backward", "kill") else pytest.param(*case, marks=pytest.mark.grid) for case in faults.cases()
]
SAYS = dict.fromkeys(("raise", "interrupt", "exit 3"), "ended") | dict.fromkeys(("exit 0", "other code"), "other code")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("faults"))
    faults.prepare(path)
    return path


@pytest.mark.parametrize(("phase", "fault"), CASES)
def test_fault(folder, phase, fault, device):
    outcome = faults.run(folder, phase, fault, device)
    assert outcome.seconds < 3 * faults.TIMEOUT + 6, outcome
    if (phase, fault) == ("leave", "exit 0"):  # a script that ends well
        assert outcome.codes == (0, 0), outcome
        return
    silent = fault == "vanish" or (phase, fault) == ("join", "exit 0")
    assert outcome.codes[0] == 1 and (outcome.codes[1] != 0 or silent), outcome
    expected = SAYS.get(fault, "stopped answering")
    expected = "stopped answering" if phase == "join" and fault != "other code" else expected
    if fault == "other code" and outcome.codes[1] == -signal.SIGABRT:  # gloo, of a sum of another length
        expected = "stopped answering"
    expected = "told" if (phase, fault) == ("save", "raise") else expected
    assert "[rank 0]" in outcome.said and outcome.kind == expected, outcome


@pytest.mark.grid
@pytest.mark.parametrize("first", range(3))
def test_restarts(tmp_path, first):
    """A run that meets one fault after the other ends with the bits of a run without. The launcher waits half a minute
    before it kills a stopped worker, so three runs share the faults.
    """
    faults.prepare(str(tmp_path))
    assert faults.recover(str(tmp_path), faults.recoverable(some=10)[first::3])
