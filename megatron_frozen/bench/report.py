"""The results page: one Markdown file made from the CSV files of a folder, whatever benchmarks wrote them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_frozen.bench.runner import ALL_CASES, COMMIT, SMALL, STAMP, BenchConfig, shown
from megatron_frozen.errors import ConfigError
from megatron_frozen.io import atomic_write

PAGE, NOTES = "README.md", "notes"
_MAX_ROWS = 400
_FACTS = (COMMIT, *STAMP)
_HEAD = """# Benchmarks

Written by `megatron-frozen bench report` from the CSV files in this folder, which hold every figure. Ratios count, not
times: medians of samples taken in turn, in one run on one machine. A target that was missed says "no".
Notes are written by hand, in `notes/`: by how much a target was missed, why, and what was tried.
"""

Rows = list[dict[str, str]]


def write_page(config: BenchConfig, *, abouts: Mapping[str, str]) -> None:
    """Write README.md beside the CSV files of ``config.output``; ``abouts`` says by name what a benchmark measures.

    Under a benchmark's targets stands the text of notes/NAME.md there, NAME being its CSV file's; the same files make
    the same page, byte for byte.

    Raises ConfigError where the folder holds no CSV file, or one that is not whole.
    """
    files = sorted(config.output.glob("*.csv"), key=lambda path: _place(path.stem, abouts))
    if not files:
        raise ConfigError(f"no CSV file lies in {config.output}; run a benchmark with this --output first")
    found = {path.stem: _read(path) for path in files}
    notes = {path.stem: path for path in sorted((config.output / NOTES).glob("*.md"))}
    parts = [_HEAD, _summary(found)]
    for name, rows in found.items():
        note = notes.pop(name).read_text(encoding="utf-8").strip() if name in notes else ""
        picture = f"![{name}]({name}.png)" if (config.output / f"{name}.png").exists() else ""
        lead = (_limits(rows), abouts.get(_bench(name), ""), picture)
        parts.append(_section(name, rows, lead=lead, note=note))
    page = config.output / PAGE
    with atomic_write(page) as temporary:
        temporary.write_text("\n".join(parts), encoding="utf-8")
    print(f"written to {page}")
    for name, path in notes.items():
        print(f"left out: {path}, as there is no {name}.csv")


def _place(name: str, abouts: Mapping[str, str]) -> tuple[int, str]:
    names = list(abouts)
    return (names.index(_bench(name)) if _bench(name) in names else len(names)), name


def _bench(stem: str) -> str:
    """Return the name of the benchmark that wrote a file."""
    return stem.replace("_", "-")


def _read(path: Path) -> Rows:
    """Return the rows of a file, also of one that a spreadsheet saved with a byte order mark.

    Raises ConfigError where it is cut off or no CSV file.
    """
    rows: list[list[str]] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (UnicodeDecodeError, csv.Error):
        pass  # as good as empty
    if len(rows) < 2 or any(len(row) != len(rows[0]) for row in rows):
        raise ConfigError(
            f"{path} is cut off or no CSV file of a benchmark; run the benchmark again, or move the file away"
        )
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def _summary(found: Mapping[str, Rows]) -> str:
    """Return the table of benchmarks: how many targets each met, of which commit, and what it ran on."""
    lines = []
    for name, rows in found.items():
        targets = [row for row in rows if row.get("met")]
        met = sum(row["met"] == "yes" for row in targets)
        facts = {column: ", ".join(sorted({row[column] for row in rows if row.get(column)})) for column in _FACTS}
        facts["date"] = min((row["date"] for row in rows if row.get("date")), default="")[:10]
        line = {"benchmark": f"[{name}](#{name})", "targets met": f"{met} of {len(targets)}" if targets else ""}
        lines.append(line | facts)
    known = [column for column in _FACTS if any(line[column] for line in lines)]
    return _table(lines, ["benchmark", "targets met", *known])


def _limits(rows: Rows) -> str:
    """Return what keeps the rows from being results of the whole benchmark, if anything does."""
    limits = []
    if any(row.get("sizes") == SMALL for row in rows):
        limits.append("**Tiny sizes, which only try the code: these figures are no results.**")
    cases = {row.get("cases", ALL_CASES) for row in rows}
    limits += [f"**Only the cases with '{text}' in their names.**" for text in sorted(cases - {ALL_CASES})]
    return " ".join(limits)


def _section(name: str, rows: Rows, *, lead: Sequence[str], note: str) -> str:
    """Return a benchmark's heading, the texts of ``lead``, its targets, its note, and the rest of its rows."""
    parts = [f"## {name}\n", *(text and f"{text}\n" for text in lead)]
    targets = [row for row in rows if row.get("met")]
    if targets:
        parts.append(_table(targets, _telling_columns(targets)))
    parts.append(note and f"{note}\n")
    for kind in dict.fromkeys(row.get("kind", "") for row in rows):
        same = [row for row in rows if row.get("kind", "") == kind and not row.get("met")]
        if same:
            more = f", the first {_MAX_ROWS} of {len(same)}" if len(same) > _MAX_ROWS else ""
            table = _table(same[:_MAX_ROWS], _telling_columns(same))
            parts.append(f"<details><summary>All rows: {kind}{more}</summary>\n\n{table}\n</details>\n")
    return "\n".join(part for part in parts if part)


def _telling_columns(rows: Rows) -> list[str]:
    """Return the columns in which these rows say something that the summary does not: of what each row is stamped
    with, what differs between them, such as threads."""
    same = {column for column in _FACTS if len({row[column] for row in rows if column in row}) == 1}
    return [column for column in rows[0] if column not in {*same, "date", "kind"} and any(row[column] for row in rows)]


def _table(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> str:
    lines = [[column.replace("_", " ") for column in columns], ["---"] * len(columns)]
    lines += [[_cell(row[column]) for column in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    """Return a number with three digits that count, and anything else as it is."""
    try:
        return text if text.lstrip("-").isdecimal() else shown(float(text))
    except ValueError:
        return text.replace("|", "\\|")
