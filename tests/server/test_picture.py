"""The choice of layouts that the state lists, and the table that the page's chooser gets."""

from __future__ import annotations

from engine_double import Double

from labkit.layout import Layout, choice_table, legal_layouts, read_layout
from labkit.model.spec import load_spec
from labkit.server.picture import Picture


def picture(model: str = "lab-5m", num_ranks: int = 4) -> Picture:
    return Picture(load_spec(model), num_ranks, 1, "cpu", "gloo")


def test_the_state_lists_what_is_legal_and_what_one_would_try_next_only() -> None:
    layouts = [entry for entry in picture().layouts() if not entry["pools"]]
    legal = [entry["layout"] for entry in layouts if entry["legal"]]
    assert legal == [layout.slug for layout in legal_layouts(load_spec("lab-5m"), 4, engine=True)]
    refused = {entry["layout"]: entry["reason"] for entry in layouts if not entry["legal"]}
    assert {"tp3", "tp8", "dp2xtp4", "pp7"} <= set(refused) and all(len(reason) > 20 for reason in refused.values())
    for slug in refused:
        layout = Layout.parse(slug)
        split = [axis for axis in ("dp", "pp", "pcp", "tp", "dcp", "ep") if getattr(layout, axis) > 1]
        assert split in (["dp"], ["pp"], ["tp"], ["dp", "tp"]), f"{slug} is one of hundreds of refused products"


def test_more_axes_and_ranks_do_not_make_the_list_of_refusals_long() -> None:
    layouts = picture("lab-moe-8x", 8).layouts()
    assert sum(not entry["legal"] for entry in layouts) < 60


def test_pools_come_after_the_layouts_and_are_legal() -> None:
    pools = [entry for entry in picture("lab-5m", 2).layouts() if entry["pools"]]
    assert [entry["layout"] for entry in pools] == ["prefill:tp1,decode:tp1"]
    assert all(entry["legal"] for entry in pools)
    held = picture("lab-5m", 4)._ownership(read_layout("prefill:tp2,decode:tp1"), "float32")
    assert [(row["rank"], row["replica"]) for row in held] == [(0, 0), (1, 0), (2, 1)]


def test_the_choices_are_the_table_and_where_cores_end() -> None:
    made = picture()
    most = made.choices["ranks_with_own_cores"]
    assert made.choices == choice_table(load_spec("lab-5m"), 4) | {"ranks_with_own_cores": most}
    entries = {entry["layout"]: entry for entry in made.layouts()}
    assert all(entry["oversubscribed"] == (entry["num_ranks"] > most) for entry in entries.values())
    assert made.choices is made.choices, "computed once"
    assert Picture(load_spec("lab-5m"), 4, 1, "cuda", "nccl").choices["ranks_with_own_cores"] is None


def test_the_server_hands_the_table_out(double: Double) -> None:
    status, table = double.ask("GET", "/lab/choices")
    assert status == 200 and {"axes", "legal", "refused", "reasons", "presets"} <= set(table)


def test_who_holds_what_knows_of_stages_and_experts() -> None:
    made = picture("lab-moe-8x", 2)
    held = {
        slug: [
            {part["part"]: (part["kind"], part["index"], part["of"]) for part in row["parts"]}
            for row in made._ownership(Layout.parse(slug), "float32")
        ]
        for slug in ("pp2", "tp2xep2", "dp2xep2")
    }
    assert [rank["attention"] for rank in held["pp2"]] == [("partitioned", 0, 2), ("partitioned", 1, 2)]
    assert "embedding" in held["pp2"][0] and "embedding" not in held["pp2"][1]
    for slug in ("tp2xep2", "dp2xep2"):
        assert [rank["experts"] for rank in held[slug]] == [("partitioned", 0, 2), ("partitioned", 1, 2)]
    assert held["dp2xep2"][0]["attention"] == ("replicated", 0, 1)
