"""Which modules a forkserver may import before it forks, and whether it is fit to fork afterwards.

Of a script only the text is looked at, none of it runs: the torch modules that it imports by name, wherever in the file, are
the ones imported early, and the wrapper with them. Variables that the script sets first to plain words
(`os.environ["OMP_NUM_THREADS"] = "1"`, on a line of its own) are set for that import. They are left to the workers when the text
does something else first that can change what the import does: computes a variable that torch reads at import, or changes the
front of sys.path.

A process may be forked when nothing lives in it that a fork leaves behind or shares: no other thread, no open GPU, no tracer.
OpenBLAS's idle threads are the exception, since it ends and restarts its pool around fork by handlers of its own
(pthread_atfork).
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from hyperpodrun.agent.wire.launch import Program

if TYPE_CHECKING:
    import ast
    import types

_READ_AT_IMPORT = (
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "BLIS_",
    "NUMEXPR_",
    "VECLIB_",
    "TORCH",
    "PYTORCH",
    "ATEN_",
    "C10_",
    "LD_",
    "PYTHON",
)
"""Variables (by prefix) that torch or the libraries beneath it read while they are imported."""


class Setting(msgspec.Struct, frozen=True):
    """A variable that a script sets before it imports torch; `default`: only where it is not set."""

    name: str
    value: str
    default: bool = False


class Named(msgspec.Struct, frozen=True):
    """The torch imports of a program as (module, names), why they are not to be made early ("" if they may be), and what it sets
    before."""

    imports: list[tuple[str, list[str]]] = []
    obstacle: str = ""
    settings: list[Setting] = []


def source_of(program: Program) -> str | None:
    """The file whose text is the program; None when it cannot be told without running something."""
    if program.run_as == "program":
        return None
    if program.run_as == "module":
        return _file_of_module(program.target)
    if os.path.isdir(program.target):
        return os.path.join(program.target, "__main__.py")
    return program.target


def _file_of_module(name: str) -> str | None:
    """Find a module's file without importing the packages around it."""
    where: list[str] | None = None
    so_far = ""
    for part in [*name.split("."), "__main__"]:
        if so_far and where is None and part == "__main__":
            break
        so_far = f"{so_far}.{part}" if so_far else part
        for finder in sys.meta_path:
            spec = finder.find_spec(so_far, where)
            if spec is not None:
                break
        else:
            return None
        where = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
        origin = spec.origin
    return origin if origin and origin.endswith(".py") else None


def named_in(path: str | None) -> Named:
    """What a source file says. One that cannot be read or parsed says nothing: the workers will tell."""
    try:
        with open(path or "", "rb") as file:
            text = file.read()
    except OSError:
        return Named()
    if b"torch" not in text:
        return Named()
    import ast

    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return Named()
    return torch_imports(tree)


def torch_imports(tree: "ast.Module") -> Named:
    """See `named_in`; `tree` is the parsed source."""
    import ast

    found: list[tuple[str, list[str]]] = []
    settings: list[Setting] = []
    obstacle, first_line = "", 0
    for statement in tree.body:
        if not _has_torch(found) and (setting := _setting(statement)) is not None:
            settings.append(setting)
            continue
        for node in _in_order(statement):
            if isinstance(node, ast.Import):
                found += [(alias.name, []) for alias in node.names if _is_early(alias.name)]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_early(node.module or ""):
                found.append((node.module or "", [alias.name for alias in node.names if alias.name != "*"]))
            elif not obstacle and not _has_torch(found):
                obstacle = _obstacle(node)
                first_line = getattr(node, "lineno", 0)
    if not _has_torch(found):
        return Named([], "", settings)  # the wrapper alone is not worth it
    return Named(found, f"line {first_line} {obstacle} before torch is imported" if obstacle else "", settings)


def _has_torch(found: list[tuple[str, list[str]]]) -> bool:
    return any(_is_torch(module) for module, _ in found)


def _is_early(module: str) -> bool:
    return _is_torch(module) or _is_wrapper(module)


def _setting(statement: "ast.stmt") -> Setting | None:
    """The variable that this statement of the script itself sets to a plain word."""
    import ast

    match statement:
        case ast.Assign(targets=[ast.Subscript(value=where, slice=ast.Constant(str(name)))], value=ast.Constant(str(value))):
            return Setting(name, value) if _ends_in(where, "environ") else None
        case ast.Expr(ast.Call(ast.Attribute(where, "setdefault"), [ast.Constant(str(name)), ast.Constant(str(value))], [])) if (
            _ends_in(where, "environ")
        ):
            return Setting(name, value, default=True)
    return None


