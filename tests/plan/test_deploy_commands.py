"""Commands to paste: what they say, by hand-written examples, what is refused, and vLLM's own parser on them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import dataclass

import pytest

from labkit.layout import LayoutError, read_layout
from labkit.load.workload import load_workload
from labkit.model.spec import load_spec
from labkit.plan.deploy import ALL_ENGINES, Command, deploy_commands, every_engine
from labkit.plan.work import EngineSettings


@dataclass(frozen=True)
class Asked:
    name: str = "8192/1024"
    prompt_tokens: int = 8192
    output_tokens: int = 1024
    rate: float | None = None
    concurrency: int | None = 32


@dataclass(frozen=True)
class Wanted:
    ttft_ms: float | None = 1000.0
    tpot_ms: float | None = None
    percentile: str = "p95"


DEFAULTS = EngineSettings()


def words(command: Command) -> list[str]:
    """The last command of the text, as a shell would split it, variables left out."""
    last = command.text.split("END\n")[-1].replace("\\\n", " ")
    return [word for word in shlex.split(last) if "=" not in word or word.startswith(("-", "{", "ttft"))]


def commands(layout: str, engine: str, model: str = "llama-3.1-70b", settings=DEFAULTS, **more) -> list[Command]:
    return deploy_commands(read_layout(layout), load_spec(model), settings, engine, **more)


def value(command: Command, flag: str) -> str:
    said = words(command)
    return said[said.index(flag) + 1]


@pytest.mark.parametrize(
    ("engine", "first", "tp", "seqs", "tokens"),
    [
        ("vllm", "vllm serve", "--tensor-parallel-size", "--max-num-seqs", "--max-num-batched-tokens"),
        ("sglang", "python -m sglang.launch_server", "--tp-size", "--max-running-requests", "--chunked-prefill-size"),
        ("trtllm", "trtllm-serve", "--tp_size", "--max_batch_size", "--max_num_tokens"),
    ],
)
def test_a_server_is_told_the_layout_and_how_it_is_set(engine, first, tp, seqs, tokens):
    settings = EngineSettings(max_num_seqs=64, max_num_batched_tokens=4096)
    (server,) = commands("tp4", engine, settings=settings)
    assert " ".join(words(server)).startswith(first) and server.role == "server" and server.version
    assert (value(server, tp), value(server, seqs), value(server, tokens)) == ("4", "64", "4096")


def test_settings_are_words_of_each_engine():
    settings = EngineSettings(max_model_len=32768, kv_cache_dtype="fp8", enable_prefix_caching=False, cuda_graphs=False)
    said = {engine: commands("tp4", engine, settings=settings)[0] for engine in ALL_ENGINES}
    vllm, sglang = " ".join(words(said["vllm"])), " ".join(words(said["sglang"]))
    assert "--max-model-len 32768 --kv-cache-dtype fp8 --no-enable-prefix-caching --enforce-eager" in vllm
    assert "--context-length 32768 --kv-cache-dtype fp8_e4m3 --disable-radix-cache" in sglang
    assert "--max_seq_len 32768" in said["trtllm"].text
    for line in ('  dtype: "fp8"', "  enable_block_reuse: false", "cuda_graph_config: null"):
        assert f"\n{line}\n" in said["trtllm"].text


def test_what_vllm_does_by_itself_is_not_said():
    said = words(commands("tp4", "vllm")[0])
    assert not {"--kv-cache-dtype", "--max-model-len", "--block-size", "--enforce-eager"} & set(said)


def test_attention_data_parallelism_counts_sequences_of_all_ranks_where_the_engine_does():
    (server,) = commands("dp8xep8", "sglang", "qwen3-235b-a22b")
    assert value(server, "--max-running-requests") == str(8 * DEFAULTS.max_num_seqs)
    assert value(server, "--attn-dp-size") == "8" and "--dp-size" not in words(server)
    (server,) = commands("dp8xep8", "trtllm", "qwen3-235b-a22b")
    assert "enable_attention_dp: true" in server.text and value(server, "--tp_size") == "8"


def test_pools_are_a_server_each_and_a_router():
    prefill, decode, router = commands("prefill:tp2,decode:dp2xtp2", "vllm")
    assert [command.role for command in (prefill, decode, router)] == ["prefill", "decode", "router"]
    assert "CUDA_VISIBLE_DEVICES=0,1 " in prefill.text and "CUDA_VISIBLE_DEVICES=2,3,4,5 " in decode.text
    assert json.loads(value(prefill, "--kv-transfer-config"))["kv_role"] == "kv_producer"
    assert "PORT=5600 " in prefill.text and "PORT=5600 " not in decode.text
    for command, flag in ((prefill, "--prefill"), (decode, "--decode")):
        assert value(router, flag).endswith(":" + value(command, "--port"))


def test_each_engine_has_a_router_of_its_own_that_knows_every_server():
    for engine in ALL_ENGINES:
        *servers, router = commands("prefill:tp2,decode:dp2xtp2", engine)
        assert router.role == "router" and {server.role for server in servers} == {"prefill", "decode"}
        for server in servers:
            assert ":" + value(server, "--port") in router.text
    assert len(servers) == 3  # TensorRT-LLM's two replicas are two servers


def test_replicas_without_a_port_in_common_are_servers_and_a_balancer_is_asked_for():
    first, second, load, _ = commands("dp2xtp2", "trtllm", workload=Asked())
    assert "CUDA_VISIBLE_DEVICES=2,3 " in second.text and value(first, "--port") != value(second, "--port")
    assert "balancer" in first.notes[0] and "YOUR_BALANCER" in load.text


def test_a_layout_over_two_nodes_is_a_command_on_each():
    first, second = commands("dp2xtp8", "vllm")
    assert (first.node, second.node) == (0, 1)
    assert value(second, "--node-rank") == "1" and "--headless" in words(second) and "--headless" not in words(first)
    (both,) = commands("tp8xpp2", "trtllm")
    assert words(both)[:6] == ["srun", "-N", "2", "-n", "16", "--mpi=pmix"]
    pools = commands("prefill:tp8,decode:tp8", "vllm", gpus_per_node=8)
    assert [command.node for command in pools[:2]] == [0, 1] and "CUDA_VISIBLE" not in pools[0].text


def test_the_load_test_asks_what_was_predicted():
    _, ours, theirs = commands("tp4", "vllm", workload=Asked(), objective=Wanted(tpot_ms=50), asked="8192/1024")
    assert value(ours, "--concurrency") == "32" and value(ours, "--objective") == "ttft=1000,tpot=50"
    assert int(value(ours, "--num-requests")) * 0.05 >= 10
    assert value(theirs, "--random-input-len") == "8192" and "ttft:1000 tpot:50" in theirs.text and not theirs.notes
    *_, ours, theirs = commands("tp4", "vllm", workload=Asked("chat", 143, 54, 2.5, None), objective=Wanted())
    assert value(ours, "--workload") == "chat" and value(ours, "--rate") == "2.5" and "the means" in theirs.notes[0]
    *_, ours, _ = commands("tp4", "vllm", workload=Asked("a", rate=2.0, concurrency=None), asked="traces/a.csv")
    assert value(ours, "--trace") == "traces/a.csv" and "--rate" not in words(ours)


def test_the_workload_file_of_two_numbers_is_one_that_labkit_reads(tmp_path):
    ours = commands("tp4", "vllm", workload=Asked(), asked="8192/1024")[1]
    file = tmp_path / "verify.toml"
    file.write_text(ours.text.split("<<'END'\n")[1].split("END\n")[0])
    (part,) = load_workload(file).parts
    assert (part.prompt_tokens.tokens, part.output_tokens.tokens) == (8192, 1024)


@pytest.mark.parametrize(
    ("engine", "model", "layout", "sentence"),
    [
        ("trtllm", "llama-3.1-70b", "pcp2xtp2", "choose a layout without pcp"),
        ("trtllm", "deepseek-v3", "tp4xdcp4", "choose a layout without dcp"),
        ("trtllm", "qwen3-235b-a22b", "dp2xtp2xep4", "the nearest that it has is dp4xep4"),
        ("trtllm", "llama-3.1-70b", "tp2+sp", "leave out +sp"),
        ("sglang", "llama-3.1-70b", "dp2xtp8", "start a server on each node"),
        ("vllm", "llama-3.1-70b", "any:tp2,long:pcp2", "send long prompts to theirs at your own gateway"),
        ("vllm", "llama-3.1-70b", "prefill:tp1,decode:tp16xdcp2", "Llama-3.1-70B has none"),
        ("vllm", "deepseek-v3", "prefill:tp8,decode:tp8xdcp2", "the larger of tp and pcp"),
        ("vllm", "llama-3.1-70b", "prefill:tp4,decode:tp8", "unequal parts of 2 nodes"),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_do_is_a_sentence(engine, model, layout, sentence):
    with pytest.raises(LayoutError) as refusal:
        commands(layout, engine, model, gpus_per_node=8)
    assert sentence.lower() in str(refusal.value).lower() and str(refusal.value).endswith(".")


def test_unknown_words_are_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="choose one of vllm, sglang, trtllm"):
        commands("tp1", "tgi")
    with pytest.raises(ValueError, match="give auto or fp8"):
        commands("tp4", "vllm", settings=EngineSettings(kv_cache_dtype="int3"))


def test_every_engine_answers_or_says_why_not():
    found = every_engine(read_layout("pcp2xtp2"), load_spec("llama-3.1-70b"), DEFAULTS, workload=Asked())
    assert [entry["engine"] for entry in found] == list(ALL_ENGINES)
    assert all(bool(entry["refused"]) != bool(entry["commands"]) for entry in found)
    assert "without pcp" in found[2]["refused"] and json.dumps(found)


def test_a_policy_that_no_engine_has_is_noted():
    notes = commands("tp4", "vllm", settings=EngineSettings(policy="labkit"))[0].notes
    assert "no production engine reserves" in notes[0]


def test_experts_over_nodes_are_exchanged_as_the_plan_reckons():
    inside = commands("dp8xep8", "vllm", "qwen3-235b-a22b")
    first, second = commands("dp16xep16", "vllm", "qwen3-235b-a22b")
    assert "--all2all-backend" not in words(inside[0]) and not inside[0].notes
    assert value(first, "--all2all-backend") == value(second, "--all2all-backend") == "deepep_low_latency"
    assert any("DeepEP" in note for note in first.notes) and not second.notes
    assert "--all2all-backend" not in words(commands("dp16xep16", "sglang", "qwen3-235b-a22b")[0])


PARSE = """
import json, sys
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.benchmarks.serve import add_cli_args
serve = make_arg_parser(FlexibleArgumentParser())
bench = FlexibleArgumentParser()
add_cli_args(bench)
for words in json.load(sys.stdin):
    verb, rest = (serve, words[2:]) if words[1] == "serve" else (bench, words[3:])
    print(json.dumps(vars(verb.parse_args(rest)), default=str, skipkeys=True))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not os.environ.get("LABKIT_VLLM_PYTHON"), reason="LABKIT_VLLM_PYTHON names no Python with vLLM")
