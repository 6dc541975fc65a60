"""Agents of one job know each other by what they were started with."""

from typing import Any

import pytest

from hyperpodrun.agent import mesh_terms
from hyperpodrun.agent.mesh.config import MeshConfig

ROSTER = ("a:1", "b:1", "c:1")


def terms(detector: str = "default", **changed: Any) -> mesh_terms.Terms:
    core: dict[str, Any] = {"slots": 3, "min_nodes": 2, "max_nodes": 3, "roster": ROSTER, "first_contact": "a:1"} | changed
    return mesh_terms.of_job(MeshConfig(**core), detector)


def verdict(mine: mesh_terms.Terms, theirs: mesh_terms.Terms) -> str | None:
    return mesh_terms.refusal("a:1", mine, "x:9", mesh_terms.encode(theirs))


@pytest.mark.parametrize(
    ("theirs", "word"),
    [
        (terms(min_nodes=3), "x:9 was started with --nnodes 3, a:1 with --nnodes 2:3"),
        (terms(max_nodes=2), "x:9 was started with --nnodes 2 --spares 1, a:1 with --nnodes 2:3"),
        (terms(slots=4, roster=()), "--nnodes 2:3 --spares 1, a:1"),
        (terms("lax"), "--failure-detector 'lax', a:1 with 'default'"),
        (terms(roster=("a:1", "b:1", "d:1")), "other nodes"),
    ],
)
def test_who_differs_is_refused_by_a_sentence_that_says_how(theirs: mesh_terms.Terms, word: str) -> None:
    said = verdict(terms(), theirs)
    assert said is not None and word in said and "--job-id" in said


@pytest.mark.parametrize(
    "theirs",
    [terms(), terms(roster=("c:1", "a:1", "b:1"), first_contact="c:1"), terms(roster=(), first_contact="b:1")],
    ids=["same", "another order, and any majority may begin", "one contact point only"],
)
def test_who_may_belong_to_the_job_is_let_in(theirs: mesh_terms.Terms) -> None:
    assert verdict(terms(), theirs) is None and verdict(theirs, terms()) is None


def test_two_first_nodes_are_refused_where_view_0_needs_the_first_ones_word() -> None:
    said = verdict(terms(min_nodes=1), terms(min_nodes=1, roster=("b:1", "a:1", "c:1"), first_contact="b:1"))
    assert said is not None and "'b:1' as the first node" in said


def test_who_does_not_say_is_refused() -> None:
    assert mesh_terms.refusal("a:1", terms(), "x:9", b"") is not None
    assert mesh_terms.refusal("a:1", terms(), "x:9", b"\x93\x01\x02\x03") is not None


def test_longest_greeting_fits() -> None:
    longest = tuple(f"{'h' * 250}{index}:65535" for index in range(4096))
    assert len(mesh_terms.encode(terms(slots=4096, roster=longest, first_contact=longest[0], min_nodes=1))) <= 1024
