"""Seven nodes of which those die together that an ordinary system would call special; real agents on this host."""

import os
from pathlib import Path

import pytest

from hyperpodrun.agent.mesh.view import candidates, digest_of
from hyperpodrun.agent.vote_file import VoteFile
from tests.launch.test_inplace import script
from tests.launch.test_nodes import kill_node, vote_path

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("options", "world"), [(("--nnodes=4", "--spares=3"), 4), (("--nnodes=2:7",), 4)], ids=["a spare each", "a smaller world"]
)
def test_rank_0s_node_the_first_contact_and_the_first_candidate_die_together(
    nodes, tmp_path: Path, options: tuple[str, ...], world: int
) -> None:
    nodes.contacts(*range(7))
    more = ("--nproc-per-node=1", "--inprocess-restart", "--max-restarts=9")
    runs = nodes.start_all(*options, *more, script=script())
    ranks = 4 if "--spares=3" in options else 7
    rows = nodes.up_after(ranks, -1)
    generation = max(row["generation"] for row in rows)
    view = VoteFile(vote_path(nodes, 1), lambda _line: None).read().view
    first = candidates(digest_of(view), tuple(member.node for member in view.members))
    names = [nodes.name(index) for index in range(7)]
    special = [view.order[0], names[0], first[0], *(name for name in view.order), *first]
    victims = [names.index(name) for name in list(dict.fromkeys(special))[:3]]
    for index in victims:
        kill_node(runs[index])
    after = nodes.up_after(world, generation)
    assert {row["rank"] for row in after} == set(range(world)), nodes.story()
    before = {row["side"]: row["pid"] for row in rows}
    for row in after:
        assert before.get(row["side"], row["pid"]) == row["pid"], "a survivor lost its process"
    (tmp_path / "finish").touch()
    assert sorted(nodes.codes()) == [-9] * 3 + [0] * 4, nodes.story()
    for index in victims:
        if os.path.exists(vote := vote_path(nodes, index)):
            os.unlink(vote)
    for run in runs:
        run.nothing_left()
