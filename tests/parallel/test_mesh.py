"""Groups of a layout, and wires that survive a switch, within bounds."""

from __future__ import annotations

import pytest

from labkit.layout import Layout
from labkit.measure.recorder import group_id
from labkit.parallel.comm import Door, Wire
from labkit.parallel.mesh import AXES, Mesh, WireCache, single_rank_mesh
from tests.parallel import on_ranks
from tests.parallel.team import Team


class _OneSided:
    """A fabric whose wires go nowhere: enough to count who is opened and closed."""

    name = "none"

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.closed: list[tuple[int, ...]] = []
        self.stale: set[tuple[int, ...]] = set()

    def open(self, name: str, ranks: tuple[int, ...], rank: int) -> Wire:
        self.opened.append(name)
        fabric = self

        class End:
            def is_stale(self) -> bool:
                return ranks in fabric.stale

            def close(self) -> None:
                fabric.closed.append(ranks)

        return End()  # type: ignore[return-value]

    def suit(self, num_busy_threads: int) -> None: ...

    def close(self) -> None: ...


def _mesh(slug: str, rank: int, fabric: _OneSided, wires: WireCache | None = None) -> Mesh:
    wires = wires or WireCache({"none": lambda: fabric})  # type: ignore[dict-item,return-value]
    return Mesh(Layout.parse(slug), rank, door=Door(), wires=wires, fabric="none")


@pytest.mark.parametrize("slug", ["tp2", "dp2", "dp2xtp2", "pp2xtp4", "dp2xpp2xpcp2xtp2"])
def test_groups_and_ids_are_those_of_the_layout(slug: str) -> None:
    layout = Layout.parse(slug)
    for rank in range(layout.world_size):
        mesh = _mesh(slug, rank, _OneSided())
        for axis in AXES:
            group = mesh.group(axis)
            assert group.ranks == layout.group_of(axis, rank)
            assert group.ranks[group.rank] == rank and group.size == len(group.ranks)
            assert group.group_id == group_id(axis, layout.groups(axis).index(group.ranks))


def test_axes_over_the_same_ranks_share_a_wire() -> None:
    fabric = _OneSided()
    _mesh("tp2", 0, fabric)
    assert len(fabric.opened) == 1


def test_all_ranks_open_the_wire_of_a_group_under_the_same_name() -> None:
    names: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    layout = Layout.parse("dp2xtp2")
    for rank in range(4):
        fabric = _OneSided()
        _mesh("dp2xtp2", rank, fabric)
        for name in fabric.opened:
            axis = name.split("-")[1]
            names.setdefault((axis, layout.group_of(axis, rank)), set()).add(name)
    assert len(names) == 5 and all(len(same) == 1 for same in names.values())
    assert len(set.union(*names.values())) == 5


def test_the_cache_is_bounded_and_the_oldest_wire_goes_first() -> None:
    fabric = _OneSided()
    wires = WireCache({"none": lambda: fabric}, capacity=2)  # type: ignore[dict-item,return-value]
    for ranks in ((0, 1), (0, 2), (0, 1), (0, 3)):
        wires.get("none", ranks, 0, f"{ranks}")
        wires.trim(keep=1)
    assert fabric.closed == [(0, 2)] and len(fabric.opened) == 3 and len(wires) == 2


def test_a_wire_that_a_member_has_dropped_is_opened_anew() -> None:
    fabric = _OneSided()
    wires = WireCache({"none": lambda: fabric})  # type: ignore[dict-item,return-value]
    first, _ = wires.get("none", (0, 1), 0, "a")
    assert wires.get("none", (0, 1), 0, "b") == (first, False)
    fabric.stale.add((0, 1))
    second, new = wires.get("none", (0, 1), 0, "c")
    assert new and second is not first and fabric.closed == [(0, 1)]


@pytest.mark.parametrize("fabric", ["shm", "gloo"])
def test_switching_layouts_with_real_wires_and_a_small_cache(team: Team, fabric: str) -> None:
    """Rank 2 idles in tp2 and so keeps a wire that the others had to drop; nobody waits for it in vain."""
    slugs = ["tp3", "tp2", "dp3", "dp2", "tp3", "tp1", "tp2"]
    seen = team.run(on_ranks.switch_layouts, fabric, slugs, 1)
    assert [[total for _, _, total in rank] for rank in seen] == [
        [6, 3, 1, 1, 6, 1, 3],
        [6, 3, 2, 2, 6, 0, 3],
        [6, 0, 3, 0, 6, 0, 0],
    ]
    assert max(kept for rank in seen for _, kept, _ in rank) == 1


def test_one_process_alone_has_groups_of_one() -> None:
    mesh = single_rank_mesh()
    assert all(mesh.group(axis).size == 1 for axis in AXES)


def test_one_process_alone_cannot_hold_a_layout_of_several() -> None:
    with pytest.raises(ValueError, match="needs 2 ranks"):
        single_rank_mesh(Layout(tp=2))


def test_a_rank_outside_the_layout_idles() -> None:
    mesh = _mesh("tp2", 2, _OneSided())
    assert not mesh.active
    with pytest.raises(AttributeError, match="stands outside the layout"):
        _ = mesh.tp


def test_an_unknown_fabric_is_named_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match="no fabric 'carrier pigeon' here; there are: none"):
        wires = WireCache({"none": lambda: _OneSided()})  # type: ignore[dict-item,return-value]
        wires.get("carrier pigeon", (0, 1), 0, "a")
