"""Which bundles of a placement group each server gets."""

from __future__ import annotations

import pytest

from torchrl_sglang.backends.launch.ray_placement import (
    Bundle,
    Demand,
    choose_seats,
    own_seats,
    shortage,
)
from torchrl_sglang.errors import ConfigurationError


def bundles(*nodes: str, **size: float) -> list[Bundle]:
    """Bundles on these nodes, all alike and free."""
    return [
        Bundle(index=index, node=node, size=size, free=size)
        for index, node in enumerate(nodes)
    ]


def chosen(seats) -> list[list[list[int]]]:
    """For each server and each of its nodes, the indexes of its bundles."""
    return [[[seat.bundle for seat in node] for node in server] for server in seats]


@pytest.mark.parametrize(
    ("nodes", "size", "demand", "count", "expected"),
    [
        # One GPU in a bundle.
        ("aabb", 1, Demand(gpus=1), 3, [[[0]], [[1]], [[2]]]),
        ("abab", 1, Demand(gpus=2), 2, [[[0, 2]], [[1, 3]]]),
        ("aaab", 1, Demand(gpus=2), 1, [[[0, 1]]]),
        # A bundle that holds a server, several, or a part of one.
        ("ab", 2, Demand(gpus=2), 2, [[[0]], [[1]]]),
        ("a", 4, Demand(gpus=2), 2, [[[0]], [[0]]]),
        ("aa", 4, Demand(gpus=8), 1, [[[0, 1]]]),
        # Servers with several nodes.
        ("ab", 8, Demand(gpus=8, nodes=2), 1, [[[0], [1]]]),
        ("abab", 1, Demand(gpus=2, nodes=2), 1, [[[0, 2], [1, 3]]]),
        ("aabb", 8, Demand(gpus=8, nodes=2), 2, [[[0], [2]], [[1], [3]]]),
        ("aabbc", 8, Demand(gpus=8, nodes=2), 2, [[[0], [2]], [[1], [3]]]),
        # A share beside a trainer: one server for each GPU.
        ("aab", 1, Demand(gpus=1, gpu_fraction=0.2), 3, [[[0]], [[1]], [[2]]]),
        ("aabb", 1, Demand(gpus=2, gpu_fraction=0.2), 2, [[[0, 1]], [[2, 3]]]),
    ],
)
def test_gpus_of_a_server_are_on_one_node(nodes, size, demand, count, expected):
    seats = choose_seats(bundles(*nodes, GPU=size), demand, count)
    assert chosen(seats) == expected
    for server in seats:
        for node in server:
            assert sum(seat.gpus for seat in node) == pytest.approx(
                demand.reserved_gpus
            )


def test_taken_gpus_are_left_alone():
    free = [{"GPU": 0.2}, {"GPU": 1.0}, {"GPU": 0.0}, {"GPU": 1.0}]
    given = [
        Bundle(index=i, node="a", size={"GPU": 1.0}, free=each)
        for i, each in enumerate(free)
    ]
    assert chosen(choose_seats(given, Demand(gpus=2), 1)) == [[[1, 3]]]
    share = Demand(gpus=1, gpu_fraction=0.2)
    assert chosen(choose_seats(given, share, 3)) == [[[0]], [[1]], [[3]]]
    with pytest.raises(
        ConfigurationError, match=r"room for 1 of 2 servers, each .* 2 GPU on one node"
    ):
        choose_seats(given, Demand(gpus=2), 2)


def test_a_share_of_a_large_bundle_is_refused():
    with pytest.raises(ConfigurationError, match="room for 0 of 1 server,"):
        choose_seats(bundles("a", GPU=2.0), Demand(gpus=1, gpu_fraction=0.5), 1)


def test_the_first_seat_takes_what_else_is_reserved():
    demand = Demand(gpus=2, resources={"CPU": 1.0})
    ((node,),) = choose_seats(bundles("a", "a", GPU=1.0, CPU=1.0), demand, 1)
    assert [dict(seat.resources) for seat in node] == [{"CPU": 1.0}, {}]


def test_other_resources_are_counted_for_each_server():
    demand = Demand(gpus=1, resources={"CPU": 1.0})
    seats = choose_seats(bundles("a", "a", GPU=2.0, CPU=1.0), demand, 2)
    assert chosen(seats) == [[[0]], [[1]]]
    with pytest.raises(ConfigurationError, match="room for 2 of 3 servers"):
        choose_seats(bundles("a", "a", GPU=2.0, CPU=1.0), demand, 3)


def test_servers_on_cpu():
    demand = Demand(resources={"CPU": 0.3})
    seats = choose_seats(bundles("a", "b", CPU=0.9), demand, 4)
    assert chosen(seats) == [[[0]], [[0]], [[0]], [[1]]]
    assert all(seat.gpus == 0 for (node,) in seats for seat in node)


def test_a_group_of_our_own_has_a_bundle_for_each_node():
    demand = Demand(nodes=2, gpus=8, resources={"CPU": 4.0})
    assert demand.as_bundle() == {"CPU": 4.0, "GPU": 8}
    assert chosen(own_seats(demand, 2)) == [[[0], [1]], [[2], [3]]]
    assert Demand(gpus=1, gpu_fraction=0.5).as_bundle() == {"GPU": 0.5}
    with pytest.raises(ConfigurationError, match="reserves nothing"):
        Demand(resources={"CPU": 0}).as_bundle()
    with pytest.raises(ConfigurationError, match="gpu_fraction=0.5 .* takes 2"):
        Demand(gpus=2, gpu_fraction=0.5).as_bundle()


def test_what_a_cluster_lacks():
    nodes = {"a": {"CPU": 8.0, "GPU": 2.0}, "b": {"CPU": 8.0}}
    assert shortage([{"GPU": 1.0, "CPU": 1.0}] * 2, nodes) is None
    assert shortage([{"GPU": 4.0}], nodes) == (
        "No node has 4 GPU; the nodes have a: 2 GPU, 8 CPU; b: 8 CPU."
    )
    assert "All servers need 3 GPU;" in (shortage([{"GPU": 1.0}] * 3, nodes) or "")
