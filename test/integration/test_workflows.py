"""GitHub's workflows are YAML, do what `make` can, and take actions that nobody can change."""

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML reads workflows")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    assert set(found) >= {"name", "permissions", "jobs"}
    for job in found["jobs"].values():
        assert job["timeout-minutes"] <= 90
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])
            for target in re.findall(r"^make ([a-z-]+)", step.get("run", ""), re.M):
                assert target in targets
