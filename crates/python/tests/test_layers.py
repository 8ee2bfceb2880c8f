"""Layers: gradients, saved bytes, and PyTorch's own machinery around them."""

import copy
import pickle

import nibble.torch as nt
import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

#: Recipes that need a run: their scales come from earlier steps, or they depend on the run's sizes.
OF_A_RUN = ("fp8-delayed", "nvfp4-nvidia")
RECIPES = [recipe for recipe in nt.recipes() if recipe not in OF_A_RUN]
#: One of each kind: plain, FP8, stored in four bits, stochastic rounding, random signs.
SOME = ("bf16", "fp8-flow", "mxfp4-hopper", "nvfp4", "ablation-mxfp4-sr-rht-tf")


def error(got, want):
    """Relative L2 error."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def mlp(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 128)).to(dtype)


class Stacks(torch.nn.Module):
    """Experts of somebody's own."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = (torch.nn.Parameter(torch.zeros(2, 64, 64)) for _ in range(2))


def results(model, x, run=None):
    """Output and all gradients."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = (run or model)(x)
    y.float().pow(2).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def routed(x, gate_up, down, expert, gate):
    """The definition of the experts."""
    y = torch.zeros_like(x)
    for e in range(gate_up.shape[0]):
        token, slot = (expert == e).nonzero(as_tuple=True)
        g, u = F.linear(x[token], gate_up[e]).chunk(2, -1)
        y = y.index_add(0, token, F.linear(F.silu(g) * u, down[e]) * gate[token, slot].unsqueeze(1))
    return y


def expert_layer(dtype, tokens=100, d=128, ffn=256, experts=8, top_k=2):
    torch.manual_seed(0)
    gate, expert = torch.randn(tokens, experts).softmax(-1).topk(top_k)
    weights = [0.1 * torch.randn(experts, 2 * ffn, d), 0.1 * torch.randn(experts, d, ffn)]
    x, gate_up, down = (w.to(dtype).requires_grad_() for w in (torch.randn(tokens, d), *weights))
    return x, gate_up, down, expert, gate.clone().requires_grad_()


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_those_of_the_product_within_the_formats_error(recipe):
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 384).bfloat16()
    x, w = torch.randn(128, 256), torch.randn(128, 384)
    got = nt.Linear.of(linear, recipe=recipe, layer_name="x", random_bits=nt.RandomBits(3))
    a = x.bfloat16().requires_grad_()
    y = got(a)
    (y.float() * w).sum().backward()
    wide = copy.deepcopy(linear).double()
    b = a.detach().double().requires_grad_()
    z = wide(b)
    (z * w).sum().backward()
    bound = 0.003 if recipe == "f32" else 0.01 if recipe == "bf16" else 0.25
    for gotten, wanted in [(y, z), (a.grad, b.grad), (linear.weight.grad, wide.weight.grad)]:
        assert error(gotten, wanted) < bound
    assert error(linear.bias.grad, wide.bias.grad) < 0.003
    assert linear.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", SOME)
def test_experts_are_their_definition_within_the_formats_error(recipe, dtype):
    inputs = expert_layer(dtype)
    w = torch.randn(100, 128)
    wanted = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    floats = [0, 1, 2, 4]
    y, z = nt.experts(*inputs, recipe=recipe), routed(*wanted)
    got = torch.autograd.grad((y.float() * w).sum(), [inputs[i] for i in floats])
    want = torch.autograd.grad((z * w).sum(), [wanted[i] for i in floats])
    bound = 0.008 if recipe == "bf16" else 0.45
    for a, b in [(y, z), *zip(got, want, strict=True)]:
        assert error(a, b) < bound
    assert [g.dtype for g in got] == [dtype, dtype, dtype, torch.float32]


def test_gradients_are_exact_in_f32():
    inputs = expert_layer(torch.float32, tokens=37)
    wanted = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    floats = [0, 1, 2, 4]
    got = torch.autograd.grad(nt.experts(*inputs, recipe="f32").pow(2).sum(), [inputs[i] for i in floats])
    want = torch.autograd.grad(routed(*wanted).pow(2).sum(), [wanted[i] for i in floats])
    assert all(error(a, b) < 2e-6 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("recipe", SOME)
def test_what_is_saved_is_what_the_recipe_says(recipe):
    model = torch.nn.Sequential(nt.Linear(256, 128, dtype=torch.bfloat16, recipe=recipe))
    x = torch.randn(128, 256, dtype=torch.bfloat16, requires_grad=True)
    with nt.ledger(model) as saved:
        model(x)
    bits = {"bf16": 16, "fp8-flow": 8 + 8 / 128, "mxfp4-hopper": 4 + 8 / 32, "nvfp4": 4 + 8 / 16 + 32 / 256}
    wanted = x.numel() * bits.get(recipe, 4 + 8 / 32) / 8
    # A recipe whose bits depend on the step also keeps its number, four bytes.
    assert saved.of("0") - wanted in (0, 4)
    assert saved.bytes == saved.of("0")


@pytest.mark.parametrize("recipe", SOME)
def test_operators_keep_the_rules_of_pytorch(recipe, device):
    x, weight, bias = torch.randn(128, 256).bfloat16(), torch.randn(384, 256), torch.randn(384)
    linear = (x, weight, bias, None, recipe, "x", 0)
    opcheck(torch.ops.nibble.linear.default, linear)
    saved = torch.ops.nibble.linear.default(*linear)[1:] or [x]
    dy = torch.randn(128, 384).bfloat16()
    opcheck(torch.ops.nibble.linear_backward.default, (saved, weight, bias, dy, None, recipe, "x", 0, [True, True]))
    x, gate_up, down, expert, gate = (a.detach() for a in expert_layer(torch.bfloat16))
    layer = (gate_up, down, expert.int(), gate)
    # What is saved has room for the most rows that routing can need. A GPU leaves the rest as it is, so two calls differ there.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor") + (("test_aot_dispatch_dynamic",) if device == "cpu" else ())
    opcheck(torch.ops.nibble.experts.default, (x, *layer, None, recipe, "x", 0), test_utils=tests)
    saved = torch.ops.nibble.experts.default(x, *layer, None, recipe, "x", 0)[1:]
    opcheck(torch.ops.nibble.experts_backward.default, (saved, *layer, torch.randn_like(x), None, recipe, "x", 0, [False, True]))


@pytest.mark.parametrize("recipe", SOME)
def test_checkpointing_compiling_and_repeating_give_the_same_bits(recipe):
    model = nt.convert(mlp(), recipe)
    x = torch.randn(4, 30, 256).bfloat16()
    bits = nt.random_bits(model)

    def at_step(run):
        bits.set(5)
        return results(model, x, run)

    once = at_step(model)
    assert equal(once, at_step(model))
    assert equal(once, at_step(lambda x: checkpoint(model, x, use_reentrant=False)))
    assert bits.step == 6
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert equal(once, at_step(compiled))
    model.eval()
    with torch.no_grad():
        bits.set(6)
        assert torch.equal(model(x), once[0])


def test_random_bits_go_on_after_a_restart():
    model, x = nt.convert(mlp(), "ablation-mxfp4-sr-rht-tf", seed=7), torch.randn(128, 256).bfloat16()
    first = results(model, x)
    state = copy.deepcopy((model.state_dict(), nt.random_bits(model).state_dict()))
    second = results(model, x)
    assert not equal(first, second), "each step draws its own bits"
    again = nt.convert(mlp(), "ablation-mxfp4-sr-rht-tf", seed=0)
    again.load_state_dict(state[0])
    nt.random_bits(again).load_state_dict(state[1])
    assert equal(second, results(again, x))


def test_a_step_beyond_32_bits_has_bits_too():
    bits = nt.RandomBits(step=2**31 + 5)
    assert bits.time(torch.get_default_device()).tolist() == [5] and bits.step == 2**31 + 5


def test_state_dict_and_parameters_stay_as_they_were():
    model = mlp()
    names, parameters = list(model.state_dict()), list(model.parameters())
    converted = nt.convert(model, "mxfp4-hopper")
    assert converted is model and list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    mlp().load_state_dict(model.state_dict())


def test_gradients_accumulate_and_frozen_weights_have_none():
    model, x = nt.convert(mlp(torch.float32), "bf16"), torch.randn(128, 256)
    once = results(model, x)
    model.zero_grad()
    for _ in range(2):
        model(x).float().pow(2).sum().backward()
    assert all(error(p.grad, 2 * g) < 1e-6 for p, g in zip(model.parameters(), once[2:], strict=True))
    model[0].weight.requires_grad_(False)
    model.zero_grad()
    model(x).float().sum().backward()
    assert model[0].weight.grad is None and model[0].bias.grad is not None


@pytest.mark.parametrize("recipe", SOME)
def test_frozen_weights_change_no_other_gradient(recipe):
    inputs = expert_layer(torch.bfloat16)
    floats = [0, 1, 2, 4]

    def gradients(frozen):
        x = [a.detach().requires_grad_(i in floats and i not in frozen) for i, a in enumerate(inputs)]
        nt.experts(*x, recipe=recipe).float().pow(2).sum().backward()
        return {i: x[i].grad for i in floats}

    whole = gradients([])
    for frozen in [[1], [2], [1, 2]]:
        some = gradients(frozen)
        assert all(some[i] is None if i in frozen else torch.equal(some[i], whole[i]) for i in floats)


@pytest.mark.parametrize("recipe", SOME)
def test_weights_that_stay_the_same_are_quantized_once(recipe):
    inputs = expert_layer(torch.bfloat16)
    model, (x, gate_up, down, expert, gate) = nt.convert(mlp(), recipe), inputs

    def step():
        nt.random_bits(model).set(5)
        h = nt.experts(*inputs, recipe=recipe, random_bits=nt.random_bits(model))
        return results(model, torch.cat([h, h], -1).detach()) + list(torch.autograd.grad(h.float().sum(), [x, gate_up, down, gate]))

    each = step()
    with nt.same_weights():
        assert equal(each, step())
        if recipe != "bf16":
            # A change that the weights' versions do not tell shows that the copies are those of before.
            for weight in (gate_up, down, model[0].weight, model[2].weight):
                weight.data.mul_(2)
            assert equal(each, step())
        with torch.no_grad():
            gate_up.add_(1)
            model[2].weight.add_(1)
        changed = step()
        assert not torch.equal(changed[0], each[0]) and not torch.equal(changed[-4], each[-4])
    assert not equal(changed, step()) if recipe != "bf16" else equal(changed, step())


@pytest.mark.parametrize("recipe", ["nvfp4-quartet2", "mxfp4-hopper", "ablation-mxfp4-sr-rht-tf"])
def test_the_same_weights_serve_all_micro_batches(recipe):
    """Also where each step has other signs, by which the gradients and the weights are transformed alike."""
    model = nt.convert(torch.nn.Sequential(torch.nn.Linear(256, 256, dtype=torch.bfloat16)), recipe)
    xs = [torch.randn(128, 256).bfloat16() for _ in range(3)]

    def dxs():
        nt.random_bits(model).set(5)
        return [results(model, x)[1] for x in xs]

    each = dxs()
    with nt.same_weights():
        shared = dxs()
    assert all(error(a, b) < 0.35 for a, b in zip(shared, each, strict=True))


def test_an_optimizer_step_ends_what_was_kept():
    layer, x = nt.Linear(256, 256, recipe="mxfp4-hopper"), torch.randn(128, 256)
    optimizer = torch.optim.SGD(layer.parameters(), lr=10.0, fused=True)
    with nt.same_weights():
        layer(x).square().sum().backward()
        optimizer.step()
        inside = layer(x)
    assert torch.equal(inside, layer(x))


def test_kept_weights_hold_no_memory_of_the_parameter(device):
    """FSDP2 frees the memory of gathered weights, and gathers them elsewhere, without a new version."""
    layer, x = nt.Linear(256, 256, recipe="bf16", dtype=torch.bfloat16), torch.randn(128, 256).bfloat16()
    weight, values = layer.weight, layer.weight.detach().clone()
    with nt.same_weights():
        once = layer(x)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
            size = weight.untyped_storage().size()
            weight.untyped_storage().resize_(0)
            others = [torch.randn(256, 256).bfloat16() for _ in range(4)]
            weight.untyped_storage().resize_(size)
            weight.copy_(values)
        assert torch.equal(layer(x), once) and others


def test_blocks_of_several_threads_end_one_by_one():
    from nibble.torch import weights

    first, second = nt.same_weights(), nt.same_weights()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert len(weights._blocks) == 1
    second.__exit__(None, None, None)
    assert not weights._blocks


def test_computed_weights_are_not_kept_and_a_second_derivative_is_refused():
    from nibble.torch import weights

    x, w = torch.randn(128, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    with nt.same_weights():
        nt.linear(x, w + 1, recipe="mxfp8")
        with torch.inference_mode():
            nt.linear(x, w * 1, recipe="mxfp8")
        assert not weights._blocks[-1]
        y = nt.linear(x, w, recipe="mxfp8")
        with pytest.raises(NotImplementedError, match="cannot be differentiated"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


def test_autocast_decides_the_type_of_activations(device):
    model = nt.convert(mlp(torch.float32), "mxfp4-hopper")
    with torch.autocast(device, torch.bfloat16):
        y = model(torch.randn(4, 256))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert model[0].weight.grad.dtype == torch.float32


def test_a_filter_chooses_and_heads_and_routers_are_left_alone():
    model = torch.nn.ModuleDict({name: torch.nn.Linear(64, 64) for name in ("up", "gate", "lm_head", "router")})
    nt.convert(model, "mxfp4-hopper")
    assert [name for name, module in model.items() if isinstance(module, nt.Linear)] == ["up"]
    nt.convert(model, "mxfp8", filter=["lm_*"])
    assert model["lm_head"].recipe == "mxfp8" and type(model["gate"]) is torch.nn.Linear
    assert "up: mxfp4-hopper" in nt.explain(model) and "lm_head: mxfp8" in nt.explain(model)
    wide = torch.nn.Sequential(mlp(), torch.nn.MultiheadAttention(64, 4), Stacks())
    nt.convert(wide, filter=lambda module, _: module.in_features == 512)
    assert type(wide[0][0]) is torch.nn.Linear and isinstance(wide[0][2], nt.Linear)
    nt.convert(model, "fp8-flow", filter="u*")
    assert model["up"].recipe == "fp8-flow"
    tied = torch.nn.ModuleDict({"table": torch.nn.Embedding(64, 64), "up": torch.nn.Linear(64, 64), "un": torch.nn.Linear(64, 64)})
    tied["un"].weight = tied["table"].weight
    nt.convert(tied)
    assert [name for name, module in tied.items() if isinstance(module, nt.Linear)] == ["up"]


def test_a_layer_that_the_formats_do_not_support_stays_with_a_warning():
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 100))
    with pytest.warns(UserWarning, match=r"1 \(128 to 100 features\)"):
        nt.convert(model, "nvfp4-quartet2")
    assert isinstance(model[0], nt.Linear) and type(model[1]) is torch.nn.Linear


def test_a_copy_of_a_model_counts_its_own_steps():
    model, x = nt.convert(mlp(), "ablation-mxfp4-sr-rht-tf"), torch.randn(4, 256).bfloat16()
    twin = copy.deepcopy(model)
    twin(x)
    assert [nt.random_bits(each).step for each in (model, twin)] == [0, 1]
    assert nt.random_bits(pickle.loads(pickle.dumps(twin))).step == 1


def test_a_recipe_is_explained_by_its_name():
    assert "mxfp4-hopper" in nt.recipes() and "MXFP4" in nt.recipes()["mxfp4-hopper"]
    text = nt.explain("mxfp4-hopper")
    assert "sent x        mxfp4" in text and "random bits" not in text
    assert "random bits" in nt.explain("ablation-mxfp4-sr")


def test_a_run_that_nobody_follows_is_told_so():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(256, 256).bfloat16()])})
    nt.convert(model, "nvfp4-nvidia", steps=100)
    with pytest.warns(UserWarning, match="progress before each step"):
        nt.random_bits(model).advance()


def test_a_recipe_may_be_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = "mxfp4-hopper"\ndescription = "mine"\n')
    model, x = nt.convert(mlp(), str(path)), torch.randn(128, 256).bfloat16()
    assert equal(results(model, x), results(nt.convert(mlp(), "mxfp4-hopper"), x))
    with pytest.raises(FileNotFoundError, match="absent.toml"):
        nt.convert(mlp(), str(tmp_path / "absent.toml"))


def test_a_recipe_that_depends_on_the_run_changes_with_its_progress():
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4)).bfloat16()
    model = torch.nn.ModuleDict({"layers": layers})
    plain = copy.deepcopy(model)
    nt.convert(model, "nvfp4-nvidia", steps=100)
    nt.convert(plain, "bf16")
    x = torch.randn(128, 256).bfloat16()
    is_bf16 = lambda: [torch.equal(a(x), b(x)) for a, b in zip(model["layers"], plain["layers"], strict=True)]  # noqa: E731
    bits = nt.random_bits(model)
    # The last 15 % of the layers are BF16, and in the last 18 % of the steps all are.
    assert is_bf16() == [False, False, False, True]
    assert "layers.0 and" not in nt.explain(model) and "nvfp4" in nt.explain(model)
    bits.progress = 0.81
    assert is_bf16() == [False, False, False, True]
    bits.progress = 0.82
    assert is_bf16() == [True] * 4 and "nvfp4 " not in nt.explain(model)
    again = nt.RandomBits(layers=4, steps=100)
    again.load_state_dict(bits.state_dict())
    assert again.at_this_point("nvfp4-nvidia") == bits.at_this_point("nvfp4-nvidia")


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: nt.convert(mlp(), "nope"), ValueError, 'no recipe "nope"'),
        (lambda: nt.convert(mlp(), "fp8-delayed"), ValueError, "earlier steps"),
        (lambda: nt.convert(mlp(), "nvfp4-nvidia"), ValueError, "depends on the run: give `convert` the number of steps"),
        (lambda: nt.linear(torch.ones(1, 64), torch.ones(64, 64), recipe="nvfp4?steps=3"), ValueError, "expected `.layers=N"),
        (lambda: nt.convert(torch.nn.Conv2d(3, 3, 3)), ValueError, "no layer of Conv2d"),
        (lambda: nt.convert(mlp())(torch.randn(4, 100).bfloat16()), ValueError, "last dimension of `x` is 100, expected the 256"),
        (lambda: nt.convert(mlp())(torch.randn(4, 256).half()), TypeError, "expected float32 or bfloat16"),
        (lambda: nt.random_bits(mlp()), ValueError, "convert first"),
        (lambda: nt.explain(mlp()), ValueError, "convert first"),
        (lambda: nt.convert(mlp().half()), TypeError, "0 has weights of torch.float16"),
        (lambda: nt.convert(mlp(), filter=["0", "*.dwn"]), ValueError, "patterns .'..dwn'. fit no layer"),
        (lambda: nt.convert(Stacks()), ValueError, "w1, w2: of no layer that is known here; if these are experts, see nibble.torch.Experts"),
        (lambda: setattr(nt.RandomBits(), "progress", 3), ValueError, "progress is 3, expected"),
        (lambda: nt.experts(*expert_layer(torch.float32)[:3], torch.ones(100, 2), torch.zeros(100, 2), recipe="bf16"), TypeError, "exchanged"),
        (lambda: nt.experts(*expert_layer(torch.float32)[:3], torch.zeros(9, 2).int(), torch.ones(9, 2), recipe="bf16"), ValueError, "`expert`"),
    ],
)
def test_a_mistake_is_an_exception_that_names_it(call, kind, words):
    with pytest.raises(kind, match=words):
        call()
