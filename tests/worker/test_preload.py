"""What a script's text says about torch."""

import ast
import os
import sys
from pathlib import Path

import pytest

from hyperpodrun.agent.wire.launch import Program
from hyperpodrun.worker import preload


def found(text):
    named = preload.torch_imports(ast.parse(text))
    return named.imports, named.obstacle


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("import os", []),
        ("import torch", [("torch", [])]),
        ("import torch as t, os, torch.nn.functional as F", [("torch", []), ("torch.nn.functional", [])]),
        ("from torch import nn, distributed as dist", [("torch", ["nn", "distributed"])]),
        ("from torch.nn import *", [("torch.nn", [])]),
        ("def main():\n    import torch", [("torch", [])]),
        ("try:\n    import torch\nexcept ImportError: pass", [("torch", [])]),
        (
            "import torch\nfrom hyperpodrun.inprocess.wrap import HPWrapper",
            [("torch", []), ("hyperpodrun.inprocess.wrap", ["HPWrapper"])],
        ),
        ("from hyperpodrun.inprocess.wrap import HPWrapper", []),
        ("import torchvision, torch_xla\nfrom .torch import x\nfrom mine.torch import y\n'import torch'", []),
    ],
)
def test_imports_named_in_a_script(text, wanted):
    assert found(text) == (wanted, "")


@pytest.mark.parametrize(
    "text, obstacle",
    [
        ("import os; os.environ['OMP_NUM_THREADS'] = str(4)", "os.environ"),
        ("from os import environ\nif True: environ['TORCH_LOGS'] = 'x'", "os.environ"),
        ("import os; os.environ.setdefault('MKL_NUM_THREADS', one)", "os.environ"),
        ("import os; os.environ['OMP_NUM_THREADS'] += '4'", "os.environ"),
        ("import os; os.environ['OMP_NUM_THREADS'] = os.environ['MKL_NUM_THREADS'] = '4'", "os.environ"),
        ("import os; os.environ['OMP_NUM_THREADS'] = '4'", ""),
        ("import os; os.environ[name] = '4'", "os.environ"),
        ("import os; os.environ.update(a)", "os.environ"),
        ("import os; del os.environ['PYTORCH_JIT']", "os.environ"),
        ("import os; os.putenv('A', 'b')", "os.environ"),
        ("import sys; sys.path.insert(0, 'x')", "sys.path"),
        ("import sys; sys.path[0:0] = ['x']", "sys.path"),
        ("import sys; sys.path = ['x'] + sys.path", "sys.path"),
        ("import os; os.environ['WANDB_MODE'] = 'off'; os.environ['CUDA_VISIBLE_DEVICES'] = '0'", ""),
        ("import os; x = os.environ['OMP_NUM_THREADS']; y = os.environ.get('OMP_NUM_THREADS')", ""),
        ("import sys; sys.path.append('x')", ""),
        ("import os; os.path.join('a')", ""),
    ],
)
def test_what_must_come_before_the_import(text, obstacle):
    imports, reason = found(f"{text}\nimport torch")
    assert imports == [("torch", [])]
    assert (obstacle in reason and "line" in reason) if obstacle else reason == ""
    assert found(f"import torch\n{text}")[1] == ""
    assert found(text) == ([], "")
    assert bool(obstacle) == bool(found(f"from hyperpodrun.inprocess import wrap\n{text}\nimport torch")[1])


def test_plain_words_that_a_script_sets_are_set_for_the_import(monkeypatch):
    text = "import os\nos.environ['OMP_NUM_THREADS'] = '3'\nfrom os import environ\nenviron.setdefault('MKL_CBWR', 'A')\n"
    text += "environ.setdefault('OMP_A', 'new')\nimport torch\nos.environ['OMP_LATE'] = 'x'"
    settings = preload.torch_imports(ast.parse(text)).settings
    assert [(s.name, s.value, s.default) for s in settings] == [
        ("OMP_NUM_THREADS", "3", False), ("MKL_CBWR", "A", True), ("OMP_A", "new", True)]  # fmt: skip
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_A", "old")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    before = dict(os.environ)
    with preload.environment(settings):
        assert (os.environ["OMP_NUM_THREADS"], os.environ["MKL_CBWR"], os.environ["OMP_A"]) == ("3", "A", "old")
    assert dict(os.environ) == before


def test_the_file_of_a_module_is_found_without_importing(tmp_path, monkeypatch):
    package = tmp_path / "outer" / "inner"
    package.mkdir(parents=True)
    for folder in (tmp_path / "outer", package):
        (folder / "__init__.py").write_text("raise SystemExit('imported')")
        (folder / "__main__.py").write_text("")
        (folder / "leaf.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, path in {
        "outer": "outer/__main__.py",
        "outer.inner": "outer/inner/__main__.py",
        "outer.inner.leaf": "outer/inner/leaf.py",
    }.items():
        assert preload.source_of(Program("module", name, ())) == str(tmp_path / path)
    assert preload.source_of(Program("module", "outer.missing.leaf", ())) is None
    assert preload.source_of(Program("module", "outer.leaf.deeper", ())) is None
    assert "outer" not in sys.modules


def test_unreadable_or_broken_sources_name_nothing(tmp_path):
    (tmp_path / "broken.py").write_text("import torch\n)")
    assert preload.named_in(str(tmp_path / "broken.py")) == preload.Named()
    assert preload.named_in(str(tmp_path / "missing.py")) == preload.Named()
    assert preload.named_in(None) == preload.Named()


def test_a_missing_module_is_left_to_the_script():
    preload.load([("no_such_module_here.sub", []), ("this", [])])
    assert sys.modules.pop("this")


def test_a_module_that_misses_another_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "half_way.py").write_text("import no_such_module_here")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError):
        preload.load([("half_way", [])])


def test_modules_of_the_users_that_we_already_hold(tmp_path):
    (tmp_path / "signal.py").write_text("")
    (tmp_path / "socket").mkdir()
    (tmp_path / "socket" / "__init__.py").write_text("")
    (tmp_path / "gc").mkdir()
    assert preload.shadowed(str(tmp_path), frozenset({"signal"})).endswith("signal.py")
    assert preload.shadowed(str(tmp_path), frozenset({"socket"})).endswith("socket")
    assert preload.shadowed(str(tmp_path), frozenset({"gc", "os"})) == ""
    assert preload.shadowed(str(Path(os.__file__).parent), frozenset({"os"})) == ""  # the same file is no other module
    (tmp_path / "gc.py").write_text("")  # built in: found before any folder is looked at
    assert preload.shadowed(str(tmp_path), frozenset({"gc", "os"})) == ""
