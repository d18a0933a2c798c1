"""``plan``: its counts are PyTorch's, and what it recommends fits."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.slow import diagonal
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from torchrl_sglang import GRPO
from torchrl_sglang.cli import main
from torchrl_sglang.cli.plan.arrange import (
    Arrangement,
    Cluster,
    NothingFits,
    arrange,
)
from torchrl_sglang.cli.plan.memory import (
    GIB,
    HALF,
    RUNTIME,
    Workload,
    layer_activations,
    pass_memory,
    server_memory,
    trained_parameters,
    trainer_memory,
)
from torchrl_sglang.cli.plan.shapes import Shape, read_shape
from torchrl_sglang.cli.plan.show import (
    THIN,
    command_of,
    grpo_arguments,
    nothing_text,
    to_text,
)
from torchrl_sglang.trainers.models import load_model, shard
from torchrl_sglang.trainers.ranks import TrainerRanks

EXAMPLES = Path(__file__).parents[3] / "examples"

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "vocab_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def qwen2(hidden, mlp, layers, vocabulary, heads, kv_heads, tied):
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
    )


QWEN_05B = qwen2(896, 4864, 24, 151_936, 14, 2, True)
QWEN_15B = qwen2(1536, 8960, 28, 151_936, 12, 2, True)
QWEN_3B = qwen2(2048, 11_008, 36, 151_936, 16, 2, True)
QWEN_7B = qwen2(3584, 18_944, 28, 152_064, 28, 4, False)
LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    vocab_size=128_256,
    num_attention_heads=32,
    num_key_value_heads=8,
)


@pytest.mark.parametrize(
    ("config", "parameters", "cache"),
    [
        # As their model cards, or a sum over their published files, have them.
        pytest.param(QWEN_05B, 494_032_768, 2 * 24 * 2 * 64, id="tied"),
        pytest.param(QWEN_7B, 7_615_616_512, 2 * 28 * 4 * 128, id="untied"),
        pytest.param(LLAMA_8B, 8_030_261_248, 2 * 32 * 8 * 128, id="llama"),
        pytest.param(
            MixtralConfig(), 46_702_792_704, 2 * 32 * 8 * 128, id="experts-of-mixtral"
        ),
        pytest.param(GPT2Config(), 124_439_808, 2 * 12 * 768, id="other"),
    ],
)
def test_sizes_of_known_models(config, parameters, cache):
    shape = read_shape(config)
    assert (shape.parameters, shape.cache) == (parameters, cache)


def test_sizes_of_layers():
    shape = read_shape(QWEN_7B)
    # Attention with biases of queries, keys and values; three matrices; two norms.
    attention = 3584 * (3584 + 2 * 512) + 3584 + 2 * 512 + 3584 * 3584
    layer = attention + 3 * 3584 * 18_944 + 2 * 3584
    assert (shape.layers, shape.largest_layer) == (28, layer)
    assert shape.outside_layers == 2 * 152_064 * 3584 + 3584
    assert shape.largest_parameter == 152_064 * 3584


def test_only_the_experts_that_a_token_goes_through_have_activations():
    shape = read_shape(Qwen3MoeConfig(num_hidden_layers=2))
    assert (shape.experts_per_token, shape.mlp) == (8, 8 * 768)


def test_the_cache_of_latent_attention():
    config = DeepseekV3Config(num_hidden_layers=4, n_routed_experts=8, **LATENT)
    shape = read_shape(config)
    assert shape.cache == 4 * (512 + 64)
    # Each GPU of a server has all of it.
    one, four = (
        server_memory(shape, tp_size=size, memory=80 * GIB, share=0.8)
        for size in (1, 4)
    )
    assert one.token == four.token


LATENT = {"hidden_size": 128, "vocab_size": 96, "first_k_dense_replace": 1}


def nbytes(tensors):
    return sum(each.nbytes for each in tensors)


def train_once(model):
    """Returns bytes of weights, gradients and AdamW's state, as PyTorch has them."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimizer.step()
    local = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in trained]
    state = [
        getattr(value, "_local_tensor", value)
        for each in optimizer.state.values()
        for name, value in each.items()
        if name != "step"
    ]
    return nbytes(local), nbytes(gradients), nbytes(state)