@contextmanager
def environment(settings: Sequence[Setting]) -> Iterator[None]:
    """With these variables set, as they are where the script imports torch; afterwards as before."""
    before = dict(os.environ)
    for setting in settings:
        if not (setting.default and setting.name in os.environ):
            os.environ[setting.name] = setting.value
    try:
        yield
    finally:
        for setting in settings:
            if setting.name in before:
                os.environ[setting.name] = before[setting.name]
            else:
                os.environ.pop(setting.name, None)


def _in_order(node: "ast.AST") -> Iterator["ast.AST"]:
    """All nodes in the order of the text."""
    import ast

    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def _is_torch(name: str) -> bool:
    return name == "torch" or name.startswith("torch.")


def _is_wrapper(name: str) -> bool:
    """A process that takes a dead one's place is waited for: the wrapper's import would be a quarter of its start."""
    return name == "hyperpodrun.inprocess" or name.startswith("hyperpodrun.inprocess.")


def _obstacle(node: "ast.AST") -> str:
    import ast

    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        if _ends_in(node.value, "environ") and _matters(node.slice):
            return "changes os.environ"
        if _ends_in(node.value, "path") and isinstance(node.value, ast.Attribute) and _ends_in(node.value.value, "sys"):
            return "changes sys.path"
    if (
        isinstance(node, ast.Attribute)
        and node.attr == "path"
        and _ends_in(node.value, "sys")
        and not isinstance(node.ctx, ast.Load)
    ):
        return "changes sys.path"
    if isinstance(node, ast.Call):
        called = node.func
        if _ends_in(called, "putenv") or _ends_in(called, "unsetenv"):
            return "changes os.environ"
        if isinstance(called, ast.Attribute):
            if (
                _ends_in(called.value, "environ")
                and called.attr in ("setdefault", "pop")
                and node.args
                and _matters(node.args[0])
            ):
                return "changes os.environ"
            if _ends_in(called.value, "environ") and called.attr in ("update", "clear"):
                return "changes os.environ"
            if _ends_in(called.value, "path") and called.attr in ("insert", "remove", "clear", "pop", "reverse", "sort"):
                return "changes sys.path"
    return ""


def _ends_in(node: "ast.AST", name: str) -> bool:
    import ast

    return (isinstance(node, ast.Attribute) and node.attr == name) or (isinstance(node, ast.Name) and node.id == name)


def _matters(key: "ast.AST") -> bool:
    """Could this name a variable that torch reads at import? Computed names could be any."""
    import ast

    return not (isinstance(key, ast.Constant) and isinstance(key.value, str)) or key.value.startswith(_READ_AT_IMPORT)


def load(imports: list[tuple[str, list[str]]]) -> None:
    """Import them. A module that does not exist is left for the script to miss; any other error is raised."""
    for module, names in imports:
        try:
            __import__(module, None, None, names)
        except ModuleNotFoundError as error:
            # Nothing ran if it is the very module that is missing; else something broke half-way.
            if error.name is None or not (module + ".").startswith(error.name + "."):
                raise


def shadowed(first_on_path: str, ours: frozenset[str]) -> str:
    """A module of the user's, next to the script, whose name is that of one we have already imported from elsewhere; or "".

    Modules built into the interpreter come before the import path: nobody's file can take their place.
    """
    try:
        names = os.listdir(first_on_path or ".")
    except OSError:
        return ""
    for name in sorted(names):
        stem = name.removesuffix(".py")
        if stem not in ours or stem in sys.builtin_module_names:
            continue
        path = os.path.join(first_on_path, name)
        file = path if stem != name else os.path.join(path, "__init__.py")
        if os.path.exists(file) and not _is_file_of(sys.modules.get(stem), file):
            return path
    return ""


def _is_file_of(module: "types.ModuleType | None", path: str) -> bool:
    """Whether the module that we hold was loaded from this very file: then the script would get the same one."""
    origin = getattr(module, "__file__", None)
    return origin is not None and os.path.exists(origin) and os.path.samefile(origin, path)


def unfit_because() -> str:
    """Why this process must not be forked; "" when it may be."""
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return "a tracer or profiler is active in new interpreters"
    threading = sys.modules.get("threading")
    if threading is not None and threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        return f"a preloaded module has started threads ({names})"
    extra = len(os.listdir("/proc/self/task")) - 1 - _explained_threads()
    if extra > 0:
        return f"a preloaded module has started {extra} native thread(s)"
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(("/dev/nvidia", "/dev/kfd")):
            return f"a preloaded module has opened the GPU ({target})"
    return ""


def _explained_threads() -> int:
    with open("/proc/self/maps", "rb") as file:
        libraries = {line.split(None, 5)[5].strip() for line in file if b"openblas" in line}
    return len(libraries) * ((os.cpu_count() or 1) - 1)
