"""An inspection as text for people."""

from __future__ import annotations

from mmgraph.inspect.model import Candidate, Inspection
from mmgraph.inspect.source import Parts
from mmgraph.inspect.trial import CallResult, Trial
from mmgraph.inspect.view import Budget, TowerView

__all__ = ["render"]

_CAPTURES = {
    "budgets": "the whole tower, for token budgets",
    "exact": "graphs of exact calls, when one comes a second time",
    "eager": "nothing: it runs in eager mode",
}
_SERVED = {
    "budget": "a graph of a budget",
    "exact": "a graph of the exact call",
}
_MIB = 2**20
_MAX_CANDIDATES = 8


def render(inspection: Inspection) -> str:
    """Return a few lines a tower, or what stands in the way where there is none."""
    i = inspection
    lines = [f"{i.model} ({i.kind}): {i.class_name}, {i.parameters / 1e6:,.1f} M parameters"]
    if i.class_name == Parts.__name__:
        lines.append("the whole can't be built; its parts can, and are called as in its config")
    if not i.towers:
        lines += ["", "no tower found: mmgraph can't attach to this model"]
        lines += [_candidate(candidate) for candidate in i.candidates[:_MAX_CANDIDATES]]
        if not i.candidates:
            lines.append("  no module of it takes pixels or audio")
    for tower in i.towers:
        lines += ["", *_tower(tower)]
    if i.towers and not i.trials:
        lines += ["", "a forecast, from arguments and shapes alone: --try runs the towers"]
        lines.append("and shows what is replayed")
    for trial in i.trials:
        lines += ["", *_trial(trial)]
    return "\n".join(lines)


def _tower(t: TowerView) -> list[str]:
    arguments = [a.name if a.required else f"[{a.name}]" for a in t.arguments]
    lines = [
        f"{t.name or 'the model itself'}: {t.class_name}",
        _line("called as", ", ".join(t.methods) + "(" + ", ".join(arguments) + ")"),
        _line("takes", f"{', '.join(t.modalities)}; {t.layout}"),
        _line("weights", f"{t.parameters / 1e6:,.1f} M, {t.num_bytes / _MIB:,.0f} MiB {t.dtype}"),
        _line("captured", f"{_CAPTURES[t.capture]}: {t.why}"),
    ]
    if t.budgets:
        lines.append(_line("budgets", ", ".join(str(b.tokens) for b in t.budgets) + " tokens"))
        lines.append(_line("buffers", _buffers(t.budgets, t.buffer_bytes)))
    if t.no_budgets is not None:
        lines.append(_line("budgets", f"none up front: {t.no_budgets}"))
    lines.append(_line("on a GPU", _prepared(t)))
    if t.shared:
        more = f" and {len(t.shared) - 3} more" if len(t.shared) > 3 else ""
        lines.append(_line("shared", ", ".join(t.shared[:3]) + more))
    return lines + [_line("you can", advice) for advice in t.advice]


def _line(label: str, text: str) -> str:
    return f"  {label:<10}{text}"


def _buffers(budgets: tuple[Budget, ...], total: int) -> str:
    small, large = budgets[0], budgets[-1]
    return (
        f"{total / _MIB:.1f} MiB for the whole ladder "
        f"({small.num_bytes / _MIB:.1f} for {small.tokens} tokens alone, "
        f"{large.num_bytes / _MIB:.1f} for {large.tokens})"
    )


def _prepared(t: TowerView) -> str:
    widths = ", ".join(f"{before} to {after}" for before, after in t.padded_widths.items())
    padded = f"{t.padded_layers} linear layers padded ({widths})" if widths else "no layer padded"
    return f"{t.blocks} blocks compiled, {padded}"


def _candidate(c: Candidate) -> str:
    return (
        f"  {c.name or 'the model itself'}: {c.class_name} takes {', '.join(c.takes)}; {c.why_not}"
    )


def _trial(trial: Trial) -> list[str]:
    lines = [f"tried {trial.tower} ({trial.what})"]
    if trial.not_run is not None:
        return [*lines, f"  not run: {trial.not_run}"]
    lines += [f"  call {n}: {_call(call)}" for n, call in enumerate(trial.calls, 1)]
    return lines


def _call(call: CallResult) -> str:
    equal = "equal to eager" if call.equal else f"DIFFERS FROM EAGER by {call.error:.1e}"
    if call.served == "eager":
        return f"eager mode ({call.reason}), {equal}"
    return f"replayed from {_SERVED[call.served]}, {equal}"
