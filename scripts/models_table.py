"""Render docs/models.md, the table of all encoders in the registry, from docs/models.json.

    python -m pytest tests/registry -m "not slow" --registry-results out/results.json
    python -m scripts.models_table --merge out/results*.json

The first command runs the short form of every entry and writes what came out; the second takes that
into docs/models.json, in a section for its platform, and renders the table. On a GPU the first is
``python -m pytest -m "gpu and not slow" tests/registry --registry-results out/results.json``.
Without ``--merge`` it only renders; with ``--check`` it writes nothing and exits with 1 if the
table is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "merged", "render"]

DATA = Path("docs/models.json")
TABLE = Path("docs/models.md")

Section = Mapping[str, Any]
"""Of one platform: "date", "device", "versions", "commit", "registered" (how many), and "entries"
by name."""

_TRACE = "trace"
_NOT_RUN = "not run yet"
_HEAD = """\
# Encoders

What was captured of each encoder, and how exact it is. Each is a tiny model with random weights,
found from the whole model and attached; the tests are in `tests/registry`. This page is made by
`python -m scripts.models_table` from [models.json](models.json): don't edit it.

**budgets**: graphs of token budgets serve calls of any size. **exact**: a call gets a graph of its
own when its sizes come a second time, see [modes.md](modes.md). **eager**: no graph. A number is
the largest relative error of an output: on `trace` (CPU, float32) against eager mode, on a GPU
(bfloat16) against a float32 twin, with eager mode's own error behind the slash. The percentage is
of items that graphs served: first calls of a size, and calls that no graph may serve, are among
them.

