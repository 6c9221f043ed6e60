"""How the members of a module's containers are written: one by its index, several by a loop."""

from __future__ import annotations

from shardc.emit.roll import index_condition


def index_path(relative: str, containers: dict[str, range]) -> str:
    """ "layers.0.mlp" -> "layers[0].mlp"; containers that do not begin at 0 are dicts: layers["20"]."""
    text, so_far = "", ""
    for part in relative.split("."):
        if part.isdigit():
            held = containers.get(so_far)
            text += f"[{part}]" if held is None or held.start == 0 else f'["{part}"]'
        else:
            text += ("." if text else "") + part
        so_far += ("." if so_far else "") + part
    return text


def elements(relative: str, held: range, indices: list[int]) -> str:
    """The elements of a container that a loop runs over: all, or a slice. held: the indices that the container has."""
    if held.start == 0:
        start = str(indices[0]) if indices[0] else ""
        stop = str(indices[-1] + 1) if indices[-1] + 1 != held.stop else ""
        return f"self.{relative}" + (f"[{start}:{stop}]" if start or stop else "")
    values = f"self.{relative}.values()"
    if indices == list(held):
        return values
    start, stop = indices[0] - held.start, indices[-1] + 1 - held.start
    return f"list({values})[{start or ''}:{stop if stop != len(held) else ''}]"


def differing_calls(
    calls: dict[tuple[str, ...], list[int]], indices: list[int], target: str, variable: str, width: int
) -> list[str]:
    """The body of a loop whose elements are called in several ways.

    calls: for the arguments of a call, the indices of the elements that get them, among `indices`, those of the loop.
    target: what the results are assigned to. variable: the name of the element. width: of the page, for this body."""
    kinds = sorted(calls.items(), key=lambda kind: (len(index_condition(kind[1], indices)), kind[1]))
    widths = {len(arguments) for arguments in calls}
    if len(kinds) == 2 and len(widths) == 1:
        (first, chosen), (second, _) = kinds
        condition = index_condition(chosen, indices)
        merged = [a if a == b else f"{a} if {condition} else {b}" for a, b in zip(first, second, strict=True)]
        line = f"    {target} = {variable}({', '.join(merged)})"
        if sum(a != b for a, b in zip(first, second, strict=True)) == 1 and len(line) <= width:
            return [line]
    lines = []
    for k, (arguments, chosen) in enumerate(kinds):
        test = "else" if k + 1 == len(kinds) else f"{'elif' if k else 'if'} {index_condition(chosen, indices)}"
        lines += [f"    {test}:", f"        {target} = {variable}({', '.join(arguments)})"]
    return lines
