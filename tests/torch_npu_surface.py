"""Write down what torch_npu offers of what this repository calls, from its wheels' own text.

    python tests/torch_npu_surface.py WHEEL [WHEEL ...] [--out FILE]

The wheels are read, never imported. tests/torch_npu_surface.json is the result for three of them.
For each name it holds the parameters that a call may use with every wheel ('*': what follows goes
by keyword only) and the file where they stand, or each wheel's file where these differ. `only_in`
is what one wheel or another has besides, `missing_in` the wheels without the name. `files` holds
the columns of the profiler's tables. Python files are parsed; npu_fusion_attention is an operator,
and its schema stands in the list from which the wheel's C++ was generated.
"""

import argparse
import ast
import json
import re
import zipfile
from pathlib import Path

# torch_npu registers its module torch_npu.npu as torch.npu. manual_seed_all: for torch.manual_seed.
NPU = """
is_available device_count set_device current_device synchronize get_device_name
get_device_properties mem_get_info empty_cache memory_allocated max_memory_allocated
reset_peak_memory_stats memory_stats manual_seed_all
Event Event.record Event.elapsed_time Event.synchronize Event.query
"""
PROFILER = """
profile profile.start profile.step profile.stop tensorboard_trace_handler schedule
ProfilerActivity.CPU ProfilerActivity.NPU
"""
NAMES = [
    "torch_npu.__version__",
    "torch_npu.npu_fusion_attention",
    *(f"torch.npu.{name}" for name in NPU.split()),
    *(f"torch_npu.profiler.{name}" for name in PROFILER.split()),
]
VIEWS = "torch_npu.profiler.analysis.prof_view"
TABLES = {
    "operator_details.csv": f"{VIEWS}._operator_view_parser.OperatorViewParser.OPERATOR_HEADERS",
    "operator_memory.csv": f"{VIEWS}._memory_view_parser.MemoryViewParser.HEADERS_OPERATOR",
}
SCHEMAS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"


class Wheel:
    """One wheel's source text, and where in it a dotted name is defined."""

    def __init__(self, path):
        self.archive = zipfile.ZipFile(path)
        self.files = set(self.archive.namelist())
        self.trees = {}
        self.version = self.find("torch_npu.__version__")[0].value.value

    def read(self, file):
        """Return a file's syntax tree."""
        if file not in self.trees:
            self.trees[file] = ast.parse(self.archive.read(file))
        return self.trees[file]

    def file_of(self, module):
        """Return the file of a module, or None where the wheel has no such module."""
        base = module.replace(".", "/")
        return next((f for f in (f"{base}.py", f"{base}/__init__.py") if f in self.files), None)

    def find(self, name):
        """Return (syntax node, file) of the definition of `name`, or None."""
        name = re.sub(r"^torch\.npu\.", "torch_npu.npu.", name)
        module, members = name, []
        while not self.file_of(module):
            module, _, last = module.rpartition(".")
            members.insert(0, last)
        found = self.in_module(module, members[0], set())
        for member in members[1:]:
            found = found and self.in_class(*found, member)
        return found

    def in_module(self, module, name, seen):
        """Look for `name` in a module and in what it imports. seen: where this search has been."""
        file = self.file_of(module)
        if file is None or (module, name) in seen:
            return None
        seen.add((module, name))
        for node in reversed(self.read(file).body):  # a name's last binding is the one that holds
            if name in _bound(node):
                return node, file
            if isinstance(node, ast.ImportFrom):
                source = _source(node, module, file.endswith("__init__.py"))
                for alias in node.names:
                    star = alias.name == "*" and not name.startswith("_")
                    if star or name == (alias.asname or alias.name):
                        found = self.in_module(source, name if star else alias.name, seen)
                        if found:
                            return found
        return None

    def in_class(self, node, file, name):
        """Look for a method or attribute in a class and in its bases of the same file."""
        for member in node.body:
            if name in _bound(member):
                return member, file
        bases = {ast.unparse(base) for base in node.bases}
        above = (n for n in self.read(file).body if isinstance(n, ast.ClassDef) and n.name in bases)
        return next(filter(None, (self.in_class(base, file, name) for base in above)), None)

    def parameters(self, name):
        """Return ([positional], [keyword-only], file), each 'name' or 'name=default', or None."""
        if name.endswith("npu_fusion_attention"):
            return self.operator(name.split(".")[-1])
        if "ProfilerActivity" in name:
            return self.used(name.split(".", 2)[-1])
        found = self.find(name)
        if found and isinstance(found[0], ast.ClassDef):
            found = self.in_class(*found, "__init__") or self.in_class(*found, "__new__")
        if found is None:
            return None
        node, file = found
        if isinstance(node, ast.Assign):
            return [], [], file
        names = [argument.arg for argument in node.args.posonlyargs + node.args.args]
        defaults = [None] * (len(names) - len(node.args.defaults)) + node.args.defaults
        positional = [_shown(n, d) for n, d in zip(names, defaults) if n not in ("self", "cls")]
        keywords = [_shown(a.arg, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults)]
        return positional, keywords, file

    def operator(self, name):
        """Return the parameters of an operator, from its schema."""
        schemas = self.archive.read(SCHEMAS).decode()
        found = re.search(rf"^\W*func: {name}\((.*)\) ->", schemas, re.MULTILINE)
        if found is None:
            return None
        before, _, after = found.group(1).partition(", *, ")
        groups = []
        for part in (before, after):
            pairs = (p.split(" ")[-1].partition("=")[::2] for p in part.split(", ") if p)
            groups.append([_shown(n, d and ast.parse(d, mode="eval").body) for n, d in pairs])
        return (*groups, SCHEMAS)

    def used(self, member):
        """Return the file of the wheel's profiler that uses `member`, which C++ defines."""
        for file in sorted(f for f in self.files if re.match(r"torch_npu/profiler/\w+\.py$", f)):
            for node in ast.walk(self.read(file)):
                if isinstance(node, ast.Attribute) and ast.unparse(node) == member:
                    return [], [], file
        return None