def test_vllms_own_parser_reads_the_commands_as_they_are_meant():
    settings = EngineSettings(max_model_len=4096, kv_cache_dtype="fp8", enable_prefix_caching=False, cuda_graphs=False,
                              block_size=32, max_num_seqs=48, gpu_memory_utilization=0.85)  # fmt: skip
    made = commands("dp2xtp8", "vllm", settings=settings, workload=Asked(), objective=Wanted())
    made += commands("dp16xep16", "vllm", "qwen3-235b-a22b")
    made += commands("prefill:pcp2xtp2,decode:tp4", "vllm") + commands("dp2xtp2xep4", "vllm", "qwen3-235b-a22b")
    asked = [said for said in map(words, made) if said[0] == "vllm"]
    done = subprocess.run([os.environ["LABKIT_VLLM_PYTHON"], "-c", PARSE], input=json.dumps(asked),
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    read = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    first, second, bench, wide, _, prefill, _, experts = read
    assert wide["all2all_backend"] == "deepep_low_latency"
    assert (first["tensor_parallel_size"], first["data_parallel_size"], first["nnodes"]) == (8, 2, 2)
    assert (first["max_num_seqs"], first["gpu_memory_utilization"], first["block_size"]) == (48, 0.85, 32)
    assert first["enable_prefix_caching"] is False and first["enforce_eager"] is True and second["headless"] is True
    assert bench["max_concurrency"] == 32 and bench["goodput"] == ["ttft:1000"]
    assert "NixlConnector" in str(prefill["kv_transfer_config"]) and prefill["prefill_context_parallel_size"] == 2
    assert experts["enable_expert_parallel"] is True
