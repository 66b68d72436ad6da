"""The catalogues are whole: the same ids, the same places to fill in, and every id that the page uses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from labkit.measure.step_messages import STEPS
from labkit.plan.checks import FAILED, NOT_MEASURED, PASSED
from labkit.plan.objective import METRICS
from labkit.plan.walk_path import NO, NOT_ASKED, YES
from labkit.show import i18n
from labkit.show.frame import LINKS, ROLES, TTFT_PARTS
from labkit.show.planner_inputs import Inputs

SHOW = Path(__file__).parents[2] / "labkit" / "show"


def used_ids() -> set[str]:
    """Ids that stand in the scripts as whole strings: t("…"), and nothing that is put together."""
    scripts = "\n".join(path.read_text() for path in (SHOW / "web").glob("*.js"))
    scripts = re.sub(r"/\*\*.*?\*/", "", scripts, flags=re.DOTALL)
    return set(re.findall(r'\bt\(\s*"([\w.\-]+)"', scripts))


@pytest.mark.parametrize("language", [code for code in i18n.LANGUAGES if code != "en"])
def test_same_ids_and_places_in_every_language(language: str) -> None:
    english, other = i18n.catalogue("en"), i18n.catalogue(language)
    assert english.keys() == other.keys()
    differing = [key for key in english if i18n.places(english[key]) != i18n.places(other[key])]
    assert differing == []


def test_every_id_in_the_scripts_has_a_text() -> None:
    assert len(used_ids()) > 40, "the search for ids in the scripts finds too few to mean anything"
    assert used_ids() - i18n.catalogue("en").keys() == set()


def test_every_id_that_is_put_together_has_a_text() -> None:
    states = ("starting", "ready", "switching", "failed", "restarting", "stopped", *LINKS[:2], "lost")
    wanted = {f"state.{state}" for state in states} | {f"role.{role}" for role in ROLES}
    wanted |= {f"part.{part}{what}" for part in TTFT_PARTS for what in ("", ".what")}
    wanted |= {f"share.{share}" for share in ("compute", "wait", "transfer", "idle")}
    wanted |= {f"memory.{part}" for part in ("weights", "kv", "other", "free")}
    banners = ("stale", "absent", "lost", "rank", "rank_final", "failed", "recovered", "notice")
    wanted |= {f"banner.{banner}{do}" for banner in banners for do in ("", ".do")}
    assert wanted - i18n.catalogue("en").keys() == set()


def test_every_id_that_the_page_fabric_puts_together_has_a_text() -> None:
    wanted = {f"fabric.{fabric}" for fabric in ("shm", "gloo", "nccl", "gloo.across")}
    wanted |= {f"curves.phase.{phase}" for phase in STEPS} | {f"telemetry.{source}" for source in ("nvml", "psutil")}
    shown = re.findall(r"^  (\w+): \{ show", (SHOW / "web" / "telemetry.js").read_text(), re.MULTILINE)
    assert len(shown) > 8, "the search for measures finds too few to mean anything"
    wanted |= {f"telemetry.{measure}" for measure in shown}
    wanted |= {f"badge.fabric.{kind}" for kind in ("measured", "recorded")}
    assert wanted - i18n.catalogue("en").keys() == set()


def test_every_id_that_the_page_planner_puts_together_has_a_text() -> None:
    own = {"max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype", "config", "layout", "n"}
    wanted = {f"planner.{name}" for name in set(Inputs.__struct_fields__) - own}
    wanted |= {f"planner.group.{name}" for name in ("model", "gpus", "traffic", "wishes")}
    wanted |= {f"planner.link.{name}" for name in ("usual", "pairs", "pcie")} | {"badge.fabric.predicted"}
    wanted |= {f"planner.workload.{name}" for name in ("lengths", "trace")}
    wanted |= {f"planner.load.{name}" for name in ("rate", "concurrency")}
    wanted |= {f"verdict.{name}" for name in ("does", "queues", "misses", "big", "illegal")}
    wanted |= {f"fault.{name}" for name in set(METRICS) - {"ttft", "tpot"}}
    wanted |= {f"walk.{answer.replace(' ', '-')}" for answer in (YES, NO, NOT_ASKED)}
    wanted |= {f"checks.{status.replace(' ', '-')}" for status in (PASSED, FAILED, NOT_MEASURED)}
    wanted |= {f"deploy.{role}" for role in ("server", "prefill", "decode", "router", "load")}
    wanted |= {f"layouts_table.{name}" for name in ("does", "fits", "refused", "all")}
    assert wanted - i18n.catalogue("en").keys() == set()


def test_every_workload_has_a_name() -> None:
    from labkit.paths import data_dir

    names = [path.stem for path in (data_dir() / "workloads").glob("*.toml")]
    assert names, "no workloads found"
    assert [name for name in names if f"workload.{name}" not in i18n.catalogue("en")] == []


def test_chinese_is_chinese() -> None:
    same = [key for key, text in i18n.catalogue("zh").items() if text == i18n.catalogue("en")[key]]
    kept = {"rank", "ladder.n", "waterfall.total", "own.mlp"}
    assert set(same) <= kept


def test_unknown_language_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'fr'.*en, zh"):
        i18n.catalogue("fr")
