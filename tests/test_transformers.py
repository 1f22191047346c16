"""One round of every method with small networks of Hugging Face's transformers, or its refusal by name."""

import runpy
from types import SimpleNamespace

import pytest
import torch

import fedhet
from fedhet.config import configuration
from fedhet.data.own import as_client_data
from fedhet.errors import FedhetError
from fedhet.methods import registry
from fedhet.models.representation import Representation
from fedhet.results.history import final_clients, read_clients
from tests.data.test_inputs import built, texts

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("home", "no_report")

SIZES = {"vocab_size": 20, "max_position_embeddings": 16, "pad_token_id": 0}
HIDDEN = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **HIDDEN))


def llama():
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES, **HIDDEN))


def distilbert():
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    return transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**SIZES, **sizes))


def gpt2():
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
    return transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**SIZES, **sizes))


def data(client):
    number = client.partition_id
    return {"train": texts(12, number), "test": texts(6, 50 + number), "public": texts(12, 99)}


SETTINGS = {
    "fedma": {"rounds": 0},
    "fedrep": {"fedrep.body-epochs": 1, "local-epochs": 2},
    "depthfl": {"depthfl.depths": "2,1"},
    "inclusivefl": {"inclusivefl.depths": "2,1"},
    "lora": {"lora.ranks": "4,2"},
}
CLASSICAL = ("nearest-neighbour", "logistic-regression", "label-spreading", "gradient-boosting")
REFUSED = {
    ("bert", "fedharm"): "fedharm.blocks = .*BertForSequenceClassification has 1 stages",
    ("llama", "fedharm"): "fedharm.blocks = .*LlamaForSequenceClassification has 1 stages",
    ("llama", "fedma"): "no rule for operator aten.pow .*input_layernorm' of LlamaForSequenceClassification",
    ("llama", "pfnm"): "no rule for operator aten.pow .*input_layernorm' of LlamaForSequenceClassification",
    **{
        (name, method): "views are known for images .* return a function `augment` with the data"
        for name in ("bert", "llama")
        for method in ("fedsimclr", "fedsimsiam", "fedca", "fedcon")
    },
}


FOUR = ("local", "fedproto", "fedmd", "fedhenn", "fml", "fedkd", "fedmrl", "fedgh", "layer-average", "flha-ghn")
"""Methods that run with four unlike networks at once; others run with two equal ones."""
ROUNDS = [
    *((method, [bert, distilbert, gpt2, llama]) for method in FOUR),
    *((method, [bert, llama]) for method in ("fd", "fedtgp", "flha-distillation", "pfedhn", "ensemble", *CLASSICAL)),
]
TWO = [method for method in registry.own_methods() if method not in dict(ROUNDS)]
ROUNDS += [(method, [bert] * 2) for method in TWO if ("bert", method) not in REFUSED]
ROUNDS += [
    pytest.param(method, [llama] * 2, marks=pytest.mark.long) for method in TWO if ("llama", method) not in REFUSED
]


def run(method, out, models, **settings):
    chosen = {"method": method, "clients": len(models), "rounds": 1, "workers": 1}
    chosen |= {} if method in CLASSICAL else {"local-epochs": 1}
    chosen |= SETTINGS.get(method, {}) | settings
    make = {"model": lambda client: models[client.partition_id](), "data": data}
    return fedhet.run(chosen, **make, out=out, progress=False)


@pytest.mark.parametrize(("method", "models"), ROUNDS)
def test_a_round_of_every_method(tmp_path, method, models):
    done = run(method, tmp_path / "run", models)
    assert done.summary["failures"] == 0
    if len(models) == 2 or method == "fedmrl":  # whose models are two networks
        return
    loaded = fedhet.load_model(done, 3, model=lambda client: models[client.partition_id]())
    inputs, _ = texts(4, 0)
    with torch.no_grad():
        outputs = loaded(**inputs)
    # A network that predicts by prototypes returns its scores.
    assert getattr(outputs, "logits", outputs).shape == (4, 2)


@pytest.mark.parametrize(("model", "method"), REFUSED)
def test_refusals_name_the_network(tmp_path, model, method):
    with pytest.raises(FedhetError, match=REFUSED[model, method]):
        run(method, tmp_path / "run", [{"bert": bert, "llama": llama}[model]] * 2)


def test_lora_adapts_gpt2(tmp_path):
    done = run("lora", tmp_path / "run", [gpt2] * 2, **{"rounds": 2, "lora.aggregate": "svd"})
    assert done.summary["failures"] == 0
    reported = {each.client: each.accuracy for each in final_clients(read_clients(done.folder))}
    for client, accuracy in reported.items():
        inputs, labels = data(SimpleNamespace(partition_id=int(client)))["test"]
        with torch.no_grad():
            logits = fedhet.load_model(done, client, model=gpt2)(**inputs).logits
        assert (logits.argmax(1) == labels).float().mean().item() == pytest.approx(accuracy, abs=1e-6)


def test_the_representation_of_a_decoder_is_that_of_the_last_token():
    inputs = as_client_data("0", (texts(5, 0), texts(5, 1))).train.inputs
    for make in (llama, gpt2):
        network = built(make).eval()
        with torch.no_grad():
            assert torch.allclose(network.score(Representation(network)(inputs)), network(inputs), atol=1e-5)


@pytest.mark.long
def test_the_example_runs_on_its_sentences(tmp_path):
    example = runpy.run_path(str(configuration.run_configs() / "text" / "example.py"))
    compared, adapted = example["main"](out=tmp_path / "runs", seeds=[0], rounds=1)
    assert compared.failure == ""
    assert adapted.summary["failures"] == 0
