"""The statements of one module's forward in one variant."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from shardc.capture.graph import op_name
from shardc.capture.symbols import ShardSize, Size
from shardc.emit.author import names_in
from shardc.emit.choose_sources import ChosenSources
from shardc.emit.containers import differing_calls, elements, index_path
from shardc.emit.expressions import ATOM, PRODUCT, SUM, Printer, Text
from shardc.emit.flow import value_of
from shardc.emit.fold import Folder, Statement, draws_sharded
from shardc.emit.frames import ChildCall, Frame, Op
from shardc.emit.lines import Body, Line
from shardc.emit.names import Namer, is_usable, loop_variable, unused
from shardc.emit.roll import Loop, Unit, roll
from shardc.emit.sources import gathered, gives, parts_of
from shardc.emit.wrap import WIDTH

_WIDTH = WIDTH - 8


class BodyWriter:
    """Writes one frame. formal_lists: for the path of each child, all formals of its class, in order.

    none_text: (child path, formal) -> what other variants pass there, for formals that this variant does not have.
    common: formals that all variants have, in one shape. too_wide: lines that did not fit into the page where they
    ended up.
    """

    def __init__(
        self,
        frame: Frame,
        namer: Namer,
        formal_lists: dict[str, list[str]],
        all_formals: list[str],
        none_text: dict[tuple[str, str], str],
        containers: dict[str, range],
        reserved: frozenset[str],
        common: frozenset[str],
        too_wide: frozenset[str],
    ):
        self.frame = frame
        self.flow = frame.flow
        self.namer = namer
        self.formal_lists = formal_lists
        self.all_formals = all_formals
        self.none_text = none_text
        self.containers = containers
        self.reserved = reserved
        self.common = common
        self.too_wide = too_wide
        self.units = roll(frame)
        self.wishes: dict[fx.Node, str] = {}
        self.kept_none: set[str] = set()  # names that have to stay None in this variant
        for item in frame.items:
            if isinstance(item, ChildCall):
                for formal, actual in zip(item.frame.formal_names, item.actuals, strict=True):
                    if is_usable(name := none_text.get((item.path, formal))):
                        self.wishes.setdefault(actual, name)
                absent = set(formal_lists[item.path]).difference(item.frame.formal_names)
                self.kept_none.update(none_text.get((item.path, formal), "") for formal in absent)
        self.kept_none -= set(self.wishes.values())

    def write(self, finish: Finish | None = None) -> Body:
        """The body; lines that would grow too long by folding are split again."""
        keep = self._must_have_names()
        while True:
            body, long = self._attempt(keep, finish or Finish())
            if long is None:
                return body
            keep = keep | {long}

    def _must_have_names(self) -> set[fx.Node]:
        keep: set[fx.Node] = set()
        for unit in self.units:
            if isinstance(unit, Loop):
                keep.update(unit.operands)
        return keep

    # -- one attempt ---------------------------------------------------------------------------------------------
    def _attempt(self, keep: set[fx.Node], finish: Finish) -> tuple[Body, fx.Node | None]:
        folder = Folder(self.frame, self.units, keep)
        self.statements = folder.statements()
        self.folded = folder.folded
        self.maker = folder.maker
        self.body = Body(absent=frozenset(self.all_formals) - set(self.frame.formal_names))
        self.printer = Printer(self._value, self._size, self._prefix, self._dtype, self._device)
        self.chosen = ChosenSources(self.frame, self.statements, finish.extra_uses(self))
        missing = self.chosen.choose(self.folded, self.common)
        if missing is not None:
            return self.body, missing
        self.name_of: dict[fx.Node, str] = {}
        self.holder: dict[str, fx.Node] = {}
        self.attribute_names: dict[fx.Node, str] = {}
        for node, name in zip(self.frame.formals, self.frame.formal_names, strict=True):
            self._bind(node, name)
        returned = self._folds_into_return(finish)
        for index, statement in enumerate(self.statements):
            self.index = index
            finish.before(self, index)
            if statement.root is returned:
                break
            long = self._write_statement(statement)
            if long is not None:
                return self.body, long
        self.index = len(self.statements)
        long = self._write_return(finish, returned)
        if long is not None:
            return self.body, long
        self.body.axes = self.printer.axes
        self.body.functions = self.printer.functions
        return self.body, None

    def _folds_into_return(self, finish: Finish) -> Unit | None:
        if not self.statements or finish.is_custom or len(self.frame.results) != 1:
            return None
        last = self.statements[-1].root
        single = (
            not isinstance(last, Loop)
            and last.outputs == self.frame.results
            and not self._is_sharded_random(self.statements[-1])
        )
        return last if single and not (isinstance(last, Op) and value_of(last.node) is None) else None

    # -- names ----------------------------------------------------------------------------------------------------
    def _bind(self, node: fx.Node, name: str) -> str:
        self.name_of[node] = name
        self.holder[name] = node
        return name

    def _is_live(self, node: fx.Node) -> bool:
        return self.chosen.last_use.get(node, -1) > self.index

    def _assign(self, node: fx.Node, wish: str | None = None) -> str:
        """A name for a new value: the wished one, unless what has it is still needed."""
        name = wish or self.wishes.get(node) or self._converted_name(node) or self.namer.hint(node)
        name = name + "_" if name in self.reserved else name
        if name in self.kept_none and name not in self.frame.formal_names:
            name = unused(name, self.kept_none | {n for n, held in self.holder.items() if self._is_live(held)})
        old = self.holder.get(name)
        if old is not None and old is not node and self._is_live(old):
            name = self._make_room(old, name)
        elif old is not None and old is not node and self.chosen.last_dtype_use.get(old, -1) > self.index:
            dtype = unused("input_dtype", self.holder)
            self._line(f"{dtype} = {name}.dtype", {dtype})
            self.attribute_names[old] = dtype
            self.holder[dtype] = old
        return self._bind(node, name)

    def _converted_name(self, node: fx.Node) -> str | None:
        """A conversion between layouts keeps the name of what it converts."""
        if not getattr(node.target, "__module__", "").startswith("shardc.runtime.collectives"):
            return None
        return self.name_of.get(self.flow.args(node)[0])

    def _make_room(self, old: fx.Node, name: str) -> str:
        """Where the author has `residual = hidden_states`, so has the emitted code; else the new one gets a number."""
        for alias in names_in(self.frame.call.module_class).aliases.get(name, ()):
            taken = self.holder.get(alias)
            if (taken is None or not self._is_live(taken)) and alias not in self.all_formals:
                self._line(f"{alias} = {name}", {alias})
                self._bind(old, alias)
                return name
        free = {n for n, node in self.holder.items() if self._is_live(node)} | set(self.all_formals)
        return unused(name, free)

    # -- expressions -------------------------------------------------------------------------------------------------
    def _value(self, node: fx.Node) -> Text:
        if node in self.folded:
            return self._unit(self.maker[node])
        parameter = self.frame.parameter(node)
        if parameter is not None:
            return Text("self." + index_path(parameter, self.containers), ATOM)
        return Text(self.name_of[node], ATOM)

    def _unit(self, unit: Unit) -> Text:
        if isinstance(unit, Op):
            previous, self.printing = getattr(self, "printing", None), unit.node
            text = self.printer.operation(unit.node, self.flow.args(unit.node), self.flow.kwargs(unit.node))
            self.printing = previous
            if value_of(unit.node) is None and len(unit.outputs) == 1:
                return Text(f"{text.at(ATOM)}[{self.flow.args(unit.outputs[0])[1]}]", ATOM)
            return text
        arguments = [self._argument(unit, name) for name in self.formal_lists[unit.path]]
        return Text(f"{self._child(unit.path)}({', '.join(arguments)})", ATOM)

    def _child(self, path: str) -> str:
        relative = path[len(self.frame.path) + 1 :] if self.frame.path else path
        return "self." + index_path(relative, self.containers)

    def _argument(self, call: ChildCall, formal: str) -> str:
        for name, actual in zip(call.frame.formal_names, call.actuals, strict=True):
            if name == formal:
                text = self._value(actual).text
                self.none_text.setdefault((call.path, formal), text)
                return text
        if call.flag is not None and call.flag[0] == formal:
            return call.flag[1]
        return self._absent(call.path, formal)

    def _absent(self, path: str, formal: str) -> str:
        """An argument that this variant does not have: the name that has it in other variants, which is None here."""
        if formal == "packed":
            return "packed"
        name = self.none_text.get((path, formal), "None")
        if not is_usable(name) or name in self.holder:
            return "None"
        if name not in self.body.absent:
            self.body.none_names.add(name)
        return name

    def _size(self, size: Size | ShardSize) -> Text:
        node = self.printing
        whole = self.chosen.source.get((node, size))
        if whole is not None and gives(whole, size):
            dim = value_of(whole).shape.index(size)
            return Text(f"{self._named(whole)}.shape[{dim}]", ATOM)
        if whole is not None:
            axis = gathered(size, whole)
            self.printer.axes.add(axis)
            dim = value_of(whole).shape.index(ShardSize(size, axis))
            return Text(f"{self._named(whole)}.shape[{dim}] * self.{axis}.size", PRODUCT)
        factors = [self._size(part) for part in parts_of(size)]
        assert isinstance(size, Size) and factors
        text = " * ".join([str(size.coefficient)] * (size.coefficient != 1) + [factor.text for factor in factors])
        binding = PRODUCT if " * " in text else ATOM
        if size.offset:
            return Text(f"{text} {'+' if size.offset > 0 else '-'} {abs(size.offset)}", SUM)
        return Text(text, binding)

    def _named(self, node: fx.Node) -> str:
        return self._value(node).at(ATOM)

    def _prefix(self, operand: fx.Node, sizes: tuple) -> tuple[str, int]:
        """`*x.shape[:2]` for leading sizes that are those of a named tensor; ("", 0) where two or more do not agree."""
        node = self.printing
        first = next((s for s in sizes if isinstance(s, (Size, ShardSize))), None)
        if first is None:
            return "", 0
        best, length = None, 1
        source = self.chosen.source
        for candidate in dict.fromkeys([operand, *(source[node, s] for s in sizes if (node, s) in source)]):
            if candidate in self.folded or candidate not in self.name_of:
                continue
            shape = value_of(candidate).shape
            agree = next(
                (i for i, (a, b) in enumerate(zip(shape, sizes, strict=False)) if a != b), min(len(shape), len(sizes))
            )
            if agree > length:
                best, length = candidate, agree
        if best is None:
            return "", 0
        shape = value_of(best).shape
        until = "" if length == len(shape) else "[:-1]" if length == len(shape) - 1 else f"[:{length}]"
        return f"*{self._named(best)}.shape{until}", length

    def _dtype(self) -> str:
        source = self.chosen.source[self.printing, "dtype"]
        return self.attribute_names.get(source) or f"{self._named(source)}.dtype"

    def _device(self) -> str:
        return f"{self._named(self.chosen.source[self.printing, 'device'])}.device"

    # -- statements ---------------------------------------------------------------------------------------------------
    def _line(self, text: str, defines: Iterable[str] = ()) -> None:
        self.body.lines.append(Line((text,), frozenset(defines)))

    def _write_statement(self, statement: Statement) -> fx.Node | None:
        """Appends the statement; returns a value to unfold if its line became too long."""
        root = statement.root
        if isinstance(root, Loop):
            self._write_loop(root)
            return None
        text = self._unit(root).text
        names = self._target_names(root)
        left = ", ".join(names) or "_"
        line = f"{left} = {text}"
        long = self._too_long(line, statement)
        if long is not None:
            return long
        self._guarded(line, names, statement)
        return None

    def _is_sharded_random(self, statement: Statement) -> bool:
        return any(draws_sharded(unit) for unit in statement.units)

    def _guarded(self, line: str, defines: Iterable[str], statement: Statement) -> None:
        if not self._is_sharded_random(statement):
            self._line(line, defines)
            return
        self.printer.axes.add("tp")
        self.printer.functions.add("sharded_rng")
        self.body.lines.append(Line(("with sharded_rng(self.tp):", "    " + line), frozenset(defines)))

    def _target_names(self, root: Unit) -> list[str]:
        if isinstance(root, Op) and value_of(root.node) is None and len(root.outputs) > 1:
            by_index = {self.flow.args(node)[1]: node for node in root.outputs}
            count = max(number_of_parts(self.flow, root.node), max(by_index) + 1)
            return [self._assign(by_index[i]) if i in by_index else "_" for i in range(count)]
        return [self._assign(node) if value_of(node) else "_" for node in root.outputs]

    def _write_return(self, finish: Finish, returned: Unit | None) -> fx.Node | None:
        if finish.is_custom:
            finish.write(self)
        elif returned is not None:
            line = f"return {self._unit(returned).text}"
            if (long := self._too_long(line, self.statements[-1])) is not None:
                return long
            self._line(line)
        else:
            self._line("return " + ", ".join(self._value(node).text for node in self.frame.results))
        return None

    def _too_long(self, line: str, statement: Statement) -> fx.Node | None:
        """The longest folded part of a line that is too long."""
        folded = [unit for unit in statement.units if unit is not statement.root]
        if not folded or (len(line) <= _WIDTH and line not in self.too_wide):
            return None
        return max(folded, key=lambda unit: len(self._unit(unit).text)).outputs[0]

    # -- loops ----------------------------------------------------------------------------------------------------
    def _write_loop(self, loop: Loop) -> None:
        relative = loop.container[len(self.frame.path) + 1 :] if self.frame.path else loop.container
        caller = loop.calls[0].frame.call.parent or self.frame.call
        own = loop.container[len(caller.path) + 1 :] if caller.path else loop.container
        variable = unused(
            loop_variable(caller.module_class, own), {n for n, x in self.holder.items() if self._is_live(x)}
        )
        carried = sorted(set(loop.carried.values()))
        starts = {}
        for index in carried:
            wish = self.namer.hint(loop.outputs[index])
            start = loop.initial(index)
            starts[index] = start
            if self.name_of[start] != wish:
                target = self._assign(loop.outputs[index], wish)
                self._line(f"{target} = {self.name_of[start]}", {target})
            else:
                target = wish
                if self._is_live(start) and start not in loop.outputs:
                    target = self._make_room(start, wish)
                    if target != wish:
                        self._line(f"{target} = {wish}", {target})
                self._bind(loop.outputs[index], target)
        results = [self.name_of[n] if i in carried else self._assign(n) for i, n in enumerate(loop.outputs)]
        calls: dict[tuple[str, ...], list[int]] = {}
        for offset, call in enumerate(loop.calls):
            calls.setdefault(tuple(self._loop_arguments(loop, call)), []).append(loop.first + offset)
        indices = [loop.first + k for k in range(len(loop.calls))]
        members = elements(relative, self.containers[relative], indices)
        target = ", ".join(results)
        lines: list[str]
        if len(calls) == 1:
            ((arguments, _),) = calls.items()
            lines = [f"for {variable} in {members}:", f"    {target} = {variable}({', '.join(arguments)})"]
        else:
            start = f", {loop.first}" if loop.first else ""
            lines = [f"for i, {variable} in enumerate({members}{start}):"]
            lines += differing_calls(calls, indices, target, variable, _WIDTH - 8)
        defines = {*results, variable, *(["i"] if len(calls) > 1 else [])}
        self.body.lines.append(Line(tuple(lines), frozenset(defines)))

    def _loop_arguments(self, loop: Loop, call: ChildCall) -> list[str]:
        found = []
        for formal in self.formal_lists[call.path]:
            if formal in loop.carried and formal in call.frame.formal_names:
                found.append(self.name_of[loop.outputs[loop.carried[formal]]])
            else:
                found.append(self._argument(call, formal))
        return found


class Finish:
    """How a forward ends; the default returns the frame's results."""

    is_custom = False

    def extra_uses(self, writer: BodyWriter) -> dict[fx.Node, int]:
        """Values that are read at other statements than the operations say, with the index of the statement."""
        return {}

    def before(self, writer: BodyWriter, index: int) -> None:
        """Called before each statement is written."""

    def write(self, writer: BodyWriter) -> None:
        """Writes the last lines."""


def number_of_parts(flow: object, node: fx.Node) -> int:
    """How many tensors an operation such as split returns; 0 where it is not known."""
    name = op_name(node.target)
    args = node.args
    operand = value_of(args[0]) if isinstance(args[0], fx.Node) else None
    if name == "chunk":
        return args[1]
    if name == "split" and len(args) > 1:
        if isinstance(args[1], (tuple, list)):
            return len(args[1])
        dim = node.kwargs.get("dim", args[2] if len(args) > 2 else 0)
        if operand and isinstance(operand.shape[dim], int):
            return -(-operand.shape[dim] // args[1])
    return 0
