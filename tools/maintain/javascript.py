"""Translate functions and classes of the planner to JavaScript, for its form on the site.

The translator knows only the syntax that these functions use. It replaces operations that
JavaScript lacks by calls of the functions in site/planner/python.js.
"""

import ast
import json

OPERATORS = {
    ast.Add: "add({}, {})",
    ast.Sub: "subtract({}, {})",
    ast.Mult: "({} * {})",
    ast.Div: "({} / {})",
    ast.FloorDiv: "Math.floor({} / {})",
    ast.Mod: "modulo({}, {})",
    ast.Pow: "({} ** {})",
    ast.LShift: "({} * 2 ** {})",
    ast.BitOr: "union({}, {})",
}
COMPARISONS = {
    ast.Eq: "({} === {})",
    ast.NotEq: "({} !== {})",
    ast.Lt: "({} < {})",
    ast.Gt: "({} > {})",
    ast.GtE: "({} >= {})",
    ast.IsNot: "({} != {})",
    ast.In: "contains({1}, {0})",
    ast.NotIn: "!contains({1}, {0})",
}
# python.js defines these methods of Python's built-in types as functions.
METHODS = "add append bit_length get items join pop remove replace split total update values"
# The planner passes these parameters of functions in python.js by name.
PARAMETERS = {"max": ["items", "key", "default"], "sorted": ["items", "key", "reverse"]}
PARAMETERS |= {"min": PARAMETERS["max"], "zip": []}


def translate(text, names):
    """Return the JavaScript of the functions, classes and constants with these names."""
    return Translator(text).module(names)


def is_property(function):
    """Return whether the function has a decorator; the only decorator is @property."""
    return bool(function.decorator_list)