@pytest.mark.parametrize("lora", [None, 4])
def test_what_a_trainer_keeps(lora):
    config = Qwen2Config(num_hidden_layers=2, **SMALL)
    shape = read_shape(config)
    model = load_model(
        AutoModelForCausalLM.from_config(config),
        device=torch.device("cpu"),
        lora=None if lora is None else {"r": lora},
    )
    memory = trainer_memory(shape, Workload(lora=lora), ranks=1, tokens=1)
    kept = (
        memory.kept["weights"],
        memory.training["gradients"],
        memory.kept["optimizer"],
    )
    assert train_once(model) == kept
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained_parameters(shape, lora) == trained


def test_what_each_of_several_ranks_keeps():
    """FSDP2 itself, on the first of four ranks of which the others do not exist."""
    config = Qwen2Config(num_hidden_layers=2, **SMALL)
    shape = read_shape(config)
    model = AutoModelForCausalLM.from_config(config)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        shard(model, TrainerRanks(size=4), torch.device("cpu"))
        found = train_once(model)
    finally:
        dist.destroy_process_group()
    memory = trainer_memory(shape, Workload(), ranks=4, tokens=1)
    kept = (
        memory.kept["weights"],
        memory.training["gradients"],
        memory.kept["optimizer"],
    )
    # FSDP2 pads the first dimension of a parameter.
    assert found == pytest.approx(kept, rel=0.01)


