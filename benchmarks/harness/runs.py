"""Finished runs, kept in a file, so that what was trained is not trained again; and how seeds are told."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Runs(dict[str, Any]):
    """Results by the JSON of their case, as in a file of a line each, to which new ones are added at once."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        super().__init__(json.loads(line) for line in lines)

    def keep(self, key: str, result: Any) -> None:
        """Add a result, in the file, too."""
        self[key] = result
        with self.file.open("a") as lines:
            lines.write(json.dumps([key, result]) + "\n")


def mean_and_spread(values: Sequence[float]) -> str:
    """Return the mean of seeds and their standard deviation."""
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.1f}"
