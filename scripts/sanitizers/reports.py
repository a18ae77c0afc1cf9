"""Print the reports of sanitizers in a folder that are our faults; exit code 1 if any.

Any report of AddressSanitizer and of UndefinedBehaviorSanitizer is: only our libraries
are instrumented. Leaks are ours where one of our libraries is in the stack of the
allocation: Python and torch keep much until the process ends, and say so nowhere.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LEAKS = "LeakSanitizer: detected memory leaks"
OURS = re.compile(r"/weightsync/(?:_C\.|_emulator/)")


def faults_in(report: str) -> list[str]:
    """Return the parts of a report that are faults of ours."""
    if LEAKS not in report:
        return [report]
    parts = report.split("\n\n")
    return [each for each in parts if "leak of" in each and OURS.search(each)]


def faults_of(folder: Path) -> list[str]:
    """Return all faults, each one once, with the file that has the first of them."""
    found: dict[str, str] = {}
    for file in sorted(folder.iterdir()):
        for each in faults_in(file.read_text(errors="replace")):
            alike = re.sub(r"0x[0-9a-f]+|==\d+==|\d+ (?:byte|object)", "", each)
            found.setdefault(alike, f"--- {file.name}\n{each}")
    return list(found.values())


def main() -> None:
    found = faults_of(Path(sys.argv[1]))
    print(*found, sep="\n")
    if found:
        sys.exit(f"The sanitizers found {len(found)} different faults.")


if __name__ == "__main__":
    main()
