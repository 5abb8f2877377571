import math

import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import cosine_similarity as sklearn_cosine
from torch import nn

import multitudes as mt
from multitudes.metrics import cosine_similarity, diversity


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 4))


def vector(network):
    return np.concatenate([p.detach().double().numpy().ravel() for p in network.parameters()])


def test_cosine_similarity_is_that_of_all_weights_and_no_buffer():
    nets = [net(seed) for seed in range(4)]
    nets[1][1].running_mean += 100
    expected = sklearn_cosine(np.stack([vector(n) for n in nets]))
    similarity = cosine_similarity(nets)
    np.testing.assert_allclose(similarity, expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(similarity.diagonal(), 1)
    close(cosine_similarity(mt.fuse(nets)), similarity)
    close(cosine_similarity([n.state_dict() for n in nets], nets[0]), similarity)
    close(cosine_similarity(iter(nets)), similarity)


def test_cosine_similarity_along_a_recording():
    network = net(0)
    recorder = mt.Recorder(network, keep=3)
    for scale in (1.0, 2.0, -1.0):
        for p in network.parameters():
            p.data.mul_(scale)
        recorder.record()
    expected = torch.tensor([[1.0, 1, -1], [1, 1, -1], [-1, -1, 1]]).double()
    close(cosine_similarity(recorder), expected)


def test_cosine_similarity_of_members_that_share_weights_is_that_of_what_each_sees():
    ensemble = mt.batch_ensemble(net(0), members=3)
    expected = sklearn_cosine(np.stack([vector(ensemble.member(i)) for i in range(3)]))
    np.testing.assert_allclose(cosine_similarity(ensemble), expected, rtol=1e-6)


def test_cosine_similarity_in_chunks_and_of_a_single_network(monkeypatch):
    nets = [net(seed) for seed in range(3)]
    similarity = cosine_similarity(nets)
    assert cosine_similarity(nets[:1]).tolist() == [[pytest.approx(1)]]
    monkeypatch.setattr(diversity, "_CHUNK", 100)
    close(cosine_similarity(nets), similarity)


def test_a_network_of_zeros_is_similar_to_nothing():
    zeros = net(0)
    for p in zeros.parameters():
        p.data.zero_()
    assert cosine_similarity([zeros, net(1)]).isnan().tolist() == [[True, True], [True, False]]


def broken():
    network = net(1)
    network[3].bias.data[2] = math.nan
    return network


BAD_NETWORKS = {
    "one": (net(0), None, "networks must be a multitude, or several networks, got Sequential"),
    "number": (3, None, "networks must be a multitude, or several networks, got int"),
    "none": ([], None, "networks must hold at least one network, got none"),
    "inside": ([net(0), 3], None, r"networks\[1\] must be a network or a state dict, got int"),
    "unlike": ([net(0), nn.Linear(3, 2)], None, r"networks\[1\] does not fit the model"),
    "no model": ([net(0).state_dict()], None, "model must be given with state dicts"),
    "nan": ([net(0), broken()], None, r"networks\[1\] holds NaN or infinite weights in '3.bias'"),
}


@pytest.mark.parametrize("networks, model, message", BAD_NETWORKS.values(), ids=BAD_NETWORKS)
def test_bad_networks_are_named(networks, model, message):
    with pytest.raises(ValueError, match=message):
        cosine_similarity(networks, model)
