"""What every method that draws must show, on every kind of network."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import multitudes as mt
from tests.cases import CLASSES, by_compiling
from tests.drawing_cases import CASES, LEARNING_CASES, NETWORKS, SAMPLED, build

contract = pytest.mark.parametrize(("method", "network"), CASES)
learning = pytest.mark.parametrize(("method", "network"), LEARNING_CASES)


@contract
def test_evaluation_gives_draws_and_training_one(method: str, network: str) -> None:
    net, (x, _) = build(method, network), NETWORKS[network].batch()
    drawn = net.eval()(x, draws=4)
    assert drawn.shape == (4, 7, CLASSES)
    assert drawn.dtype == torch.float32
    assert drawn.isfinite().all()
    for i in range(4):
        for j in range(i):
            assert not torch.allclose(drawn[i], drawn[j], atol=1e-4)
    if method not in SAMPLED:
        assert net.train()(x).shape == (1, 7, CLASSES)


@contract
def test_no_draws_are_one_answer_without_noise(method: str, network: str) -> None:
    net, (x, _) = build(method, network).eval(), NETWORKS[network].batch()
    state = torch.get_rng_state()
    first = net(x, draws=0)
    assert first.shape == (1, 7, CLASSES)
    assert torch.equal(net(x, draws=0), first)
    assert torch.equal(torch.get_rng_state(), state)


@contract
def test_a_seed_repeats_the_draws(method: str, network: str) -> None:
    net, (x, _) = build(method, network).eval(), NETWORKS[network].batch()
    state = torch.get_rng_state()
    first = net(x, draws=3, seed=1)
    assert torch.equal(net(x, draws=3, seed=1), first)
    assert not torch.allclose(net(x, draws=3, seed=2), first, atol=1e-4)
    assert torch.equal(torch.get_rng_state(), state)


@contract
def test_draws_do_not_depend_on_how_they_are_made(method: str, network: str) -> None:
    net, (x, _) = build(method, network).eval(), NETWORKS[network].batch()
    want = net(x, draws=5, seed=1)
    torch.testing.assert_close(net(x, draws=5, seed=1, memory=1), want, rtol=1e-4, atol=1e-5)
    net._draw_cache.way = "loop"
    torch.testing.assert_close(net(x, draws=5, seed=1), want, rtol=1e-4, atol=1e-5)


@contract
def test_a_batch_of_one_works(method: str, network: str) -> None:
    net, (x, _) = build(method, network).eval(), NETWORKS[network].batch()
    torch.testing.assert_close(net(x[:1], draws=0), net(x, draws=0)[:, :1], rtol=1e-4, atol=1e-5)
    assert net(x[:1], draws=3).shape == (3, 1, CLASSES)


@contract
def test_dtype_is_kept(method: str, network: str) -> None:
    net = build(method, network, model=NETWORKS[network].model().double()).eval()
    x = NETWORKS[network].batch()[0].double()
    assert net(x, draws=3).dtype == torch.float64
    assert {p.dtype for p in net.parameters()} == {torch.float64}


@contract
def test_the_given_model_is_left_as_it_was(method: str, network: str) -> None:
    model = NETWORKS[network].model()
    before, structure = {name: t.clone() for name, t in model.state_dict().items()}, repr(model)
    net = build(method, network, model=model)
    net.eval()(NETWORKS[network].batch()[0], draws=2)
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            tensor.add_(1)
    assert repr(model) == structure
    assert not model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@contract
def test_training_mode_is_the_models(method: str, network: str) -> None:
    for mode in (True, False):
        net = build(method, network, model=NETWORKS[network].model().train(mode))
        assert {module.training for module in net.modules()} == {mode}


@learning
def test_backward_reaches_every_parameter(method: str, network: str) -> None:
    net = build(method, network).train()
    touched = {name: False for name, _ in net.named_parameters()}
    for _ in range(30 if method == "patched" else 3):  # a component learns when it is drawn
        net.zero_grad()
        loss = net.loss(*NETWORKS[network].batch(16), dataset_size=100)
        assert loss.shape == ()
        assert loss.isfinite()
        loss.backward()
        for name, p in net.named_parameters():
            touched[name] |= p.grad is not None and bool(p.grad.any())
    assert [name for name, reached in touched.items() if not reached] == []


@learning
def test_the_loss_falls(method: str, network: str) -> None:
    net = build(method, network).train()
    x, y = NETWORKS[network].batch(16)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    torch.manual_seed(0)
    losses = []
    for _ in range(80):
        loss = net.loss(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@contract
def test_saving_and_loading_gives_the_same_draws(method: str, network: str, tmp_path: Path) -> None:
    saved = build(method, network)
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(0.01)
    whole = nn.ModuleDict({"part": saved})
    save_file({k: v.contiguous() for k, v in whole.state_dict().items()}, tmp_path / "net.safetensors")
    loaded = nn.ModuleDict({"part": build(method, network, seed=9, model=NETWORKS[network].model(seed=5))})
    loaded.load_state_dict(load_file(tmp_path / "net.safetensors"))
    x, _ = NETWORKS[network].batch()
    for draws in (0, 3):
        want = saved.eval()(x, draws=draws, seed=4)
        assert torch.equal(loaded["part"].eval()(x, draws=draws, seed=4), want)


@contract
def test_copies_and_pickles_give_the_same_draws(method: str, network: str) -> None:
    net, (x, _) = build(method, network).eval(), NETWORKS[network].batch()
    want = net(x, draws=3, seed=1)
    stream = io.BytesIO()
    pickle.dump(net, stream)
    stream.seek(0)
    for other in (copy.deepcopy(net), pickle.load(stream)):
        assert torch.equal(other(x, draws=3, seed=1), want)
        with torch.no_grad():
            for tensor in [*other.parameters(), *other.buffers()]:
                tensor.zero_()
    assert torch.equal(net(x, draws=3, seed=1), want)


@contract
def test_predict_is_the_mean_of_the_draws_probabilities(method: str, network: str) -> None:
    net, (x, _) = build(method, network).train(), NETWORKS[network].batch()
    p = net.predict(x, draws=6, seed=1)
    assert net.training
    assert not p.predictions.requires_grad
    torch.testing.assert_close(p.probs, net.eval()(x, draws=6, seed=1).softmax(-1).mean(0), rtol=1e-4, atol=1e-6)


@learning
def test_an_ensemble_of_networks_that_draw(method: str, network: str) -> None:
    net, (x, y) = build(method, network), NETWORKS[network].batch()
    ensemble = mt.deep_ensemble(net, 3, seed=1).eval()
    ensemble.draws = 4
    drawn = ensemble(x, seed=2)
    assert drawn.shape == (12, 7, CLASSES)
    mt.check(ensemble, x)
    for index, expected in enumerate(ensemble(x, draws=0)):
        member = ensemble.member(index).eval()
        torch.testing.assert_close(member(x, draws=0)[0], expected, rtol=1e-3, atol=1e-4)
        assert member.draws == 4
    torch.testing.assert_close(ensemble.kl(), sum(ensemble.member(i).kl() for i in range(3)), rtol=1e-4, atol=1e-4)
    loss = ensemble.train().loss(x, y, dataset_size=50)
    loss.backward()
    assert loss.isfinite()


@contract
def test_an_ensemble_of_trained_networks_that_draw(method: str, network: str) -> None:
    one, other = build(method, network, seed=0).eval(), build(method, network, seed=1).eval()
    x, _ = NETWORKS[network].batch()
    ensemble = mt.fuse([one, other]).eval()
    drawn = ensemble(x, draws=4, seed=2)
    assert drawn.shape == (8, 7, CLASSES)
    expected = torch.cat([one(x, draws=0), other(x, draws=0)])
    torch.testing.assert_close(ensemble(x, draws=0), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("method", "network"), by_compiling(LEARNING_CASES))
def test_compiled_agrees_with_eager(method: str, network: str) -> None:
    torch.compiler.reset()
    net, (x, _) = build(method, network).eval(), NETWORKS[network].batch()
    compiled = torch.compile(copy.deepcopy(net), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, draws=0), net(x, draws=0), rtol=1e-4, atol=1e-5)
    drawn = compiled(x, draws=300)
    eager = net(x, draws=300)
    error = ((drawn.var(0) + eager.var(0)) / 300).sqrt()
    assert ((drawn.mean(0) - eager.mean(0)).abs() < 6 * error + 1e-5).all()
    assert torch.compile(copy.deepcopy(net).train(), backend="aot_eager", fullgraph=True)(x).shape == (1, 7, CLASSES)


@contract
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_agrees_with_cpu(method: str, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # its rounding is coarser than what is tested
    net, (x, _) = build(method, network).eval(), NETWORKS[network].batch()
    on_gpu = copy.deepcopy(net).to("cuda")
    torch.testing.assert_close(on_gpu(x.cuda(), draws=0).cpu(), net(x, draws=0), rtol=1e-3, atol=1e-3)
    drawn, want = on_gpu(x.cuda(), draws=500, seed=0).cpu(), net(x, draws=500, seed=0)
    error = ((drawn.var(0) + want.var(0)) / 500).sqrt()
    assert ((drawn.mean(0) - want.mean(0)).abs() < 6 * error + 1e-3).all()
    state = torch.cuda.get_rng_state()
    assert torch.equal(on_gpu(x.cuda(), draws=5, seed=3), on_gpu(x.cuda(), draws=5, seed=3))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    chunked = on_gpu(x.cuda(), draws=5, seed=3, memory=1)
    torch.testing.assert_close(chunked, on_gpu(x.cuda(), draws=5, seed=3), rtol=1e-3, atol=1e-3)


@contract
def test_bad_inputs_are_told_in_a_sentence(method: str, network: str) -> None:
    net, (x, _) = build(method, network).eval(), NETWORKS[network].batch(4)
    for wrong in (x[0], x[:, :-1], x.flatten(1)[:, :4], [1, 2], None):
        with pytest.raises(ValueError, match=r"^x (of shape|must be)"):
            net.predict(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="NaN"):
        net.predict(torch.full_like(x, torch.nan))
