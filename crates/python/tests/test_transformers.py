"""Models of `transformers`: one line converts them, and their own machinery goes on."""

import copy
import warnings

import nibble.torch as nt
import pytest
import torch

transformers = pytest.importorskip("transformers")


SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}


def qwen3_moe():
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
    return transformers.Qwen3MoeForCausalLM(config).bfloat16()


def qwen3():
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).bfloat16()


def batch(seed=0):
    torch.manual_seed(seed)
    return torch.randint(0, 256, (4, 64))


def test_a_model_is_converted_whole_and_saves_less():
    plain, model = qwen3_moe(), qwen3_moe()
    names = list(model.state_dict())
    nt.convert(model, "mxfp4-hopper")
    assert list(model.state_dict()) == names
    text = nt.explain(model)
    assert "mlp.experts" in text and "q_proj" in text and "gate" not in text.replace("gate_up", "")
    ids = batch()
    with nt.ledger(plain) as before:
        wanted = plain(ids, labels=ids).loss
    with nt.ledger(model) as after:
        loss = model(ids, labels=ids).loss
    assert abs(loss - wanted) < 0.02
    assert after.bytes < before.bytes
    wanted.backward()
    loss.backward()
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        error = (got.grad.double() - want.grad.double()).norm() / want.grad.double().norm()
        assert error < 0.5, name


def test_experts_alone_by_transformers_own_switch():
    import nibble.torch.transformers  # noqa: F401

    model, converted = qwen3_moe(), qwen3_moe()
    model.set_experts_implementation("nibble")
    nt.convert(converted, "mxfp4-hopper", filter=["*.experts"])
    ids = batch()
    assert torch.equal(model(ids).logits, converted(ids).logits)


def test_experts_that_the_filter_leaves_out_are_no_warning():
    model = qwen3_moe()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nt.convert(model, "mxfp4-hopper", filter=["*_proj"])
    assert "experts" not in nt.explain(model)


def test_bf16_experts_are_those_of_transformers_within_rounding():
    plain, model = qwen3_moe(), qwen3_moe()
    nt.convert(model, "bf16")
    ids = batch()
    a, b = plain(ids).logits.float(), model(ids).logits.float()
    assert (a - b).norm() / a.norm() < 0.02


def test_what_nibble_cannot_compute_is_refused_by_name():
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = transformers.GptOssForCausalLM(config)
    with pytest.warns(UserWarning, match="GptOssExperts has biases"):
        nt.convert(model, "mxfp4-hopper")


def test_a_refused_conversion_changes_nothing():
    model = qwen3_moe()
    with pytest.raises(ValueError, match="share one implementation"):
        nt.convert(model, "mxfp4-hopper", filter=["*.0.mlp.experts", "*_proj"])
    with pytest.raises(ValueError, match='no recipe "nope"'):
        nt.convert(model, "nope", filter=["*.experts"])
    assert not any(isinstance(module, nt.Linear) or hasattr(module, "nibble") for module in model.modules())


# The Trainer does not resume a model with experts, converted or not: it saves a file for each expert's weights, and looks for stacks.
def test_their_trainer_resumes_with_the_same_bits(tmp_path, device, monkeypatch):
    import nibble.torch.transformers

    # On a GPU, PyTorch sums gradients of embeddings in any order unless told otherwise.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)

    data = [{"input_ids": batch(i)[0].cpu(), "labels": batch(i)[0].cpu()} for i in range(48)]

    def trainer(folder, steps):
        model = nt.convert(qwen3(), "ablation-mxfp4-sr-rht-tf")
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            save_steps=2,
            report_to=[],
            use_cpu=device == "cpu",
            disable_tqdm=True,
            seed=1,
        )
        return transformers.Trainer(
            model, arguments, train_dataset=data, callbacks=[nibble.torch.transformers.StepOfTrainer()]
        )

    whole = trainer(tmp_path / "whole", 4)
    whole.train()
    first = trainer(tmp_path / "parts", 2)
    first.train()
    rest = trainer(tmp_path / "parts", 4)
    rest.train(resume_from_checkpoint=True)
    a, b = (copy.deepcopy(t.model.state_dict()) for t in (whole, rest))
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a[name], b[name]) for name in a)
