"""Which GPUs workers see: the reading of CUDA_VISIBLE_DEVICES, and the real pynvml over a made-up driver library."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.health.gpus import Board, Gpu, GpuQueryError, Slice, query_boards, select, visible_gpus, visible_tokens

PLAIN = tuple(Board(f"GPU-{n}{n}00-aaaa", f"00000000:{n:02X}:00.0") for n in range(4))
TWINS = (Board("GPU-1a"), Board("GPU-1b"), Board("GPU-2c"))
SLICED = (
    Board("GPU-00", mig=(Slice("MIG-00a", 7, 0), Slice("MIG-00b", 8, 0))),
    Board("GPU-01"),
    Board("GPU-02", mig=()),
    Board("GPU-03", mig=(Slice("MIG-03a", 1, 0), Slice("MIG-03a-more", 2, 0))),
)

VISIBLE = {
    "unset": (PLAIN, None, "0 1 2 3"),
    "empty": (PLAIN, "", ""),
    "blank": (PLAIN, "  ", ""),
    "-1 hides all": (PLAIN, "-1", ""),
    "ordinals in the user's order": (PLAIN, "3,1", "3 1"),
    "spaces": (PLAIN, " 3 , 1 ", "3 1"),
    "ends at a negative one": (PLAIN, "2,-1,0", "2"),
    "ends at one too high": (PLAIN, "1,4,0", "1"),
    "ends at a word": (PLAIN, "1,x,0", "1"),
    "ends at nothing": (PLAIN, "1,,0", "1"),
    "a trailing comma": (PLAIN, "1,2,", "1 2"),
    "other alphabets' digits": (PLAIN, "\u0663", ""),
    "begins with nonsense": (PLAIN, "all", ""),
    "strtoul": (PLAIN, "1gpu,+2", "1 2"),
    "a number past any int": (PLAIN, "1," + "9" * 5000, "1"),
    "twice the same": (PLAIN, "1,2,1", ""),
    "twice the same behind the end": (PLAIN, "1,-1,1", "1"),
    "names": (PLAIN, "GPU-3300-aaaa,GPU-0000-aaaa", "3 0"),
    "cut names": (PLAIN, "GPU-33,GPU-0", "3 0"),
    "twice the same under two names": (PLAIN, "GPU-33,GPU-3300", ""),
    "nothing is no name, though it begins every name": (TWINS[:1], "GPU-1,,GPU-1", "0"),
    "an unknown name ends it": (PLAIN, "GPU-0,GPU-9,GPU-1", "0"),
    "an ambiguous name ends it": (TWINS, "GPU-2,GPU-1,GPU-1a", "2"),
    "names, then an ordinal": (PLAIN, "GPU-0,1", "0"),
    "ordinals, then a name": (PLAIN, "0,GPU-1", "0"),
    "names are case sensitive": (PLAIN, "gpu-0", ""),
    "no boards": ((), "0", ""),
    "MIG unset: the first instance only, and no other board": (SLICED, None, "0/MIG-00a"),
    "MIG by ordinal": (SLICED, "1,3", "3/MIG-03a"),
    "a plain board beside boards in MIG mode": (SLICED, "1", "1"),
    "a board without instances is none": (SLICED, "2,1", "1"),
    "MIG by its board's name": (SLICED, "GPU-03", "3/MIG-03a"),
    "MIG names count each": (SLICED, "MIG-00b,MIG-03a-m,MIG-00a", "0/MIG-00b 3/MIG-03a-more 0/MIG-00a"),
    "a whole MIG name is not ambiguous": (SLICED, "MIG-03a", "3/MIG-03a"),
    "an ambiguous MIG name ends it": (SLICED, "MIG-00b,MIG-00", "0/MIG-00b"),
    "old MIG names": (SLICED, "MIG-GPU-00/8/0,MIG-GPU-03/1/0", "0/MIG-00b 3/MIG-03a"),
    "an old MIG name that is not there": (SLICED, "MIG-GPU-00/8/0,MIG-GPU-00/8/1", "0/MIG-00b"),
    "the same instance under both names": (SLICED, "MIG-GPU-00/8/0,MIG-00b", ""),
    "MIG names, then a board": (SLICED, "MIG-00b,GPU-01", "0/MIG-00b"),
    "MIG names without MIG": (PLAIN, "MIG-00b", ""),
}


def shown(boards: tuple[Board, ...], gpus: list[Gpu]) -> str:
    return " ".join(str(gpu.index) if gpu.uuid == boards[gpu.index].uuid else f"{gpu.index}/{gpu.uuid}" for gpu in gpus)


@pytest.mark.parametrize("boards, value, expected", VISIBLE.values(), ids=VISIBLE.keys())
def test_visible_devices(boards: tuple[Board, ...], value: str | None, expected: str) -> None:
    assert shown(boards, select(boards, value)) == expected


@pytest.mark.parametrize("boards, value, expected", VISIBLE.values(), ids=VISIBLE.keys())
def test_a_token_shows_its_one_device(boards: tuple[Board, ...], value: str | None, expected: str) -> None:
    for gpu in select(boards, value):
        assert [(again.index, again.uuid) for again in select(boards, gpu.token)] == [(gpu.index, gpu.uuid)]


@given(st.text(alphabet="0123456789,-+ GPUMIaxé/٣", max_size=20))
def test_any_list_is_survived(value: str) -> None:
    for boards in (PLAIN, TWINS, SLICED):
        gpus = select(boards, value)
        assert len({gpu.uuid for gpu in gpus}) == len(gpus)
        assert all(0 <= gpu.index < len(boards) for gpu in gpus)


@given(st.lists(st.integers(-2, 5), min_size=1, max_size=6))
def test_ordinals_are_counted_as_cuda_counts_them(numbers: list[int]) -> None:
    """The same rule, written down a second time."""
    valid = []
    for number in numbers:
        if number not in range(4):
            break
        valid.append(number)
    expected = [] if len(set(valid)) < len(valid) else valid
    assert [gpu.index for gpu in select(PLAIN, ",".join(map(str, numbers)))] == expected


def tokens(count: int, **env: str) -> list[str]:
    return visible_tokens(env, count)


def test_tokens_without_a_list() -> None:
    assert tokens(3) == ["0", "1", "2"]
    assert tokens(2, NVIDIA_VISIBLE_DEVICES="5,6") == ["0", "1"]


def test_tokens_follow_the_users_list() -> None:
    assert tokens(2, CUDA_VISIBLE_DEVICES="3, GPU-77 ,1") == ["3", "GPU-77"]


def test_hidden_devices_stay_hidden() -> None:
    assert tokens(2, CUDA_VISIBLE_DEVICES="") == ["", ""]
    assert tokens(2, CUDA_VISIBLE_DEVICES="-1") == ["-1", "-1"]


@pytest.mark.parametrize("value", ["3", "3,-1,1", "3,,1"])
def test_too_short_a_list_is_refused(value: str) -> None:
    with pytest.raises(GpuQueryError, match=r"shows 1 device, but there are 2 ranks"):
        tokens(2, CUDA_VISIBLE_DEVICES=value)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a fake libnvidia-ml.so.1."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return str(folder)


def machine(library: str, words: str, **more: str) -> Mapping[str, str]:
    return {"LD_LIBRARY_PATH": library, "FAKE_NVML": words, "PATH": os.defpath} | more


@pytest.mark.processes
def test_boards_as_pynvml_reports_them(library: str) -> None:
    assert visible_gpus(machine(library, "b b", CUDA_VISIBLE_DEVICES="GPU-1,GPU-0")) == [
        Gpu(1, "GPU-1000-cafe", "00000000:3B:00.0", "GPU-1"),
        Gpu(0, "GPU-0000-cafe", "00000000:3A:00.0", "GPU-0"),
    ]


@pytest.mark.processes
def test_mig_as_pynvml_reports_it(library: str) -> None:
    assert query_boards(machine(library, "b b2 b0")) == (
        Board("GPU-0000-cafe", "00000000:3A:00.0"),
        Board("GPU-1000-cafe", "00000000:3B:00.0", (Slice("MIG-1100-cafe", 7, 0), Slice("MIG-1200-cafe", 8, 0))),
        Board("GPU-2000-cafe", "00000000:3C:00.0", ()),
    )


@pytest.mark.processes
def test_no_driver_library_is_no_gpus(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")  # hides a real one
    assert visible_gpus({"LD_LIBRARY_PATH": str(tmp_path)}) == []


@pytest.mark.processes
def test_a_python_environment_does_not_reach_the_child(library: str, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    assert len(visible_gpus(machine(library, "b", PYTHONPATH=str(tmp_path), PYTHONHOME="/nonexistent"))) == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    "words, sentence",
    [
        ("b init=9", "the GPU driver does not tell its GPUs (Driver Not Loaded)"),
        ("b b board=15", "the GPU driver does not tell its GPUs (GPU 1: GPU is lost)"),
        ("b crash", "the GPU driver library crashed"),
    ],
)
def test_a_driver_that_fails_is_an_error(words: str, sentence: str, library: str) -> None:
    with pytest.raises(GpuQueryError) as caught:
        visible_gpus(machine(library, words))
    assert str(caught.value).startswith(sentence)
    assert "nvidia-smi" in str(caught.value)


def children() -> set[str]:
    """The pids of this process's children, zombies included."""
    found = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue  # it has ended meanwhile
        if int(parent) == os.getpid():
            found.add(pid)
    return found


@pytest.mark.processes
def test_a_driver_that_hangs_costs_the_time_limit_only(library: str) -> None:
    before = children()
    began_s = time.monotonic()
    with pytest.raises(GpuQueryError, match=r"did not answer within 0\.5 s"):
        visible_gpus(machine(library, "b hang"), timeout_s=0.5)
    assert time.monotonic() - began_s < 60
    assert children() == before


@pytest.mark.processes
def test_a_missing_interpreter_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(GpuQueryError, match="does not start"):
        visible_gpus({})


def test_asking_loads_no_driver_library_here(library: str) -> None:
    source = (
        "import os, sys\nfrom hyperpodrun.agent.health.gpus import visible_gpus\n"
        "assert len(visible_gpus(os.environ)) == 1\n"
        "assert 'pynvml' not in sys.modules and 'ctypes' not in sys.modules, sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", source], env=dict(machine(library, "b")), check=True)