def _bound(node):
    """The names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _source(node, module, is_package):
    """The module from which an import statement of `module` takes its names."""
    if not node.level:
        return node.module
    parents = module.split(".")
    package = parents[: len(parents) - node.level + is_package]
    return ".".join([*package, node.module] if node.module else package)


def _shown(name, default):
    return f"{name}={ast.literal_eval(default)!r}" if default else name


def surface(wheels):
    """Return the manifest that the head of this file describes."""
    names = {}
    for name in NAMES:
        found = {wheel.version: wheel.parameters(name) for wheel in wheels}
        missing = [version for version, f in found.items() if f is None]
        found = {version: f for version, f in found.items() if f}
        safe = _common(list(found.values()))
        beyond = {v: [p for p in f[0] + f[1] if p not in safe] for v, f in found.items()}
        sources = {version: file for version, (*_, file) in found.items()}
        one_file = len(set(sources.values())) == 1
        names[name] = {
            "missing_in": missing,
            "only_in": {version: more for version, more in beyond.items() if more},
            "parameters": safe,
            "read_from": sources.popitem()[1] if one_file else sources,
        }
    files = {}
    for table, name in TABLES.items():
        first, *others = (ast.literal_eval(wheel.find(name)[0].value) for wheel in wheels)
        files[table] = [column for column in first if all(column in other for other in others)]
    return {"files": files, "names": names, "wheels": [wheel.version for wheel in wheels]}


def _common(found):
    """What every call may use: positional as far as all agree on the order, the rest by keyword."""
    positional = []
    for parameters in zip(*(f[0] for f in found)):
        if len(set(parameters)) > 1:
            break
        positional.append(parameters[0])
    first, *others = [f[0] + f[1] for f in found] or [[]]
    keywords = [p for p in first if p not in positional and all(p in other for other in others)]
    return positional + ["*"] * bool(keywords) + keywords


def as_text(manifest):
    """Return the manifest as JSON, a name's every field on a line of its own."""

    def block(entries, indent):
        lines = (f"{indent}  {json.dumps(key)}: {value}" for key, value in sorted(entries.items()))
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"

    def line(entries):
        held = {k: v for k, v in entries.items() if v or k == "parameters"}
        return {key: json.dumps(value) for key, value in held.items()}

    names = {name: block(line(entry), "    ") for name, entry in manifest["names"].items()}
    parts = {"files": block(line(manifest["files"]), "  "), "names": block(names, "  ")}
    return block({**parts, "wheels": json.dumps(manifest["wheels"])}, "") + "\n"


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("wheels", nargs="+", metavar="WHEEL")
    options.add_argument("--out", metavar="FILE", type=Path, help="else it is printed")
    args = options.parse_args()
    found = as_text(surface([Wheel(path) for path in args.wheels]))
    if args.out:
        args.out.write_text(found)
    else:
        print(found, end="")


if __name__ == "__main__":
    main()