def saved_bytes(config, *, tokens, autocast):
    """Returns the bytes that PyTorch keeps for a backward pass, but for weights."""
    dtype = torch.float32 if autocast else torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, 90, (2, tokens // 2))
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        output = model.model(ids, mask).last_hidden_state
    assert output.requires_grad
    return sum(size for place, size in kept.items() if place not in weights)


@pytest.mark.parametrize(
    ("kind", "autocast"),
    diagonal([Qwen2Config, LlamaConfig, Qwen3Config], [True, False]),
)
def test_activations_of_a_layer(kind, autocast):
    tokens, few, many = 512, *(kind(num_hidden_layers=n, **SMALL) for n in (1, 4))
    shape = read_shape(few)
    few, many = (
        saved_bytes(each, tokens=tokens, autocast=autocast) for each in (few, many)
    )
    weights = HALF * shape.largest_layer if autocast else 0
    measured = ((many - few) / 3 - weights) / tokens
    assert layer_activations(shape, autocast=autocast) == pytest.approx(
        measured, rel=0.06
    )


# What was measured on an H200, in bytes, with the share by which the formula may
# differ. ``benchmarks/RESULTS.md`` has the commands; a further row is a line here.
MEASURED_PASSES = [
    # (shape, ranks, tokens of a pass, longest sequence, packed, optimizer, bytes,
    # share)
    pytest.param(
        *(QWEN_05B, 1, 8 * 1056, 1056, False, False, 18.7e9, 0.02), id="loss.py-0.5b"
    ),
    # benchmarks/training.py: AdamW's moments are there.
    pytest.param(
        *(QWEN_05B, 1, 16_384, 3063, True, True, 15.405e9, 0.03), id="training.py-0.5b"
    ),
    pytest.param(
        # A step of one pass, in which there are no gradients of another one.
        *(QWEN_3B, 1, 14_679, 3063, True, True, 52.453e9 + 12.344e9, 0.01),
        id="training.py-3b",
    ),
    # test/llm/gpu/test_plan_gpu.py: the first of four ranks of FSDP2.
    pytest.param(
        *(QWEN_05B, 1, 8192, 1024, True, False, 7.886 * GIB, 0.02), id="gpu-0.5b"
    ),
    pytest.param(
        *(QWEN_05B, 4, 8192, 1024, True, False, 4.100 * GIB, 0.03), id="gpu-0.5b-4"
    ),
    pytest.param(
        *(QWEN_15B, 1, 8192, 1024, True, False, 18.544 * GIB, 0.01), id="gpu-1.5b"
    ),
    pytest.param(
        *(QWEN_15B, 4, 8192, 1024, True, False, 6.915 * GIB, 0.03), id="gpu-1.5b-4"
    ),
]
MEASURED_GPUS = [
    # The recipe before ``GRPO``: passes of 8 responses of 520 + 1,024 tokens.
    pytest.param(QWEN_3B, 8 * 1544, 1544, 80.2 * GIB, 0.09, id="recipe-3b"),
]


@pytest.mark.parametrize(
    (
        "config",
        "ranks",
        "tokens",
        "sequence",
        "packed",
        "optimizer",
        "measured",
        "share",
    ),
    MEASURED_PASSES,
)
def test_measured_passes(
    config, ranks, tokens, sequence, packed, optimizer, measured, share
):
    """The most that PyTorch's allocator has given away."""
    shape, work = read_shape(config), Workload(sequence=sequence, packed=packed)
    memory = trainer_memory(shape, work, ranks=ranks, tokens=tokens)
    found = memory.peaks["training"]
    if not optimizer:
        found -= memory.kept["optimizer"]
    assert found == pytest.approx(measured, rel=share)


@pytest.mark.parametrize(
    ("config", "tokens", "sequence", "measured", "share"), MEASURED_GPUS
)
def test_measured_gpus(config, tokens, sequence, measured, share):
    """What the driver says of the whole GPU, with all that is no tensor."""
    shape, work = read_shape(config), Workload(sequence=sequence, packed=False)
    memory = trainer_memory(shape, work, ranks=1, tokens=tokens)
    assert memory.peak + RUNTIME == pytest.approx(measured, rel=share)
    assert memory.peak < measured


def test_a_measured_colocated_run():
    """0.5B shapes beside a server with half of an H200: 81.5 GiB at most."""
    shape = read_shape(QWEN_05B)
    memory = trainer_memory(shape, Workload(sequence=1544), ranks=1, tokens=8 * 1544)
    server = 0.5 * 139.8 * GIB
    found = server + memory.peaks["updating"] + 2 * RUNTIME
    assert found == pytest.approx(81.5 * GIB, rel=0.03)


def test_checkpointing_leaves_the_input_of_each_layer():
    shape = read_shape(QWEN_7B)
    padded = Workload(packed=False)
    kept = pass_memory(shape, padded, autocast=False, tokens=16_384)
    assert kept["activations"] == 28 * 16_384 * 3584 * 2
    assert kept["logits or a layer"] == 16_384 * 152_064 * 6
    whole = pass_memory(
        shape, replace(padded, checkpointing=False), autocast=False, tokens=16_384
    )
    assert whole["activations"] > 20 * kept["activations"]


def test_packed_responses_have_logits_without_a_gradient_beside_them():
    shape = read_shape(QWEN_7B)
    kept = pass_memory(shape, Workload(packed=True), autocast=True, tokens=16_384)
    head = 152_064 * 3584 * 2
    assert kept["logits or a layer"] == 16_384 * 152_064 * 2 + head
    assert not kept["attention mask"]


def test_a_server_shares_heads_and_repeats_them():
    shape = read_shape(QWEN_7B)
    sizes = [
        server_memory(shape, tp_size=size, memory=80 * GIB, share=0.85)
        for size in (1, 4, 28)
    ]
    assert [each.token for each in sizes] == [57_344, 14_336, 14_336]
    assert sizes[0].cache == 0.85 * 80 * GIB - 2 * shape.parameters
    assert sizes[0].tokens == int(sizes[0].cache // 57_344)


SHAPES = [QWEN_05B, QWEN_3B, QWEN_7B, LLAMA_8B]


@pytest.mark.parametrize(
    ("gpus", "memory"), diagonal([1, 2, 3, 8, 16, 64], [24, 80, 139])
)
def test_recommended_arrangements_fit(gpus, memory):
    cluster = Cluster(gpus=gpus, memory=memory * GIB)
    for shape in map(read_shape, SHAPES):
        for work in (
            Workload(),
            Workload(lora=16),
            Workload(reference=True, sequence=8192),
        ):
            check(shape, cluster, work, arrange(shape, cluster, work))


def check(
    shape: Shape, cluster: Cluster, work: Workload, found: Arrangement | NothingFits
):
    if isinstance(found, NothingFits):
        assert found.reasons
        assert found.remedies
        return
    servers = found.replicas * found.tp_size
    assert found.replicas >= 1
    assert shape.heads % found.tp_size == 0
    assert found.trainer.peak <= cluster.usable
    assert found.server.tokens >= work.group_size * work.sequence
    assert found.ranks <= work.responses
    if found.place == "separate":
        assert found.ranks + servers <= cluster.gpus
        assert found.unused == cluster.gpus - found.ranks - servers
        assert found.ranks % cluster.per_node == 0 or cluster.nodes == 1
        return
    assert max(found.ranks, servers) <= cluster.gpus
    # The trainer's weights and optimizer stay while the server generates.
    assert (
        found.share * cluster.memory + found.trainer.peaks["updating"]
        <= cluster.usable - RUNTIME
    )


def test_one_gpu_is_shared_and_more_are_not():
    shape = read_shape(QWEN_05B)
    one, two, eight = (
        arrange(shape, Cluster(gpus=gpus), Workload()) for gpus in (1, 2, 8)
    )
    assert (one.place, one.ranks, one.replicas) == ("colocated", 1, 1)
    assert (two.place, two.ranks, two.replicas) == ("separate", 1, 1)
    assert (eight.place, eight.ranks, eight.replicas) == ("separate", 4, 4)


def test_trainers_and_servers_have_whole_machines():
    found = arrange(read_shape(QWEN_7B), Cluster(gpus=32), Workload())
    assert (found.ranks, found.replicas) == (16, 16)


def test_a_batch_keeps_so_many_ranks_busy():
    work = Workload(groups_per_batch=4)
    found = arrange(read_shape(QWEN_05B), Cluster(gpus=64), work)
    assert found.ranks == 8
    larger = arrange(
        read_shape(QWEN_05B), Cluster(gpus=64), Workload(groups_per_batch=64)
    )
    assert larger.ranks == 32


@pytest.mark.parametrize(
    ("gpus", "wish", "reason"),
    [
        (8, {"tp_size": 3}, "tp_size=3 does not divide"),
        (2, {"tp_size": 4}, "No machine has the tp_size=4 GPUs"),
        (16, {"place": "colocated"}, "on one machine, and these are on 2"),
    ],
)
def test_a_wish_that_no_memory_would_fulfil(gpus, wish, reason):
    found = arrange(read_shape(QWEN_7B), Cluster(gpus=gpus), Workload(), **wish)
    assert isinstance(found, NothingFits)
    assert reason in found.reasons[0]
    assert found.remedies


def test_what_would_fit_does():
    shape, cluster = read_shape(QWEN_7B), Cluster(gpus=1)
    found = arrange(shape, cluster, Workload())
    assert isinstance(found, NothingFits)
    assert "The trainer needs 1 x 113" in found.reasons[-2]
    assert "An adapter of rank 16 (--lora 16) fits these GPUs." in found.remedies
    assert isinstance(arrange(shape, cluster, Workload(lora=16)), Arrangement)
    assert "2 GPUs of this kind would do" in found.remedies[-1]
    assert isinstance(arrange(shape, replace(cluster, gpus=2), Workload()), Arrangement)


@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("lora", [None, 16])
def test_the_command_is_one_of_the_recipe(gpus, lora, tmp_path, monkeypatch):
    """Its words are read by the program that they are for."""
    monkeypatch.chdir(EXAMPLES / "grpo")
    monkeypatch.syspath_prepend(str(EXAMPLES / "grpo"))
    read = runpy.run_path("train.py")["read_arguments"]
    shape = replace(read_shape(QWEN_3B), name="some/model")
    memory = (139 if gpus == 1 else 80) * GIB
    found = arrange(shape, Cluster(gpus=gpus, memory=memory), Workload(lora=lora))
    line = command_of(shape, found)
    before, _, words = line.partition(" run.yaml ")
    assert before.endswith("examples/grpo/train.py")
    arguments = read(["cpu.yaml", *words.split(), f"output={tmp_path}"])
    assert arguments["model"] == "some/model"
    assert arguments["max_tokens_per_pass"] == found.tokens_per_pass
    engine = arguments["engine"]
    assert engine["mem_fraction_static"] == found.share
    assert engine["num_replicas"] * engine["tp_size"] <= gpus
    GRPO(**{**arguments, "prompts": [{"query": "1+1="}] * 16, "eval_prompts": None})


QWEN_32B = Qwen2Config(
    hidden_size=5120,
    intermediate_size=27_648,
    vocab_size=152_064,
    num_attention_heads=40,
    num_key_value_heads=8,
    num_hidden_layers=64,
    max_position_embeddings=32_768,
)


@pytest.mark.parametrize("place", ["separate", "colocated"])
def test_a_server_has_the_fewest_gpus_that_hold_a_batch(place):
    """One GPU holds the model and a group, and few responses beside it."""
    shape, cluster, work = read_shape(QWEN_32B), Cluster(gpus=8), Workload(lora=32)
    found = arrange(shape, cluster, work, place=place)
    sizes = [1, 2, 4] if place == "separate" else [1, 2, 4, 8]
    each = [arrange(shape, cluster, work, place=place, tp_size=n) for n in sizes]
    held = {a.tp_size: a.sequences for a in each if isinstance(a, Arrangement)}
    enough = [size for size, count in held.items() if count >= work.responses]
    assert found.tp_size == (enough[0] if enough else max(held, key=held.get))


def test_a_batch_that_few_ranks_can_share(capsys):
    """A rank has at least one response; no number of GPUs would do, but a batch."""
    shape, work = read_shape(QWEN_7B), Workload(group_size=1, groups_per_batch=1)
    cluster = Cluster(gpus=8)
    found = arrange(shape, cluster, work)
    assert isinstance(found, NothingFits)
    assert "A batch of 1 can be shared by as many GPUs" in found.reasons[0]
    assert "--groups-per-batch 8" in found.remedies[-1]
    wider = replace(work, groups_per_batch=8)
    assert isinstance(arrange(shape, cluster, wider), Arrangement)
    assert "Take a --group-size of 2 or more" in nothing_text(
        shape, cluster, work, found
    )


def test_how_much_is_left_is_said():
    shape = read_shape(QWEN_7B)
    found = arrange(shape, Cluster(gpus=4), Workload())
    left = found.cluster.usable - found.trainer.peak
    assert found.margin == left < THIN * found.trainer.peak
    text = to_text(shape, found)
    assert f"A thin margin: the peak leaves {left / GIB:.1f} GiB" in text
    roomy = arrange(shape, Cluster(gpus=8), Workload())
    assert "A thin margin" not in to_text(shape, roomy)
    tokens = found.tokens_per_pass // 2
    less = trainer_memory(shape, found.work, ranks=found.ranks, tokens=tokens).peak
    left = found.cluster.usable - less
    assert f"max_tokens_per_pass={tokens} leaves {left / GIB:.1f} GiB" in text
    # A pass has a whole response, whatever its limit.
    work = replace(found.work, sequence=found.tokens_per_pass)
    short = replace(found, work=work)
    assert "Shorter sequences or more trainer ranks" in to_text(shape, short)
    arguments = grpo_arguments(found)
    assert (arguments["max_staleness"], arguments["correction"]) == (
        1,
        "decoupled_token_is",
    )


def test_the_command_line(tiny_model_path, capsys):
    words = ["plan", "--model", tiny_model_path, "--sequence", "128", "--gpu-memory"]
    assert main([*words, "24", "--gpus", "2"]) == 0
    text = capsys.readouterr().out
    assert "Trainer: 1 GPU of its own" in text
    assert "Servers: 1 server of tp_size=1" in text
    assert f"python examples/grpo/train.py run.yaml model={tiny_model_path}" in text
    assert main([*words, "24", "--gpus", "1", "--prompt", "96"]) == 0
    # Of 8 * 128 tokens, 96 + 8 * 32 are distinct.
    assert "has 2.91 times as many tokens" in capsys.readouterr().out
    assert main([*words, "24", "--gpus", "2", "--json", "--place", "colocated"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["place"], found["ranks"]) == ("colocated", 2)
    assert found["arguments"]["colocated"]
    assert main([*words, "3", "--gpus", "1"]) == 1
    assert "Nothing fits." in capsys.readouterr().out


def test_a_configuration_file(tiny_model_path, tmp_path, capsys):
    """The command has the folder; a wrong value is told."""
    words = ["plan", "--gpus", "1", "--gpu-memory", "24", "--sequence", "128"]
    file = Path(tiny_model_path, "config.json")
    assert main([*words, "--model", str(file)]) == 0
    assert f" model={tiny_model_path} " in capsys.readouterr().out
    wrong = {**json.loads(file.read_text()), "hidden_size": "wide"}
    (tmp_path / "config.json").write_text(json.dumps(wrong))
    assert main([*words, "--model", str(tmp_path)]) == 2
    assert "'hidden_size' expected int" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "/no/such/model"], "There is no model folder '/no/such/model'"),
        (["--model", "./nothere"], "There is no model folder './nothere'"),
        (["--gpu-memory", "0.001"], "less than the 2 GiB of a GPU that CUDA takes"),
        (["--sequence", "100000"], "is more than the"),
        (["--sequence", "9", "--prompt", "9"], "leaves no token of --sequence 9"),
    ],
)
def test_invalid_arguments_are_refused(words, message, tiny_model_path, capsys):
    begin = ["plan", "--gpus", "1", "--model", tiny_model_path]
    assert main([*begin, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, capsys):
    """A misspelt name does not wait for the retries of transformers."""
    urls = []

    def nowhere(*names):
        urls.append(names)
        return "http://127.0.0.1:9/"

    monkeypatch.setattr("huggingface_hub.hf_hub_url", nowhere)
    assert main(["plan", "--model", "nobody/misspelt", "--gpus", "1"]) == 2
    error = capsys.readouterr().err
    assert "There is no folder 'nobody/misspelt'" in error
    assert "the hub cannot be reached" in error
    assert urls == [("nobody/misspelt", "config.json")]