class Translator:
    """Translate a module; each method returns the JavaScript of one kind of node."""

    def __init__(self, text):
        self.tree, self.parameters = ast.parse(text), dict(PARAMETERS)
        # These are the methods of the class that is being translated.
        self.methods = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                names = [argument.arg for argument in node.args.args]
                self.parameters[node.name] = [name for name in names if name != "self"]

    def module(self, names):
        parts = []
        for node in self.tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            target = node.target if isinstance(node, ast.AugAssign) else target
            name = getattr(target or node, "id", getattr(node, "name", None))
            if name and name in names:
                declared = "var " if isinstance(node, ast.Assign) else ""
                parts.append(declared + self.statement(node))
        return "\n".join(parts)

    # ---- statements --------------------------------------------------------------------------
    def block(self, nodes):
        return "{\n" + "\n".join(map(self.statement, nodes)) + "\n}"

    def statement(self, node):
        return getattr(self, f"statement_{type(node).__name__}")(node)

    def function(self, node, opening):
        """Return a function that first declares its variables, because Python declares none."""
        args, defaults = node.args.args, node.args.defaults
        names = [argument.arg for argument in args if argument.arg != "self"]
        is_method = len(names) < len(args)
        values = [f" = {self.expression(value)}" for value in defaults]
        values = [""] * (len(names) - len(values)) + values
        listed = [name + value for name, value in zip(names, values, strict=True)]
        if node.args.kwarg:
            listed.append(f"{node.args.kwarg.arg} = {{}}")
        stored = (child for child in ast.walk(node) if isinstance(child, ast.Name))
        stored = {name.id for name in stored if isinstance(name.ctx, ast.Store)}
        local = sorted(stored - set(names))
        local += ["self = this"] * is_method
        declared = f"let {', '.join(local)};\n" if local else ""
        body = "\n".join(map(self.statement, node.body))
        return f"{opening}({', '.join(listed)}) {{\n{declared}{body}\n}}"

    def statement_FunctionDef(self, node):
        return self.function(node, f"function {node.name}")

    def statement_ClassDef(self, node):
        methods, attributes = [], []
        functions = [part for part in node.body if isinstance(part, ast.FunctionDef)]
        self.methods = {part.name for part in functions if not is_property(part)}
        for part in node.body:
            if isinstance(part, ast.FunctionDef):
                methods.append(self.function(part, f"{'get ' * is_property(part)}{part.name}"))
            elif isinstance(part, ast.Assign):
                attributes += self.class_attributes(node.name, part)
        base = self.expression(node.bases[0]) if node.bases else "PythonObject"
        start = f"var {node.name} = callable(class extends {base} {{\n"
        return start + "\n".join(methods) + "\n});\n" + "\n".join(attributes)

    def class_attributes(self, name, node):
        prototype, value = f"{name}.prototype", node.value
        is_method = isinstance(value, ast.Name) and value.id in self.methods
        text = f"{prototype}.{value.id}" if is_method else self.expression(value)
        for target in node.targets:
            yield f"{prototype}.{target.id} = {text};"

    def statement_Return(self, node):
        return f"return {self.expression(node.value) if node.value else ''};"

    def statement_Expr(self, node):
        is_docstring = isinstance(node.value, ast.Constant)
        return "" if is_docstring else f"{self.expression(node.value)};"

    def statement_Continue(self, _):
        return "continue;"

    def statement_Assign(self, node):
        value = self.expression(node.value)
        for target in reversed(node.targets):
            value = self.assign(target, value)
        return f"{value};"

    def assign(self, target, value):
        if isinstance(target, ast.Subscript):
            where = self.expression(target.value), self.expression(target.slice)
            return f"put({', '.join(where)}, {value})"
        return f"{self.expression(target)} = {value}"

    def statement_AugAssign(self, node):
        old, value = self.expression(node.target), self.expression(node.value)
        new = OPERATORS[type(node.op)].format(old, value)
        return f"{self.assign(node.target, new)};"

    def statement_If(self, node):
        text = f"if ({self.condition(node.test)}) {self.block(node.body)}"
        return text + (f" else {self.block(node.orelse)}" if node.orelse else "")

    def statement_For(self, node):
        target, source = self.expression(node.target), self.expression(node.iter)
        return f"for ({target} of iterate({source})) {self.block(node.body)}"

    def statement_With(self, node):
        # Translate contextlib.suppress(), because no other context manager occurs.
        error = self.expression(node.items[0].context_expr.args[0])
        body = self.block(node.body)
        return f"try {body} catch (error) {{ if (!(error instanceof {error})) throw error; }}"

    # ---- expressions -------------------------------------------------------------------------
    def expression(self, node):
        return getattr(self, f"expression_{type(node).__name__}")(node)

    def expressions(self, nodes):
        return ", ".join(map(self.expression, nodes))

    def condition(self, node):
        text = self.expression(node)
        return text if isinstance(node, ast.Compare) else f"truth({text})"

    def expression_Constant(self, node):
        return json.dumps(node.value, ensure_ascii=False)

    def expression_Name(self, node):
        return node.id

    def expression_Attribute(self, node):
        value = self.expression(node.value)
        if node.attr == "__getitem__":
            return f"((key) => at({value}, key))"
        is_bound = value == "self" and node.attr in self.methods
        return f"{value}.{node.attr}" + (f".bind({value})" if is_bound else "")

    def expression_Subscript(self, node):
        value = self.expression(node.value)
        if isinstance(node.slice, ast.Slice):
            return f"{value}.slice({self.expression(node.slice.lower)})"
        return f"at({value}, {self.expression(node.slice)})"

    def expression_Starred(self, node):
        value = self.expression(node.value)
        return f"...{value}" if isinstance(node.ctx, ast.Store) else f"...iterate({value})"

    def expression_List(self, node):
        return f"[{self.expressions(node.elts)}]"

    expression_Tuple = expression_List

    def expression_Set(self, node):
        return f"new Set([{self.expressions(node.elts)}])"

    def expression_Dict(self, node):
        pairs = zip(node.keys, node.values, strict=True)
        pairs = ", ".join(f"[{self.expressions(pair)}]" for pair in pairs)
        return f"dict([{pairs}])"

    def expression_BinOp(self, node):
        values = self.expression(node.left), self.expression(node.right)
        return OPERATORS[type(node.op)].format(*values)

    def expression_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            return f"!{self.condition(node.operand)}"
        return f"(-{self.expression(node.operand)})"

    def expression_BoolOp(self, node):
        name, text = "or" if isinstance(node.op, ast.Or) else "and", ""
        for value in reversed(node.values):
            value_text = self.expression(value)
            text = f"{name}({value_text}, () => {text})" if text else value_text
        return text

    def expression_Compare(self, node):
        pairs = zip([node.left, *node.comparators], node.ops, node.comparators, strict=False)
        texts = [
            COMPARISONS[type(operator)].format(self.expression(left), self.expression(right))
            for left, operator, right in pairs
        ]
        return f"({' && '.join(texts)})"

    def expression_IfExp(self, node):
        values = self.expression(node.body), self.expression(node.orelse)
        return f"({self.condition(node.test)} ? {values[0]} : {values[1]})"

    def expression_Lambda(self, node):
        names = ", ".join(argument.arg for argument in node.args.args)
        return f"(({names}) => {self.expression(node.body)})"

    def expression_JoinedStr(self, node):
        texts = []
        for part in node.values:
            if isinstance(part, ast.Constant):
                texts.append(self.expression(part))
            else:
                layout = self.expression(part.format_spec) if part.format_spec else '""'
                texts.append(f"format({self.expression(part.value)}, {layout})")
        return f"[{', '.join(texts)}].join('')"

    def comprehension(self, node, result):
        """Return the list of a comprehension's results."""
        for number, part in enumerate(reversed(node.generators)):
            target, values = self.expression(part.target), self.expression(part.iter)
            values = f"[...iterate({values})]"
            for test in part.ifs:
                values += f".filter(({target}) => {self.condition(test)})"
            result = f"{values}.{'flatMap' if number else 'map'}(({target}) => {result})"
        return result

    def expression_ListComp(self, node):
        return self.comprehension(node, self.expression(node.elt))

    expression_GeneratorExp = expression_ListComp

    def expression_DictComp(self, node):
        pair = f"[{self.expressions([node.key, node.value])}]"
        return f"dict({self.comprehension(node, pair)})"

    def expression_Call(self, node):
        function, args = node.func, [self.expression(arg) for arg in node.args]
        name = getattr(function, "attr", getattr(function, "id", ""))
        if name in ("max", "min") and len(args) > 1:
            args = [f"[{', '.join(args)}]"]
        named = {word.arg: self.expression(word.value) for word in node.keywords if word.arg}
        known = self.parameters.get(name, [])
        # Put named arguments into their positions, because JavaScript passes arguments by position.
        for parameter in known[len(args) :] if named else []:
            args.append(named.pop(parameter, "undefined"))
        others = [f"{json.dumps(key)}: {value}" for key, value in named.items() if key != "strict"]
        others += [f"...{self.expression(word.value)}" for word in node.keywords if not word.arg]
        if others:
            args.append(f"{{{', '.join(others)}}}")
        if isinstance(function, ast.Name):
            return f"{name}({', '.join(args)})"
        owner = getattr(function.value, "func", None)
        if getattr(owner, "id", "") == "super":
            return f"super.{name}({', '.join(args)})"
        value = self.expression(function.value)
        if name in METHODS.split():
            return f"methods.{name}({', '.join([value, *args])})"
        return f"{value}.{name}({', '.join(args)})"