One graph of a budget an encoder, blocks as they are, flash attention: what makes graphs fast is
measured and tested on models of released sizes ([benchmarks](benchmarks/README.md)), and any graph
counts as fast enough here.
"""
_COLUMNS = ("architecture", "modality", "inputs", "tower", "on trace", "on H200", "transformers")


def main(arguments: Sequence[str]) -> int:
    """Merge results if there are any, and render or check the table."""
    parser = argparse.ArgumentParser(prog="python -m scripts.models_table", description=__doc__)
    parser.add_argument("--merge", nargs="+", default=[], type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    data = _read(DATA)
    data = merged(data, map(_read, options.merge))
    if options.check:
        current = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
        up_to_date = current == render(data)
        print(f"{TABLE} is {'up to date' if up_to_date else 'out of date: see ' + __name__}")
        return 0 if up_to_date else 1
    if options.merge:
        DATA.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    TABLE.write_text(render(data), encoding="utf-8")
    return 0


def merged(
    data: Mapping[str, Section], runs: Iterable[Mapping[str, Section]]
) -> dict[str, Section]:
    """Take the results of one session, a file for each process of it, into `data`.

    A session that ran all entries replaces its section, another one adds to it.
    """
    out = dict(data)
    for name, section in _joined(runs).items():
        is_whole = len(section["entries"]) == section["registered"]
        kept = {} if is_whole else out.get(name, {}).get("entries", {})
        out[name] = {**section, "entries": {**kept, **section["entries"]}}
    return out


def _joined(runs: Iterable[Mapping[str, Section]]) -> dict[str, Section]:
    out: dict[str, Section] = {}
    for run in runs:
        for name, section in run.items():
            entries = out.get(name, {}).get("entries", {})
            out[name] = {**section, "entries": {**entries, **section["entries"]}}
    return out


def render(data: Mapping[str, Section]) -> str:
    """Return the whole page."""
    sections = dict(sorted(data.items(), key=lambda item: (_version(item[0]), item[0])))
    names = sorted({name for section in sections.values() for name in section["entries"]})
    notes: list[str] = []
    rows = [_row(name, sections, notes) for name in names]
    parts = [_HEAD, _runs(sections), _counts(sections), _table(rows)]
    if notes:
        parts.append(
            "## Why no budget\n\n" + "".join(f"{i}. {n}\n" for i, n in enumerate(notes, 1))
        )
    return "\n".join(parts)


def _row(name: str, sections: Mapping[str, Section], notes: list[str]) -> tuple[str, ...]:
    runs = {k: s["entries"][name] for k, s in sections.items() if name in s["entries"]}
    present = {k: run for k, run in runs.items() if run["graph"] != "absent"}
    newest = list((present or runs).values())[-1]
    versions = list(dict.fromkeys(_version_text(k) for k in present))
    return (
        name.partition("/")[0] if not name.startswith("timm/") else name,
        newest["modality"],
        newest["inputs"],
        _tower(newest),
        _status({k: r for k, r in runs.items() if k.startswith(_TRACE)}, notes),
        _status({k: r for k, r in runs.items() if not k.startswith(_TRACE)}, notes),
        ", ".join(versions),
    )


def _tower(run: Mapping[str, Any]) -> str:
    path = f"`{run['tower']}`: " if run.get("tower") else ""
    breaks = run.get("breaks", 0)
    around = f", in segments around {breaks} submodules" if breaks else ""
    return f"{path}{run.get('class_name', '')}{around}"


def _status(runs: Mapping[str, Mapping[str, Any]], notes: list[str]) -> str:
    """What the newest version gave, and older ones where that was something else."""
    if not runs:
        return _NOT_RUN
    (_, newest), *others = reversed(list(runs.items()))
    text = _result(newest, notes)
    for key, run in others:
        if run["graph"] != newest["graph"] or bool(run.get("problems")):
            text += f"; {_version_text(key)}: {_result(run, notes)}"
    return text


def _result(run: Mapping[str, Any], notes: list[str]) -> str:
    graph = str(run["graph"])
    if run.get("problems"):
        return f"**{graph}, wrong** {_note('; '.join(run['problems']), notes)}"
    if graph == "absent":
        return graph
    number = f"{run.get('error', 0):.2g}"
    if "eager_error" in run:
        number += f" / {run['eager_error']:.2g}"
    if "hit_rate" in run:
        number += f", {100 * run['hit_rate']:.0f} %"
    why = f" {_note(run['why'], notes)}" if run.get("why") else ""
    return f"{graph}, {number}{why}" if graph != "eager" else f"eager{why}"


def _note(text: str, notes: list[str]) -> str:
    """The number of a note; the same text is the same note."""
    text = text.replace("|", "\\|")
    if text not in notes:
        notes.append(text)
    return f"[{notes.index(text) + 1}](#why-no-budget)"


def _runs(sections: Mapping[str, Section]) -> str:
    lines = [
        f"* `{name}`: {s['date']}, {s['device']}, {s['versions']}{_commit(s)}\n"
        for name, s in sections.items()
    ]
    if all(name.startswith(_TRACE) for name in sections):
        lines.append(f"* on a GPU: {_NOT_RUN}\n")
    return "".join(lines)


def _commit(section: Section) -> str:
    commit = section.get("commit")
    return f", {commit[:7]}{' with changes' if section.get('dirty') else ''}" if commit else ""


def _counts(sections: Mapping[str, Section]) -> str:
    lines = []
    for name, section in sections.items():
        graphs = [run["graph"] for run in section["entries"].values()]
        wrong = sum(bool(run.get("problems")) for run in section["entries"].values())
        kinds = ("budgets", "exact", "eager", "absent")
        counts = ", ".join(f"{graphs.count(kind)} {kind}" for kind in kinds)
        lines.append(f"* `{name}`: {len(graphs)} encoders: {counts}; {wrong} wrong\n")
    return "".join(lines)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def _version(section: str) -> tuple[int, ...]:
    return tuple(int(part) for part in _version_text(section).split("."))


def _version_text(section: str) -> str:
    return section.rpartition("-")[2]


def _read(path: Path) -> dict[str, Section]:
    if not path.exists():
        return {}
    data: dict[str, Section] = json.loads(path.read_text(encoding="utf-8"))
    return data


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
