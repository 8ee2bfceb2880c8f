"""Models of `torchtitan`: its overrides convert them, and its schedulers tell the layers the step."""

import json
from types import SimpleNamespace

import nibble.torch as nt
import pytest
import torch

pytest.importorskip("torchtitan")
pytest.importorskip("torchtitan.config.override")

import nibble.torch.torchtitan as titan
from torch.nn.attention import SDPBackend
from torchtitan.config import ConfigManager
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

VOCAB = 2048


def trainer_config(recipe=None, *, follow=True, **arguments):
    """torchtitan's MoE debug model with two layers and eight experts, and attention that needs no GPU."""
    config = qwen3_moe_debug()
    config.training.steps = 8
    config.training.seq_len = 32
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        moe, routed = layer.moe, layer.moe.routed_experts
        for part in (moe, moe.router, routed.inner_experts, routed.token_dispatcher):
            part.num_experts = 8
        moe.router.gate.out_features = 8
        moe.router.top_k = routed.token_dispatcher.top_k = 2
    if recipe is not None:
        imports = [("nibble.torch.torchtitan.layers", {"recipe": recipe, **arguments})]
        imports += ["nibble.torch.torchtitan.trainer_step"] * follow
        config.override = OverrideConfig(imports=imports)
        apply_overrides(config.override, config)
    return config


def built(config, device):
    model = config.model_spec.model.build()
    model.verify_module_protocol()
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(device))
    for layer in model.layers.values():
        # The others sum gradients in any order.
        layer.attention.inner_attention.sdpa_backends = [SDPBackend.MATH]
    return model.bfloat16()


class Run:
    """A training run by torchtitan's parts, in the order of its trainer."""

    def __init__(self, config, device):
        self.model = built(config, device)
        self.optimizers = config.optimizer.build(model_parts=[self.model])
        self.schedulers = config.lr_scheduler.build(optimizers=self.optimizers, training_steps=config.training.steps)

    def train(self, steps):
        for step in steps:
            for micro_batch in range(2):
                loss(self.model, 2 * step + micro_batch).backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedulers.step()


def loss(model, seed=0, length=32):
    torch.manual_seed(seed)
    ids = torch.randint(0, VOCAB, (2, length + 1))
    logits = model(ids[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@pytest.mark.parametrize(("recipe", "bound"), [("bf16", 0.03), ("mxfp4-hopper", 0.5)])
def test_a_converted_model_trains_like_its_own(recipe, bound, device):
    # In float32, as rounding to bfloat16 between layers would send some tokens to other experts.
    plain, model = (built(trainer_config(of, follow=False), device).float() for of in (None, recipe))
    before, after = plain.state_dict(), model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    wanted, got = loss(plain), loss(model)
    assert abs(got - wanted) / wanted < 0.02
    wanted.backward()
    got.backward()
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        error = (b.grad.double() - a.grad.double()).norm() / a.grad.double().norm()
        assert error < bound, (name, error)


def test_all_but_routers_and_the_head_are_converted_and_save_less(device):
    plain, model = built(trainer_config(), device), built(trainer_config("mxfp4-hopper"), device)
    text = nt.explain(model)
    assert "layers.0.moe.routed_experts.inner_experts" in text and "layers.0.attention" in text
    assert "lm_head" not in text and "router" not in text
    with nt.ledger(plain) as before:
        loss(plain, length=256)
    with nt.ledger(model) as after:
        loss(model, length=256)
    of_experts = [
        sum(n for (name, _), n in each.bytes_of.items() if "routed_experts" in name) for each in (before, after)
    ]
    assert of_experts[1] < of_experts[0] / 3


def test_a_filter_selects_by_name(device):
    text = nt.explain(built(trainer_config("mxfp4-hopper", filter=["*.inner_experts"]), device))
    assert "inner_experts" in text and "attention" not in text


def test_a_resumed_run_has_the_same_bits(device, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    whole, first, rest = (Run(trainer_config("ablation-mxfp4-sr-rht-tf"), device) for _ in range(3))
    whole.train(range(3))
    first.train(range(1))
    rest.model.load_state_dict(first.model.state_dict())
    rest.optimizers.load_state_dict(first.optimizers.state_dict())
    rest.schedulers.load_state_dict(first.schedulers.state_dict())
    rest.train(range(1, 3))
    torch.use_deterministic_algorithms(False)
    a, b = whole.model.state_dict(), rest.model.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_micro_batches_draw_bits_of_their_own(device):
    model = Run(trainer_config("ablation-mxfp4-sr-rht-tf"), device).model
    gradients = []
    for _ in range(2):
        loss(model).backward()
        gradients.append(model.layers["0"].moe.routed_experts.inner_experts.w2_EDF.grad.clone())
        model.zero_grad()
    assert not torch.equal(*gradients)


def test_recomputed_layers_draw_the_bits_of_their_forward_pass(device):
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    gradients = []
    for policy in (None, FullAC.Config(), SelectiveAC.Config()):
        model = built(trainer_config("ablation-mxfp4-sr-rht-tf"), device)
        if policy is not None:
            policy.build().apply(model)
        titan.follow(model)
        loss(model).backward()
        gradients.append([p.grad for p in model.parameters()])
    for others in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], others, strict=True))


@pytest.mark.cpu_only
def test_mistakes_are_named():
    with pytest.raises(ValueError, match='no recipe "nope"'):
        trainer_config("nope")
    with pytest.raises(ValueError, match="no layer of Qwen3Model.Config was converted"):
        trainer_config("mxfp4-hopper", filter=["*.no_such_layer"])
    with pytest.raises(ValueError, match="depends on the run"):
        trainer_config("nvfp4-nvidia")
    with pytest.raises(ValueError, match="made for 9 steps, and the run has 8"):
        Run(trainer_config("nvfp4-nvidia", steps=9), "cpu")


@pytest.mark.cpu_only
def test_a_recipe_that_depends_on_the_step_needs_the_step():
    model = built(trainer_config("ablation-mxfp4-sr-rht-tf", follow=False), "cpu")
    with pytest.raises(ValueError, match="list nibble.torch.torchtitan.trainer_step"):
        loss(model)


@pytest.mark.cpu_only
@pytest.mark.parametrize("divided", ["tp_enabled", "ep_enabled"])
def test_experts_divided_by_torchtitan_are_refused(divided):
    dims = {"tp_enabled": False, "ep_enabled": False, "spmd_backend": "spmd_types", divided: True}
    experts = built(trainer_config("bf16"), "cpu").layers["0"].moe.routed_experts
    with pytest.raises(NotImplementedError, match="do not support tensor or expert parallelism"):
        experts.parallelize(SimpleNamespace(**dims))


@pytest.mark.cpu_only
def test_the_command_line_of_the_documentation_is_understood():
    imports = ['nibble.torch.torchtitan.layers={"recipe": "mxfp4-hopper"}', "nibble.torch.torchtitan.trainer_step"]
    assert all(target in titan.__doc__ for target in imports)
    command = ["--module", "qwen3", "--config", "qwen3_moe_debug", "--override.imports", *imports]
    config = ConfigManager().parse_args(command)
    assert len(apply_overrides(config.override, config)) == 2
    json.dumps(config.to_dict())  # torchtitan logs it
