"""Slurm's short form of host names."""

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.transport.hostlist import HostlistError, expand


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("gpu-[001-003,007],login1", "gpu-001 gpu-002 gpu-003 gpu-007 login1"),
        ("ip-10-1-[2-3]-[15,99]", "ip-10-1-2-15 ip-10-1-2-99 ip-10-1-3-15 ip-10-1-3-99"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[8-11]x", "n8x n9x n10x n11x"),
        ("n[5]", "n5"),
        ("[1-2]", "1 2"),
        ("a,a", "a a"),
    ],
)
def test_known_forms(text, hosts):
    assert expand(text) == hosts.split()


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a,",
        "n[",
        "n]",
        "n[1",
        "n[]",
        "n[1,]",
        "n[a]",
        "n[3-1]",
        "n[[1]]",
        "n[1-2-3]",
        "n m",
        "n[-1]",
        "n[1-99999999]",
        "n[1-9][0-9999][0-9]",
    ],
)
def test_what_is_no_host_list(text):
    with pytest.raises(HostlistError):
        expand(text)


@given(st.text(alphabet="n01-,[]x9 ", max_size=24))
def test_any_text_expands_within_bounds_or_is_refused(text):
    try:
        hosts = expand(text)
    except HostlistError as error:
        assert str(error)
        return
    assert hosts and all(host and not set(host) & set("[], ") for host in hosts)


numbers = st.integers(0, 1200)
ranges = st.tuples(numbers, st.integers(0, 12), st.integers(1, 5)).map(lambda r: (r[0], r[0] + r[1], r[2]))
words = st.text(alphabet="abz-", min_size=1, max_size=4)
hosts_as_data = st.lists(
    st.tuples(
        words, st.lists(st.tuples(st.lists(ranges, min_size=1, max_size=3), st.text(alphabet="q.", max_size=2)), max_size=2)
    ),
    min_size=1,
    max_size=4,
)


def written(data):
    def one(first, last, width):
        return f"{first:0{width}d}" + (f"-{last:0{width}d}" if last > first else "")

    return ",".join(
        word + "".join("[" + ",".join(one(*r) for r in group) + "]" + tail for group, tail in groups) for word, groups in data
    )


def meant(data):
    """The same, the slow and obvious way."""
    for word, groups in data:
        so_far = [word]
        for group, tail in groups:
            so_far = [
                begun + str(number).rjust(width, "0") + tail
                for begun in so_far
                for first, last, width in group
                for number in range(first, last + 1)
            ]
        yield from so_far


@given(hosts_as_data)
def test_expansion_is_what_was_meant(data):
    assert expand(written(data)) == list(meant(data))


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs Slurm's scontrol")
@given(hosts_as_data)
def test_slurm_agrees(data):
    text = written(data)
    shown = subprocess.run(["scontrol", "show", "hostnames", text], capture_output=True, text=True, check=True).stdout
    assert shown.split() == expand(text)
